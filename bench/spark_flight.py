"""A broker read and written by Spark through its door for Arrow Flight, beside the same spool by its path.

The broker is in a process of its own, on the same two cores as Spark; what goes between them is loopback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import qflow
from bench.children import alive, report, wait_to_be_killed
from bench.measure import Row, Setup, Workload, at_least, by_side, bytes_name, interleave, rates, ratio
from bench.spark import (
    TOPICS,
    WARM_RUNS,
    check_count,
    fill,
    reading,
    session,
    stream_of,
    topic_of,
    versions,
    warm,
)
from bench.timing import timed


def serve(spool: str) -> None:
    """Child: own a spool with a door, until it is killed."""
    from qflow.flight import serve as open_door

    with qflow.open(spool) as broker, open_door(broker, port=0) as server:
        report(f"grpc://127.0.0.1:{server.port}")
        wait_to_be_killed()


ROLES = {"spark-flight-owner": serve}


def read(setup: Setup) -> Iterator[Row]:
    for size in (100, 1024):
        yield _read(setup, size)


def _read(setup: Setup, size: int) -> Row:
    messages = setup.size(1_000_000, 10_000)
    setup.need_disk(messages * (size + 50) * 2)
    spark = session()
    with setup.scratch() as path:
        spool = path / "spool"
        fill(spool, messages, size, topic_of)
        with alive("spark-flight-owner", spool) as url:
            check_count(stream_of(spark, url), messages)
            sides = [reading(lambda: stream_of(spark, url)), reading(lambda: stream_of(spark, spool))]
            warm(*sides, runs=setup.size(WARM_RUNS, 0))
            seconds = interleave(setup.rounds, 1, *sides)
    ours, direct = by_side(rates, ("by URL", "by path"), messages, seconds)
    return Row(
        name=f"batch read over Flight of {messages:,} x {bytes_name(size)} to `noop`: rate over the direct read's",
        figure=ratio(ours, direct),
        bound=at_least(0.7),
        details=[ours, direct],
        notes=[versions(spark)],
    )


def sink(setup: Setup) -> Iterator[Row]:
    messages, size = setup.size(1_000_000, 10_000), 100
    setup.need_disk(messages * (size + 50) * 2 * 2 * (setup.few_rounds + WARM_RUNS + 2))
    spark = session()
    with setup.scratch() as path:
        spool = path / "spool"
        fill(spool, 0, size, topic_of)
        columns = [f"rpad(cast(id as string), {size}, '.') as value", f"concat('plant/', id % {TOPICS}) as topic"]
        frame = spark.range(messages, numPartitions=2).selectExpr(*columns)
        with alive("spark-flight-owner", spool) as url:
            sides = [_writing(frame, url), _writing(frame, str(spool))]
            runs = setup.size(WARM_RUNS, 0)
            warm(*sides, runs=runs)
            seconds = interleave(setup.few_rounds, 1, *sides)
            check_count(stream_of(spark, url), 2 * messages * (runs + setup.few_rounds + 1))
    ours, direct = by_side(rates, ("by URL", "by path"), messages, seconds)
    yield Row(
        name=f"sink over Flight, a batch of {messages:,} x {size} B: rate over that into the path",
        figure=ratio(ours, direct),
        bound=None,
        details=[ours, direct],
        notes=["both have the same owner, which checks and stores what comes over Flight, too"],
    )


def _writing(frame: Any, where: str) -> Callable[[], float]:
    return timed(lambda: frame.write.format("qflow").mode("append").save(where))


WORKLOADS = [
    Workload("spark-flight", "Spark reads a stream over Arrow Flight to `noop`, beside the direct read", read),
    Workload("spark-flight-sink", "Spark writes a data frame over Arrow Flight, beside the path", sink),
]
