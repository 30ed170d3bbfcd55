"""`qflow sessions`."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit
from qflow.cli.listing import ListingGroup
from qflow.cli.spool import owned_if_there
from qflow.config import parse_size

if TYPE_CHECKING:
    from qflow.mqtt.listing import MqttFacts, SessionFacts

_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


@click.group(
    cls=ListingGroup, short_help="Show the MQTT sessions of a spool, or delete one.", subcommand_metavar="[list] SPOOL"
)
def sessions() -> None:
    """Show the MQTT sessions of a spool, whose clients sleep or are there, its groups, and what is retained.

    \b
        qflow sessions SPOOL
        qflow sessions SPOOL --filter 'valve-*' --json
        qflow sessions delete SPOOL CLIENT

    A spool that has the name of a command is written as `./delete`.
    """


@sessions.command("list", short_help="Show sessions, groups, and what is retained.")
@options.existing_spool
@click.option("--filter", "pattern", metavar="CLIENT", help="Those of this client id alone; `*` stands for any text.")
@click.option("--stream", metavar="NAME", help="Where messages wait, if `qflow.mqtt.serve` names it.  [default: mqtt]")
@options.as_json
def list_sessions(spool: Path, pattern: str | None, stream: str | None, as_json: bool) -> int:
    """Show the MQTT sessions of SPOOL. It only reads, with or without a live owner.

    \b
    gone     since when the client has been away
    expires  when the session ends, if the client does not come back
    unacked  messages that were sent, and that the client did not acknowledge
    behind   messages that the stream has from where the session goes on, of all
             topics: so many, at the most, it is still to get

    Exits with 1 if a record is damaged.
    """
    from qflow import inspect
    from qflow.mqtt.listing import read_mqtt

    wanted = (lambda client_id: True) if pattern is None else _pattern(pattern).fullmatch
    found = inspect.read_rooms(spool, partial(read_mqtt, stream=stream, wanted=wanted))
    if as_json:
        facts.print_json(attrs.asdict(found))
    else:
        _print(found, time.time())
    return Exit.DIFFERS if found.problems else Exit.FINE


@sessions.command(short_help="Forget a session that sleeps.")
@options.existing_spool
@click.argument("client_id", metavar="CLIENT")
def delete(spool: Path, client_id: str) -> None:
    """Forget the session of CLIENT, and what it was still to get; a will that waits is published by the next server.

    It needs the spool for itself: where a server runs, a client that connects with clean start and that id does it.
    """
    import asyncio

    from qflow.aio.broker import AsyncBroker
    from qflow.mqtt.server.forgetting import forget_session

    with owned_if_there(spool, parse_size(options.DEFAULT_CAPACITY, "capacity"), None) as broker:
        asyncio.run(forget_session(AsyncBroker(broker), client_id))
    click.echo(f"the session of {facts.readable(client_id)} is deleted")


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


def _print(found: MqttFacts, now_s: float) -> None:
    for problem in found.problems:
        click.echo(f"problem: {problem}")
    if found.sessions:
        facts.print_table(
            ["client", "gone", "expires", "filters", "unacked", "behind"],
            [_row(one, now_s) for one in found.sessions],
        )
    else:
        click.echo("no sessions")
    if found.groups:
        click.echo()
        facts.print_table(
            ["group", "filter", "members", "unacked", "behind"],
            (
                [
                    facts.readable(one.group),
                    facts.readable(one.filter),
                    len(one.members),
                    one.unacknowledged,
                    one.behind_messages,
                ]
                for one in found.groups
            ),
        )
    click.echo()
    click.echo(f"{facts.counted(found.retained_messages, 'retained message')}, {found.retained_bytes:,} bytes")


def _row(one: SessionFacts, now_s: float) -> list[Any]:
    gone = "no" if one.left_ms is None else _span(now_s - one.left_ms / 1000)
    if one.expires_ms is not None:
        left_s = one.expires_ms / 1000 - now_s
        expires = f"in {_span(left_s)}" if left_s > 0 else "is over"
    else:
        expires = "never" if one.expiry_s is None else f"after {_span(one.expiry_s)}"
    filters = len(one.subscriptions)
    return [facts.readable(one.client_id), gone, expires, filters, one.unacknowledged, one.behind_messages]


def _span(seconds: float) -> str:
    """Return a time in its largest whole unit, such as `3h`."""
    whole = max(0, int(seconds))
    return next((f"{whole // size}{unit}" for unit, size in _UNITS if whole >= size), "0s")
