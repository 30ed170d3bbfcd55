"""`qflow grep`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qflow.amqp import letters
from qflow.cli import facts, messages, options, stream_messages
from qflow.cli.damage import tell_of_examination
from qflow.cli.exits import Exit
from qflow.cli.progress import counting
from qflow.cli.spool import not_there

if TYPE_CHECKING:
    from qflow import StreamMessage
    from qflow.inspect import SpoolFacts
    from qflow.inspect.facts import MessageFacts, QueueFacts
    from qflow.inspect.pages import Page
    from qflow.message import Headers

Matches = Callable[[bytes, "Headers"], bool]


@click.command()
@options.existing_spool
@click.argument("pattern")
@click.argument("names", metavar="[QUEUE|STREAM]...", nargs=-1, shell_complete=options.queues_and_streams)
@click.option("-i", "--ignore-case", is_flag=True, help="Large and small letters are the same.")
@click.option("-F", "--fixed", is_flag=True, help="PATTERN is a text, not a regular expression.")
@click.option("-c", "--count", "only_count", is_flag=True, help="Only how many there are, for each queue and stream.")
@click.option(
    "-m", "--max", "--limit", "most", type=click.IntRange(min=1), help="At most so many of each queue and stream."
)
@options.as_json
def grep(
    spool: Path,
    pattern: str,
    names: tuple[str, ...],
    ignore_case: bool,
    fixed: bool,
    only_count: bool,
    most: int | None,
    as_json: bool,
) -> int:
    """Find the messages of durable queues and of streams whose body, or a header as `NAME=VALUE`, holds PATTERN.

    PATTERN is a regular expression of Python. Without names all queues and streams are looked through, of queues what
    nobody has acked; nothing is taken, also beside an owner. A body that is not UTF-8 is looked through as far as it
    is. Exits with 1 if nothing is found, or some cannot be read.

    \b
        qflow grep SPOOL 'timeout|refused' jobs.dead
        qflow grep SPOOL -i -c acme
        qflow grep SPOOL '^tenant=acme$' jobs --json
    """
    from qflow import inspect

    try:
        looked_for = re.compile(re.escape(pattern) if fixed else pattern, re.MULTILINE | re.IGNORECASE * ignore_case)
    except (re.error, OverflowError, RecursionError) as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}; -F looks for a text") from error
    search = _Search(spool, _matcher(looked_for), most)
    found = inspect.read_spool(spool)
    shown = 0
    with counting("looking", None if names else sum(queue.messages for queue in found.queues)) as search.advance:
        for name, lines in _chosen(search, found, names):
            count = 0
            for line in lines:
                count += 1
                if not only_count:
                    _print(name, line, as_json)
            if only_count and as_json:
                facts.print_json({"name": name, "messages": count})
            elif only_count:
                click.echo(f"{facts.readable(name)}: {count}")
            shown += count
    code = tell_of_examination(spool, search.problems)
    return code if shown else Exit.DIFFERS


def _print(name: str, found: MessageFacts | StreamMessage, as_json: bool) -> None:
    from qflow.inspect.facts import MessageFacts

    if isinstance(found, MessageFacts):
        number, described = found.sequence, {"queue": name, **messages.described(found)}
    else:
        number, described = found.offset, stream_messages.described(found)
    if as_json:
        facts.print_json(described)
    else:
        part = f"{found.partition}/" if not isinstance(found, MessageFacts) and found.partition else ""
        click.echo(f"{facts.readable(name)}:{part}{number}: {messages.shown(found.body)}")


def _chosen(search: _Search, found: SpoolFacts, names: tuple[str, ...]) -> Iterator[tuple[str, Iterable[Any]]]:
    """Yield each queue and stream that is to be looked through, and what is found there."""
    streams = {stream.name: stream for stream in found.streams}
    queues = {queue.name: queue for queue in found.queues}
    there = dict.fromkeys((*streams, *queues))
    for name in names:
        if name not in there:
            raise not_there(search.spool, name, "durable queue and no stream", there)
    chosen = dict.fromkeys(names) or there
    pages = search.pages_of([queues[name] for name in chosen if name in queues])
    for name in chosen:
        if name in streams:
            yield name, search.stream(name)
        if name in queues:
            yield name, search.queue(next(pages))


@attrs.define
class _Search:
    spool: Path
    matches: Matches
    most: int | None
    problems: list[str] = attrs.field(factory=list)
    advance: Callable[[int], None] = lambda _count: None

    def pages_of(self, queues: Sequence[QueueFacts]) -> Iterator[Iterator[Page]]:
        def is_wanted(message: MessageFacts) -> bool:
            return self.matches(message.body, message.headers)

        for _, pages in messages.pages_of(self.spool, queues, keep=is_wanted, most=self.most):
            yield pages

    def queue(self, pages: Iterator[Page]) -> Iterator[MessageFacts]:
        for page in pages:
            yield from page.messages
            self.problems += page.problems
            self.advance(page.looked_at)

    def stream(self, name: str) -> Iterator[StreamMessage]:
        left = -1 if self.most is None else self.most
        for batch in stream_messages.batches(self.spool, name, self.problems):
            self.advance(len(batch))
            for message in batch:
                if left and self.matches(message.body, message.headers):
                    left -= 1
                    yield message
            if not left:
                return


def _matcher(looked_for: re.Pattern[str]) -> Matches:
    def matches(body: bytes, headers: Headers) -> bool:
        return looked_for.search(body.decode(errors="replace")) is not None or any(
            looked_for.search(f"{name}={messages.text_of_value(value)}")
            for name, value in letters.headers_of(headers).items()
        )

    return matches
