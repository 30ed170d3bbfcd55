"""The server is killed while messages expire and are rejected: each is a dead letter once, and none is lost."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import qflow
from amqp_client import Basic, method
from amqp_clients import PATIENCE_S, serving
from amqp_history import Client, History, Key, Publisher, live_under_kills
from amqp_raw import Queue, Raw
from processes import free_port
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
CLIENTS = 5 if TORTURE else 2
"""Of each kind."""
KILLS = int(os.environ.get("QFLOW_ROUNDS", "0")) or (60 if TORTURE else 2)
MESSAGES = 300 if TORTURE else 150
"""Confirmed in each round, at least, before the server is killed."""
DEAD = "dead"
SOURCES = {"expires": {"x-message-ttl": 30}, "rejected": {}, "drops": {"x-max-length": 5}}


class Dying(Publisher):
    """Publishes what is to become a dead letter."""

    targets = tuple(SOURCES)


class Rejecting(Client):
    """Rejects what comes, one or many at once, and vanishes now and then."""

    def live(self, raw: Raw) -> None:
        raw.ask(Basic.Qos(0, 100, False), Basic.QosOk)
        raw.ask(Basic.Consume(0, "rejected", "tag"), Basic.ConsumeOk)
        while not self.stopping.is_set() and self.chance.random() > 0.005:
            tag = raw.until(Basic.Deliver).delivery_tag
            if self.chance.random() < 0.1:
                raw.send(method(1, Basic.Nack(tag, True, False)))


def declare_all(port: int) -> None:
    """Have the queues."""
    to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
    with Raw(port).open() as raw:
        raw.ask(Queue.Declare(0, DEAD, durable=True), Queue.DeclareOk)
        for queue, arguments in SOURCES.items():
            raw.ask(Queue.Declare(0, queue, durable=True, arguments=arguments | to_dead), Queue.DeclareOk)


def left(spool: Path) -> dict[str, list[Key]]:
    """Return what is in the queues of a spool that nobody serves."""
    with qflow.open(spool) as broker:
        found = {name: list(map(key_of, taken(broker.queue(name)))) for name in broker.queues()}
        assert broker.check() == []
        return found


def taken(queue: qflow.Queue) -> Iterator[bytes]:
    """Yield the bodies of all messages of a queue; they are settled."""
    while batch := queue.get_many(100, timeout_s=0):
        yield from batch.bodies
        batch.ack()


def key_of(body: bytes) -> Key:
    """Return which message this is; it must be as it was published."""
    publisher, target, number = body.split(b" ", 3)[:3]
    key = Key(int(publisher), target.decode(), int(number))
    assert key.body() == body
    return key


def test_a_dead_letter_is_neither_lost_nor_doubled(tmp_path: Path) -> None:
    """Each confirmed message is somewhere at the end, once, and the most of them where dead letters go."""
    print(f"seed {SEED} (set QFLOW_SEED)")
    chance, began = random.Random(SEED), time.monotonic()
    history, port = History(), free_port()
    clients = [
        kind(history, port, number, chance.randrange(2**32)) for kind in (Dying, Rejecting) for number in range(CLIENTS)
    ]
    live_under_kills(
        tmp_path / "spool", history, clients, declare_all, port=port, kills=KILLS, messages=MESSAGES, chance=chance
    )
    assert history.wrong == []
    with serving(tmp_path / "spool", port=port), Raw(port).open() as raw:
        deadline = time.monotonic() + PATIENCE_S
        while raw.ask(Queue.Declare(0, "expires", passive=True), Queue.DeclareOk).message_count:
            assert time.monotonic() < deadline
    found = left(tmp_path / "spool")
    print(
        f"{len(history.confirmed)} confirmed; at the end { {name: len(keys) for name, keys in found.items()} }; "
        f"{KILLS + 1} kills, {time.monotonic() - began:.0f} s"
    )
    came = Counter(key for keys in found.values() for key in keys)
    assert not found["expires"]
    assert [key for key in history.confirmed if key not in came] == []
    assert [key for key, times in came.items() if times > 1] == []
