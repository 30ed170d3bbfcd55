"""Streams and Parquet: a stream archived as it grows, files loaded into one, and what a spool's topics look like."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qflow.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

AVAILABLE_NOW = "available-now"
PARTITIONS = ("topic", "date", "hour", "partition")
"""What an archive may be split by, into directories."""
CHECKPOINT = "_qflow_checkpoint"
"""Beside the files of an archive, where readers of Parquet do not look: how far it came."""
LOOK_S = 0.2


class Progress(NamedTuple):
    """One batch of an archive."""

    batch: int
    rows: int
    rows_per_s: float
    seconds: float


class TopicFacts(NamedTuple):
    """One topic of a stream, over what is retained of it."""

    stream: str
    topic: str
    messages: int
    bytes: int
    seconds: float
    """From its first message to its last."""
    rate_per_s: float | None
    """None: all came at one moment."""
    p50_ms: float | None
    """Between one message and the next; None: there is only one."""
    p95_ms: float | None
    p99_ms: float | None
    longest_gap_s: float | None


def archive(
    spark: SparkSession,
    spool: str,
    stream: str,
    directory: str,
    *,
    topic_filter: str = "#",
    trigger: str = AVAILABLE_NOW,
    partition_by: tuple[str, ...] = (),
    most_per_batch: int | None = None,
    tell: Callable[[Progress], object] = lambda progress: None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Append a stream to Parquet files, each message once; go on where the last one stopped.

    Args:
        directory: of the files, and how far the archive is.
        trigger: `available-now`: up to what is there, and return; or `10s`: look every ten seconds, until `stopped`.
        partition_by: some of `PARTITIONS`.
        most_per_batch: messages written at once, at most.
        tell: called after each batch.

    Returns:
        How many messages were written.

    Raises:
        InvalidArgument: it cannot be split by that. Else as Spark does.
    """
    wrong = set(partition_by) - set(PARTITIONS)
    if wrong:
        raise InvalidArgument(f"an archive cannot be split by {min(wrong)!r}: there are {', '.join(PARTITIONS)}")
    reader = spark.readStream.format("qflow").option("subscribe", stream).option("startingOffsets", "earliest")
    reader = reader.option("filter", topic_filter).option("includeHeaders", True)
    if most_per_batch is not None:
        reader = reader.option("maxOffsetsPerTrigger", most_per_batch)
    columns = ["*"]
    if "date" in partition_by:
        columns.append("to_date(timestamp) as date")
    if "hour" in partition_by:
        columns.append("hour(timestamp) as hour")
    frame = reader.load(spool).selectExpr(*columns)
    checkpoint = str(Path(directory) / CHECKPOINT)
    writer = frame.writeStream.format("parquet").option("checkpointLocation", checkpoint)
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    if trigger == AVAILABLE_NOW:
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=_interval(trigger))
    query = writer.start(directory)
    seen = -1
    total = 0
    try:
        ended = False
        while not ended:
            ended = query.awaitTermination(LOOK_S) or stopped()
            for found in query.recentProgress:
                if found["batchId"] > seen and found["numInputRows"]:
                    seen = found["batchId"]
                    total += found["numInputRows"]
                    tell(_progress(found))
    finally:
        query.stop()
    return total


def _interval(trigger: str) -> str:
    number = trigger.strip().removesuffix("s").strip()
    try:
        seconds = float(number)
    except ValueError:
        seconds = -1.0
    if seconds < 0:
        raise InvalidArgument(f"a trigger is {AVAILABLE_NOW}, or seconds such as 10s, not {trigger!r}")
    return f"{round(seconds * 1000)} milliseconds"


def _progress(found: Any) -> Progress:
    seconds = found["durationMs"].get("triggerExecution", 0) / 1000
    rows = found["numInputRows"]
    return Progress(found["batchId"], rows, rows / seconds if seconds else 0.0, seconds)


def load(spark: SparkSession, directory: str, spool: str, stream: str) -> int:
    """Publish the rows of Parquet files into a stream, all or none; return how many there are.

    Those of an archive come in the order they were in, by partition and offset.

    Raises:
        NotFound: there is no such directory, or no stream takes a topic. InvalidArgument: columns are missing.
    """
    if not Path(directory).is_dir():
        raise NotFound(f"there is no directory {directory}: give the one of the Parquet files")
    frame = spark.read.parquet(directory)
    order = [name for name in ("partition", "offset") if name in frame.columns]
    if order:
        frame = frame.orderBy(*order)
    frame.write.format("qflow").mode("append").option("stream", stream).save(spool)
    return int(frame.count())


def report(spark: SparkSession, spool: str, streams: Iterable[str]) -> list[TopicFacts]:
    """Return what the topics of some streams look like, the busiest first. Cost: reads all that is retained."""
    found: list[TopicFacts] = []
    for stream in streams:
        rows = spark.read.format("qflow").option("subscribe", stream).load(spool)
        found += [TopicFacts(stream, *row) for row in _by_topic(rows).collect()]
    return sorted(found, key=lambda one: (-one.messages, one.stream, one.topic))


def _by_topic(rows: DataFrame) -> DataFrame:
    """Return the columns of `TopicFacts`, by topic."""
    spark = rows.sparkSession
    rows.createOrReplaceTempView("qflow_report")
    return spark.sql(
        """
        with moments as (
            select topic, length(value) as size, unix_micros(timestamp) / 1e6 as moment,
                   unix_micros(timestamp) / 1e6 - lag(unix_micros(timestamp) / 1e6)
                       over (partition by topic order by timestamp, partition, offset) as gap
            from qflow_report)
        select topic, count(*) as messages, sum(size) as bytes, max(moment) - min(moment) as seconds,
               try_divide(count(*) - 1, max(moment) - min(moment)) as rate_per_s,
               1000 * percentile_approx(gap, 0.5) as p50_ms, 1000 * percentile_approx(gap, 0.95) as p95_ms,
               1000 * percentile_approx(gap, 0.99) as p99_ms, max(gap) as longest_gap_s
        from moments group by topic
        """
    )


def draw(found: list[TopicFacts], png: str, *, most: int = 20) -> None:
    """Draw rates, and times between messages, of the busiest topics.

    Raises:
        NotFound: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotFound(f"to draw needs matplotlib ({error}): pip install matplotlib") from error
    shown = found[:most][::-1]
    figure = Figure(figsize=(11, 1.5 + 0.3 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [f"{one.stream}: {one.topic}" for one in shown]
    left.barh(names, [one.rate_per_s or 0 for one in shown], color="#4477aa")
    left.set_xlabel("messages a second")
    for label, marker, values in (
        ("p50", "o", [one.p50_ms for one in shown]),
        ("p95", "s", [one.p95_ms for one in shown]),
        ("p99", "^", [one.p99_ms for one in shown]),
    ):
        right.plot([value or 0 for value in values], names, marker, label=label)
    right.set_xlabel("ms from a message to the next")
    right.set_xscale("symlog", linthresh=1)
    right.legend()
    figure.savefig(png, dpi=120)
