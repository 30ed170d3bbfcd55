"""The process that is killed: it consumes, transforms and produces, each step in a transaction.

    python transform_worker.py SPOOL SEED LIFE

It tells `ready`, then `done TOKEN…` for each transaction that is committed, one `write` a line.
"""

from __future__ import annotations

import os
import random
import sys
import threading

import qflow

CAPACITY = 6_000
BROKER_CAPACITY = 15_000
THREADS = 3
SHAPES = ("even", "odd")


class Failed(Exception):
    """A step that fails on purpose: its transaction is rolled back."""


def open_spool(path: str) -> tuple[qflow.Broker, qflow.Queue]:
    """Open the spool; the queues with their small memory."""
    broker = qflow.open(path, capacity_bytes=BROKER_CAPACITY, spill="segments", segment_bytes="8KiB")
    for name in SHAPES:
        broker.bind(broker.declare_queue(name, capacity_bytes=CAPACITY), name)
    broker.declare_queue("all", capacity_bytes=CAPACITY, priorities=2)
    return broker, broker.declare_queue("source", capacity_bytes=CAPACITY)


def transform(broker: qflow.Broker, source: qflow.Queue, chance: random.Random) -> list[str]:
    """Do one step; return the tokens it has moved, once that is committed."""
    batch = source.get_many(chance.randrange(1, 6), timeout_s=0.2)
    tokens = [body.decode().partition(" ")[0] for body in batch.bodies]
    try:
        with broker.transaction() as tx:
            for token, delivery in zip(tokens, batch, strict=True):
                number = int(token)
                tx.publish(SHAPES[number % 2], delivery.body)
                tx.put("all", token.encode(), priority=number % 2)
                if chance.random() < 0.5:
                    tx.ack(delivery)
                else:
                    tx.ack_many([delivery])
            if chance.random() < 0.2:
                raise Failed
    except Failed:
        batch.nack()
        return []
    return tokens


def work(broker: qflow.Broker, source: qflow.Queue, chance: random.Random) -> None:
    while True:
        tokens = transform(broker, source, chance)
        if tokens:
            os.write(1, f"done {' '.join(tokens)}\n".encode())


if __name__ == "__main__":
    spool, seed, life = sys.argv[1:]
    broker, source = open_spool(spool)
    os.write(1, b"ready\n")
    for part in range(THREADS):
        threading.Thread(target=work, args=(broker, source, random.Random(f"{seed} {life} {part}"))).start()
