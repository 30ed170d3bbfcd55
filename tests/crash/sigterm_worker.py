"""The process that is asked to end: its handler of SIGTERM closes the broker while four threads work on it.

    python sigterm_worker.py SPOOL SEED HOW

HOW is `exits` or `returns`: what the handler does once the broker is closed. A line of the report is one `write`:

    ready
    put TOKEN…          about to put or publish these, together
    done TOKEN…         confirmed
    got TOKEN           a queue has delivered it
    ack TOKEN…          about to ack
    acked TOKEN…        confirmed
    wrong WORDS         what must never be
"""

from __future__ import annotations

import atexit
import itertools
import os
import random
import signal
import sys
import threading
from types import FrameType

import qflow

QUEUES = ("left", "right")
THREADS = 3


def open_spool(path: str) -> qflow.Broker:
    broker = qflow.open(path, capacity_bytes="256KiB")
    for name in QUEUES:
        broker.declare_queue(name)
    broker.declare_stream("s", topics=["t/#"])
    return broker


class Worker:
    """The main thread and others do the same, until the broker is closed."""

    def __init__(self, broker: qflow.Broker, seed: int, exits: bool) -> None:
        self.broker = broker
        self.seed = seed
        self.exits = exits
        self.ended = False
        self.exiting = False
        self.numbers = itertools.count()

    def tell(self, *words: object) -> None:
        os.write(1, (" ".join(map(str, words)) + "\n").encode())

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.ended = True
        self.broker.close()
        if self.exits and not self.exiting:
            self.exiting = True
            sys.exit(0)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self.handle)
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # else CPython sets it to kill, at the very end
        threads = [threading.Thread(target=self.work, args=(part,)) for part in range(THREADS)]
        for thread in threads:
            thread.start()
        self.tell("ready")
        self.work(THREADS)
        for thread in threads:
            thread.join()

    def work(self, part: int) -> None:
        chance = random.Random(f"{self.seed} {part}")
        try:
            while True:
                self.act(chance)
        except (qflow.BrokerClosed, qflow.AlreadySettled) as error:
            if not self.ended:
                self.tell("wrong", repr(error))
        except Exception as error:
            self.tell("wrong", repr(error))
            raise

    def tokens(self, kind: str, count: int) -> list[str]:
        return [f"{kind}-{next(self.numbers)}" for _ in range(count)]

    def act(self, chance: random.Random) -> None:
        name = chance.choice(QUEUES)
        queue = self.broker.queue(name)
        kind = chance.randrange(6)
        if len(queue) > 50:
            kind = 3
        tokens = self.tokens("s" if kind == 2 else "q", chance.randrange(2, 6) if kind in (1, 4) else 1)
        if kind == 0:
            self.tell("put", *tokens)
            queue.put(tokens[0].encode())
        elif kind == 1:
            self.tell("put", *tokens)
            queue.put_many([token.encode() for token in tokens])
        elif kind == 2:
            self.tell("put", *tokens)
            self.broker.publish("t/a", tokens[0].encode(), key=chance.choice("ab"))
        elif kind == 3:
            self.consume(queue, chance)
            return
        elif kind == 4:
            more = self.tokens("s", 1)
            self.tell("put", *tokens, *more)
            with self.broker.transaction() as tx:
                tx.put_many(name, [token.encode() for token in tokens[1:]])
                tx.put(chance.choice(QUEUES), tokens[0].encode())
                tx.publish("t/a", more[0].encode())
            tokens += more
        else:
            self.move(queue, chance)
            return
        self.tell("done", *tokens)

    def consume(self, queue: qflow.Queue, chance: random.Random) -> None:
        batch = queue.get_many(chance.randrange(1, 9), 0)
        if not batch:
            return
        tokens = [body.decode() for body in batch.bodies]
        self.tell("got", *tokens)
        kind = chance.randrange(4)
        if kind == 0:
            batch.nack()
            return
        self.tell("ack", *tokens)
        if kind == 1:
            batch.ack()
        elif kind == 2:
            queue.ack_many(list(batch), wait=True)
            self.tell("acked", *tokens)
        else:
            batch.ack(wait=True)
            self.tell("acked", *tokens)

    def move(self, queue: qflow.Queue, chance: random.Random) -> None:
        """Ack one message and put another in its place."""
        try:
            delivery = queue.get(0)
        except qflow.QueueEmpty:
            return
        token, (new,) = delivery.body.decode(), self.tokens("q", 1)
        self.tell("got", token)
        self.tell("ack", token)
        self.tell("put", new)
        with self.broker.transaction() as tx:
            tx.ack(delivery)
            tx.put(chance.choice(QUEUES), new.encode())
        self.tell("acked", token)
        self.tell("done", new)


if __name__ == "__main__":
    Worker(open_spool(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "exits").run()
