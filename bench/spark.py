"""Spark: streams read with `format("qflow")` beside Parquet and JSON lines of the same rows, in one warm session.

What is read goes to `noop`, which takes every column and keeps none. Parquet and JSON lines hold what a read of the
stream gave, all its columns, as Spark writes them by default; JSON lines are read with their schema given. Bodies are
random bytes, so that nothing is gained by packing them. All of it lies in the page cache, and nobody owns the spool
while it is read. Seconds are those of the wall, from the call until the last row is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import count as counter
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import qflow
from bench.errors import CannotRun
from bench.measure import Row, Series, Setup, Workload, at_least, at_most, by_side, bytes_name, interleave, rates, ratio
from bench.timing import timed

BATCH = 1000
SEED = 1
TOPICS = 100
MASTER = "local[2]"
STREAM = "bench"
WARM_RUNS = 3
"""How often each side runs before anything counts, beside the first round: Java compiles what runs often."""
GROUPS, IN_GROUP = 100, 10
"""Topics of the filtered read: a batch is of one group, so a group lies in 1 % of the blocks."""


def session() -> Any:
    """Return the session of all rows: the one that is there, or a new one.

    Raises:
        CannotRun: there is no PySpark here, or no Java.
    """
    try:
        import pyarrow  # noqa: F401

        from qflow.spark import session as of_qflow

        return of_qflow("bench", master=MASTER)
    except (ImportError, qflow.NotFound) as error:
        raise CannotRun(str(error)) from error


def versions(spark: Any) -> str:
    """Return what the figures of Spark depend on."""
    java = spark.sql("SELECT java_method('java.lang.System', 'getProperty', 'java.version')").first()[0]
    return f"PySpark {version('pyspark')}, pyarrow {version('pyarrow')}, Java {java}, {MASTER}"


def bodies(size: int, messages: int = BATCH, seed: int = SEED) -> list[bytes]:
    """Return bodies that are all different."""
    data = Random(seed).randbytes(size * messages)
    return [data[first : first + size] for first in range(0, len(data), size)]


def fill(spool: Path, messages: int, size: int, topic: Callable[[int], str]) -> None:
    """Make a spool with a stream of so many messages, with the topic that their number has, and an empty one."""
    with qflow.open(spool) as broker:
        broker.declare_stream(STREAM, topics=["plant/#"])
        broker.declare_stream("empty", topics=["nothing/#"])
        for first in range(0, messages, BATCH):
            numbers = range(first, min(first + BATCH, messages))
            broker.publish_many(list(zip(map(topic, numbers), bodies(size, len(numbers), first), strict=True)))


def topic_of(number: int) -> str:
    """Return one of 100 topics of 12 characters."""
    return f"plant/{number % TOPICS:02d}/heat"


def stream_of(spark: Any, spool: Path, stream: str = STREAM, **options: object) -> Any:
    """Return a data frame of a stream."""
    return spark.read.format("qflow").options(subscribe=stream, **options).load(str(spool))


def reading(make: Callable[[], Any]) -> Callable[[], float]:
    """Return a side that reads a data frame, which is made anew each time, to `noop`."""
    return timed(lambda: make().write.format("noop").mode("overwrite").save())


def warm(*sides: Callable[[], float], runs: int = WARM_RUNS) -> None:
    """Run all sides some times."""
    for _ in range(runs):
        for side in sides:
            side()


def check_count(frame: Any, expected: int) -> None:
    """See that a data frame has as many rows as it should."""
    found = frame.count()
    if found != expected:
        raise AssertionError(f"{found:,} rows came, expected {expected:,}")


# Batch and streaming reads -------------------------------------------------------------------------------------------


def read(setup: Setup) -> Iterator[Row]:
    for size, over_json in ((100, at_least(3)), (1024, None)):
        yield from _read(setup, size, over_json)


def _read(setup: Setup, size: int, over_json: Any) -> Iterator[Row]:
    messages = setup.size(1_000_000, 10_000)
    setup.need_disk(messages * (size + 50) * 4)
    spark = session()
    with setup.scratch() as path:
        spool, parquet, lines = path / "spool", str(path / "parquet"), str(path / "json")
        fill(spool, messages, size, topic_of)
        frame = stream_of(spark, spool)
        check_count(frame, messages)
        frame.write.parquet(parquet)
        frame.write.json(lines)
        schema = frame.schema
        sides = [
            reading(lambda: stream_of(spark, spool)),
            reading(lambda: spark.read.parquet(parquet)),
            reading(lambda: spark.read.schema(schema).json(lines)),
        ]
        warm(*sides, runs=setup.size(WARM_RUNS, 0))
        seconds = interleave(setup.rounds, 1, *sides)
    ours, of_parquet, of_json = by_side(rates, ('format("qflow")', "Parquet", "JSON lines"), messages, seconds)
    name = f"batch read of {messages:,} x {bytes_name(size)} to `noop`"
    yield Row(
        name=f"{name}: rate over Parquet's",
        figure=ratio(ours, of_parquet),
        bound=at_least(0.7),
        details=[ours, of_parquet, of_json],
        notes=[versions(spark)],
    )
    yield Row(name=f"{name}: rate over JSON lines'", figure=ratio(ours, of_json), bound=over_json)


def available_now(setup: Setup) -> Iterator[Row]:
    messages, size = setup.size(1_000_000, 10_000), 100
    setup.need_disk(messages * (size + 50) * 2)
    spark = session()
    batch_s: list[float] = []
    with setup.scratch() as path:
        spool, fresh = path / "spool", counter()
        fill(spool, messages, size, topic_of)

        def streaming() -> float:
            checkpoint = str(path / f"checkpoint-{next(fresh)}")
            start = perf_counter()
            frame = spark.readStream.format("qflow").options(subscribe=STREAM, startingOffsets="earliest")
            writer = frame.load(str(spool)).writeStream.format("noop").option("checkpointLocation", checkpoint)
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
            seconds = perf_counter() - start
            batches = [one for one in query.recentProgress if one["numInputRows"]]
            if [one["numInputRows"] for one in batches] != [messages]:
                raise AssertionError(f"{len(batches)} batches came, expected one of {messages:,} rows")
            batch_s.append(batches[0]["durationMs"]["triggerExecution"] / 1000)
            return seconds

        sides = [streaming, reading(lambda: stream_of(spark, spool))]
        warm(*sides, runs=setup.size(WARM_RUNS, 0))
        streaming_s, reading_s = interleave(setup.rounds, 1, *sides)
    ours = rates("available-now, from start() to the end of the query", messages, streaming_s)
    batch = rates("batch read", messages, reading_s)
    yield Row(
        name=f"streaming, available-now, {messages:,} x {size} B in one batch to `noop`: rate over the batch read's",
        figure=ratio(ours, batch),
        bound=at_least(0.4),
        details=[ours, batch, rates("of that, the batch alone", messages, batch_s[-len(streaming_s) :])],
        notes=["each query has a checkpoint of its own; to start one and to end it costs what it costs"],
    )


# Some topics ---------------------------------------------------------------------------------------------------------


def some_topics(setup: Setup) -> Iterator[Row]:
    messages, size = setup.size(10_000_000, 100_000), 100
    setup.need_disk(messages * (size + 50) * 2)
    spark = session()
    topic_filter = f"plant/{GROUPS // 2}/+"

    def grouped(number: int) -> str:
        return f"plant/{number // BATCH % GROUPS}/{number % IN_GROUP}"

    with setup.scratch() as path:
        spool = path / "spool"
        fill(spool, messages, size, grouped)
        sides = {
            "by a filter": lambda: stream_of(spark, spool, filter=topic_filter),
            "everything": lambda: stream_of(spark, spool),
            "an empty stream": lambda: stream_of(spark, spool, "empty"),
        }
        check_count(sides["by a filter"](), messages // GROUPS)
        timed = [reading(side) for side in sides.values()]
        warm(*timed, runs=setup.size(WARM_RUNS, 0))
        seconds = interleave(setup.few_rounds, 1, *timed)
        held, blocks, decoded = count_blocks(spool, topic_filter)
    name = f"filtered read, 1 % of {GROUPS * IN_GROUP:,} topics in 1 % of the batches, of {messages:,} x {size} B"
    note = f"{held:,} of {blocks:,} blocks hold the {messages // GROUPS:,} messages of these topics"
    yield Row(
        name=f"{name}: blocks read over those that match",
        figure=Series("blocks read / blocks that match", "x", [decoded / held]),
        bound=at_most(2),
        notes=[note],
    )
    some, everything, empty = (
        Series(side, "ms", [value * 1e3 for value in one]) for side, one in zip(sides, seconds, strict=True)
    )
    beyond = [_beyond(side, empty) for side in (everything, some)]
    yield Row(
        name=f"{name}: time of reading all over the filter's, both beyond an empty read's",
        figure=ratio(*beyond),
        bound=at_least(10),
        details=[some, everything, empty],
        notes=[note, "beyond an empty read's median; what is less than a millisecond beyond it counts as one"],
    )


def _beyond(side: Series, empty: Series) -> Series:
    return Series(f"{side.name}, beyond empty", "ms", [max(1.0, value - empty.median) for value in side.values])


def count_blocks(spool: Path, topic_filter: str) -> tuple[int, int, int]:
    """Return how many blocks hold a topic that a filter matches, how many there are, and how many a read looks into."""
    from qflow.arrow.schema import Column
    from qflow.spark import spools
    from qflow.spark.batch import StreamBatchReader
    from qflow.spark.options import parse
    from qflow.spark.source import TYPES
    from qflow.storage import blocks
    from qflow.storage.log.keys import scan
    from qflow.storage.streams import columns as column_pieces
    from qflow.streams.topic_filter import compile_filter

    columns = tuple(Column(name) for name in TYPES if name != "headers")
    reader = StreamBatchReader(parse({"path": str(spool), "subscribe": STREAM, "filter": topic_filter}), columns)
    decoded = 0
    whole = column_pieces.read

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal decoded
        found = whole(*arguments, **more)
        decoded += found.decoded
        return found

    column_pieces.read = counted
    try:
        for part in reader.partitions():
            for _ in reader.read(part):
                pass
    finally:
        column_pieces.read = whole
    matches = compile_filter(topic_filter)
    held = there = 0
    state = spools.look(str(spool))
    try:
        with spools.reading(str(spool)) as txn:
            for key, value in scan(txn, state.streams[STREAM].owner, 0, 0, 2**62):
                there += 1
                held += any(map(matches, blocks.read_names(value, where=f"block {key.hex()}")))
    finally:
        spools.let_go(str(spool))
    return held, there, decoded


WORKLOADS = [
    Workload("spark-read", "Spark reads a stream to `noop`, beside Parquet and JSON lines of the same rows", read),
    Workload("spark-stream", "the same by a streaming query that ends, beside the batch read", available_now),
    Workload("spark-filter", "Spark reads some topics of ten million messages, beside all of them", some_topics),
]
