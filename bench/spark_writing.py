"""A data frame written into a spool by Spark: rows a second, with an owner of the spool and without.

The data frame is held in memory by Spark, in two parts. Parquet of the same rows syncs nothing; `noop` shows what it
takes to come by the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count as counter
from pathlib import Path
from typing import Any

import qflow
from bench.children import alive, report, wait_to_be_killed
from bench.measure import Row, Setup, Workload, at_least, by_side, interleave, rates, ratio
from bench.spark import STREAM, TOPICS, WARM_RUNS, check_count, session, stream_of, versions, warm
from bench.timing import timed


def own(spool: str) -> None:
    """Child: own a spool until it is killed."""
    with qflow.open(spool):
        report("ready")
        wait_to_be_killed()


ROLES = {"spark-owner": own}


def make_spool(path: Path) -> Path:
    with closing(qflow.open(path)) as broker:
        broker.declare_stream(STREAM, topics=["plant/#"])
    return path


def sink(setup: Setup) -> Iterator[Row]:
    messages, size = setup.size(1_000_000, 10_000), 100
    setup.need_disk(messages * (size + 50) * 2 * (setup.few_rounds + WARM_RUNS + 2))
    spark = session()
    written = 0
    with setup.scratch() as path:
        owned, free, fresh = make_spool(path / "owned"), make_spool(path / "free"), counter()
        frame = _rows(spark, messages, size)
        frame.cache()
        try:
            check_count(frame, messages)
            with alive("spark-owner", owned):

                def into(spool: Path) -> Callable[[], float]:
                    return timed(lambda: frame.write.format("qflow").mode("append").save(str(spool)))

                def parquet() -> None:
                    frame.write.parquet(str(path / f"parquet-{next(fresh)}"))

                def noop() -> None:
                    frame.write.format("noop").mode("overwrite").save()

                sides = [into(owned), into(free), timed(parquet), timed(noop)]
                runs = setup.size(WARM_RUNS, 0)
                warm(*sides, runs=runs)
                seconds = interleave(setup.few_rounds, 1, *sides)
                written = (runs + setup.few_rounds + 1) * messages
                for spool in (owned, free):
                    check_count(stream_of(spark, spool), written)
        finally:
            frame.unpersist()
    names = ("owner alive in another process", "no owner", "Parquet, nothing synced", "noop")
    with_owner, without, parquet_rate, noop_rate = by_side(rates, names, messages, seconds)
    for what, ours in ((names[0], with_owner), (names[1], without)):
        yield Row(
            name=f"sink, a batch of {messages:,} x {size} B, {what}",
            figure=ours,
            bound=at_least(500_000, "/s"),
            details=[ratio(ours, parquet_rate), parquet_rate, noop_rate],
            notes=["synced, with the record of how far the batch is; a transaction is 16 MiB at most", versions(spark)],
        )


def _rows(spark: Any, messages: int, size: int) -> Any:
    """Return rows of 100 topics, whose values are all different."""
    return spark.range(0, messages, 1, 2).selectExpr(
        f"lpad(cast(id as string), {size}, 'x') value", f"concat('plant/', lpad(id % {TOPICS}, 2, '0'), '/heat') topic"
    )


WORKLOADS = [
    Workload("spark-sink", "a data frame of a million rows written into a spool", sink),
]
