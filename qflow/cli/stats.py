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


@click.command()
@options.existing_spool
@options.as_json
def stats(spool: Path, as_json: bool) -> int:
    """Show the queues and streams of a spool.

    The first tables come from the log and its journal, and are exact. The last ones show what the owner, if there
    is one, wrote last; it writes once a second: what is in memory, who holds messages, and who waits. Exits with 1 if
    the log contradicts itself.

    \b
    Examples:
      qflow stats spool
      qflow stats spool --json | jq .owner_pid
    """
    from qflow import inspect

    found = _without_the_dead(inspect.read_spool(spool))
    if as_json:
        facts.print_json(attrs.asdict(found))
    else:
        _print(found)
    return Exit.DIFFERS if found.problems else Exit.FINE


def _without_the_dead(found: SpoolFacts) -> SpoolFacts:
    """Return what is known of a spool, but not what an owner told that has gone: nobody holds or waits any more."""
    owner, live = found.owner_pid, found.live
    if live is None or (owner is not None and owner in (0, live["pid"])):
        return found
    return attrs.evolve(found, live=None, live_age_s=None)


def _print(found: SpoolFacts) -> None:
    for problem in found.problems:
        click.echo(f"problem: {problem}")
    click.echo(_owner(found))
    if found.journal_records:
        click.echo(f"{facts.of_journal(found.journal_records)}; what follows counts them in")
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
    if found.live is not None:
        _print_live(found.live, found.live_age_s)
        _print_traffic(found.live["queues"])
        _print_holders(found.live["queues"])


def _owner(found: SpoolFacts) -> str:
    match found.owner_pid:
        case None:
            end = "closed cleanly" if found.clean else "the last one did not close it"
            return f"no owner; {end}; nothing is held, and nobody waits"
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


def _print_traffic(queues: dict[str, dict[str, Any]]) -> None:
    """Print who takes and who waits, of queues where somebody does. (Owners of earlier versions do not tell.)"""
    rows: list[list[object]] = []
    for name, queue in queues.items():
        rates, blocked = queue.get("rates") or {}, queue.get("blocked_putters", 0)
        consumers = queue.get("consumers_total", 0)
        unacked_s = queue["oldest_unacked_s"] if queue["acquired_messages"] else None
        put, acked = rates.get("put_10s", 0), rates.get("acked_10s", 0)
        if not (consumers or blocked or unacked_s is not None or put or acked or queue.get("paused")):
            continue
        waits = f"{queue['blocked_longest_s']:.0f} s, {queue['blocked_on']}" if blocked else None
        shown = facts.readable(name) + (", paused" if queue.get("paused") else "")
        since = None if unacked_s is None else f"{unacked_s:.0f} s"
        rows.append([shown, since, consumers, blocked, waits, f"{put:.1f}", f"{acked:.1f}"])
    headings = ["queue", "oldest unacked", "consumers", "blocked putters", "first waits", "put/s", "acked/s"]
    facts.print_next_table(headings, rows)


def _print_holders(queues: dict[str, dict[str, Any]]) -> None:
    rows = [
        [
            facts.readable(name),
            facts.readable(one["consumer"]),
            str(one["pid"] or "-"),
            one["messages"],
            f"{one['oldest_s']:.0f} s",
        ]
        for name, queue in queues.items()
        for one in queue.get("holders", ())
    ]
    facts.print_next_table(["queue", "held by", "process", "messages", "for"], rows)
