"""From replay to live without a seam: subscribers that come at any moment, while publishers run at full speed.

Each *hand-over* is one subscriber who begins in the past, or now, reads on until it is well behind what was the end when
it came, and goes. Everything it was to get came once and in order, whatever of it was read from the log and whatever
from memory. Together 100 of them and more; with QFLOW_TORTURE set, more than 1,000.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

import qflow
from qflow.streams import part as part_module
from thorough import TORTURE
from unit.clocks import LONG_S

PUBLISHERS = 2
SUBSCRIBERS = 3
MESSAGES = 600
"""Of each publisher, in each round."""
TOPICS = 4
HANDOVERS = 220 if TORTURE else 25
"""Of each case; there are 24 ways to come."""


class Round:
    """One stream, its publishers, and the subscribers who come and go meanwhile."""

    def __init__(self, broker: qflow.Broker, seed: int, partitions: int, largest: int) -> None:
        self.broker = broker
        self.seed = seed
        self.largest = largest
        self.stream = broker.declare_stream(f"s{seed}", topics=["#"], partitions=partitions)
        self.handovers = [0] * SUBSCRIBERS
        self.wrong: list[BaseException] = []
        self.ended = threading.Event()

    def run(self) -> int:
        publishers = [threading.Thread(target=self.guarded, args=(self.publish, n)) for n in range(PUBLISHERS)]
        subscribers = [threading.Thread(target=self.guarded, args=(self.come_and_go, n)) for n in range(SUBSCRIBERS)]
        for thread in publishers + subscribers:
            thread.start()
        for thread in publishers:
            thread.join()
        self.ended.set()
        for thread in subscribers:
            thread.join(LONG_S)
            assert not thread.is_alive(), "a subscriber waits for what is there"
        if self.wrong:
            raise self.wrong[0]
        return sum(self.handovers)

    def guarded(self, work, number: int) -> None:
        try:
            work(number, random.Random(self.seed * 100 + number))
        except BaseException as error:
            self.wrong.append(error)

    def publish(self, number: int, chance: random.Random) -> None:
        """Number the messages of each publisher, and deal them out to topics by that number."""
        sent = 0
        while sent < MESSAGES:
            count = min(chance.choice([1, 1, 2, 7, 40]), MESSAGES - sent)
            batch = [
                (f"{number}/{one % TOPICS}", b"%d|" % one + bytes(chance.randrange(self.largest)))
                for one in range(sent, sent + count)
            ]
            if chance.random() < 0.5:
                self.broker.publish_many(batch)
            else:
                futures = [self.broker.submit_publish(topic, body) for topic, body in batch]
                futures[-1].result(LONG_S)
            sent += count

    def come_and_go(self, number: int, chance: random.Random) -> None:
        last = False
        while not last:
            last = self.ended.is_set()  # once more after the end: it must find all of it
            self.hand_over(chance)
            self.handovers[number] += 1

    def hand_over(self, chance: random.Random) -> None:
        wanted = chance.choice(["#", "#", "+/2", "0/+", "1/3"])
        heads = self.stream.stats().next_offsets
        start = chance.choice(["earliest", "latest", "latest", "offset"])
        place: str | int = start
        low = [0] * len(heads)
        if start == "offset" and len(heads) == 1:
            place = max(0, heads[0] - chance.randrange(100))
            low = [place]
        elif start != "earliest":
            start = place = "latest"
            low = heads
        name = chance.choice([None, f"d{threading.get_ident()}"])
        with self.broker.subscribe(self.stream, wanted, start=place, name=name) as subscription:
            self.read(subscription, wanted, low, start, chance)
        if name is not None:
            self.broker.delete_subscription(self.stream, name)

    def read(
        self, subscription: qflow.Subscription, wanted: str, low: list[int], start: str, chance: random.Random
    ) -> None:
        """Read on until it is past where the stream ended when it came, or to the very end."""
        goals = [head + 10 for head in self.stream.stats().next_offsets]
        offsets: list[list[int]] = [[] for _ in goals]
        numbers: dict[str, list[int]] = {}
        passed: set[int] = set()
        while len(passed) < len(goals):
            ended = self.ended.is_set()
            batch = subscription.get_many(chance.choice([1, 3, 50, 1000]), 0 if ended else 0.02)
            for delivery in batch:
                offsets[delivery.partition].append(delivery.offset)
                numbers.setdefault(delivery.topic, []).append(int(delivery.body.partition(b"|")[0]))
                if delivery.offset >= goals[delivery.partition]:
                    passed.add(delivery.partition)
            if subscription.name is not None:
                batch.ack()  # what it holds takes memory, of which there may be too little for more
            if ended and not batch:
                break
            if not ended and not batch and wanted != "#":
                break  # its publisher has ended already, perhaps
        whole = ended and not batch
        for topic, found in numbers.items():
            assert found == list(range(found[0], found[-1] + 1, TOPICS)), f"{topic}: lost, doubled, or out of order"
            if whole:
                assert found[-1] >= MESSAGES - TOPICS, f"{topic}: the end is missing"
            if start == "earliest":
                assert found[0] < TOPICS, f"{topic}: the beginning is missing"
        for partition, found in enumerate(offsets):
            assert found == sorted(set(found))
            assert not found or found[0] >= low[partition]
            if wanted == "#" and found:
                assert found == list(range(found[0], found[-1] + 1)), "lost"
                if start in ("offset", "earliest"):
                    assert found[0] == low[partition], "the beginning is missing"


@pytest.mark.parametrize(
    ("capacity", "partitions", "largest"),
    [("64MiB", 1, 200), ("64MiB", 3, 200), ("60KiB", 1, 400), ("4KiB", 2, 2_000), (0, 1, 100)],
    ids=["one partition", "three partitions", "tails evicted", "no tails", "no memory"],
)
def test_each_message_comes_once_and_in_order_whenever_a_subscriber_comes(
    spool: Path, monkeypatch: pytest.MonkeyPatch, capacity: str | int, partitions: int, largest: int
) -> None:
    """I16: also where nothing stays in memory, and where a live reader falls behind."""
    monkeypatch.setattr(part_module, "HINTS", 8)
    handovers = rounds = 0
    with qflow.open(spool, capacity_bytes=capacity) as broker:
        while handovers < HANDOVERS:
            rounds += 1
            handovers += Round(broker, rounds, partitions, largest).run()
            assert broker.check() == []
            assert broker.engine.streams.room._held == broker.engine.streams.room._incoming == 0
            broker.delete_stream(f"s{rounds}")
