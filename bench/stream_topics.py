"""Replays of some topics: how many blocks they read, against those that hold one, and how long it takes to choose them.

One topic is replayed when maintenance has indexed what it does by itself, and not yet what came last. For a filter with
a wildcard everything is indexed, so that all topics are in the list it is looked up in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from random import Random
from time import perf_counter
from typing import Any

import attrs

import qflow
from bench.measure import Row, Series, Setup, Workload, at_least, at_most, interleave, micros, ratio
from bench.streams import BATCH, BODY_BYTES, SEED, batch_of, blocks_of, opened, topic_of

SHARE = 100
"""A topic comes in one of so many batches."""


def index(broker: qflow.Broker, stream: Any, *, everything: bool) -> None:
    """Index now what maintenance would, or everything but the last block."""
    least = 1 if everything else None
    with broker.engine.upkeep.moving:  # maintenance indexes, too
        while stream.index(least):
            pass


@attrs.define
class Decoded:
    """Counts the blocks that are read as a whole."""

    blocks: int = 0
    read: Callable[..., Any] | None = None

    def __enter__(self) -> Decoded:
        from qflow.storage.streams import partitions  # here: other workloads run with commits that have it elsewhere

        read = self.read = partitions.read

        def counted(*arguments: Any, **more: Any) -> Any:
            found = read(*arguments, **more)
            self.blocks += found.decoded
            return found

        partitions.read = counted
        return self

    def __exit__(self, *_: object) -> None:
        from qflow.storage.streams import partitions

        assert self.read is not None
        partitions.read = self.read


def replayed(broker: qflow.Broker, stream: Any, topic_filter: str, *, first: int = 0) -> tuple[int, int, float]:
    """Replay what a filter matches, and some `first`, which do not count; return messages, blocks, seconds."""
    taken = 0
    with Decoded() as decoded:
        start = perf_counter()
        with closing(broker.subscribe(stream, topic_filter, start="earliest", follow=False)) as subscription:
            if first:
                taken = len(subscription.get_many(first).bodies)
                decoded.blocks = 0  # it has read some that come next
                start = perf_counter()
            while batch := subscription.get_many(BATCH):
                taken += len(batch.bodies)
                batch.ack()
        seconds = perf_counter() - start
    return taken, decoded.blocks, seconds


def picked(broker: qflow.Broker, stream: Any, topic: str) -> tuple[int, float]:
    """Replay everything, and pick the messages of a topic; return how many that were, and seconds."""
    taken = 0
    start = perf_counter()
    with closing(broker.subscribe(stream, "#", start="earliest", follow=False)) as subscription:
        while batch := subscription.get_many(BATCH):
            taken += sum(1 for one, _ in zip(batch.topics, batch.bodies, strict=True) if one == topic)
            batch.ack()
    return taken, perf_counter() - start


def holding(broker: qflow.Broker, stream: Any, topic: str) -> tuple[int, int]:
    """Return how many blocks hold a topic, and how many there are."""
    from qflow.storage.blocks import read_names

    found = [topic in read_names(value, where=f"block {first}") for first, value in blocks_of(broker, stream)]
    return sum(found), len(found)


def one_topic(setup: Setup) -> Iterator[Row]:
    messages, topics = setup.size(1_000_000, 100_000), setup.size(10_000, 1_000)
    draw = Random(SEED)

    def grouped(batch: int) -> Callable[[int], str]:
        first = batch % SHARE * (topics // SHARE)
        return lambda number: topic_of(first + number % (topics // SHARE))

    def scattered(batch: int) -> Callable[[int], str]:
        return lambda _: topic_of(draw.randrange(topics))

    yield from _one_topic(setup, messages, topics, "in 1 % of the batches", grouped, bounds=True)
    yield from _one_topic(setup, messages, topics, "all topics at random", scattered, bounds=False)


def _one_topic(
    setup: Setup, messages: int, topics: int, how: str, names: Callable[[int], Callable[[int], str]], *, bounds: bool
) -> Iterator[Row]:
    setup.need_disk(messages * BODY_BYTES * 2)
    topic = topic_of(topics // 2)
    with setup.scratch() as path, opened(path / "spool") as (broker, stream):
        for batch in range(messages // BATCH):
            broker.publish_many(batch_of(names(batch)))
        index(broker, stream, everything=setup.quick)
        held, blocks = holding(broker, stream, topic)
        decoded: list[int] = []
        taken: set[int] = set()

        def filtered() -> float:
            count, read, seconds = replayed(broker, stream, topic)
            decoded.append(read)
            taken.add(count)
            return seconds

        def scanned() -> float:
            count, seconds = picked(broker, stream, topic)
            taken.add(count)
            return seconds

        filtered_s, scanned_s = interleave(setup.few_rounds, 1, filtered, scanned)
    if len(taken) != 1:
        raise AssertionError(f"the replays came to different numbers of messages: {sorted(taken)}")
    name = f"replay of one topic of {topics:,}, {messages:,} messages, {how}"
    note = f"{held:,} of {blocks:,} blocks hold its {taken.pop():,} messages"
    yield Row(
        name=f"{name}: blocks read over those that hold it",
        figure=Series("blocks read / blocks that hold it", "x", [read / held for read in decoded[1:]]),
        bound=at_most(2) if bounds else None,
        notes=[note],
    )
    filtered_ms, scanned_ms = (
        Series(side, "ms", [value * 1e3 for value in seconds])
        for side, seconds in (("by a filter", filtered_s), ("a scan of everything, filtered in Python", scanned_s))
    )
    yield Row(
        name=f"{name}: time of a scan over a filter's",
        figure=ratio(scanned_ms, filtered_ms),
        bound=at_least(20) if bounds else None,
        details=[filtered_ms, scanned_ms],
        notes=[note],
    )


def wildcard(setup: Setup) -> Iterator[Row]:
    topics = setup.size(100_000, 10_000)
    for sites, sensors in ((topics // 100, 100), (topics * 4 // 25, 6), (topics, 1)):
        names = [f"site/{site}/{f's{one}' if one else 'temp'}" for site in range(sites) for one in range(sensors)]
        Random(SEED).shuffle(names)
        yield from _wildcard(setup, names, sites, f"{sites:,} sites x {sensors}")


def _wildcard(setup: Setup, names: list[str], expected: int, shape: str) -> Iterator[Row]:
    """Publish a message for each topic, and choose by `site/+/temp`. Of more than 16,384 topics it lists none."""
    from qflow.storage.topics.selection import Selection

    topic_filter = "site/+/temp"
    looks_ms: list[tuple[float, float]] = []
    with setup.scratch() as path, qflow.open(path / "spool") as broker:
        stream: Any = broker.declare_stream("bench", topics=["site/#"])
        for first in range(0, len(names), BATCH):
            some = names[first : first + BATCH]
            broker.publish_many(batch_of(some.__getitem__, messages=len(some)))
        index(broker, stream, everything=True)
        for _ in range(setup.rounds + 1):
            selection = Selection(stream.owner, topic_filter)
            times = [perf_counter()]
            with broker.engine.spool.log.read() as txn:
                for _ in range(2):
                    selection.blocks(txn, 0, 0, 256)
                    times.append(perf_counter())
            looks_ms.append(((times[1] - times[0]) * 1e3, (times[2] - times[1]) * 1e3))
        read: list[int] = []

        def replay(topic_filter: str, count: int) -> float:
            taken, blocks, seconds = replayed(broker, stream, topic_filter, first=1)
            if taken != count:
                raise AssertionError(f"{taken} of {count} messages came")
            read.append(blocks)
            return seconds / max(1, blocks)

        chosen_s, all_s = interleave(
            setup.few_rounds,
            setup.size(5, 1),
            lambda: replay(topic_filter, expected),
            lambda: replay("#", len(names)),
        )
    yield Row(
        name=f"`{topic_filter}` over {len(names):,} topics, {shape}: which topics it matches",
        figure=Series("the first look at the index", "ms", [first for first, _ in looks_ms[1:]]),
        bound=at_most(50, "ms"),
        details=[Series("the second, which knows the topics", "ms", [second for _, second in looks_ms[1:]])],
        notes=["a look finds up to 256 blocks; the names are read by the first"],
    )
    chosen, everything = micros("by the filter, a block", 1, chosen_s), micros("everything, a block", 1, all_s)
    yield Row(
        name=f"`{topic_filter}` over {len(names):,} topics, {shape}: time of a block over one of a full replay",
        figure=ratio(chosen, everything),
        bound=at_most(1.5),
        details=[chosen, everything],
        notes=[
            f"the filter reads {min(read):,} blocks, a full replay {max(read):,}; one message each topic;",
            "timed from the second batch on, when it is known which topics the filter matches",
        ],
    )


WORKLOADS = [
    Workload("stream-topic", "one topic of 10,000 by a filter, against a scan that filters in Python", one_topic),
    Workload("stream-wildcard", "`+` in the middle of a filter over 100,000 topics", wildcard),
]
