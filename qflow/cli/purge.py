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

    Another process may own the spool. Without --yes it asks, at a terminal.

    \b
        qflow purge SPOOL jobs.dead --dry-run
        qflow purge SPOOL jobs.dead --yes
    """
    with reached_if_there(spool, capacity) as broker:
        queue = existing_queue(broker, queue_name)
        if dry_run:
            would, held = len(queue), queue.stats().acquired_messages
            if as_json:
                facts.print_json({"queue": queue_name, "would_purge": would, "held": held})
            else:
                click.echo(f"would delete {facts.counted(would, 'message')}, of which consumers hold {held:,}")
            return
        asking.make_sure(is_sure, f"Delete {facts.counted(len(queue), 'message')} of {facts.readable(queue_name)}?")
        count = queue.purge()
    if as_json:
        facts.print_json({"queue": queue_name, "purged": count})
    else:
        click.echo(f"messages deleted from {facts.readable(queue_name)}: {count:,}")
