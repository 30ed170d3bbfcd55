"""What a trigger of a streaming query costs, with ten rows and with nothing to do, beside Spark's own rate-micro-batch.

Queries run one at a time, in turns, each anew with a checkpoint of its own, and trigger again as soon as they can. A
round's figure is the median of its triggers, as Spark reports them, without the first ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count as counter
from statistics import median
from typing import Any

from bench.errors import CannotRun
from bench.measure import Row, Series, Setup, Workload, at_most, interleave
from bench.spark import STREAM, fill, session, topic_of, versions, warm

ROWS = 10
"""In each trigger that has something to do."""
SKIPPED = 3
"""The first triggers of a query, which start workers and read checkpoints."""
PATIENCE_S = 60
_IDLE = "spark.sql.streaming.noDataProgressEventInterval"


@contextmanager
def idle_reported(spark: Any) -> Iterator[None]:
    """Have Spark report each trigger with nothing to do, not one in ten seconds."""
    before = spark.conf.get(_IDLE)
    spark.conf.set(_IDLE, "0")
    try:
        yield
    finally:
        spark.conf.set(_IDLE, before)


class _Query:
    """A running query, which is stopped at the end."""

    def __init__(self, frame: Any, checkpoint: str) -> None:
        self._context = frame.sparkSession.sparkContext
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        self._query = writer.trigger(processingTime="0 seconds").start()

    def triggers_s(self, rows: int, wanted: int) -> list[float]:
        """Return how long so many triggers of so many rows took."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            if self._query.exception() is not None:
                raise AssertionError(str(self._query.exception()))
            found = [
                one["durationMs"]["triggerExecution"] / 1000
                for one in self._query.recentProgress
                if one["numInputRows"] == rows
            ]
            if len(found) >= SKIPPED + wanted:
                return found[SKIPPED : SKIPPED + wanted]
            if time.monotonic() > deadline:
                raise CannotRun(f"{len(found)} triggers of {rows} rows came within {PATIENCE_S} s")
            time.sleep(0.2)

    def close(self) -> None:
        self._context.setLogLevel("OFF")  # it would tell of the batch that is cut off
        try:
            self._query.stop()
        finally:
            self._context.setLogLevel("ERROR")


def triggers(setup: Setup) -> Iterator[Row]:
    wanted = setup.size(20, 2)
    spark = session()
    with setup.scratch() as path, idle_reported(spark):
        spool, fresh = path / "spool", counter()
        fill(spool, setup.size(10_000, 1000), 100, topic_of)

        def stream(start: str) -> Any:
            frame = spark.readStream.format("qflow").options(subscribe=STREAM, startingOffsets=start)
            return frame.option("maxOffsetsPerTrigger", ROWS).load(str(spool))

        def rate() -> Any:
            return spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS).load()

        def side(make: Callable[[], Any], rows: int) -> Callable[[], float]:
            def one() -> float:
                with closing(_Query(make(), str(path / f"checkpoint-{next(fresh)}"))) as query:
                    return median(query.triggers_s(rows, wanted))

            return one

        sides = [side(lambda: stream("earliest"), ROWS), side(lambda: stream("latest"), 0), side(rate, ROWS)]
        warm(*sides, runs=setup.size(1, 0))
        seconds = interleave(setup.few_rounds, 1, *sides)
    names = (f'format("qflow"), {ROWS} rows', 'format("qflow"), nothing to do', f"rate-micro-batch, {ROWS} rows")
    some, idle, peer = (
        Series(name, "ms", [value * 1e3 for value in one]) for name, one in zip(names, seconds, strict=True)
    )
    notes = [
        f"{wanted} triggers a round; rate-micro-batch has rows in every trigger, so both are held against those",
        versions(spark),
    ]
    for what, ours in ((f"with {ROWS} rows", some), ("with nothing to do", idle)):
        yield Row(
            name=f"a trigger {what}: time beyond that of rate-micro-batch with {ROWS} rows",
            figure=Series(
                f"{ours.name} - {peer.name}",
                "ms",
                [one - other for one, other in zip(ours.values, peer.values, strict=True)],
            ),
            bound=at_most(120, "ms"),
            details=[ours, peer],
            notes=notes,
        )


WORKLOADS = [
    Workload("spark-trigger", "what a trigger of a streaming query costs, beside rate-micro-batch", triggers),
]
