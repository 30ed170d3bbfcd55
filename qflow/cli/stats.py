"""`qflow stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit
from qflow.cli.streams import print_streams

if TYPE_CHECKING:
    from qflow.inspect import SpoolFacts


@click.command(short_help="Show the queues and streams of a spool.")
@options.existing_spool
@options.as_json
def stats(spool: Path, as_json: bool) -> int:
    """Show the queues and streams of a spool.

    The first tables come from the log and its journal, and are exact. The last one shows what the owner, if there
    is one, wrote last; it writes once a second. Exits with 1 if the log contradicts itself.
    """
    from qflow import inspect

    found = inspect.read_spool(spool)
    if as_json:
        facts.print_json(attrs.asdict(found))
    else:
        _print(found)
    return Exit.DIFFERS if found.problems else Exit.FINE


def _print(found: SpoolFacts) -> None:
    for problem in found.problems:
        click.echo(f"problem: {problem}")
    click.echo(_owner(found))
    if found.journal_records:
        records = facts.counted(found.journal_records, "record")
        click.echo(f"{records} in the journal that the log does not hold yet; what follows counts them in")
    if found.queues:
        click.echo()
        facts.print_table(
            ["queue", "messages", "bytes", "floor", "next"],
            (
                [facts.readable(queue.name), queue.messages, queue.bytes, queue.floor, queue.next_sequence]
                for queue in found.queues
            ),
        )
    else:
        click.echo("no durable queues")
    if found.streams:
        click.echo()
        print_streams(found.streams)
    if found.live is not None and found.owner_pid is not None:
        _print_live(found.live, found.live_age_s)


def _owner(found: SpoolFacts) -> str:
    match found.owner_pid:
        case None:
            return "no owner; closed cleanly" if found.clean else "no owner; the last one did not close it"
        case 0:
            return "owned by another process"
        case pid:
            return f"owned by process {pid}"


def _print_live(live: dict[str, Any], age_s: float | None) -> None:
    age = "" if age_s is None else f", {age_s:.1f} s ago"
    click.echo(f"\nas process {live['pid']} saw it{age}; capacity {facts.mebibytes(live['capacity_bytes'])}:\n")
    columns = [
        "messages",
        "resident_bytes",
        "spilled_messages",
        "spilled_bytes",
        "logged_messages",
        "acquired_messages",
    ]
    facts.print_table(
        ["queue", *(column.replace("_", " ") for column in columns)],
        ([facts.readable(name), *(queue[column] for column in columns)] for name, queue in live["queues"].items()),
    )
