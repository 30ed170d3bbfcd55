"""kill -9 under publishers and a group: what was confirmed is there, once; what was acked never comes again."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import qflow
from crash import stream_worker
from crash.beside import reader_beside
from crash.stream_worker import PRODUCERS
from crash.test_kill_rounds import alarm
from qflow import inspect

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
LIVES = 4
ROUNDS = 6

Place = tuple[int, int]


def live_and_die(spool: Path, seed: int, life: int, numbers: list[int], chance: random.Random) -> list[list[str]]:
    """Start a worker, kill it somewhere, and return the words of each line it told."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", stream_worker.__file__, *map(str, (spool, seed, life, *numbers))],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process, alarm(process):
        lines: list[bytes] = []
        done = 0
        wanted = chance.randrange(3, 200)
        while done < wanted:
            line = process.stdout.readline()
            assert line, "the worker ended by itself"
            lines.append(line)
            done += line.startswith((b"pub", b"acked"))
        try:
            process.wait(timeout=chance.uniform(0, 0.003))
        except subprocess.TimeoutExpired:
            process.kill()
        lines += process.stdout.readlines()
        assert process.wait() == -signal.SIGKILL
    if not lines[-1].endswith(b"\n"):
        lines.pop()
    return [line.decode().split() for line in lines]


def places_of(words: list[str]) -> Iterator[Place]:
    numbers = list(map(int, words))
    return zip(numbers[::2], numbers[1::2], strict=True)


class Oracle:
    """What must, may and must not be in the stream, and come to the group."""

    def __init__(self) -> None:
        self.tried: set[tuple[int, int]] = set()
        self.confirmed: dict[tuple[int, int], Place | None] = {}
        self.at: dict[Place, str] = {}
        self.ack_tried: set[Place] = set()
        self.acked: set[Place] = set()

    def hear(self, lines: list[list[str]]) -> None:
        delivered: set[Place] = set()
        for word, *rest in lines:  # who confirms may be overtaken by who consumes, so attempts come first
            if word == "try":
                self.tried |= {(int(rest[0]), int(number)) for number in rest[1:]}
        for word, *rest in lines:
            if word == "wrong":
                raise AssertionError(" ".join(rest))
            if word == "pub":
                part, number, partition, offset = map(int, rest)
                assert (part, number) not in self.confirmed, "a duplicate was stored"
                self.confirmed[part, number] = (partition, offset)
                assert self.at.setdefault((partition, offset), f"{part}:{number}") == f"{part}:{number}"
            elif word == "dup":
                part, number = map(int, rest)
                assert (part, number) in self.tried
                self.confirmed.setdefault((part, number), None)
            elif word == "got":
                place = int(rest[0]), int(rest[1])
                assert self.at.setdefault(place, rest[2]) == rest[2], f"{place} holds another message than before"
                assert place not in self.acked, f"{place} came again after its ack was confirmed"
                assert place not in delivered, f"{place} came twice, and nobody had returned it"
                delivered.add(place)
            elif word == "nack":
                delivered -= set(places_of(rest))
            elif word == "ack":
                self.ack_tried |= set(places_of(rest))
            elif word == "acked":
                self.acked |= set(places_of(rest))

    def next_numbers(self) -> list[int]:
        """The first number of each producer that was not confirmed."""
        return [1 + max((n for part, n in self.confirmed if part == one), default=-1) for one in range(PRODUCERS)]

    def check_stored(self, stream: qflow.Stream) -> set[Place]:
        """Check all that is in the stream; return where."""
        stored: dict[str, Place] = {}
        following = [0, 0]
        latest: dict[str, int] = {}
        for message in stream.query():
            place = message.partition, message.offset
            assert message.offset == following[message.partition], "offsets are dense"
            following[message.partition] += 1
            part, number = map(int, message.body.split(b":")[:2])
            assert message.body == stream_worker.body_of(part, number)
            name = f"{part}:{number}"
            assert name not in stored, f"{name} was stored twice"
            assert (part, number) in self.tried
            assert self.at.get(place, name) == name
            assert number == latest.get(str(part), -1) + 1, "a producer's messages are in order, none is missing"
            latest[str(part)] = number
            stored[name] = place
        for (part, number), told in self.confirmed.items():
            assert f"{part}:{number}" in stored, f"{part}:{number} was confirmed and is lost"
            assert told is None or stored[f"{part}:{number}"] == told
        assert stream.stats().next_offsets == following
        return set(stored.values())


@pytest.mark.parametrize("number", range(ROUNDS))
def test_a_stream_and_its_group_survive_kills(number: int, tmp_path: Path) -> None:
    """I1, I2, I13, I16, edge 33, after each of several kills."""
    seed = SEED * 100 + number
    print(f"seed {SEED} (set QFLOW_SEED), round {number}")
    chance = random.Random(seed)
    spool = tmp_path / "spool"
    oracle = Oracle()
    with ExitStack() as beside:  # every other round has a process that reads, from the first kill on
        for life in range(LIVES):
            oracle.hear(live_and_die(spool, seed, life, oracle.next_numbers(), chance))
            if not life:
                beside.enter_context(reader_beside(spool, bool(number % 2)))
            assert inspect.check_spool(spool) == []
        check_what_is_left(spool, oracle)


def check_what_is_left(spool: Path, oracle: Oracle) -> None:
    """Open what the last kill left, and read it."""
    with stream_worker.open_spool(str(spool)) as broker:
        assert broker.recovery.problems == ()
        assert not broker.recovery.clean
        assert broker.check() == []
        stored = oracle.check_stored(broker.stream("s"))
        with stream_worker.subscribe(broker) as subscription:
            came: list[Place] = []
            while batch := subscription.get_many(100, 0):
                assert all(delivery.redelivered for delivery in batch)
                came += [(delivery.partition, delivery.offset) for delivery in batch]
                batch.ack()
        assert len(came) == len(set(came))
        for partition in (0, 1):
            line = [offset for one, offset in came if one == partition]
            assert line == sorted(line)
        assert not oracle.acked & set(came), "a confirmed ack was lost"
        assert stored - set(came) <= oracle.ack_tried, "messages are lost"
        next_numbers = [1 + max(n for part, n in oracle.tried if part == one) for one in range(PRODUCERS)]
        for part, following in enumerate(next_numbers):
            result = broker.publish("t", b"", key=b"p%d" % part, producer=f"p{part}", number=following)
            assert not result.duplicate
            assert (result.partitions["s"], result.offsets["s"]) not in stored
        assert broker.check() == []
