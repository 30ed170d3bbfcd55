"""`qflow tail`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import facts, messages, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.exits import Exit
from qflow.cli.facts import terminal_cells
from qflow.cli.stop import Stop, Stopped
from qflow.cli.writer import Writer

if TYPE_CHECKING:
    from qflow.inspect.facts import MessageFacts

STDOUT = 1
LOOK_S = 0.25
"""Between two looks for what is new."""
FIRST_BYTES = 16 * 2**20
"""Of all bodies together, as the last messages are looked for: what is larger is read as it is shown."""


@click.command()
@options.existing_spool
@options.queue_name
@messages.most
@click.option("-f", "--follow", is_flag=True, help="Go on with those that are put from now on, until a signal.")
@messages.where
@options.as_json
def tail(
    spool: Path, queue_name: str, most: int, follow: bool, conditions: tuple[str, ...], as_json: bool
) -> int | None:
    """Show the last durable messages of a durable QUEUE that nobody has acked, a line each; nothing is taken, also
    beside an owner.

    With --follow, it looks four times a second: what was put and acked between two looks is not seen, and a delayed
    message is seen once more when it is due. On a terminal, a line is cut to its width. `qflow subscribe --follow` does
    it for streams.

    \b
        qflow tail SPOOL jobs -n 20
        qflow tail SPOOL jobs --follow --where tenant=acme
    """
    from qflow import inspect

    keep, cells = messages.wanted(conditions), terminal_cells()
    body_bytes = None if as_json or cells is None else 4 * cells + 1
    code = Exit.FINE
    with Stop() as stop:
        writer = Writer(STDOUT, b"\n", stop)
        show = _shower(writer, as_json, cells)
        try:
            first_bytes = FIRST_BYTES // most if body_bytes is None else body_bytes
            page = inspect.read_newest(spool, queue_name, most, keep=keep, body_bytes=first_bytes)
            code = max(code, tell_of_examination(spool, page.problems))
            for found in [page.messages] if body_bytes else inspect.read_whole(spool, queue_name, page.messages):
                show(found)
            while follow:
                if not page.more:
                    writer.check()
                    stop.sleep(LOOK_S)
                page = inspect.read_page(
                    spool, queue_name, page.positions, keep=keep, body_bytes=body_bytes, number=page.number
                )
                code = max(code, tell_of_examination(spool, page.problems))
                show(page.messages)
        except Stopped:
            return stop.exit_code
    return code


def _shower(writer: Writer, as_json: bool, cells: int | None) -> Callable[[Iterable[MessageFacts]], None]:
    """Return what writes messages, a line each."""

    def line(message: MessageFacts) -> str:
        return facts.json_of(messages.described(message)) if as_json else messages.line_of(message, cells)

    def show(found: Iterable[MessageFacts]) -> None:
        writer.write([line(message).encode(errors="backslashreplace") for message in found])

    return show
