"""Streams: publishing against raw LMDB commits of the same bytes, replays, and what subscribers cost who publishes.

All of it syncs, so seconds are those of the wall; where subscribers that want nothing are counted, also the publishing
thread's on the processor. What is replayed lies in the page cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count as counter
from itertools import islice
from pathlib import Path
from random import Random
from time import perf_counter, thread_time
from typing import Any

import qflow
from bench.durable import raw_commits
from bench.measure import Row, Series, Setup, Workload, at_least, at_most, by_side, interleave, micros, rates, ratio
from bench.timing import timed

BATCH = 1000
SEED = 1
BODY_BYTES = 256
VALUE_BYTES = 64 * 1024
"""A raw commit writes values of that, as large as a block."""
SUBSCRIBERS = (0, 1, 10, 100, 1000)

Messages = list[tuple[str, bytes]]


def topic_of(number: int) -> str:
    """Return a topic of 20 characters."""
    return f"plant/{number:09d}/heat"


def batch_of(topics: Callable[[int], str], size: int = BODY_BYTES, messages: int = BATCH) -> Messages:
    """Return messages whose bodies are objects of their own, as a producer's are."""
    return [(topics(number), number.to_bytes(size, "big")) for number in range(messages)]


def fill(broker: qflow.Broker, messages: int, topics: int = 100) -> None:
    """Publish that many to the stream of the `opened` broker, over so many topics."""
    for first in range(0, messages, BATCH):
        here = min(BATCH, messages - first)
        broker.publish_many(batch_of(lambda number: topic_of(number % topics), messages=here))


@contextmanager
def opened(path: Path, **settings: Any) -> Iterator[tuple[qflow.Broker, Any]]:
    """Open a spool with a stream that takes every topic of `topic_of`."""
    with qflow.open(path, **settings) as broker:
        yield broker, broker.declare_stream("bench", topics=["plant/#"])


# Publishing --------------------------------------------------------------------------------------------------------


def publish(setup: Setup) -> Iterator[Row]:
    times, chunks = 5, setup.size(21, 3)
    few, many = batch_of(lambda number: topic_of(number % 100)), batch_of(topic_of)
    fresh, draw = counter(BATCH), Random(SEED)

    def of_new_topics() -> list[Messages]:
        return [batch_of(lambda _: topic_of(next(fresh))) for _ in range(times)]

    def of_random_topics() -> list[Messages]:
        return [batch_of(lambda _: topic_of(draw.randrange(100_000))) for _ in range(times)]

    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        broker, _ = stack.enter_context(opened(path / "spool"))
        size = BATCH * BODY_BYTES
        values = [bytes(min(VALUE_BYTES, size - first)) for first in range(0, size, VALUE_BYTES)]
        raw = raw_commits(stack, path / "raw", values, times)
        bound_ones = [publishing(broker, lambda: [few] * times), publishing(broker, lambda: [many] * times)]
        others = [publishing(broker, make) for make in (of_random_topics, of_new_topics)]
        *bound_s, raw_s = interleave(setup.rounds, chunks, *bound_ones, raw)
        *others_s, beside_s = interleave(setup.few_rounds, chunks, *others, raw)
    for what, seconds, raw_seconds, bound in (
        ("100 topics", bound_s[0], raw_s, at_least(0.6)),
        ("1,000 topics", bound_s[1], raw_s, at_least(0.4)),
        ("1,000 of 100,000 topics", others_s[0], beside_s, None),
        ("1,000 new topics", others_s[1], beside_s, None),
    ):
        ours = rates("qflow publish_many", BATCH * times, seconds)
        floor = rates("raw LMDB commit of the same bytes", BATCH * times, raw_seconds)
        yield Row(
            name=f"publish_many, 1,000 x {BODY_BYTES} B, {what} a batch: rate over raw LMDB commits",
            figure=ratio(ours, floor),
            bound=bound,
            details=[ours, floor],
            notes=[
                "topics of 20 characters; they are indexed meanwhile, whoever takes a turn; raw values are of 64 KiB"
            ],
        )


def publishing(broker: qflow.Broker, make: Callable[[], list[Messages]]) -> Callable[[], float]:
    """Return a side that publishes batches, which are made before, untimed."""

    def side() -> float:
        batches = make()
        start = perf_counter()
        for messages in batches:
            broker.publish_many(messages)
        return perf_counter() - start

    return side


# Replaying ---------------------------------------------------------------------------------------------------------


def replay(setup: Setup) -> Iterator[Row]:
    messages = setup.size(1_000_000, 10_000)
    setup.need_disk(messages * BODY_BYTES * 2)
    with ExitStack() as stack:
        broker, stream = stack.enter_context(opened(stack.enter_context(setup.scratch()) / "spool"))
        fill(broker, messages)
        tenth = messages // 10
        sides: dict[str, tuple[int, Callable[[], float]]] = {
            "without a name": (messages, partial(_in_batches, broker, stream, messages, None)),
            "durable, acks synced at the end": (messages, partial(_in_batches, broker, stream, messages, "reader")),
            "`for delivery in subscription`": (tenth, partial(_one_by_one, broker, stream, tenth)),
            "raw cursor over the blocks": (messages, partial(_raw_cursor, broker, stream, messages)),
        }
        tasks = _by_a_task(stack, broker, stream, messages)
        if tasks is not None:
            sides["a task of asyncio"] = (messages, tasks)
        measured = interleave(setup.few_rounds, 1, *(side for _, side in sides.values()))
    for (name, (taken, _)), seconds in zip(list(sides.items())[:2], measured, strict=False):
        others = zip(sides.items(), measured, strict=True)
        yield Row(
            name=f"replay of {messages:,} x {BODY_BYTES} B to one subscriber, batches of 1,000, {name}",
            figure=Series("get_many, .bodies, ack", "s", list(seconds)),
            bound=at_most(1.0, "s"),
            details=[rates(other, many, theirs) for (other, (many, _)), theirs in others],
            notes=[f"{taken:,} were replayed in each round; MetricMQ's table says 4 s, on another machine"],
        )


def _in_batches(broker: qflow.Broker, stream: Any, expected: int, name: str | None) -> float:
    """Replay with `get_many`; a durable subscription is deleted afterwards, untimed."""
    taken = 0
    start = perf_counter()
    with closing(broker.subscribe(stream, "#", name=name, start="earliest", follow=False)) as subscription:
        while batch := subscription.get_many(BATCH):
            taken += len(batch.bodies)
            batch.ack()
        broker.engine.spool.log.drain()
        seconds = perf_counter() - start
    if name is not None:
        broker.delete_subscription(stream, name)
    _check(taken, expected)
    return seconds


def _one_by_one(broker: qflow.Broker, stream: Any, expected: int) -> float:
    start = perf_counter()
    with closing(broker.subscribe(stream, "#", start="earliest", follow=False)) as subscription:
        taken = sum(1 for delivery in islice(subscription, expected) if delivery.body is not None)
    seconds = perf_counter() - start
    _check(taken, expected)
    return seconds


def _raw_cursor(broker: qflow.Broker, stream: Any, expected: int) -> float:
    """Copy each block out."""
    start = perf_counter()
    size = sum(len(value) for _, value in blocks_of(broker, stream))
    seconds = perf_counter() - start
    _check(size > expected * BODY_BYTES, True)
    return seconds


def blocks_of(broker: qflow.Broker, stream: Any) -> Iterator[tuple[int, bytes]]:
    """Yield (first sequence, bytes) of each block of the first partition, in one transaction."""
    from qflow.storage.log.keys import scan

    with broker.engine.spool.log.read() as txn:
        for key, value in scan(txn, stream.owner, 0, 0, 2**63):
            yield int.from_bytes(key[-8:], "big"), value


def _by_a_task(stack: ExitStack, broker: qflow.Broker, stream: Any, expected: int) -> Callable[[], float] | None:
    """Return a side that replays in an event loop; None where `qflow.aio` has no subscriptions."""
    from qflow.aio import AsyncBroker

    tasks: Any = AsyncBroker(broker)
    if not hasattr(tasks, "subscribe"):
        return None
    loop = stack.enter_context(asyncio.Runner())

    async def work() -> None:
        taken = 0
        subscription = await tasks.subscribe(stream, "#", start="earliest", follow=False)
        while batch := await subscription.get_many(BATCH):
            taken += len(batch.bodies)
            await batch.ack()
        await subscription.close()
        _check(taken, expected)

    @timed
    def side() -> None:
        loop.run(work())

    return side


def _check(found: int, expected: int) -> None:
    if found != expected:
        raise AssertionError(f"{found} of {expected} came")


# Live subscribers --------------------------------------------------------------------------------------------------


def subscribers(setup: Setup) -> Iterator[Row]:
    """A stream for each number of subscribers, all in one broker; one of them wants what is published, or ten do."""
    chunks = setup.size(21, 2)
    crowds = [(size, min(size, 1)) for size in SUBSCRIBERS] + [(SUBSCRIBERS[-1], 10)]
    with ExitStack() as stack:
        broker = stack.enter_context(qflow.open(stack.enter_context(setup.scratch()) / "spool"))
        sides = [_Crowd(stack, broker, *crowd) for crowd in crowds]
        batches = interleave(setup.few_rounds, chunks, *(side.in_batches for side in sides))
        singles = interleave(setup.few_rounds, chunks, *(side.one_by_one for side in sides))
    names = [f"subscribers: {size:,}, served: {matching}" for size, matching in crowds]
    one, most, ten = SUBSCRIBERS.index(1), len(crowds) - 2, len(crowds) - 1
    by_batch = by_side(rates, names, _Crowd.batches * BATCH, batches)
    yield Row(
        name=f"publish_many, 1,000 x {BODY_BYTES} B, 1,000 live subscribers with distinct filters: rate over one",
        figure=ratio(by_batch[most], by_batch[one]),
        bound=at_least(0.8),
        details=[*by_batch, ratio(by_batch[ten], by_batch[one])],
        notes=["what is published goes to one subscriber, or to ten, who take it after each turn, untimed"],
    )
    by_message = by_side(micros, names, _Crowd.singles, singles)
    yield Row(
        name=f"publish, {BODY_BYTES} B, 1,000 live subscribers with distinct filters: processor's time over one",
        figure=ratio(by_message[most], by_message[one]),
        bound=at_most(1.25),
        details=[*by_message, ratio(by_message[ten], by_message[one])],
        notes=["one by one, each synced; the time of the publishing thread alone"],
    )


class _Crowd:
    """A stream with live subscribers, of whom some want what is published."""

    batches = 2
    singles = 20

    def __init__(self, stack: ExitStack, broker: qflow.Broker, size: int, matching: int) -> None:
        name = f"crowd-{size}-{matching}"
        self._broker = broker
        self._messages = batch_of(lambda number: f"{name}/0/{number % 100:02d}")
        stream = broker.declare_stream(name, topics=[f"{name}/#"])
        filters = [f"{name}/{max(0, number - matching + 1)}/+" for number in range(size)]
        everybody = [stack.enter_context(closing(broker.subscribe(stream, one))) for one in filters]
        for subscription in everybody:
            _check(len(subscription.get_many(1, timeout_s=0)), 0)  # it is live now
        self._served = everybody[:matching]

    def in_batches(self) -> float:
        start = perf_counter()
        for _ in range(self.batches):
            self._broker.publish_many(self._messages)
        seconds = perf_counter() - start
        self._drain(self.batches * BATCH)
        return seconds

    def one_by_one(self) -> float:
        publish, (topic, body) = self._broker.publish, self._messages[0]
        start = thread_time()
        for _ in range(self.singles):
            publish(topic, body)
        seconds = thread_time() - start
        self._drain(self.singles)
        return seconds

    def _drain(self, expected: int) -> None:
        for subscription in self._served:
            taken = 0
            while batch := subscription.get_many(BATCH, timeout_s=0):
                taken += len(batch)
                batch.ack()
            _check(taken, expected)


WORKLOADS = [
    Workload("stream-publish", "1,000 messages a commit into a stream; raw: their bytes in values of 64 KiB", publish),
    Workload("stream-replay", "everything a stream holds, to one subscriber; raw: a cursor over the blocks", replay),
    Workload("stream-subscribers", "publishing while up to 1,000 subscribers wait, of whom one is served", subscribers),
]
