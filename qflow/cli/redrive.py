"""`qflow redrive`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import asking, facts, foreseen, options
from qflow.cli.spool import existing_queue, reached_if_there

if TYPE_CHECKING:
    from qflow.cli.spool import AnyBroker


@click.command(short_help="Move dead letters back to the queues they came from.")
@options.existing_spool
@click.argument("queue_name", metavar="DLQ")
@click.option("--to", metavar="QUEUE", help="Move all of them to this queue instead, also those without an origin.")
@click.option("--limit", type=click.IntRange(min=1), help="Move at most so many.")
@asking.yes
@foreseen.dry_run
@options.capacity
@options.as_json
def redrive(
    spool: Path,
    queue_name: str,
    to: str | None,
    limit: int | None,
    is_sure: bool,
    dry_run: bool,
    capacity: int,
    as_json: bool,
) -> None:
    """Move the messages of the dead-letter queue DLQ back to the queues they came from, in order.

    Each commit moves up to a hundred, so a message is always in one queue or in the other. It keeps
    its body, topic, headers and `dead_letter_count`; its deliveries are counted anew.

    A message stays if it does not say where it came from, or if that queue is gone, is at its limit or
    takes no message of that size. How many stay, and why, is printed whatever happens.

    A dead letter that came by AMQP goes back to the queue that `x-first-death-queue` names, under the
    exchange and the routing key it had there, and keeps `x-death`.

    At a terminal it asks, without --yes. With --dry-run it reads the log, which has durable queues alone, and counts
    what consumers hold as if it were moved.

    \b
        qflow redrive SPOOL jobs.dead --dry-run
        qflow redrive SPOOL jobs.dead --to jobs --limit 100
    """
    if dry_run:
        foresee(spool, queue_name, to, limit, as_json)
        return
    where = "where they came from" if to is None else facts.readable(to)
    asking.ask_if_there(is_sure, f"Move the messages of {facts.readable(queue_name)} to {where}?")
    move_messages(spool, queue_name, to, limit, capacity, as_json)


def foresee(spool: Path, queue_name: str, to: str | None, limit: int | None, as_json: bool) -> None:
    """Print what would be moved."""
    moved, kept = foreseen.redrive(spool, queue_name, to, limit)
    _print(queue_name, moved, kept, to, as_json, would=True)


def move_messages(
    spool: Path, queue_name: str, to: str | None, limit: int | None, capacity: int, as_json: bool
) -> None:
    """Move messages of a queue and print what became of them, whatever happens."""
    moved: dict[str, int] = {}
    kept: dict[str, int] = {}
    with reached_if_there(spool, capacity) as broker:
        for name in filter(None, (queue_name, to)):
            existing_queue(broker, name)
        try:
            _move(broker, queue_name, to, limit, moved, kept)
        finally:
            _print(queue_name, moved, kept, to, as_json)


def _move(
    broker: AnyBroker, queue_name: str, to: str | None, limit: int | None, moved: dict[str, int], kept: dict[str, int]
) -> None:
    """Move messages, and add what was moved and kept, by queue and by reason."""
    from qflow.amqp.letters import reviving
    from qflow.broker import Broker
    from qflow.queues.redrive import Redrive

    if not isinstance(broker, Broker):
        report = broker.redrive(queue_name, to=to, limit=limit)
        moved.update(report.moved)
        kept.update(report.kept)
        return
    moving = Redrive(broker, queue_name, to=to, revive=reviving(queue_name, to))
    try:
        moving.run(limit)
    finally:
        moved.update(moving.moved)
        kept.update(moving.kept)


def _print(
    queue_name: str, moved: dict[str, int], kept: dict[str, int], to: str | None, as_json: bool, would: bool = False
) -> None:
    if as_json:
        facts.print_json({"queue": queue_name, "would_move" if would else "moved": moved, "kept": kept})
        return
    what = "messages that would be moved" if would else "messages moved"
    click.echo(f"{what} from {facts.readable(queue_name)}: {sum(moved.values()):,}")
    for name, count in sorted(moved.items()):
        click.echo(f"  {count:,} to {facts.readable(name)}")
    if kept:
        click.echo(f"messages kept: {sum(kept.values()):,}")
        for reason, count in sorted(kept.items()):
            click.echo(f"  {count:,}: {reason}")
        if to is None:
            click.echo("another queue gets them by --to QUEUE")
