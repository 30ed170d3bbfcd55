"""Messages as commands show them, and which of them are wanted: `--where`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qflow.amqp import letters
from qflow.cli import facts
from qflow.cli.facts import cut
from qflow.errors import CorruptionError

if TYPE_CHECKING:
    from qflow.inspect.facts import MessageFacts, QueueFacts
    from qflow.inspect.pages import Page
    from qflow.message import Headers

SHOWN = 60
"""Characters of a body in a table."""
SHOWN_BYTES = 4 * SHOWN + 1
"""So much of a body is enough for that."""
HEADERS_SHOWN = 200
"""Characters of all headers of a message in a table."""
_PIECE = 2**16
"""Characters that are escaped at a time: each escape is an object of its own until they are joined."""

most = click.option(
    "-n", "--limit", "most", type=click.IntRange(1, 10_000), default=10, show_default=True, help="How many."
)


def _conditions(_context: click.Context, _parameter: click.Parameter, values: Sequence[str]) -> Sequence[str]:
    for value in values:
        if not value.partition("=")[0]:
            raise click.BadParameter(f"{value!r} begins with the name of a header: NAME=VALUE, or NAME for any value")
    return values


where = click.option(
    "--where",
    "conditions",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_conditions,
    help="Only those with this header; NAME alone is any value. All of several must hold.",
)


def pages(
    spool: Path,
    queue_name: str,
    positions: dict[int, int] | None = None,
    *,
    keep: Callable[[MessageFacts], bool] | None = None,
    most: int | None = None,
    body_bytes: int | None = None,
    number: int | None = None,
) -> Iterator[Page]:
    """Yield what a queue holds, a page after the other, with `most` messages together at the most; see `read_page`."""
    from qflow import inspect

    while most is None or most > 0:
        page = inspect.read_page(
            spool, queue_name, positions, keep=keep, most=most, body_bytes=body_bytes, number=number
        )
        yield page
        most = None if most is None else most - len(page.messages)
        positions, number = page.positions, page.number
        if not page.more:
            return


def pages_of(
    spool: Path,
    queues: Sequence[QueueFacts],
    *,
    keep: Callable[[MessageFacts], bool] | None = None,
    most: int | None = None,
) -> Iterator[tuple[QueueFacts, Iterator[Page]]]:
    """Yield each of these queues, which were found in the log, with its pages; there are none of an empty one."""
    first_pages = _first_pages(spool, [queue for queue in queues if _may_hold(queue)], keep, most)
    for queue in queues:
        yield queue, _all_pages(spool, queue, next(first_pages), keep, most) if _may_hold(queue) else iter(())


def _may_hold(queue: QueueFacts) -> bool:
    return bool(queue.messages or queue.problem)


def _first_pages(
    spool: Path, queues: Sequence[QueueFacts], keep: Callable[[MessageFacts], bool] | None, most: int | None
) -> Iterator[Page]:
    """Yield the first page of each queue. They are read many at a time; one at a time from where the log is damaged."""
    from qflow import inspect

    position, together = 0, len(queues)
    while position < len(queues):
        try:
            read = inspect.read_first_pages(spool, queues[position : position + together], keep=keep, most=most)
        except CorruptionError:
            if together == 1:
                raise
            together = 1
            continue
        yield from read
        position += len(read)


def _all_pages(
    spool: Path,
    queue: QueueFacts,
    page: Page,
    keep: Callable[[MessageFacts], bool] | None,
    most: int | None,
) -> Iterator[Page]:
    yield page
    if page.more:
        left = None if most is None else most - len(page.messages)
        yield from pages(spool, queue.name, page.positions, keep=keep, most=left, number=page.number)


def wanted(conditions: Sequence[str]) -> Callable[[MessageFacts], bool] | None:
    """Return what tells whether a message has all these headers; None if every message is wanted."""
    if not conditions:
        return None

    def is_wanted(message: MessageFacts) -> bool:
        headers = letters.headers_of(message.headers)
        return all(_holds(condition, headers) for condition in conditions)

    return is_wanted


def _holds(condition: str, headers: Mapping[str, Any]) -> bool:
    if condition in headers:  # a name may have an equals sign in it
        return True
    name, equals, value = condition.partition("=")
    if not equals or name not in headers:
        return False
    text = text_of_value(headers[name])
    return value in (text, escaped(text), repr(text)[1:-1])  # as tables show it, and as findings and `qflow show` do


def text_of_value(value: Any) -> str:
    """Return a header's value as it is written on a command line."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case _:
            return str(value)


def described(message: MessageFacts) -> dict[str, Any]:
    """Return a message of a queue as JSON has it."""
    by_amqp = letters.described(message.headers)
    return {
        "sequence": message.sequence,
        "put_at": moment(message.time_ms),
        "headers": message.headers,
        **({} if by_amqp is None else {"amqp": by_amqp}),
        "size_bytes": len(message.body),
        **facts.text_fields("body", message.body),
    }


def moment(time_ms: int) -> str:
    """Return a time in ISO 8601, of UTC."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def line_of(message: MessageFacts, cells: int | None) -> str:
    """Return sequence, time and body on one line, which fits a terminal of so many cells."""
    line = f"{message.sequence}  {moment(message.time_ms)}  {shown(message.body, None if cells is None else cells)}"
    return line if cells is None else cut(line, cells)


def shown(body: bytes, length: int | None = SHOWN) -> str:
    """Return a body as a terminal may show it, on one line, cut to a length; None = all of it."""
    text = (body if length is None else body[: 4 * length]).decode(errors="replace")
    safe = escaped(text)
    if length is None or (len(safe) <= length and len(body) <= 4 * length):
        return safe
    return safe[: length - 3] + "..."


def shown_headers(headers: Headers) -> str:
    """Return headers as `--where` takes them, on one line, cut."""
    told = " ".join(
        f"{name}={text_of_value(value)[:HEADERS_SHOWN]}" for name, value in letters.legible(headers).items()
    )
    return shown(told.encode(errors="replace"), HEADERS_SHOWN)


def escaped(text: str) -> str:
    """Return a text with whatever a terminal might obey written as an escape."""
    if text.isprintable():
        return text
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return "".join(_UNPRINTABLE.sub(_escape, piece) for piece in pieces)


_UNPRINTABLE = re.compile(r"[^ -~]")


def _escape(letter: re.Match[str]) -> str:
    return letter[0] if letter[0].isprintable() else ascii(letter[0])[1:-1]
