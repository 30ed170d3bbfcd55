"""`qflow sessions`."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qflow.cli import asking, facts, foreseen, options
from qflow.cli.exits import Exit
from qflow.cli.options import ListingGroup
from qflow.cli.spool import reached_if_there
from qflow.errors import NotFound

if TYPE_CHECKING:
    from qflow.mqtt.listing import GroupFacts, MqttFacts, SessionFacts

_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))


@click.group(cls=ListingGroup, subcommand_metavar="[list] SPOOL")
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
@click.option("--exact", is_flag=True, help="Count what waits for each by its filters: it reads the stream's blocks.")
@options.as_json
def list_sessions(spool: Path, pattern: str | None, stream: str | None, exact: bool, as_json: bool) -> int:
    """Show the MQTT sessions of SPOOL. It only reads, with or without a live owner.

    \b
    gone        since when the client has been away; no: it is there
    expires     when the session ends, if the client does not come back:
                `in 1h` is the time that is left; `1h after it goes` is the time
                that it will have, while the client is there; `1h after a start`,
                where it was there when the server was killed
    unacked     messages that were sent, and that the client did not acknowledge
    unreleased  messages with QoS 2 that the client sent and did not release
                (PUBREL): they are published, and their packet ids are kept, so
                that one which is sent again is not published twice
    waiting     messages that it is still to get: at most what the stream has
                from where the session goes on, of all topics; with --exact those
                that its filters match, or a bound where that is too much to be
                looked at

    Exits with 1 if a record is damaged.

    \b
    Examples:
      qflow sessions spool
      qflow sessions spool --filter 'panel-*' --exact
    """
    from qflow import inspect
    from qflow.mqtt.listing import read_mqtt

    wanted = (lambda client_id: True) if pattern is None else _pattern(pattern).fullmatch
    found = inspect.read_rooms(spool, partial(read_mqtt, stream=stream, wanted=wanted, counts=exact))
    if as_json:
        facts.print_json(attrs.asdict(found))
    else:
        _print(found, time.time())
    return Exit.DIFFERS if found.problems else Exit.FINE


@sessions.command(short_help="Forget the session of a client.")
@options.existing_spool
@click.argument("client_id", metavar="CLIENT")
@asking.yes
@foreseen.dry_run
def delete(spool: Path, client_id: str, is_sure: bool, dry_run: bool) -> None:
    """Forget the session of CLIENT, and what it was still to get, also while another process owns the spool.

    A client that is there is told so (0x98) and closed. Its will is published, where no server runs by the next one.
    Without --yes it asks, at a terminal.

    \b
        qflow sessions delete SPOOL valve-1 --dry-run
        qflow sessions delete SPOOL valve-1 --yes
    """
    import asyncio

    from qflow.aio.broker import AsyncBroker
    from qflow.mqtt.server.forgetting import forget_session
    from qflow.remote.client.broker import RemoteBroker, delete_session

    what = _what_is_deleted(spool, client_id)
    if dry_run:
        click.echo(f"would delete {what}")
        return
    asking.make_sure(is_sure, f"Delete {what}?")
    with reached_if_there(spool) as broker:
        if isinstance(broker, RemoteBroker):
            delete_session(broker, client_id)
        else:
            asyncio.run(forget_session(AsyncBroker(broker), client_id))
    click.echo(f"the session of {facts.readable(client_id)} is deleted")


def _what_is_deleted(spool: Path, client_id: str) -> str:
    """Return in words what there is of a session. Raises NotFound: nothing, as far as the log can be read."""
    from qflow import inspect
    from qflow.mqtt.listing import read_mqtt

    found = inspect.read_rooms(spool, partial(read_mqtt, wanted=client_id.__eq__))
    name = facts.readable(client_id)
    if not found.sessions:
        if not found.problems:
            raise NotFound(f"there is no session of the client {client_id!r}; `qflow sessions` lists those there are")
        return f"what there is of a session of {name}, since records are damaged"
    [one] = found.sessions
    filters = facts.counted(len(one.subscriptions), "subscription")
    ends = ", and close its client, which is connected" if one.connected and found.is_owned else ""
    return f"the session of {name}, with {filters}{ends}"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


def _print(found: MqttFacts, now_s: float) -> None:
    for problem in found.problems:
        click.echo(f"problem: {problem}")
    if found.sessions:
        facts.print_table(
            ["client", "gone", "expires", "filters", "unacked", "unreleased", "waiting"],
            [_row(one, now_s, found.is_owned) for one in found.sessions],
        )
    else:
        click.echo("no sessions")
    facts.print_next_table(
        ["group", "filter", "members", "unacked", "waiting"],
        (
            [facts.readable(one.group), facts.readable(one.filter), len(one.members), one.unacknowledged, _waiting(one)]
            for one in found.groups
        ),
    )
    click.echo()
    click.echo(f"{facts.counted(found.retained_messages, 'retained message')}, {found.retained_bytes:,} bytes")


def _row(one: SessionFacts, now_s: float, is_owned: bool) -> list[Any]:
    gone = "no" if one.left_ms is None else _span(now_s - one.left_ms / 1000)
    return [
        facts.readable(one.client_id),
        gone,
        _expires(one, now_s, is_owned),
        len(one.subscriptions),
        one.unacknowledged,
        one.unreleased,
        _waiting(one),
    ]


def _expires(one: SessionFacts, now_s: float, is_owned: bool) -> str:
    """Return when a session ends, or how long it lasts after its client has gone, or the server has begun again."""
    if one.expiry_s is None:
        return "never"
    if one.expires_ms is None:
        return f"{_span(one.expiry_s)} after {'it goes' if is_owned else 'a start'}"
    left_s = one.expires_ms / 1000 - now_s
    return f"in {_span(left_s)}" if left_s > 0 else "is over"


def _waiting(one: SessionFacts | GroupFacts) -> int | str | None:
    """Return how many messages wait, or a bound that says it is one; None where it is not known."""
    if one.waiting_is_exact or not one.behind_messages:
        return one.waiting_messages if one.waiting_is_exact else one.behind_messages
    return f"at most {one.behind_messages if one.waiting_messages is None else one.waiting_messages:,}"


def _span(seconds: float) -> str:
    """Return a time in its largest whole unit, such as `3h`."""
    whole = max(0, int(seconds))
    return next((f"{whole // size}{unit}" for unit, size in _UNITS if whole >= size), "0s")
