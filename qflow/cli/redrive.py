"""`qflow redrive`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import facts, options
from qflow.cli.spool import owned_if_there, queue_to_empty


@click.command(short_help="Move dead letters back to the queues they came from.")
@options.existing_spool
@click.argument("queue_name", metavar="DLQ")
@click.option("--to", metavar="QUEUE", help="Move all of them to this queue instead, also those without an origin.")
@click.option("--limit", type=click.IntRange(min=1), help="Move at most so many.")
@options.capacity
@options.as_json
def redrive(spool: Path, queue_name: str, to: str | None, limit: int | None, capacity: int, as_json: bool) -> None:
    """Move the messages of the dead-letter queue DLQ back to the queues they came from, in order.

    Each commit moves up to a hundred, so a message is always in one queue or in the other. It keeps
    its body, topic, headers and `dead_letter_count`; its deliveries are counted anew.

    A message stays if it does not say where it came from, or if that queue is gone, is at its limit or
    takes no message of that size. How many stay, and why, is printed whatever happens.
    """
    from qflow.queues.redrive import Redrive

    with owned_if_there(spool, capacity, None) as broker:
        queue_to_empty(broker, queue_name)
        moving = Redrive(broker, queue_name, to=to)
        try:
            moving.run(limit)
        finally:
            _print(queue_name, moving.moved, moving.kept, as_json)


def _print(queue_name: str, moved: dict[str, int], kept: dict[str, int], as_json: bool) -> None:
    if as_json:
        facts.print_json({"queue": queue_name, "moved": moved, "kept": kept})
        return
    click.echo(f"messages moved from {facts.readable(queue_name)}: {sum(moved.values()):,}")
    for name, count in sorted(moved.items()):
        click.echo(f"  {count:,} to {facts.readable(name)}")
    if kept:
        click.echo(f"messages kept: {sum(kept.values()):,}")
        for reason, count in sorted(kept.items()):
            click.echo(f"  {count:,}: {reason}")
