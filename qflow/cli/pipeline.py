"""`qflow pipeline`: a stream to Parquet, Parquet to a stream, and what the topics of a spool look like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import facts, options
from qflow.cli.stop import Stop
from qflow.errors import InvalidArgument, QflowError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qflow.spark.pipeline import Progress

_master = click.option(
    "--master", default="local[*]", show_default=True, help="Where Spark runs; on this host, for the spool is here."
)


def _session(master: str) -> SparkSession:
    from qflow.spark import session

    return session("qflow pipeline", master=master)


def _parse_target(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    kind, colon, directory = value.partition(":")
    if kind != "parquet" or not colon or not directory:
        raise click.BadParameter(f"it is parquet:DIR, not {value!r}")
    return str(Path(directory).absolute())


def _parse_columns(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, (value or "").split(","))))


@click.group(short_help="Move streams and Parquet files with Spark, and report on them.")
def pipeline() -> None:
    """Move streams and Parquet files with Spark, and report on them: beside the owner of a spool, or without one.

    Needs `pip install "qflow[spark]"` and a Java.
    """


@pipeline.command(short_help="Archive a stream to Parquet.")
@options.existing_spool
@click.argument("stream")
@click.option("--to", "directory", metavar="parquet:DIR", required=True, callback=_parse_target, help="Where it goes.")
@click.option("--filter", "topic_filter", default="#", show_default=True, help="Of these topics only, as in MQTT.")
@click.option(
    "--trigger", default="available-now", show_default=True, help="available-now, or how often to look, such as 10s."
)
@click.option("--partition-by", metavar="NAMES", callback=_parse_columns, help="Split by topic, date, hour, partition.")
@click.option("--most-per-batch", type=click.IntRange(min=1), help="Messages written at once, at most.")
@_master
@options.as_json
def run(
    spool: Path,
    stream: str,
    directory: str,
    topic_filter: str,
    trigger: str,
    partition_by: tuple[str, ...],
    most_per_batch: int | None,
    master: str,
    as_json: bool,
) -> int | None:
    """Append what STREAM holds, and with a trigger of some seconds what comes, to Parquet files in DIR.

    Each message once: what was archived before is known in DIR, and the next run goes on there, also after a crash. To
    read files of a run that was killed, use Spark.
    """
    from qflow.spark.pipeline import archive

    def tell(progress: Progress) -> None:
        if not as_json:
            click.echo(
                f"batch {progress.batch}: {progress.rows:,} messages in {progress.seconds:.1f} s, "
                f"{progress.rows_per_s:,.0f} a second",
                err=True,
            )

    spark = _session(master)
    with Stop() as stop:  # after Spark has set its own handlers
        try:
            written = archive(
                spark,
                str(spool.absolute()),
                stream,
                directory,
                topic_filter=topic_filter,
                trigger=trigger,
                partition_by=partition_by,
                most_per_batch=most_per_batch,
                tell=tell,
                stopped=lambda: stop.requested,
            )
        except Exception as error:
            raise _plain(error) from error
        finally:
            spark.stop()
    if as_json:
        facts.print_json({"spool": str(spool), "stream": stream, "directory": directory, "messages": written})
    else:
        click.echo(f"{written:,} messages of stream {stream} were written to {directory}")
    return stop.exit_code


@pipeline.command(short_help="Publish Parquet files into a stream.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--into", "target", nargs=2, metavar="SPOOL STREAM", required=True, help="Where it goes.")
@_master
@options.as_json
def load(directory: Path, target: tuple[str, str], master: str, as_json: bool) -> None:
    """Publish the rows of Parquet files in DIR into a stream, all of them or none.

    They have columns `value` and `topic`, and may have `key` and `headers`, as `qflow pipeline run` writes them. A
    second time they are published once more.
    """
    from qflow.spark.pipeline import load as load_files

    spool, stream = target
    spark = _session(master)
    try:
        count = load_files(spark, str(directory.absolute()), str(Path(spool).absolute()), stream)
    except Exception as error:
        raise _plain(error) from error
    finally:
        spark.stop()
    if as_json:
        facts.print_json({"directory": str(directory), "spool": spool, "stream": stream, "messages": count})
    else:
        click.echo(f"{count:,} messages were published into stream {stream} of {spool}")


@pipeline.command(short_help="Show rates, sizes and gaps of topics.")
@options.existing_spool
@click.option("--stream", "streams", multiple=True, help="Of this one; may be repeated. Else of all.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw it, too.")
@_master
@options.as_json
def report(spool: Path, streams: tuple[str, ...], png: Path | None, master: str, as_json: bool) -> None:
    """Show, by topic, over all that the streams of a spool retain: messages, bytes, rate, and times between messages.

    `p50`, `p95` and `p99` are percentiles of the time from a message to the next one of its topic.
    """
    from qflow import inspect
    from qflow.spark import pipeline as work

    names = streams or [stream.name for stream in inspect.read_spool(spool).streams]
    spark = _session(master)
    try:
        found = work.report(spark, str(spool.absolute()), names)
    except Exception as error:
        raise _plain(error) from error
    finally:
        spark.stop()
    if png is not None:
        work.draw(found, str(png))
    if as_json:
        facts.print_json({"spool": str(spool), "topics": [topic._asdict() for topic in found]})
    elif not found:
        click.echo("no messages")
    else:
        facts.print_table(
            ["stream", "topic", "messages", "bytes", "a second", "p50 ms", "p95 ms", "p99 ms", "longest gap s"],
            (
                [facts.readable(one.stream), facts.readable(one.topic), one.messages, one.bytes, *map(_number, one[5:])]
                for one in found
            ),
        )


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"


def _plain(error: Exception) -> Exception:
    """Return an error of ours in place of Spark's, which has its sentence in the middle."""
    if isinstance(error, QflowError):
        return error
    lines = str(error).splitlines()
    ours = [line.partition("qflow.errors.")[2] for line in lines if "qflow.errors." in line]
    if ours:
        return InvalidArgument(ours[-1].partition(": ")[2])
    return InvalidArgument(f"Spark failed: {lines[0] if lines else type(error).__name__}")
