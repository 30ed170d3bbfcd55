"""`qflow peek`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import facts, messages, options
from qflow.cli.damage import tell_of_examination

if TYPE_CHECKING:
    from qflow.inspect.facts import MessageFacts


@click.command()
@options.existing_spool
@options.queue_name
@messages.most
@messages.where
@options.as_json
def peek(spool: Path, queue_name: str, most: int, conditions: tuple[str, ...], as_json: bool) -> int:
    """Show the first durable messages of a durable QUEUE that nobody has acked; nothing is taken, also beside an owner.

    A body is cut to 60 characters, headers to 200; `qflow show` has a message whole. Dead letters have a column that
    says why they are dead. With --json there is an object a line, with whole bodies: one that is not UTF-8 text is in
    `body_base64`. Exits with 1 if some cannot be read.

    \b
        qflow peek SPOOL jobs
        qflow peek SPOOL jobs -n 100 --where tenant=acme --where retried
        qflow peek SPOOL jobs --json | jq .headers
    """
    found: list[MessageFacts] = []
    problems: list[str] = []
    keep, body_bytes = messages.wanted(conditions), None if as_json else messages.SHOWN_BYTES
    for page in messages.pages(spool, queue_name, keep=keep, most=most, body_bytes=body_bytes):
        if as_json:
            for message in page.messages:
                facts.print_json(messages.described(message))
        else:
            found += page.messages
        problems += page.problems
    if found:
        _print(found)
    elif not as_json:
        click.echo(f"no message {'like that ' if conditions else ''}waits in {facts.readable(queue_name)}")
    return tell_of_examination(spool, problems)


def _print(found: Sequence[MessageFacts]) -> None:
    """Print a table; what no message has is no column of it."""
    from qflow.amqp import letters
    from qflow.inspect.health import reason_of

    reasons = [reason_of(letters.headers_of(one.headers)) for one in found]
    columns: dict[str, list[str] | list[int]] = {
        "sequence": [str(one.sequence) for one in found],
        "put at": [messages.moment(one.time_ms) for one in found],
        "bytes": [one.size_bytes for one in found],
        "body": [messages.shown(one.body) for one in found],
        "reason": [messages.shown(why.encode(errors="replace")) for why in reasons],
        "headers": [messages.shown_headers(one.headers) for one in found],
    }
    there = {name: column for name, column in columns.items() if name not in ("reason", "headers") or any(column)}
    facts.print_table(list(there), zip(*there.values(), strict=True))
