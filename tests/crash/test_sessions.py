"""Many short lives of one spool, each with other steps and another end: what was confirmed is there, and all is whole.

The test that kills at every step knows what it kills; these are what a service does, again and again, by chance.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
from crash.seams import run_in_child, was_killed
from faults.seams import bodies_of
from qflow import inspect
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
HISTORIES = int(os.environ.get("QFLOW_ROUNDS", "0")) or (1000 if TORTURE else 12)
SETTINGS: list[dict[str, Any]] = [{}, {"journal_bytes": "64KiB"}, {"journal": "off"}, {"capacity_bytes": 100_000}]
SIZES = (0, 10, 300, 3_000, 9_000, 20_000, 70_000)


class Life:
    """One life of a spool, in a child. It notes what is on its way, and then that it is confirmed."""

    def __init__(self, spool: Path, notes: Path, seed: int) -> None:
        self._chance = random.Random(seed)
        self._seed = seed
        self._numbers = 0
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.broker = qflow.open(spool, door=False, **self._chance.choice(SETTINGS))
        self.broker.declare_queue("dead")
        self.queue = self.broker.declare_queue("q", max_deliveries=3, dead_letter="dead")
        self.other = self.broker.declare_queue("other")
        self.broker.declare_stream("s", topics=["t"])

    def run(self) -> None:
        steps: list[Callable[[], object]] = [*[self.put] * 6, self.put_many, self.submit, self.take, self.take_all]
        steps += [self.give_back, self.reject, self.publish, self.transact]
        for _ in range(self._chance.choice([1, 2, 5, 20, 40])):
            self._chance.choice(steps)()
        end = self._chance.random()
        if end < 0.65:
            self.broker.close()
        elif end < 0.8:
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, what: str, bodies: list[bytes]) -> None:
        text = "".join(f"{what} {body.partition(b'|')[0].decode()} {len(body)}\n" for body in bodies)
        os.write(self._notes, text.encode())

    def bodies(self, most: int) -> list[bytes]:
        """Return new bodies, and note that they are on their way."""
        made = []
        for _ in range(self._chance.randint(1, most)):
            self._numbers += 1
            made.append(b"%d-%d|" % (self._seed, self._numbers) + bytes(self._chance.choice(SIZES)))
        self.note("wants", made)
        return made

    def put(self) -> None:
        bodies = self.bodies(1)
        self.queue.put(bodies[0])
        self.note("has", bodies)

    def put_many(self) -> None:
        bodies = self.bodies(6)
        self.queue.put_many(bodies)
        self.note("has", bodies)

    def submit(self) -> None:
        bodies = self.bodies(4)
        for future in [self.queue.submit(body) for body in bodies]:
            future.result()
        self.note("has", bodies)

    def publish(self) -> None:
        bodies = self.bodies(2)
        self.broker.publish_many([("t", body) for body in bodies])
        self.note("retains", bodies)

    def take(self, most: int = 1) -> None:
        batch = self.queue.get_many(most, timeout_s=0)
        self.note("settles", batch.bodies)
        if batch:
            batch.ack(wait=self._chance.random() < 0.5)

    def take_all(self) -> None:
        self.take(50)

    def give_back(self) -> None:
        self.queue.get_many(2, timeout_s=0).nack()

    def reject(self) -> None:
        self.queue.get_many(1, timeout_s=0).nack(requeue=False, reason="bad")

    def transact(self) -> None:
        bodies, held = self.bodies(1), self.queue.get_many(1, timeout_s=0)
        self.note("settles", held.bodies)
        with self.broker.transaction() as tx:
            for delivery in held:
                tx.ack(delivery)
            tx.put(self.other, bodies[0])
        self.note("has", bodies)


def check(spool: Path, notes: Path) -> None:
    """What was confirmed, and not settled since, is there as it was."""
    said: dict[str, dict[str, int]] = {"wants": {}, "has": {}, "settles": {}, "retains": {}}
    for line in notes.read_text().splitlines():
        what, name, size = line.split()
        said[what][name] = int(size)
    with qflow.open(spool, door=False) as broker:
        assert broker.recovery.problems == ()
        found = [name_of(body) for name in ("q", "other") for body in bodies_of(broker.queue(name))]
        broker.engine.log.drain()  # what was delivered too often is a dead letter now
        found += [name_of(body) for body in bodies_of(broker.queue("dead"))]
        retained = [name_of(message.body) for message in broker.stream("s").query()]
    assert len(dict(found)) == len(found), "a message is there twice"
    assert set(found) | set(retained) <= set(said["wants"].items())
    assert set(said["has"].items()) - set(found) <= set(said["settles"].items())
    assert set(said["retains"].items()) <= set(retained)


def name_of(body: bytes) -> tuple[str, int]:
    return body.partition(b"|")[0].decode(), len(body)


@pytest.mark.parametrize("number", range(HISTORIES))
def test_what_was_confirmed_is_there_after_many_short_lives(number: int, spool: Path, tmp_path: Path) -> None:
    seed = SEED + number
    print(f"seed {seed}")
    notes = tmp_path / "notes"
    for life in range(random.Random(seed).randint(2, 5)):
        was_killed(run_in_child(lambda: Life(spool, notes, 100 * seed + life).run()))  # noqa: B023
        assert inspect.check_spool(spool) == []
    check(spool, notes)
