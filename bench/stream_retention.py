"""Streams that hold much: how long they take to open after a kill, and to drop a gibibyte while others publish."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import attrs

import qflow
from bench import children
from bench.measure import Row, Series, Setup, Workload, at_most, percentile, ratio
from bench.restart import BOUND, FLAT, drop_caches
from bench.stream_topics import index
from bench.streams import BATCH, BODY_BYTES, batch_of, fill, opened, topic_of

POLL_S = 0.005
PATIENCE_S = 120.0
SMALL_BYTES = 100
MIB = 2**20


# Opening -----------------------------------------------------------------------------------------------------------


def restart(setup: Setup) -> Iterator[Row]:
    sizes = (2_000, 5_000) if setup.quick else (10_000, 10_000_000)
    setup.need_disk(sum(sizes) * SMALL_BYTES * 2)
    with setup.scratch() as path:
        spools = [path / str(size) for size in sizes]
        filled = [children.run_and_kill("fill-stream", *one) for one in zip(spools, sizes, strict=True)]
        times: list[list[dict[str, float]]] = [[] for _ in spools]
        for _ in range(setup.few_rounds):
            for spool, found in zip(spools, times, strict=True):
                cold = drop_caches(setup)
                found.append(children.run_and_kill("open-stream", spool))
    figures = []
    for size, seconds, found in zip(sizes, filled, times, strict=True):
        opening, resumed, newest = (
            Series(name, "ms", [one[key] * 1e3 for one in found])
            for name, key in (
                ("of that, open", "open_s"),
                ("open to the first message of a durable subscription", "first_get_s"),
                ("and to the newest message, by a query", "newest_s"),
            )
        )
        figures.append(resumed)
        yield Row(
            name=f"open after SIGKILL to the first message, {size:,} retained in a stream",
            figure=resumed,
            bound=BOUND,
            details=[opening, newest],
            notes=[f"published in batches of 1,000, in {seconds:.1f} s; {cold}"],
        )
    yield Row(
        name=f"flat: {sizes[-1]:,} over {sizes[0]:,} messages retained in a stream",
        figure=Series("ratio of the medians", "x", [figures[-1].median / figures[0].median]),
        bound=FLAT,
    )


def _fill_stream(path: str, count_text: str) -> None:
    broker = qflow.open(Path(path))
    stream = broker.declare_stream("bench", topics=["plant/#"])
    broker.subscribe(stream, "#", name="reader", start="earliest").close()
    messages = batch_of(lambda number: topic_of(number % 100), SMALL_BYTES)
    start = perf_counter()
    for _ in range(int(count_text) // BATCH):
        broker.publish_many(messages)
    children.report(perf_counter() - start)
    children.wait_to_be_killed()


def _open_stream(path: str) -> None:
    start = perf_counter()
    broker = qflow.open(Path(path))
    opened_at = perf_counter()
    delivery = broker.subscribe("bench", "#", name="reader").get()
    first_at = perf_counter()
    newest = list(broker.stream("bench").query(newest=1))
    done = perf_counter()
    if delivery.offset != 0 or not newest:
        raise AssertionError("the stream came back changed")
    children.report({"open_s": opened_at - start, "first_get_s": first_at - start, "newest_s": done - start})
    children.wait_to_be_killed()


# Retention ---------------------------------------------------------------------------------------------------------


@attrs.define
class Publisher:
    """Publishes one message after the other in a thread of its own, and notes how long each took."""

    broker: qflow.Broker
    starts: list[float] = attrs.field(factory=list)
    seconds: list[float] = attrs.field(factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop = threading.Event()
        thread = threading.Thread(target=self._work, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _work(self, stop: threading.Event) -> None:
        body, topic = bytes(BODY_BYTES), topic_of(0)
        while not stop.is_set():
            start = perf_counter()
            self.broker.publish(topic, body)
            self.seconds.append(perf_counter() - start)
            self.starts.append(start)

    def between(self, start: float, stop: float) -> list[float]:
        """Return what was published in a stretch of time, by how long it took."""
        pairs = zip(self.starts, self.seconds, strict=False)
        return sorted(took for began, took in pairs if began < stop and began + took > start)


@attrs.frozen
class Dropped:
    """One round."""

    waited_s: float
    """Until maintenance looked at it."""
    took_s: float
    blocks: int
    before: list[float]
    during: list[float]


def retention(setup: Setup) -> Iterator[Row]:
    size = setup.size(1024, 8) * MIB
    setup.need_disk(size * 2)
    rounds = setup.kept_rounds or setup.size(3, 1)
    with setup.scratch() as path, opened(path / "spool") as (broker, stream):
        found = [_dropped(setup, broker, stream, size) for _ in range(rounds + 1)][1:]
    took = Series("from the first look until floor and blocks are gone", "s", [one.took_s for one in found])
    yield Row(
        name=f"retention drops {size / MIB:,.0f} MiB of {BODY_BYTES} B messages while one thread publishes",
        figure=took,
        bound=at_most(1.0, "s"),
        details=[
            Series("before that, until maintenance looked", "s", [one.waited_s for one in found]),
            Series("blocks", "", [one.blocks for one in found]),
        ],
        notes=["`alter_stream(retention_bytes=...)`; maintenance looks once a second, and rests between its steps"],
    )
    for what, share, bound in (("p99", 0.99, at_most(3)), ("median", 0.5, None), ("slowest", 1.0, None)):
        before = Series("before it", "ms", [percentile(one.before, share) * 1e3 for one in found])
        during = Series("during it", "ms", [percentile(one.during, share) * 1e3 for one in found])
        yield Row(
            name=f"retention drops {size / MIB:,.0f} MiB: {what} of a publish during it over before",
            figure=ratio(during, before),
            bound=bound,
            details=[during, before],
            notes=[f"{min(len(one.during) for one in found):,} publishes or more during it"],
        )


def _dropped(setup: Setup, broker: qflow.Broker, stream: Any, size: int) -> Dropped:
    """Fill the stream up to a size and a bit more, and drop that size."""
    kept = size // 16
    broker.alter_stream(stream.name, retention_bytes=None)
    while stream.stats().bytes < size + kept:
        fill(broker, 10 * BATCH)
    index(broker, stream, everything=setup.quick)
    blocks = _blocks(broker, stream, stream.partitions[0].next)
    looks: list[float] = []
    retain = stream.retain

    def noted() -> bool:
        looks.append(perf_counter())
        return bool(retain())

    publisher = Publisher(broker)
    with publisher.running():
        start = perf_counter()
        _poll(lambda: perf_counter() > start + setup.size(2, 0) + 0.2)
        limit = stream.stats().bytes - size
        stream.retain = noted
        altered = perf_counter()
        broker.alter_stream(stream.name, retention_bytes=limit)
        lane = stream.partitions[0].lane
        _poll(lambda: bool(looks) and lane.row.bytes < limit + kept // 4 and not lane.removing)
        done = perf_counter()
    del stream.retain
    left = _blocks(broker, stream, stream.partitions[0].floor)
    if left > 1:  # the one at the floor holds some that stay
        raise AssertionError(f"{left} blocks below the floor are still there")
    return Dropped(
        waited_s=looks[0] - altered,
        took_s=done - looks[0],
        blocks=blocks - _blocks(broker, stream, stream.partitions[0].next),
        before=publisher.between(start, altered),
        during=publisher.between(looks[0], done),
    )


def _blocks(broker: qflow.Broker, stream: Any, end: int) -> int:
    """Return how many blocks hold something below a sequence."""
    from qflow.storage.topics.records import blocks_between

    with broker.engine.spool.log.read() as txn:
        return len(blocks_between(txn, stream.owner, 0, 0, end, 2**40))


def _poll(done: Callable[[], bool]) -> None:
    until = perf_counter() + PATIENCE_S
    while not done():
        if perf_counter() > until:
            raise AssertionError("nothing happened for two minutes")
        sleep(POLL_S)


WORKLOADS = [
    Workload("stream-restart", "open after SIGKILL with a stream of ten million messages", restart),
    Workload("stream-retention", "a stream drops a gibibyte while one thread publishes into it", retention),
]

ROLES: dict[str, Callable[..., None]] = {"fill-stream": _fill_stream, "open-stream": _open_stream}
