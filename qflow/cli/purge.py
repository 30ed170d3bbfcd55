"""`qflow purge`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import asking, chosen, facts, foreseen, messages, options
from qflow.cli.chosen import Chosen
from qflow.cli.damage import tell_of_examination
from qflow.cli.exits import Exit
from qflow.cli.spool import AnyQueue, existing_queue, reached_if_there


@click.command()
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
    found = chosen.choose(spool, queue_name, conditions, due=False) if conditions else None
    if dry_run:
        _foresee(spool, queue_name, found, as_json)
    else:
        if not is_sure:
            with reached_if_there(spool, capacity) as broker:
                queue = existing_queue(broker, queue_name)
                what = facts.counted(len(queue) if found is None else len(found.sequences), "message")
            asking.make_sure(is_sure, f"Delete {what} of {facts.readable(queue_name)}?")
        with reached_if_there(spool, capacity) as broker:
            _purge(existing_queue(broker, queue_name), found, as_json)
    return Exit.FINE if found is None else tell_of_examination(spool, found.problems)


def _purge(queue: AnyQueue, found: Chosen | None, as_json: bool) -> None:
    """Delete all messages of a queue, or those that were found and wait, and print how many."""
    if found is not None:
        left = len(found.sequences) - len(chosen.delete(queue, found.sequences, "purged" if as_json else None))
        if left and not as_json:
            click.echo(f"not waiting any more, held by a consumer or gone: {left:,}")
        return
    count = queue.purge()
    if as_json:
        facts.print_json({"queue": queue.name, "purged": count})
    else:
        click.echo(f"messages deleted from {facts.readable(queue.name)}: {count:,}")


def _foresee(spool: Path, queue_name: str, found: Chosen | None, as_json: bool) -> None:
    """Print what would be deleted."""
    if found is not None:
        would, told, of_consumers = len(found.sequences), {}, "those that consumers hold among them, which stay"
    else:
        would, held = foreseen.depth(spool, queue_name)
        told = {"held": held}
        of_consumers = "those that consumers hold among them" if held is None else f"of which consumers hold {held:,}"
    if as_json:
        facts.print_json({"queue": queue_name, "would_purge": would, **told})
    else:
        click.echo(f"would delete {facts.counted(would, 'message')}, {of_consumers}")
