"""A report on the topics of streams, computed by Spark over all retained messages, and a chart of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from qflow.errors import NotFound
from qflow.named_tuples import NamedTuple
from qflow.spark.options import naming
from qflow.spark.words import INSTALL, spark_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHOWN = 20
"""The most topics in the chart."""


class TopicFacts(NamedTuple):
    """One topic of a stream, over its retained messages."""

    stream: str
    topic: str
    messages: int
    bytes: int
    largest: int
    """Bytes of its largest message."""
    seconds: float
    """Seconds from its first message to its last."""
    rate_per_s: float | None
    """Messages per second; None = all came at one time."""
    gap_p50_ms: float | None
    """Milliseconds between a message and the next; None = there is only one."""
    gap_p95_ms: float | None
    gap_p99_ms: float | None
    gap_longest_ms: float | None
    latency_p50_ms: float | None
    """Milliseconds from when a message was sent, by a header, to when it was published; None = no header says so."""
    latency_p95_ms: float | None
    latency_p99_ms: float | None
    latency_longest_ms: float | None


_BY_TOPIC = """
    with sent as (
        select topic, partition, offset, coalesce(length(value), 0) as size, unix_micros(timestamp) as moment,
               cast(get(filter({rows}.headers, header -> header.key = :header), 0).value as string) as said
        from {rows}),
    moments as (
        select topic, size, moment,
               (moment - lag(moment) over (partition by topic order by moment, partition, offset)) / 1e3 as gap,
               (moment - coalesce(try_cast(said as double) * 1e6, unix_micros(try_cast(said as timestamp)))) / 1e3
                   as latency
        from sent),
    topics as (
        select topic, count(*) as messages, sum(size) as bytes, max(size) as largest,
               (max(moment) - min(moment)) / 1e6 as seconds,
               percentile_approx(gap, array(0.5, 0.95, 0.99, 1.0)) as gaps,
               percentile_approx(latency, array(0.5, 0.95, 0.99, 1.0)) as latencies
        from moments group by topic)
    select topic, messages, bytes, largest, seconds, try_divide(messages - 1, seconds) as rate_per_s,
           gaps[0], gaps[1], gaps[2], gaps[3], latencies[0], latencies[1], latencies[2], latencies[3]
    from topics
"""
"""The columns of `TopicFacts`, in order."""


def report(spark: SparkSession, spool: str, streams: Iterable[str], *, sent_header: str = "") -> list[TopicFacts]:
    """Return the figures of all topics of some streams, the busiest first.

    Args:
        sent_header: name of a header that says when a message was sent: seconds since 1970, or a time as ISO 8601.

    Raises:
        NotFound: there is no such stream.
    Cost: reads and sorts all retained messages.
    """
    found: list[TopicFacts] = []
    with spark_errors():
        for stream in streams:
            rows = spark.read.format("qflow").option(*naming(stream)).option("includeHeaders", True).load(spool)
            by_topic = spark.sql(_BY_TOPIC, args={"header": sent_header}, rows=rows)
            found += [TopicFacts(stream, *row) for row in by_topic.collect()]
    return sorted(found, key=lambda one: (-one.messages, one.stream, one.topic))


def check_drawing() -> None:
    """Raise `NotFound` if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NotFound(f"drawing needs matplotlib ({error}): {INSTALL}") from error


def draw(found: list[TopicFacts], png: str) -> None:
    """Draw rates and gaps of the busiest topics, and latencies, if there are any.

    Raises:
        NotFound: matplotlib is not installed. OSError: the file cannot be written.
    """
    check_drawing()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = found[:SHOWN][::-1]
    late = any(one.latency_p50_ms is not None for one in shown)
    figure = Figure(figsize=(15 if late else 11, 2 + 0.3 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    left, *others = figure.subplots(1, 3 if late else 2, sharey=True)
    several = len({one.stream for one in found}) > 1
    names = [_shorter(f"{one.stream}: {one.topic}" if several else one.topic) for one in shown]
    places = range(len(shown))
    left.barh(places, [one.rate_per_s or 0 for one in shown], color="#4477aa")
    left.set_yticks(places, names)
    left.set_xlabel("messages a second")
    _draw_percentiles(others[0], "ms from a message to the next", [one[7:11] for one in shown])
    if late:
        _draw_percentiles(others[1], "ms from when it was sent", [one[11:15] for one in shown])
    streams = ", ".join(dict.fromkeys(one.stream for one in found))
    busiest = f", the {SHOWN} busiest of {len(found):,} topics" if len(found) > SHOWN else ""
    figure.suptitle(_shorter(f"{sum(one.messages for one in found):,} messages of {streams}{busiest}", 120))
    figure.savefig(png, dpi=120, format="png")


def _draw_percentiles(axes: Any, label: str, rows: list[tuple[float | None, ...]]) -> None:
    for number, (name, marker) in enumerate((("p50", "o"), ("p95", "s"), ("p99", "^"), ("longest", "|"))):
        known = [(place, max(row[number] or 0, 0)) for place, row in enumerate(rows) if row[number] is not None]
        axes.plot([value for _, value in known], [place for place, _ in known], marker, label=name, alpha=0.8, ls="")
    axes.set_xlabel(label)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-0.2, 2 * max((value or 0 for row in rows for value in row), default=0) + 1)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small")


def _shorter(text: str, most: int = 48) -> str:
    plain = text.replace("$", r"\$")  # matplotlib would read a formula
    return plain if len(plain) <= most else plain[: most - 1] + "…"
