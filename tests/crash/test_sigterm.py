"""SIGTERM, whose handler closes the broker: the process ends as it should, and the spool is clean and whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from crash import sigterm_worker
from crash.test_kill_rounds import alarm
from qflow import inspect
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
ROUNDS = int(os.environ.get("QFLOW_ROUNDS", "0")) or (1000 if TORTURE else 12)


def live_and_end(spool: Path, seed: int, how: str, chance: random.Random) -> list[list[str]]:
    """Start a worker, ask it to end at some moment, perhaps twice, and return what it told."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", sigterm_worker.__file__, str(spool), str(seed), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process, alarm(process):
        assert process.stdout is not None
        assert process.stderr is not None
        told = [process.stdout.readline() for _ in range(chance.randrange(1, 60))]
        pass_time(process, chance.uniform(0, 0.005))
        process.send_signal(signal.SIGTERM)
        if chance.random() < 0.4:
            pass_time(process, chance.uniform(0, 0.01))
            process.send_signal(signal.SIGTERM)
        told += process.stdout.readlines()
        said = process.stderr.read().decode()
        assert (process.wait(), said) == (0, ""), said
    assert all(line.endswith(b"\n") for line in told)
    return [line.decode().split() for line in told]


def pass_time(process: subprocess.Popen[bytes], most_s: float) -> None:
    """Let a process work for a moment."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=most_s)


@pytest.mark.parametrize("tenth", range(10 if TORTURE else 4))
def test_a_handler_of_sigterm_closes_the_broker(tenth: int, tmp_path: Path) -> None:
    """Every confirmed message that nobody acked is there, once; the process ends with 0 and says nothing."""
    print(f"seed {SEED} (set QFLOW_SEED)")
    rounds = range(tenth, ROUNDS, 10 if TORTURE else 4)
    counts: Counter[str] = Counter()
    for number in rounds:
        chance = random.Random(SEED * 10_000 + number)
        how = ("exits", "returns")[number % 2]
        spool = tmp_path / str(number)
        counts.update(run_round(spool, number, how, chance))
    print(f"{len(rounds)} rounds, {dict(counts)}")


def run_round(spool: Path, number: int, how: str, chance: random.Random) -> Counter[str]:
    told = live_and_end(spool, SEED * 10_000 + number, how, chance)
    counts: Counter[str] = Counter({how: 1})
    words: dict[str, set[str]] = {name: set() for name in ("put", "done", "got", "ack", "acked")}
    for kind, *tokens in told:
        counts[kind] += len(tokens)
        assert kind != "wrong", tokens
        if kind != "ready":
            words[kind].update(tokens)
    assert inspect.check_spool(spool) == []
    with sigterm_worker.open_spool(str(spool)) as broker:
        assert broker.recovery.clean
        assert broker.recovery.problems == ()
        assert broker.check() == []
        found: Counter[str] = Counter()
        for name in sigterm_worker.QUEUES:
            queue = broker.queue(name)
            while len(queue):
                batch = queue.get_many(100, 0)
                found.update(body.decode() for body in batch.bodies)
                batch.ack()
        with broker.subscribe("s", start="earliest", follow=False) as sub:
            found.update(delivery.body.decode() for delivery in sub)
        assert broker.check() == []
    assert max(found.values(), default=0) <= 1, "doubled"
    assert set(found) <= words["put"]
    assert not words["done"] - words["ack"] - set(found), "lost"
    assert not words["acked"] & set(found), "acked, and back"
    for kind, *tokens in told:  # what goes together is there together
        if kind == "put":
            there = {token in found for token in tokens if token not in words["got"]}
            assert len(there) <= 1, "torn"
    return counts
