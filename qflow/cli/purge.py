"""`qflow purge`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import asking, chosen, facts, foreseen, messages, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.exits import Exit
from qflow.cli.spool import existing_queue, reached_if_there


@click.command(short_help="Delete the messages of a queue.")
@options.existing_spool
@options.queue_name
@messages.where
@asking.yes
@foreseen.dry_run
@options.capacity
@options.as_json
def purge(
    spool: Path,
    queue_name: str,
    conditions: tuple[str, ...],
    is_sure: bool,
    dry_run: bool,
    capacity: int,
    as_json: bool,
) -> int:
    """Delete all messages of QUEUE, also those that consumers hold, whose acks do nothing then. Prints how many.

    Another process may own the spool. Without --yes it asks, at a terminal. --dry-run asks the owner; if none answers,
    it reads the log, which has durable queues alone.

    With --where it looks in the log for what it deletes, so no transient message is found, and what consumers hold
    stays. Exits with 1 then if some of it cannot be read.

    \b
        qflow purge SPOOL jobs.dead --dry-run
        qflow purge SPOOL jobs.dead --yes
        qflow purge SPOOL jobs.dead --where 'dead_letter_nack_reason=card declined' --dry-run
    """
    if conditions:
        return _purge_chosen(spool, queue_name, conditions, is_sure, dry_run, capacity, as_json)
    if dry_run:
        _foresee(spool, queue_name, as_json)
        return Exit.FINE
    with reached_if_there(spool, capacity) as broker:
        queue = existing_queue(broker, queue_name)
        asking.make_sure(is_sure, f"Delete {facts.counted(len(queue), 'message')} of {facts.readable(queue_name)}?")
        count = queue.purge()
    if as_json:
        facts.print_json({"queue": queue_name, "purged": count})
    else:
        click.echo(f"messages deleted from {facts.readable(queue_name)}: {count:,}")
    return Exit.FINE


def _purge_chosen(
    spool: Path,
    queue_name: str,
    conditions: tuple[str, ...],
    is_sure: bool,
    dry_run: bool,
    capacity: int,
    as_json: bool,
) -> int:
    """Delete those that wait and have some headers, or say how many there are; return the exit code."""
    found = chosen.choose(spool, queue_name, conditions, due=False)
    name, what = facts.readable(queue_name), facts.counted(len(found.sequences), "message")
    if dry_run and as_json:
        facts.print_json({"queue": queue_name, "would_purge": len(found.sequences)})
    elif dry_run:
        click.echo(f"would delete {what}, those that consumers hold among them, which stay")
    else:
        with reached_if_there(spool, capacity) as broker:
            queue = existing_queue(broker, queue_name)
            asking.make_sure(is_sure, f"Delete {what} of {name}?")
            left = len(found.sequences) - len(chosen.delete(queue, found.sequences, "purged" if as_json else None))
        if left and not as_json:
            click.echo(f"not waiting any more, held by a consumer or gone: {left:,}")
    tell_of_examination(spool, found.problems, {})
    return Exit.DIFFERS if found.problems else Exit.FINE


def _foresee(spool: Path, queue_name: str, as_json: bool) -> None:
    """Print what would be deleted."""
    would, held = foreseen.depth(spool, queue_name)
    if as_json:
        facts.print_json({"queue": queue_name, "would_purge": would, "held": held})
        return
    of_consumers = f"of which consumers hold {held:,}" if held is not None else "those that consumers hold among them"
    click.echo(f"would delete {facts.counted(would, 'message')}, {of_consumers}")
