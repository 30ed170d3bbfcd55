"""`qflow subscribe`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.damage import ranges_in_words
from qflow.cli.exits import Exit
from qflow.cli.options import START_HELP, date_meant, parse_start
from qflow.cli.standard import complain
from qflow.cli.stop import Stop, Stopped
from qflow.cli.stream_messages import described
from qflow.cli.writer import Writer
from qflow.errors import InvalidArgument
from qflow.streams.topic_filter import may_meet

if TYPE_CHECKING:
    from qflow import StreamMessage
    from qflow.inspect import Gap, StreamReader

STDOUT = 1


@click.command()
@options.existing_spool
@click.argument("stream", shell_complete=options.streams)
@click.argument("topic_filter", metavar="[FILTER]", default="#")
@click.option(
    "--from",
    "start",
    metavar="START",
    default="earliest",
    show_default=True,
    callback=parse_start,
    help=START_HELP,
)
@click.option("--partition", type=click.IntRange(min=0), help="Of this partition only.")
@click.option("--follow", is_flag=True, help="At the end of the stream, wait for more.")
@click.option("--limit", "--max", "limit", type=click.IntRange(min=1), help="Stop after so many messages.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["body", "topic", "json"]),
    default="body",
    show_default=True,
    help="What is written of a message: its body; topic, tab and body; or all of it.",
)
@options.delimiter
def subscribe(
    spool: Path,
    stream: str,
    topic_filter: str,
    start: str | int | datetime,
    partition: int | None,
    follow: bool,
    limit: int | None,
    form: str,
    delimiter: bytes,
) -> int | None:
    """Write the messages of STREAM whose topics FILTER matches to stdout, each followed by the delimiter.

    FILTER is as in MQTT: `+` stands for one level, `#` for the rest; `#` alone matches all but topics that begin with
    `$`. It only reads, with or without a live owner, and keeps no position.

    Each partition is in order; several are merged by the times of their messages, with --follow each time anew.
    Messages that retention dropped before they were written, or that are damaged, are counted on stderr. If some are
    damaged, it exits with 1 in the end.

    `qflow publish --topic-in-line` reads what --format=topic writes. With --format=json, a body that is not UTF-8 text
    is in `body_base64`, and a key in `key_base64`.

    \b
    Examples:
      qflow subscribe spool plant 'plant/+/heat' --follow
      qflow subscribe spool plant '#' --from 2026-11-01 --format json | jq -r .topic
    """
    from qflow import inspect

    gaps = _Gaps(stream)
    with Stop() as stop, gaps:
        try:
            with inspect.read_stream(
                spool, stream, topic_filter, partition=partition, start=start, on_gap=gaps.note
            ) as reader:
                _tell_if_apart(reader, topic_filter)
                writer = Writer(STDOUT, delimiter, stop)
                for batch in _up_to(_batches(reader, writer, stop if follow else None, gaps), limit):
                    writer.write(list(map(_LINES[form], batch)))
        except Stopped:
            return stop.exit_code
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}{date_meant(start)}") from error
        return Exit.DIFFERS if gaps.damaged else Exit.FINE


def _tell_if_apart(reader: StreamReader, topic_filter: str) -> None:
    """Say on stderr if nothing that the stream takes can match a filter: it may have older messages that do."""
    if not any(may_meet(topic_filter, topics) for topics in reader.topics):
        name, wanted = facts.readable(reader.name), facts.readable(topic_filter)
        takes = " ".join(map(facts.readable, reader.topics))
        complain(f"qflow: stream {name} takes {takes}, of which {wanted} matches nothing")


class _Gaps:
    """Prints on stderr what cannot be read any more: one line for all gaps of a partition since the last one."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._noted: dict[tuple[int, bool], list[Gap]] = {}
        """Gaps not printed yet, by (partition, damaged); adjacent ones are joined."""
        self.damaged = False

    def note(self, gap: Gap) -> None:
        """Note a gap, to be printed by `tell`."""
        self.damaged |= gap.damaged
        noted = self._noted.setdefault((gap.partition, gap.damaged), [])
        if noted and noted[-1].end == gap.first:
            noted[-1] = attrs.evolve(noted[-1], end=gap.end)
        else:
            noted.append(gap)

    def tell(self) -> None:
        """Print the gaps that were noted."""
        noted, self._noted = self._noted, {}
        for (partition, _), gaps in noted.items():
            count = sum(gap.messages for gap in gaps)
            offsets = ranges_in_words((gap.first, gap.end - 1) for gap in gaps)
            what = f"{count:,} messages of all topics are gone, offsets {offsets}"
            if count == 1:
                what = f"a message is gone, offset {offsets}"
            where = f"stream {facts.readable(self._stream)}, partition {partition}"
            complain(f"qflow: {where}: {what}: {' '.join(gaps[0].reason.split())}")

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.tell()


def _batches(reader: StreamReader, writer: Writer, stop: Stop | None, gaps: _Gaps) -> Iterator[list[StreamMessage]]:
    """Yield the messages there are, and with `stop` those to come, until it raises `Stopped`."""
    yield from reader.new()
    while stop is not None:
        gaps.tell()
        writer.check()
        stop.sleep(Stop.PATIENCE_S)
        yield from reader.new()


def _up_to(batches: Iterable[list[StreamMessage]], limit: int | None) -> Iterator[list[StreamMessage]]:
    """Yield batches until they hold `limit` messages; no further batch is read."""
    left = limit
    for batch in batches:
        if left is None or len(batch) < left:
            yield batch
            left = None if left is None else left - len(batch)
        else:
            yield batch[:left]
            return


_LINES: dict[str, Callable[[StreamMessage], bytes]] = {
    "body": attrgetter("body"),
    "topic": lambda message: b"%b\t%b" % (message.topic.encode(), message.body),
    "json": lambda message: facts.json_of(described(message)).encode(),
}
