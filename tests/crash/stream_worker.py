"""The process that is killed: producers that number what they publish, and a group that consumes it.

    python stream_worker.py SPOOL SEED LIFE NUMBER…

Each producer goes on at its NUMBER, the first that was not confirmed to it; what was stored of that is a duplicate.
A line of the report is one `write`, so what was told is told whatever happens next:

    ready
    try    PRODUCER NUMBER…                about to publish these, in one call each
    pub    PRODUCER NUMBER PARTITION OFFSET    confirmed
    dup    PRODUCER NUMBER                 it was stored before
    got    PARTITION OFFSET BODY
    nack   PARTITION OFFSET…               about to return these
    ack    PARTITION OFFSET PARTITION OFFSET…    about to ack
    acked  the same                        confirmed
    wrong  WORDS                           what must never be
"""

from __future__ import annotations

import os
import random
import sys
import threading

import qflow

PRODUCERS = 2
CONSUMERS = 2
CAPACITY = 20_000
BACKLOG = 300
"""Producers wait for consumers when so much is not delivered."""


def open_spool(path: str) -> qflow.Broker:
    broker = qflow.open(path, capacity_bytes=CAPACITY)
    broker.declare_stream("s", topics=["#"], partitions=2)
    return broker


def body_of(producer: int, number: int) -> bytes:
    """Return the body of a message; anybody can make it again."""
    return b"%d:%d:" % (producer, number) + bytes((producer * 7 + number * 13) % 700)


def subscribe(broker: qflow.Broker) -> qflow.Subscription:
    return broker.subscribe("s", group="g", start="earliest")


class Worker:
    """Producers and consumers, in threads, until the end."""

    def __init__(self, spool: str, seed: int, life: int, numbers: list[int]) -> None:
        self.seed, self.life, self.numbers = seed, life, numbers
        self.broker = open_spool(spool)
        self.subscriptions = [subscribe(self.broker) for _ in range(CONSUMERS)]

    def tell(self, *words: object) -> None:
        os.write(1, (" ".join(map(str, words)) + "\n").encode())

    def run(self) -> None:
        self.tell("ready")
        works = [(self.produce, part) for part in range(PRODUCERS)] + [
            (self.consume, part) for part in range(CONSUMERS)
        ]
        threads = [threading.Thread(target=self.guarded, args=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def guarded(self, work, part: int) -> None:
        try:
            work(part, random.Random(f"{self.seed} {self.life} {work.__name__} {part}"))
        except BaseException as error:
            self.tell("wrong", type(error).__name__, error)
            raise

    def produce(self, part: int, chance: random.Random) -> None:
        number = self.numbers[part]
        while True:
            if self.subscriptions[0].lag > BACKLOG:
                threading.Event().wait(0.001)
                continue
            if number and chance.random() < 0.2:  # as one who heard nothing the first time
                self.publish(part, number - 1, chance)
            count = chance.choice([1, 1, 4])
            self.tell("try", part, *range(number, number + count))
            for _ in range(count):
                self.publish(part, number, chance)
                number += 1

    def publish(self, part: int, number: int, chance: random.Random) -> None:
        where = {"key": b"p%d" % part, "producer": f"p{part}", "number": number}
        topic, body = f"t/{part}/{number % 5}", body_of(part, number)
        if chance.random() < 0.5:
            result = self.broker.publish(topic, body, **where)
        else:
            result = self.broker.submit_publish(topic, body, **where).result()
        if result.duplicate:
            self.tell("dup", part, number)
        else:
            self.tell("pub", part, number, result.partitions["s"], result.offsets["s"])

    def consume(self, part: int, chance: random.Random) -> None:
        subscription = self.subscriptions[part]
        while True:
            batch = subscription.get_many(chance.choice([1, 3, 20]))
            for delivery in batch:
                self.tell("got", delivery.partition, delivery.offset, delivery.body.rpartition(b":")[0].decode())
                if delivery.body != body_of(*map(int, delivery.body.split(b":")[:2])):
                    self.tell("wrong", "body", delivery)
            places = [place for one in batch for place in (one.partition, one.offset)]
            kind = chance.random()
            if kind < 0.2:
                self.tell("nack", *places)
                batch.nack()
                continue
            self.tell("ack", *places)
            if kind < 0.4:
                batch.ack()
                continue
            if kind < 0.7:
                batch.ack(wait=True)
            elif kind < 0.85:
                with self.broker.transaction() as tx:
                    tx.ack_many(batch)
            else:
                for delivery in batch:
                    delivery.ack(wait=True)
            self.tell("acked", *places)


if __name__ == "__main__":
    spool, seed, life, *numbers = sys.argv[1:]
    Worker(spool, int(seed), int(life), list(map(int, numbers))).run()
