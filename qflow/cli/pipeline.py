"""`qflow pipeline`: a stream to Parquet, Parquet to a stream, and a report on the topics of a spool."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qflow.cli import facts, options
from qflow.cli.spool import not_there
from qflow.cli.standard import complain
from qflow.cli.stop import Stop
from qflow.errors import InvalidArgument, QflowError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from qflow.spark.archive import Progress


def _parse_master(context: click.Context, parameter: click.Parameter, given: str) -> str:
    if not re.fullmatch(r"local(\[(\*|[1-9]\d{0,3})(, *\d{1,3})?\])?", given):
        raise click.BadParameter(f"it is local[*] or local[N], for a spool is read on its own host, not {given!r}")
    return given


_master = click.option(
    "--master", default="local[*]", show_default=True, callback=_parse_master, help="How many cores Spark may use."
)


@contextmanager
def _spark(master: str) -> Iterator[SparkSession]:
    """Give a new Spark session, whose Java prints nothing unless it fails to start.

    A signal during the start is handled once the session can be stopped: a Java left before that would run on. It has a
    session of its own: a signal to our process group, such as that of `timeout`, is for us to handle.
    """
    from qflow.spark import session
    from qflow.spark.java import find_java
    from qflow.spark.sessions import is_elsewhere
    from qflow.spark.words import check_pyspark, plain

    check_pyspark()
    if not is_elsewhere():
        find_java()
    from pyspark import java_gateway

    java_gateway.Popen = partial(subprocess.Popen, start_new_session=True)
    complain("Spark is starting ...")
    with Stop() as stop, tempfile.TemporaryFile() as said:
        ours = os.dup(2)
        os.dup2(said.fileno(), 2)  # Java and its workers inherit it
        try:
            spark = session("qflow pipeline", master=master, log_level="OFF")
        except QflowError:
            raise
        except Exception as error:
            _leave_if_asked(stop)  # Java may have got that signal, too
            said.seek(0)
            lines = [line.strip() for line in said.read().decode(errors="replace").splitlines()]
            last = [line for line in lines if line and not line.startswith("at ")][-1:]
            why = plain(error)
            raise InvalidArgument("; Java said: ".join([str(why), *last])) from error
        finally:
            os.dup2(ours, 2)
            os.close(ours)
    try:
        _leave_if_asked(stop)
        yield spark
    finally:
        with suppress(Exception):  # Java was killed: there is nothing to stop
            spark.stop()


def _leave_if_asked(stop: Stop) -> None:
    if stop.exit_code is not None:
        raise click.exceptions.Exit(stop.exit_code)


def _check_streams(spool: Path, names: Iterable[str]) -> list[str]:
    """Return the streams of a spool, after checking that these are among them; before Spark starts, which is slow.

    Raises:
        NotFound: one is not there, or there is no spool.
    """
    from qflow import inspect

    there = [stream.name for stream in inspect.read_spool(spool).streams]
    for name in names:
        if name not in there:
            raise not_there(spool, name, "stream", there)
    return there


def _parse_target(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    kind, colon, directory = value.partition(":")
    if kind != "parquet" or not colon or not directory:
        raise click.BadParameter(f"it is parquet:DIR, not {value!r}")
    from qflow.spark.places.parse import local_path

    path = local_path(directory)
    if path is None and "://" in directory:
        raise click.BadParameter(
            f"an archive lies on a disk of this host, and {directory} does not: give a directory here, or write there "
            "with a query of your own"
        )
    return path or str(Path(directory).absolute())


def _parse_columns(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, (value or "").split(","))))


@click.group()
def pipeline() -> None:
    """Move messages between streams and Parquet files with Spark, and report on streams; a live owner may go on.

    Needs `pip install '.[spark]'` in a clone of qflow, and a Java.
    """


class _Places(options.SpoolPath):
    """The directory of a spool that exists, or URLs of brokers, or several of both, with commas between."""

    name = "spool"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the text, with absolute paths."""
        from qflow.spark.places.local import LocalPlace
        from qflow.spark.places.parse import parse_places

        try:
            places = parse_places({"path": str(value)})
        except QflowError as error:
            self.fail(str(error), parameter, context)
        for place in places:
            if isinstance(place, LocalPlace):
                super().convert(place.where, parameter, context)
        return ",".join(place.where for place in places)


def _check_places(spool: str, stream: str, reach: dict[str, str]) -> None:
    """Check that a stream is at one of the places, before Spark starts.

    Raises:
        NotFound: it is not. InvalidArgument: two of them are the same. Away: a broker does not answer.
    """
    from qflow.spark.places.local import LocalPlace
    from qflow.spark.places.parse import parse_places
    from qflow.spark.places.place import check_apart

    places = parse_places(reach | {"path": spool})
    if len(places) == 1 and isinstance(places[0], LocalPlace):
        _check_streams(Path(spool), [stream])
        return
    found = [(place, place.look()) for place in places]
    check_apart(found)
    there = sorted({name for _, state in found for name in state.streams})
    if stream not in there:
        raise not_there(spool, stream, "stream", there)


@pipeline.command(short_help="Archive a stream to Parquet.")
@click.argument("spool", metavar="SPOOL", type=_Places(exists=True))
@click.argument("stream")
@click.option("--to", "directory", metavar="parquet:DIR", required=True, callback=_parse_target, help="Where it goes.")
@click.option("--filter", "topic_filter", default="#", show_default=True, help="Of these topics only, as in MQTT.")
@click.option(
    "--trigger", default="available-now", show_default=True, help="available-now, or how often to look, such as 10s."
)
@click.option("--partition-by", metavar="NAMES", callback=_parse_columns, help="Split by topic, date, hour, partition.")
@click.option("--most-per-batch", type=click.IntRange(min=1), help="Messages written at once, at most.")
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False), help="What brokers at URLs ask for.")
@click.option("--ca", type=click.Path(exists=True, dir_okay=False), help="Certificates that those of brokers are of.")
@click.option("--group", metavar="NAME", help="Retention waits for what this archive, as NAME, has not written.")
@_master
@options.as_json
def run(
    spool: str,
    stream: str,
    directory: str,
    topic_filter: str,
    partition_by: tuple[str, ...],
    master: str,
    as_json: bool,
    token_file: str | None,
    ca: str | None,
    **more: Any,
) -> int | None:
    """Append the messages of STREAM, with a trigger of some seconds also those to come, to Parquet files in DIR.

    Each message once: DIR keeps the position, and the next run goes on there, also after a crash or
    Ctrl-C. DIR holds one archive: another stream, filter or split needs another one. To read files of a run that was
    killed, use Spark.

    SPOOL may be the URL of a broker that is served with --flight, or several paths and URLs with commas between; the
    stream is read from each that has it.

    \b
    Examples:
      qflow pipeline run spool plant --to parquet:archive
      qflow pipeline run spool plant --to parquet:archive --trigger 10s --partition-by date
    """
    from qflow.spark.archive import Archive, Contents

    total = 0

    def tell(progress: Progress) -> None:
        nonlocal total
        total += progress.rows
        if not as_json:
            complain(
                f"batch {progress.batch}: {progress.rows:,} messages in {progress.seconds:.1f} s, "
                f"{progress.rows_per_s:,.0f} a second; {total:,} so far"
            )

    given = {"tokenFile": token_file, "ca": ca}
    reach = {name: value for name, value in given.items() if value is not None}
    _check_places(spool, stream, reach)
    archive = Archive(spool, Contents(stream, topic_filter, partition_by), directory, reach=reach, **more)
    with archive, _spark(master) as spark, Stop() as stop:  # `Stop` last: Spark sets handlers of its own
        try:
            written = archive.run(spark, tell=tell, stopped=lambda: stop.requested)
        except (QflowError, OSError):
            _leave_if_asked(stop)  # Java, or its workers, may have had that signal, too
            raise
    if as_json:
        facts.print_json({"spool": spool, "stream": stream, "directory": directory, "messages": written})
    else:
        click.echo(f"{written:,} messages of stream {stream} were written to {directory}")
    return stop.exit_code


@pipeline.command(short_help="Publish Parquet files into a stream.")
@click.argument("directory", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--into", "target", nargs=2, metavar="SPOOL STREAM", required=True, help="Where it goes.")
@click.option("--name", default="", help="Of the load: under another name the same files are published once more.")
@_master
@options.as_json
def load(directory: Path, target: tuple[str, str], name: str, master: str, as_json: bool) -> None:
    """Publish the rows of Parquet files in DIR into a stream, all of them or none.

    They have columns `value` and `topic`, and may have `key` and `headers`, as `qflow pipeline run` writes them.

    The same files are published into the same stream once: so repeat a load that was interrupted. To have them there
    twice, give the second load a --name.

    \b
    Examples:
      qflow pipeline load archive --into spool plant.again
    """
    from qflow.spark.archive import check_place
    from qflow.spark.loading import load as load_files

    spool, stream = target
    _check_streams(Path(spool), [stream])
    check_place(str(directory.absolute()))
    with _spark(master) as spark:
        found = load_files(spark, str(directory.absolute()), str(Path(spool).absolute()), stream, name=name)
    if as_json:
        published = 0 if found.before else found.messages
        facts.print_json({"directory": str(directory), "spool": spool, "stream": stream, "messages": published})
    elif found.before:
        click.echo(
            f"nothing was done: the {found.messages:,} messages of these files were published into stream {stream} of "
            f"{spool} before. To publish them once more, give this load another --name"
        )
    else:
        click.echo(f"{found.messages:,} messages were published into stream {stream} of {spool}")


@pipeline.command(short_help="Show rates, sizes, gaps and latencies of topics.")
@options.existing_spool
@click.option("--stream", "streams", multiple=True, help="Of this one; may be repeated. Else of all.")
@click.option("--sent-header", default="", metavar="NAME", help="Header that says when a message was sent.")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw it, too.")
@_master
@options.as_json
def report(
    spool: Path, streams: tuple[str, ...], sent_header: str, png: Path | None, master: str, as_json: bool
) -> None:
    """Show, by topic, for all retained messages: count, bytes, rate, and percentiles of gaps and latencies.

    A gap is the time from a message to the next one of its topic. A latency is the time from when a message was sent to
    when it was published; it is shown if a header of the messages has the former, in seconds since 1970 or as ISO 8601
    text: name the header with --sent-header.

    \b
    Examples:
      qflow pipeline report spool --stream plant --png plant.png
    """
    from qflow.spark import report as work

    there = _check_streams(spool, streams)
    if png is not None:
        work.check_drawing()
        if not os.access(png.absolute().parent, os.W_OK):
            raise InvalidArgument(f"{png.absolute().parent} is no directory that can be written: give --png another")
    found = []
    if streams or there:
        with _spark(master) as spark:
            names = dict.fromkeys(streams) or there
            found = work.report(spark, str(spool.absolute()), names, sent_header=sent_header)
    if png is not None and found:
        work.draw(found, str(png))
    if as_json:
        facts.print_json({"spool": str(spool), "topics": [topic._asdict() for topic in found]})
    elif not found:
        click.echo("no messages")
    else:
        until = 15 if sent_header else 11
        percentiles = ["p50 ms", "p95 ms", "p99 ms", "longest"]
        headings = ["stream", "topic", "messages", "bytes", "largest", "a second"]
        headings += ["gap p50 ms", *percentiles[1:]] + (["latency p50 ms", *percentiles[1:]] if sent_header else [])
        facts.print_table(
            headings,
            (
                [facts.readable(one.stream), facts.readable(one.topic), *one[2:5], *map(_number, one[6:until])]
                for one in found
            ),
        )


def _number(value: str | float | None) -> str | None:
    return f"{value:,.1f}" if isinstance(value, int | float) else value
