"""A process that is killed: the owner of a spool, or one that works on it through the door, each step told.

    python door_client.py SPOOL REPORTS ROLE SEED NUMBER

What it tells is in a file of its own in REPORTS. A line is one `write`, so what was told is told whatever happens next;
it begins with the moment, which all processes share:

    try    QUEUE GROUP TOKEN…             about to put these, all or none
    put    QUEUE SEQUENCE TOKEN…          confirmed, with consecutive sequences from that on
    got    QUEUE SEQUENCE TOKEN REDELIVERED COUNT BEGAN    by a call that began at that moment
    ack    QUEUE SEQUENCE…                about to ack
    acked  QUEUE SEQUENCE…                confirmed
    number NUMBER TOKEN                   about to publish this under this number
    pub    NUMBER TOKEN PARTITION OFFSET  confirmed; without a place, it was stored before
    lost   WORDS                          the connection has ended
    wrong  WORDS                          what must never be

A partition of the stream is told of as a queue.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import qflow
import qflow.aio
from crash.worker import body_of, token_of

QUEUES = ("left", "right", "out")
"""What is put into `right` is moved to `out`, where it stays."""
STREAM, GROUP = "s", "g"
CAPACITY = 200_000
BACKLOG = 200
"""A queue that is longer is not put into."""
AGAIN_S = 0.01
PATIENCE_S = 60.0
GONE = (qflow.BrokerClosed, qflow.InDoubt)
"""What a client is told when the owner is killed."""


def own(spool: str) -> qflow.Broker:
    """Open the spool, with all that clients use."""
    broker = qflow.open(spool, capacity_bytes=CAPACITY)
    broker.declare_queues(QUEUES)
    broker.declare_stream(STREAM, topics=["s/#"], partitions=2)
    return broker


def lane_of(partition: int) -> str:
    """Return the name that a partition has in reports."""
    return f"{STREAM}/{partition}"


def rest() -> None:
    """Let others go on."""
    threading.Event().wait(AGAIN_S)


class Report:
    """What one process tells."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)

    def tell(self, word: str, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, (time.monotonic_ns(), word, *words))) + "\n").encode())

    def got(self, queue: str, deliveries: Iterable[Any], began: int) -> list[int]:
        """Tell what came; return the sequences."""
        numbers = []
        for one in deliveries:
            place = getattr(one, "offset", one.sequence)
            lane = lane_of(one.partition) if queue == STREAM else queue
            self.tell("got", lane, place, token_of(one.body), int(one.redelivered), one.delivery_count, began)
            numbers.append(place)
        return numbers


class Client:
    """Connects, works as its role is, and connects again when the owner is gone."""

    def __init__(self, spool: str, reports: str, role: str, seed: int, number: int) -> None:
        self.spool, self.role, self.number = spool, role, number
        self.chance = random.Random(f"{seed} {number}")
        self.report = Report(Path(reports, f"{role}-{number}"))
        self.reports = Path(reports)
        self.tokens = (f"{role}-{number}-{count}" for count in itertools.count())

    def run(self) -> None:
        """Work until the process is killed."""
        try:
            if self.role == "owner":
                own(self.spool)
                threading.Event().wait()
            while True:
                work = getattr(self, self.role)
                if asyncio.iscoroutinefunction(work):
                    asyncio.run(self.live_in_tasks(work))
                else:
                    self.live(work)
        except BaseException as error:
            self.report.tell("wrong", type(error).__name__, error)
            raise

    def live(self, work: Any) -> None:
        try:
            with qflow.connect(self.spool) as broker:
                work(broker)
        except qflow.NotFound:
            rest()  # nobody owns the spool now
        except GONE as error:
            self.report.tell("lost", type(error).__name__, error)

    async def live_in_tasks(self, work: Any) -> None:
        try:
            async with qflow.aio.connect(self.spool) as broker:
                await work(broker)
        except* qflow.NotFound:
            pass  # nobody owns the spool now
        except* GONE as errors:
            self.report.tell("lost", *(type(error).__name__ for error in errors.exceptions))
        await asyncio.sleep(AGAIN_S)

    # For threads -------------------------------------------------------------------------------------------------

    def putter(self, broker: Any) -> None:
        """Put, one by one, in batches and by submit."""
        while True:
            name = self.chance.choice(("left", "right"))
            queue = broker.queue(name)
            if len(queue) > BACKLOG:
                rest()
                continue
            group = [next(self.tokens) for _ in range(self.chance.choice((1, 1, 1, 5, 12)))]
            kind = self.chance.random()
            if kind < 0.5:
                self.report.tell("try", name, *group)
                bodies = [body_of(token) for token in group]
                first = queue.put(bodies[0]) if len(bodies) == 1 else queue.put_many(bodies)[0]
                self.report.tell("put", name, first, *group)
                continue
            futures = []
            for token in group:
                self.report.tell("try", name, token)
                futures.append((token, queue.submit(body_of(token))))
            for token, future in futures:
                self.report.tell("put", name, future.result(), token)

    def taker(self, broker: Any) -> None:
        """Get, singly and in batches; ack with and without waiting, and give back."""
        queue = broker.queue("left")
        while True:
            began = time.monotonic_ns()
            if self.chance.random() < 0.5:
                held = [queue.get()]
            else:
                held = list(queue.get_many(self.chance.randrange(1, 20)))
            numbers = self.report.got("left", held, began)
            kind = self.chance.random()
            if kind < 0.25:
                for delivery in held:
                    delivery.nack()
                continue
            self.report.tell("ack", "left", *numbers)
            queue.ack_many(held, wait=kind < 0.6)
            if kind < 0.6:
                self.report.tell("acked", "left", *numbers)

    def mover(self, broker: Any) -> None:
        """Take from one queue and put into the next, in transactions."""
        queue = broker.queue("right")
        while True:
            began = time.monotonic_ns()
            held = list(queue.get_many(self.chance.randrange(1, 10)))
            numbers = self.report.got("right", held, began)
            tokens = [token_of(delivery.body) for delivery in held]
            self.report.tell("ack", "right", *numbers)
            self.report.tell("try", "out", *tokens)
            with broker.transaction() as tx:
                tx.put_many("out", [delivery.body for delivery in held])
                tx.ack_many(held)
            self.report.tell("acked", "right", *numbers)
            self.report.tell("put", "out", tx.result[0][0], *tokens)

    def publisher(self, broker: Any) -> None:
        """Publish with numbers: what was in doubt is published again under the same, and is stored once."""
        number = self.reached()
        while True:
            token = f"publisher-{self.chance.randrange(3)}-{number}"
            again = number in self.tried
            token = self.tried.setdefault(number, token)
            if not again:
                self.report.tell("number", number, token)
            key = token.rpartition("-")[0]
            stored = broker.publish(f"s/{key}", body_of(token), key=key, producer="p", number=number)
            if stored.duplicate:
                self.report.tell("pub", number, token)
            else:
                self.report.tell("pub", number, token, stored.partitions[STREAM], stored.offsets[STREAM])
            number += 1

    def reached(self) -> int:
        """Return the number that comes next; what was tried before keeps its token."""
        self.tried: dict[int, str] = {}
        done = -1
        for path in self.reports.glob("publisher-*"):
            for line in whole_lines(path):
                if line[1] == "number":
                    self.tried[int(line[2])] = line[3]
                elif line[1] == "pub":
                    done = max(done, int(line[2]))
        return done + 1

    def reader(self, broker: Any) -> None:
        """Read as a member of a group."""
        with broker.subscribe(STREAM, group=GROUP, start="earliest") as subscription:
            while True:
                began = time.monotonic_ns()
                batch = subscription.get_many(self.chance.randrange(1, 20))
                self.report.got(STREAM, batch, began)
                kind = self.chance.random()
                if kind < 0.2:
                    batch.nack()
                    continue
                places = [(lane_of(one.partition), one.offset) for one in batch]
                for lane, place in places:
                    self.report.tell("ack", lane, place)
                batch.ack(wait=kind < 0.6)
                for lane, place in places if kind < 0.6 else ():
                    self.report.tell("acked", lane, place)

    # For tasks ---------------------------------------------------------------------------------------------------

    async def tasks(self, broker: Any) -> None:
        """Put and take in several tasks of one connection, cancelled at random."""
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(self.task_putting(broker.queue("left")))
                group.create_task(self.task_taking(broker.queue("left")))

    async def task_putting(self, queue: Any) -> None:
        while True:
            group = [next(self.tokens) for _ in range(self.chance.choice((1, 1, 5)))]
            self.report.tell("try", "left", *group)
            bodies = [body_of(token) for token in group]
            first = await queue.put(bodies[0]) if len(group) == 1 else (await queue.put_many(bodies))[0]
            self.report.tell("put", "left", first, *group)
            await asyncio.sleep(AGAIN_S)

    async def task_taking(self, queue: Any) -> None:
        while True:
            began = time.monotonic_ns()
            getting = asyncio.ensure_future(queue.get_many(self.chance.randrange(1, 20)))
            getting.add_done_callback(lambda task: task.cancelled() or task.exception())  # if nobody waits any more
            if self.chance.random() < 0.3:
                await asyncio.sleep(0)
                getting.cancel()
            await asyncio.wait([getting])
            if getting.cancelled():
                continue
            batch = getting.result()
            numbers = self.report.got("left", batch, began)
            kind = self.chance.random()
            if kind < 0.2:
                await batch.nack()
                continue
            self.report.tell("ack", "left", *numbers)
            await batch.ack(wait=kind < 0.6)
            if kind < 0.6:
                self.report.tell("acked", "left", *numbers)


def whole_lines(path: Path) -> list[list[str]]:
    """Return the words of each line that was told to its end."""
    lines = path.read_bytes().split(b"\n")
    return [line.decode().split(" ") for line in lines[:-1]]


if __name__ == "__main__":
    spool, reports, role, seed, number = sys.argv[1:]
    Client(spool, reports, role, int(seed), int(number)).run()
