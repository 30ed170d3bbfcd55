"""`qflow purge`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import asking, facts, foreseen, options
from qflow.cli.spool import existing_queue, reached_if_there


@click.command(short_help="Delete the messages of a queue.")
@options.existing_spool
@options.queue_name
@asking.yes
@foreseen.dry_run
@options.capacity
@options.as_json
def purge(spool: Path, queue_name: str, is_sure: bool, dry_run: bool, capacity: int, as_json: bool) -> None:
    """Delete all messages of QUEUE, also those that consumers hold, whose acks do nothing then. Prints how many.

    Another process may own the spool. Without --yes it asks, at a terminal. --dry-run asks the owner; if none answers,
    it reads the log, which has durable queues alone.

    \b
        qflow purge SPOOL jobs.dead --dry-run
        qflow purge SPOOL jobs.dead --yes
    """
    if dry_run:
        _foresee(spool, queue_name, as_json)
        return
    with reached_if_there(spool, capacity) as broker:
        queue = existing_queue(broker, queue_name)
        asking.make_sure(is_sure, f"Delete {facts.counted(len(queue), 'message')} of {facts.readable(queue_name)}?")
        count = queue.purge()
    if as_json:
        facts.print_json({"queue": queue_name, "purged": count})
    else:
        click.echo(f"messages deleted from {facts.readable(queue_name)}: {count:,}")


def _foresee(spool: Path, queue_name: str, as_json: bool) -> None:
    """Print what would be deleted."""
    would, held = foreseen.depth(spool, queue_name)
    if as_json:
        facts.print_json({"queue": queue_name, "would_purge": would, "held": held})
        return
    of_consumers = f"of which consumers hold {held:,}" if held is not None else "those that consumers hold among them"
    click.echo(f"would delete {facts.counted(would, 'message')}, {of_consumers}")
