"""kill -9 at random moments: a worker that puts and acks is killed, and what it was promised must hold.

The oracle is RabbitMQ's: each message is *uncertain* from the attempt to put it until the put is confirmed, *confirmed*
from then until the attempt to ack it, uncertain again until that is confirmed, and gone for ever after.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import qflow
from crash import worker
from crash.beside import reader_beside

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
LIVES = 3
ROUNDS = 12


class Oracle:
    """What must, may and must not come out of one durable queue."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []
        self.sequence: dict[str, int] = {}  # of confirmed ones, and of those that were delivered
        self.confirmed: set[str] = set()
        self.hoped: set[str] = set()
        """Those that are not logged, put or not: delivered, perhaps, before the producer could tell that it was put."""
        self.loose: dict[str, int] = {}
        self.ack_tried: set[int] = set()
        self.acked: set[int] = set()
        self.life_of: dict[str, int] = {}
        self.highest = -1
        self.highest_before = -1
        """The highest sequence of earlier lives: what is put later must be above."""

    def tried(self, tokens: list[str], life: int) -> None:
        self.groups.append(tokens)
        for token in tokens:
            self.life_of[token] = life

    def put(self, first: int, tokens: list[str]) -> None:
        for sequence, token in enumerate(tokens, first):
            assert self.sequence.setdefault(token, sequence) == sequence, f"{token} changed its sequence"
            assert sequence > self.highest_before, f"sequence {sequence} was used before"
            self.confirmed.add(token)
            self.highest = max(self.highest, sequence)

    def got(self, sequence: int, token: str, redelivered: bool, life: int) -> None:
        assert token in self.life_of or token in self.hoped or token.startswith("loose"), f"{token} was never put"
        assert sequence not in self.acked, f"{sequence} ({token}) came again after its ack was confirmed"
        assert self.sequence.setdefault(token, sequence) == sequence, f"{token} changed its sequence"
        if self.life_of.get(token, life) < life:
            assert redelivered, f"{token} was recovered and does not say so"
        self.highest = max(self.highest, sequence)

    def check_drained(self, drained: list[tuple[int, str]]) -> None:
        came = [token for _, token in drained]
        assert len(set(came)) == len(came), "a message came twice"
        assert [sequence for sequence, _ in drained] == sorted(sequence for sequence, _ in drained)
        arrived = set(came)
        assert not arrived & self.loose.keys(), "a message that is not logged came back"
        settled = self.ack_tried | self.acked
        must = {
            token
            for token, sequence in self.sequence.items()
            if sequence not in settled and token in self.life_of  # confirmed, or delivered, which comes after
        }
        assert self.confirmed - arrived <= {t for t in self.confirmed if self.sequence[t] in settled}
        assert must <= arrived, f"lost: {sorted(must - arrived)[:5]}"
        for group in self.groups:
            here = [token in arrived or token in self.sequence for token in group]
            assert all(here) or not any(here), f"half of a batch came: {group}"


def live_and_die(spool: Path, seed: int, life: int, chance: random.Random) -> list[list[str]]:
    """Start a worker, kill it somewhere, and return the words of each line it told."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", worker.__file__, str(spool), str(seed), str(life)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process, alarm(process):
        lines = []
        puts = 0
        wanted = chance.randrange(3, 90)
        while puts < wanted:
            line = process.stdout.readline()
            assert line, "the worker ended by itself"
            assert not line.startswith(b"wrong"), line.decode()
            lines.append(line)
            puts += line.startswith((b"put left", b"put right"))
        try:
            process.wait(timeout=chance.uniform(0, 0.003))
        except subprocess.TimeoutExpired:
            process.kill()
        lines += process.stdout.readlines()
        assert process.wait() == -signal.SIGKILL
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    return [line.decode().split() for line in lines]


@contextmanager
def alarm(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Abort a worker that hangs, with the stack of each of its threads in the captured error output."""
    timer = threading.Timer(100, process.send_signal, [signal.SIGABRT])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def listen(lines: list[list[str]], oracles: dict[str, Oracle], life: int) -> None:
    """Tell the oracles what the worker told."""
    confirmed = 0
    for oracle in oracles.values():
        oracle.highest_before = oracle.highest
    # A consumer may tell what it got before the producer could tell that it tells: attempts and loose puts come first.
    for word, *rest in sorted(lines, key=lambda line: line[0] not in ("try", "hope", "loose")):
        oracle = oracles[rest[0]] if rest else Oracle()
        if word == "wrong":
            raise AssertionError(" ".join(rest))
        if word == "try":
            oracle.tried(rest[2:], life)
        elif word == "put":
            confirmed += rest[0] in worker.DURABLE
            oracle.put(int(rest[1]), rest[2:])
        elif word == "hope":
            oracle.hoped.add(rest[1])
        elif word == "loose":
            assert int(rest[1]) > oracle.highest_before
            oracle.loose[rest[2]] = int(rest[1])
            oracle.highest = max(oracle.highest, int(rest[1]))
    fresh: dict[str, list[int]] = defaultdict(list)
    nacked: set[tuple[str, str]] = set()
    for word, *rest in lines:
        oracle = oracles[rest[0]] if rest else Oracle()
        if word == "got":
            oracle.got(int(rest[1]), rest[2], rest[3] == "1", life)
            if (rest[0], rest[1]) in nacked:
                assert rest[3] == "1", f"{rest} was returned and does not say so"
            else:
                fresh[rest[0]].append(int(rest[1]))
        elif word == "nack":
            nacked.add((rest[0], rest[1]))
        elif word == "ack":
            oracle.ack_tried |= set(map(int, rest[1:]))
        elif word == "acked":
            oracle.acked |= set(map(int, rest[1:]))
    assert confirmed, "the worker had confirmed nothing"
    for name, sequences in fresh.items():
        assert sequences == sorted(set(sequences)), f"{name}: not in order, or one of them twice"


@pytest.mark.parametrize("number", range(ROUNDS))
def test_what_was_confirmed_survives_three_kills(number, tmp_path):
    """Edge 20: after each SIGKILL confirmed puts arrive once and in order, confirmed acks never, batches all or none."""
    seed = SEED * 100 + number
    print(f"seed {SEED} (set QFLOW_SEED), round {number}")
    chance = random.Random(seed)
    spool = tmp_path / "spool"
    oracles = {name: Oracle() for name in (*worker.DURABLE, "loose")}
    with ExitStack() as beside:  # every other round has a process that reads, from the first kill on
        for life in range(LIVES):
            oracles["loose"] = Oracle()  # not remembered across open
            listen(live_and_die(spool, seed, life, chance), oracles, life)
            if not life:
                beside.enter_context(reader_beside(spool, bool(number % 2)))
        check_what_is_left(spool, oracles)


def check_what_is_left(spool: Path, oracles: dict[str, Oracle]) -> None:
    """Open what the last kill left, and drain it."""
    with qflow.open(spool, capacity_bytes=worker.BROKER_CAPACITY) as broker:
        assert os.listdir(spool / "spill") == []
        assert not broker.recovery.clean
        assert broker.recovery.problems == ()
        assert broker.queues() == sorted(worker.DURABLE)
        for name in worker.DURABLE:
            queue = broker.declare_queue(name, capacity_bytes=worker.CAPACITY)
            assert broker.check() == []
            drained = []
            while len(queue):
                with queue.get(timeout_s=0) as delivery:
                    assert delivery.redelivered
                    token = worker.token_of(delivery.body)
                    oracles[name].got(delivery.sequence, token, True, LIVES)
                    drained.append((delivery.sequence, token))
            oracles[name].check_drained(drained)
            assert queue.put(b"after") > oracles[name].highest
            assert queue.stats().lost_total == queue.stats().quarantined_total == 0
        assert broker.check() == []
