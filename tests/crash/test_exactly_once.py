"""kill -9 under consume, transform, produce: with transactions, each message is transformed exactly once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from crash import transform_worker
from crash.beside import reader_beside
from crash.test_kill_rounds import alarm
from qflow import inspect

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
ROUNDS = 3
LIVES = 4
MESSAGES = 400


def live_and_die(spool: Path, seed: int, life: int, chance: random.Random) -> list[str]:
    """Start a worker, kill it somewhere, and return the tokens of what it told to be committed."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", transform_worker.__file__, str(spool), str(seed), str(life)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process, alarm(process):
        assert process.stdout.readline() == b"ready\n"
        lines = [process.stdout.readline() for _ in range(chance.randrange(0, 25))]
        try:
            process.wait(timeout=chance.uniform(0, 0.003))
        except subprocess.TimeoutExpired:
            process.kill()
        lines += process.stdout.readlines()
        assert process.wait() == -signal.SIGKILL
    assert all(line.startswith(b"done ") for line in lines)
    return [token for line in lines if line.endswith(b"\n") for token in line.decode().split()[1:]]


@pytest.mark.parametrize("number", range(ROUNDS))
def test_each_message_is_transformed_exactly_once(number: int, tmp_path: Path) -> None:
    """I3: in the source or in all of its targets, never in both, never twice, after each of several kills."""
    seed = SEED * 100 + number
    print(f"seed {SEED} (set QFLOW_SEED), round {number}")
    chance = random.Random(seed)
    spool = tmp_path / "spool"
    broker, source = transform_worker.open_spool(str(spool))
    source.put_many([b"%d %s" % (number, b"x" * chance.randrange(300)) for number in range(MESSAGES)])
    broker.close()
    everything = {str(number) for number in range(MESSAGES)}
    told: set[str] = set()
    with reader_beside(spool, bool(number % 2)):
        for life in range(LIVES):
            told |= set(live_and_die(spool, seed, life, chance))
            assert inspect.check_spool(spool) == []
        broker, source = transform_worker.open_spool(str(spool))
    assert broker.recovery.problems == ()
    assert not broker.recovery.clean
    assert len(source) + len(broker.queue("all")) == MESSAGES
    assert len(source) <= MESSAGES - len(told)
    while len(source):
        transform_worker.transform(broker, source, chance)
    assert broker.check() == []
    arrived: Counter[str] = Counter()
    for name in ("even", "odd", "all"):
        queue = broker.queue(name)
        tokens: list[str] = []
        while batch := queue.get_many(50, timeout_s=0):
            tokens += [body.decode().partition(" ")[0] for body in batch.bodies]
            batch.ack()
        assert len(tokens) == len(set(tokens)), f"{name}: a message was transformed twice"
        if name != "all":
            assert all(int(token) % 2 == (name == "odd") for token in tokens)
        arrived.update(tokens)
    assert arrived == Counter(dict.fromkeys(everything, 2))
    assert broker.check() == []
    broker.close()
