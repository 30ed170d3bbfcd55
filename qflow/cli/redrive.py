"""`qflow redrive`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import asking, facts, foreseen, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.exits import Exit
from qflow.cli.spool import existing_queue, reached_if_there
from qflow.errors import InvalidArgument

if TYPE_CHECKING:
    from qflow.broker import Broker
    from qflow.remote.client.broker import RemoteBroker

SLICE_MESSAGES = 500
"""Asked of an owner at once: it goes on with so many when the command is interrupted."""


@click.command(short_help="Move dead letters back to the queues they came from.")
@options.existing_spool
@click.argument("queue_name", metavar="DLQ", shell_complete=options.queues)
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
) -> int:
    """Move the messages of the dead-letter queue DLQ back to the queues they came from, in order.

    Each commit moves up to a hundred, so a message is always in one queue or in the other. It keeps
    its body, topic, headers and `dead_letter_count`; priority and times are those of a new put, and its deliveries are
    counted anew. With --to, what is no dead letter keeps its key, priority and expiry, too.

    A message stays if it does not say where it came from, if that queue is gone, is at its limit or takes no message
    of that size, or if it is not due yet. So does what there is no room to look at, as those that stay are held
    meanwhile, and all of a queue that is paused. How many stay, and why, is printed whatever happens. An owner is
    asked for some hundreds at a time: after Ctrl-C it ends with those, which are printed as not known.

    A dead letter that came by AMQP goes back to the queue that `x-first-death-queue` names, under the
    exchange and the routing key it had there, and keeps `x-death`.

    At a terminal it asks, without --yes. With --dry-run it reads the log, which has durable queues alone, and counts
    what consumers hold as if it were moved.

    \b
        qflow redrive SPOOL jobs.dead --dry-run
        qflow redrive SPOOL jobs.dead --to jobs --limit 100
    """
    if dry_run:
        return foresee(spool, queue_name, to, limit, as_json)
    where = "where they came from" if to is None else facts.readable(to)
    asking.ask_if_there(is_sure, f"Move the messages of {facts.readable(queue_name)} to {where}?")
    move_messages(spool, queue_name, to, limit, capacity, as_json)
    return Exit.FINE


def foresee(spool: Path, queue_name: str, to: str | None, limit: int | None, as_json: bool) -> int:
    """Print what would be moved, and what cannot be read; return the exit code."""
    outcome = _Outcome()
    outcome.moved, outcome.kept, problems = foreseen.redrive(spool, queue_name, to, limit)
    _print(queue_name, outcome, to, as_json, would=True)
    tell_of_examination(spool, problems, {})
    return Exit.DIFFERS if problems else Exit.FINE


def move_messages(
    spool: Path, queue_name: str, to: str | None, limit: int | None, capacity: int, as_json: bool
) -> None:
    """Move messages of a queue and print what became of them, whatever happens."""
    from qflow.broker import Broker

    outcome = _Outcome()
    with reached_if_there(spool, capacity) as broker:
        for name in filter(None, (queue_name, to)):
            existing_queue(broker, name)
        if to == queue_name:
            raise InvalidArgument(f"messages of queue {queue_name!r} cannot be moved to itself")
        try:
            if isinstance(broker, Broker):
                _move(broker, queue_name, to, limit, outcome)
            else:
                _ask_to_move(broker, queue_name, to, limit, outcome)
        finally:
            _print(queue_name, outcome, to, as_json)


class _Outcome:
    """What became of the messages, as far as it is known."""

    def __init__(self) -> None:
        self.moved: dict[str, int] = {}
        """How many went to each queue."""
        self.kept: dict[str, int] = {}
        """How many stay, by reason."""
        self.in_doubt = 0
        """As many more at most may have been moved."""
        self.why = "the owner was asked, and has not said how many it moved"
        """They are not known."""


def _move(broker: Broker, queue_name: str, to: str | None, limit: int | None, outcome: _Outcome) -> None:
    """Move messages of a spool that this process owns."""
    from qflow.amqp.letters import reviving
    from qflow.queues.redrive import Redrive

    moving = Redrive(broker, queue_name, to=to, revive=reviving(queue_name, to))
    try:
        moving.run(limit)
    finally:
        outcome.moved, outcome.kept, outcome.in_doubt = moving.moved, moving.kept, moving.in_doubt
        outcome.why = "they were being committed when this ended"


def _ask_to_move(broker: RemoteBroker, queue_name: str, to: str | None, limit: int | None, outcome: _Outcome) -> None:
    """Have the owner move messages, some at a time. Those that stay are looked at anew each time."""
    there = len(broker.queue(queue_name))
    left = there if limit is None else min(limit, there)
    while left > 0:
        asked = outcome.in_doubt = min(left, max(SLICE_MESSAGES, sum(outcome.kept.values())))
        report = broker.redrive(queue_name, to=to, limit=asked)
        for name, count in report.moved.items():
            outcome.moved[name] = outcome.moved.get(name, 0) + count
        outcome.kept, outcome.in_doubt = report.kept, 0
        done = sum(report.moved.values())
        left = left - done if done == asked else 0


def _print(queue_name: str, outcome: _Outcome, to: str | None, as_json: bool, *, would: bool = False) -> None:
    from qflow.queues.redrive import NOT_DUE, PAUSED

    moved, kept = outcome.moved, outcome.kept
    if as_json:
        doubt = {"in_doubt": outcome.in_doubt} if outcome.in_doubt else {}
        facts.print_json({"queue": queue_name, "would_move" if would else "moved": moved, "kept": kept, **doubt})
        return
    what = "messages that would be moved" if would else "messages moved"
    click.echo(f"{what} from {facts.readable(queue_name)}: {sum(moved.values()):,}")
    for name, count in sorted(moved.items()):
        click.echo(f"  {count:,} to {facts.readable(name)}")
    if kept:
        click.echo(f"messages kept: {sum(kept.values()):,}")
        for reason, count in sorted(kept.items()):
            click.echo(f"  {count:,}: {reason}")
        if to is None and not kept.keys() <= {NOT_DUE, PAUSED}:
            click.echo("another queue gets them by --to QUEUE")
    if outcome.in_doubt:
        click.echo(f"not known of up to {outcome.in_doubt:,} more: {outcome.why}")
