"""The process that is killed: random work on durable and transient queues, each step told before and after.

    python worker.py SPOOL SEED LIFE

A line of the report is one `write` to the standard output, so what was told is told whatever happens next:

    ready
    try    QUEUE GROUP TOKEN…        about to put these, as a group
    put    QUEUE SEQUENCE TOKEN…     confirmed, with consecutive sequences from that on
    hope   QUEUE TOKEN               about to put it, not to be logged
    loose  QUEUE SEQUENCE TOKEN      put, and not logged
    got    QUEUE SEQUENCE TOKEN REDELIVERED
    nack   QUEUE SEQUENCE
    ack    QUEUE SEQUENCE…           about to ack
    acked  QUEUE SEQUENCE…           confirmed
    wrong  WORDS                     what must never be
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import zlib
from hashlib import sha256

import qflow

DURABLE = ("left", "right")
CAPACITY = 3_000
BROKER_CAPACITY = 8_000


def body_of(token: str) -> bytes:
    """Return the body that goes with a token; anybody can make it again."""
    shape = random.Random(zlib.crc32(token.encode()))
    size = shape.choice(
        [0, 10, 100, 100, 300, 600, 600, shape.randrange(2_000), 20_000 if shape.random() < 0.1 else 50]
    )
    head = token.encode() + b"|"
    filler = sha256(head).digest() * (size // 32 + 1)
    return head + filler[:size]


def token_of(body: bytes) -> str:
    """Return the token of a body, or a word that no token is where the body is not what was put."""
    token = body.partition(b"|")[0].decode("utf-8", "replace")
    return token if body_of(token) == body else "DAMAGED"


def open_spool(path: str, spill: str) -> tuple[qflow.Broker, dict[str, qflow.Queue]]:
    broker = qflow.open(path, capacity_bytes=BROKER_CAPACITY, spill=spill, segment_bytes="8KiB")
    queues = {name: broker.declare_queue(name, capacity_bytes=CAPACITY) for name in DURABLE}
    queues["loose"] = broker.declare_queue("loose", durable=False, capacity_bytes=CAPACITY)
    return broker, queues


class Worker:
    """Producers and a consumer for each queue, in threads, until the end."""

    def __init__(self, spool: str, seed: int, life: int) -> None:
        self.life = life
        self.seed = seed
        self.broker, self.queues = open_spool(spool, "segments" if life % 2 else "files")
        self.numbers = itertools.count()

    def tell(self, *words: object) -> None:
        os.write(1, (" ".join(map(str, words)) + "\n").encode())

    def run(self) -> None:
        self.tell("ready")
        threads = []
        for name in self.queues:
            threads += [threading.Thread(target=self.guarded, args=(self.produce, name, part)) for part in range(2)]
            threads.append(threading.Thread(target=self.guarded, args=(self.consume, name, 9)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def guarded(self, work, name: str, part: int) -> None:
        try:
            work(name, random.Random(f"{self.seed} {self.life} {name} {part}"))
        except BaseException as error:
            self.tell("wrong", name, type(error).__name__, error)
            raise

    def token(self, name: str) -> str:
        return f"{name}-{self.life}-{next(self.numbers)}"

    def produce(self, name: str, chance: random.Random) -> None:
        queue = self.queues[name]
        waiting: list[tuple[str, object]] = []
        while True:
            if len(queue) > 150:
                self.settle_submits(name, waiting)
                threading.Event().wait(0.001)
                continue
            kind = chance.random()
            if kind < 0.4:
                token = self.token(name)
                self.tell("try", name, token, token)
                self.tell("put", name, queue.put(body_of(token)), token)
            elif kind < 0.6:
                tokens = [self.token(name) for _ in range(chance.randrange(1, 12))]
                self.tell("try", name, tokens[0], *tokens)
                sequences = queue.put_many([body_of(token) for token in tokens])
                self.tell("put", name, sequences[0], *tokens)
            elif kind < 0.9 or name == "loose":
                token = self.token(name)
                self.tell("try", name, token, token)
                waiting.append((token, queue.submit(body_of(token))))
                if len(waiting) > 5:
                    self.settle_submits(name, waiting)
            else:
                token = self.token(name)
                self.tell("hope", name, token)
                self.tell("loose", name, queue.put(body_of(token), durable=False), token)

    def settle_submits(self, name: str, waiting: list) -> None:
        for token, future in waiting:
            self.tell("put", name, future.result(), token)
        waiting.clear()

    def consume(self, name: str, chance: random.Random) -> None:
        queue = self.queues[name]
        while True:
            if chance.random() < 0.5:
                held = [queue.get()]
            else:
                held = list(queue.get_many(chance.randrange(1, 10)))
            for delivery in held:
                self.tell("got", name, delivery.sequence, token_of(delivery.body), int(delivery.redelivered))
            kind = chance.random()
            if kind < 0.25:
                for delivery in held:
                    self.tell("nack", name, delivery.sequence)
                    delivery.nack()
                continue
            numbers = [delivery.sequence for delivery in held]
            self.tell("ack", name, *numbers)
            if kind < 0.6:
                queue.ack_many(held, wait=True)
                self.tell("acked", name, *numbers)
            else:
                queue.ack_many(held)


if __name__ == "__main__":
    Worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run()
