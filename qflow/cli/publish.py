"""`qflow publish`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.lines import Lines
from qflow.cli.spool import AnyBroker, is_owner, largest_message, reached
from qflow.cli.stop import Stop, Stopped
from qflow.config import QueueSettings
from qflow.errors import InvalidArgument, MessageTooLarge, NotFound, QflowError, TransactionTooLarge
from qflow.message import Headers
from qflow.names import argument

if TYPE_CHECKING:
    from qflow import PublishResult

STDIN = 0
ROOM_S = 1.0
"""Seconds to wait for room at the limit of a bound queue: this process owns the spool, so no consumer makes room."""
OUTSTANDING = 512
"""Messages of a producer in one commit: fewer than the window of its numbers."""
MAX_TOPIC_BYTES = 65_535


def _parse_headers(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    headers = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not equals:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        headers[name] = text
    return headers


@click.command()
@options.existing_spool
@click.argument("topic", required=False)
@click.argument("body", required=False)
@click.option("--topic-in-line", is_flag=True, help="Each line of stdin is a topic, a tab, and the message.")
@click.option("--key", help="Messages of one key are in one partition of a stream, in order.")
@click.option(
    "--header", "headers", metavar="NAME=VALUE", multiple=True, callback=_parse_headers, help="May be repeated."
)
@click.option("--producer", metavar="NAME", help="Who publishes: what has a number he published before is not stored.")
@click.option(
    "--number", type=click.IntRange(min=0), help="The number of the first message; each next one has one more."
)
@options.delimiter
@options.capacity
@options.as_json
def publish(
    spool: Path,
    topic: str | None,
    body: str | None,
    topic_in_line: bool,
    key: str | None,
    headers: dict[str, str],
    producer: str | None,
    number: int | None,
    delimiter: bytes,
    capacity: int,
    as_json: bool,
) -> int | None:
    """Publish BODY to TOPIC, or the lines of stdin: a message a line.

    A message goes into every stream that takes its topic, and every queue that is bound to it. Messages counted as
    confirmed are synced on disk. The counts are printed whatever happens: an interrupted run can be continued after as
    many lines as were confirmed, duplicates, or taken by no stream and no queue, together.

    With --producer and --number, lines can be published again without harm, as long as their numbers are among the last
    1,024 of that producer.

    With --topic-in-line, lines that no stream and no queue takes are counted and left out; the exit code is then 2.

    \b
    Examples:
      qflow publish spool plant/1/heat 21.5 --header unit=C
      tail -F all.log | qflow publish spool logs/web
      qflow subscribe spool plant '#' --format topic | qflow publish other --topic-in-line
    """
    from qflow import inspect

    if topic_in_line and topic is not None:
        raise click.UsageError("with --topic-in-line, topics and messages come from stdin: leave TOPIC out")
    if not topic_in_line and topic is None:
        raise click.UsageError("Missing argument 'TOPIC'; or --topic-in-line")
    if (producer is None) != (number is None):
        raise click.UsageError("--producer and --number go together")
    inspect.read_spool(spool)  # raises if there is no spool, where opening it would make one
    form = Form(topic=topic, key=key, headers=headers, producer=producer, number=number)
    with Stop() as stop:
        tally = Tally(spool)
        publisher = Publisher(form, tally, "" if body is not None else "stdin")
        try:
            _publish(spool, capacity, body, delimiter, publisher, stop)
        except Stopped:
            return stop.exit_code
        finally:
            tally.print(as_json)
        tally.check()
        return stop.exit_code


@attrs.frozen(kw_only=True)
class Form:
    """Arguments that all messages share."""

    topic: str | None
    """None = each line begins with its topic."""
    key: str | None
    headers: Headers
    producer: str | None
    number: int | None


class Publisher:
    """Makes messages of lines and publishes them, with one broker after another.

    Args:
        source: where lines come from, for errors; empty for a single message.
    """

    def __init__(self, form: Form, tally: Tally, source: str) -> None:
        self._form = form
        self._tally = tally
        self._source = source

    def publish(self, broker: AnyBroker, lines: list[bytes]) -> None:
        """Publish lines; those before a refused one are confirmed. Raises NotFound: nothing takes their topic."""
        messages: list[tuple[Any, ...]] = []
        for line in lines:
            try:
                messages.append(self._message(line))
            except InvalidArgument as error:
                self._send(broker, messages)
                raise self._named(error) from error
        self._send(broker, messages)
        if self._form.topic is not None:
            self._tally.check()

    def _message(self, line: bytes) -> tuple[Any, ...]:
        form = self._form
        if form.topic is not None:
            return form.topic, line, form.key
        topic, tab, body = line.partition(b"\t")
        if not tab:
            raise InvalidArgument("there is no tab in it, which ends the topic: see --topic-in-line")
        try:
            return topic.decode(), body, form.key
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"its topic is not UTF-8: {error}") from error

    def _named(self, error: QflowError) -> QflowError:
        """Return an error with the number of its line: the one after those that were counted."""
        return type(error)(f"{self._source}: line {self._tally.lines + 1}: {error}") if self._source else error

    def _send(self, broker: AnyBroker, messages: list[tuple[Any, ...]]) -> None:
        if self._form.producer is None:
            self._send_together(broker, messages)
            return
        for start in range(0, len(messages), OUTSTANDING):
            self._send_numbered(broker, messages[start : start + OUTSTANDING])

    def _send_together(self, broker: AnyBroker, messages: list[tuple[Any, ...]]) -> None:
        """Publish in one commit; if a message is refused, and so all, publish in parts, to store those before it."""
        try:
            results = broker.publish_many(messages, headers=self._form.headers or None, timeout_s=ROOM_S)
        except (InvalidArgument, MessageTooLarge, TransactionTooLarge) as error:
            if len(messages) == 1:
                raise self._named(error) from error
            middle = len(messages) // 2
            self._send_together(broker, messages[:middle])
            self._send_together(broker, messages[middle:])
        else:
            self._tally.count(messages, results)

    def _send_numbered(self, broker: AnyBroker, messages: list[tuple[Any, ...]]) -> None:
        form = self._form
        assert form.number is not None
        first = form.number + self._tally.lines
        futures = []
        refusal: QflowError | None = None
        for number, (topic, body, key) in enumerate(messages, first):
            try:
                future = broker.submit_publish(
                    topic,
                    body,
                    key=key,
                    headers=form.headers or None,
                    producer=form.producer,
                    number=number,
                    timeout_s=ROOM_S,
                )
            except QflowError as error:
                refusal = error
                break
            futures.append(future)
        for message, future in zip(messages, futures, strict=False):
            self._tally.count([message], [future.result()])
        if refusal is not None:
            raise self._named(refusal) from refusal


def _publish(spool: Path, capacity: int, body: str | None, delimiter: bytes, publisher: Publisher, stop: Stop) -> None:
    """Publish everything; the spool is closed and opened again whenever its memory is filled.

    Messages of queues stay in memory, and this process never gets them: see `qflow put`.
    """
    lines: Lines | None = None
    batches: Iterator[list[bytes]] | None = None if body is None else iter([[os.fsencode(body)]])
    while True:
        with reached(spool, capacity, None if batches is None or body is not None else stop) as broker:
            if batches is None:
                most = min(largest_message(broker) + MAX_TOPIC_BYTES, 2**31)
                settings = QueueSettings(max_message_bytes=most)
                lines = Lines(STDIN, "stdin", delimiter, settings, stop, capacity)
                batches = iter(lines)
            for batch in batches:
                publisher.publish(broker, batch)
                if is_owner(broker) and 2 * broker.stats().resident_bytes > capacity:
                    break
            else:
                break
    if lines is not None:
        lines.warn_of_unfinished()


class Tally:
    """Counts of what was confirmed, where it is, and what was not stored. `spool` is for remedies in errors."""

    def __init__(self, spool: Path) -> None:
        self.lines = 0
        """Lines whose result is known."""
        self._spool = spool
        self._confirmed = 0
        self._bytes = 0
        self._duplicates = 0
        self._unrouted = 0
        self._first_unrouted: tuple[int, str] | None = None
        self._in_streams: Counter[str] = Counter()
        self._offsets: dict[str, dict[int, list[int]]] = {}
        self._in_queues: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def count(self, messages: Sequence[tuple[Any, ...]], results: Iterable[PublishResult]) -> None:
        """Count published messages, in order. Cost: 1 µs a message."""
        for (topic, body, *_), result in zip(messages, results, strict=True):
            self.lines += 1
            if result.duplicate:
                self._duplicates += 1
                continue
            if not (result.offsets or result.sequences):
                self._unrouted += 1
                self._first_unrouted = self._first_unrouted or (self.lines, topic)
                continue
            self._confirmed += 1
            self._bytes += len(body)
            for name, offset in result.offsets.items():
                self._in_streams[name] += 1
                known = self._offsets.setdefault(name, {}).setdefault(result.partitions.get(name, 0), [offset, offset])
                known[1] = offset
            for name, sequence in result.sequences.items():
                (self._dropped if sequence is None else self._in_queues)[name] += 1

    def check(self) -> None:
        """Raise `NotFound` if some were taken by no stream and no queue."""
        if self._first_unrouted is None:
            return
        line, topic = self._first_unrouted
        lost = "it was not stored" if self._unrouted == 1 else f"{self._unrouted:,} such messages were not stored"
        where = f"line {line}: " if self.lines > 1 else ""
        declared = f"{argument(str(self._spool))} --declare NAME --topics={argument(topic)}"
        raise NotFound(
            f"{where}nobody takes topic {facts.readable(topic)}: no stream does, and no queue is bound to it; {lost}. "
            f"Make a stream: qflow streams {declared}"
        )

    def print(self, as_json: bool) -> None:
        """Print the counts."""
        if as_json:
            streams = {
                name: {"messages": self._in_streams[name], "offsets": offsets}
                for name, offsets in self._offsets.items()
            }
            facts.print_json(
                {
                    "confirmed": self._confirmed,
                    "bytes": self._bytes,
                    "duplicates": self._duplicates,
                    "unrouted": self._unrouted,
                    "streams": streams,
                    "queues": dict(self._in_queues),
                    "dropped": dict(self._dropped),
                }
            )
            return
        click.echo(f"messages confirmed: {self._confirmed:,} ({facts.counted(self._bytes, 'byte')})")
        for name, offsets in sorted(self._offsets.items()):
            where = f"{len(offsets):,} partitions"
            if offsets.keys() == {0}:
                first, last = offsets[0]
                where = f"offset {first}" if first == last else f"offsets {first} to {last}"
            click.echo(f"  {self._in_streams[name]:,} in stream {facts.readable(name)}, {where}")
        for name, count in sorted(self._in_queues.items()):
            click.echo(f"  {count:,} in queue {facts.readable(name)}")
        for name, count in sorted(self._dropped.items()):
            click.echo(f"  {count:,} dropped by queue {facts.readable(name)}, or made dead letters")
        if self._duplicates:
            click.echo(f"published before, and not stored again: {self._duplicates:,}")
        if self._unrouted:
            click.echo(f"taken by nobody, and not stored: {self._unrouted:,}")
