"""`qflow redrive`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qflow.cli import asking, facts, foreseen, messages, options
from qflow.cli.chosen import AT_ONCE, Chosen, choose
from qflow.cli.damage import tell_of_examination
from qflow.cli.exits import Exit
from qflow.cli.spool import existing_queue, reached_if_there
from qflow.errors import InvalidArgument

if TYPE_CHECKING:
    from qflow.broker import Broker
    from qflow.remote.client.broker import RemoteBroker
    from qflow.stats import RedriveReport


@click.command()
@options.existing_spool
@click.argument("queue_name", metavar="DLQ", shell_complete=options.queues)
@click.option("--to", metavar="QUEUE", help="Move all of them to this queue instead, also those without an origin.")
@click.option("--limit", "--max", "limit", type=click.IntRange(min=1), help="Move at most so many.")
@messages.where
@asking.yes
@foreseen.dry_run
@options.capacity
@options.as_json
def redrive(
    spool: Path,
    queue_name: str,
    to: str | None,
    limit: int | None,
    conditions: tuple[str, ...],
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

    At a terminal it asks, without --yes. With --dry-run it reads the log, which has durable messages alone, and
    counts what consumers hold as if it were moved. With --where it looks there for what it moves, so no transient
    message is found, and holds nothing of the others.

    \b
        qflow redrive SPOOL jobs.dead --dry-run
        qflow redrive SPOOL jobs.dead --to jobs --limit 100
        qflow redrive SPOOL jobs.dead --where 'dead_letter_nack_reason=card declined'
    """
    errand = Errand(spool, queue_name, to, limit, conditions, capacity, as_json)
    where = "where they came from" if to is None else facts.readable(to)
    return errand.foresee() if dry_run else errand.do(is_sure, where)


@attrs.frozen
class Errand:
    """Which messages of a queue are to be moved, and where to."""

    spool: Path
    queue_name: str
    to: str | None
    """The queue they go to; None: where they came from."""
    limit: int | None
    conditions: tuple[str, ...]
    """Headers that they have; see `messages.wanted`."""
    capacity: int
    as_json: bool

    def foresee(self) -> int:
        """Print what would be moved, and what cannot be read; return the exit code."""
        keep = messages.wanted(self.conditions)
        outcome = _Outcome()
        outcome.moved, outcome.kept, problems = foreseen.redrive(self.spool, self.queue_name, self.to, self.limit, keep)
        self._print(outcome, would=True)
        return tell_of_examination(self.spool, problems)

    def do(self, is_sure: bool, where: str) -> int:
        """Move them, if that is what who is asked wants, and print what became of them; return the exit code."""
        chosen = choose(self.spool, self.queue_name, self.conditions, due=True) if self.conditions else None
        which = "the messages" if chosen is None else facts.counted(len(chosen.sequences), "message")
        asking.ask_if_there(is_sure, f"Move {which} of {facts.readable(self.queue_name)} to {where}?")
        self._move(chosen)
        return Exit.FINE if chosen is None else tell_of_examination(self.spool, chosen.problems)

    def _move(self, chosen: Chosen | None) -> None:
        """Move messages of a queue, and print what became of them, whatever happens."""
        from qflow.broker import Broker

        outcome = _Outcome()
        with reached_if_there(self.spool, self.capacity) as broker:
            for name in filter(None, (self.queue_name, self.to)):
                existing_queue(broker, name)
            if self.to == self.queue_name:
                raise InvalidArgument(f"messages of queue {self.queue_name!r} cannot be moved to itself")
            try:
                if isinstance(broker, Broker):
                    self._move_here(broker, chosen, outcome)
                elif chosen is None:
                    self._ask_to_move(broker, outcome)
                else:
                    self._ask_to_move_chosen(broker, chosen, outcome)
            finally:
                self._print(outcome)

    def _move_here(self, broker: Broker, chosen: Chosen | None, outcome: _Outcome) -> None:
        """Move messages of a spool that this process owns."""
        from qflow.amqp.letters import reviving
        from qflow.queues.redrive import NOT_DUE, Redrive

        moving = Redrive(broker, self.queue_name, to=self.to, revive=reviving(self.queue_name, self.to))
        try:
            if chosen is None:
                moving.run(self.limit)
            else:
                moving.run_chosen(chosen.sequences, self.limit)
        finally:
            outcome.moved, outcome.kept, outcome.in_doubt = moving.moved, moving.kept, moving.in_doubt
            if chosen is not None and chosen.later:
                outcome.kept[NOT_DUE] = chosen.later
            outcome.why = "they were being committed when this ended"

    def _ask_to_move(self, broker: RemoteBroker, outcome: _Outcome) -> None:
        """Have the owner move messages, some at a time. Those that stay are looked at anew each time."""
        there = len(broker.queue(self.queue_name))
        left = there if self.limit is None else min(self.limit, there)
        while left > 0:
            asked = outcome.in_doubt = min(left, max(AT_ONCE, sum(outcome.kept.values())))
            report = broker.redrive(self.queue_name, to=self.to, limit=asked)
            done = outcome.note_moved(report)
            outcome.kept = report.kept
            left = left - done if done == asked else 0

    def _ask_to_move_chosen(self, broker: RemoteBroker, chosen: Chosen, outcome: _Outcome) -> None:
        """Have the owner move chosen messages, some at a time."""
        from qflow.queues.redrive import NOT_DUE

        if chosen.later:
            outcome.kept[NOT_DUE] = chosen.later
        left = len(chosen.sequences) if self.limit is None else self.limit
        for start in range(0, len(chosen.sequences), AT_ONCE):
            some = chosen.sequences[start : start + AT_ONCE]
            outcome.in_doubt = min(left, len(some))
            report = broker.redrive(self.queue_name, to=self.to, limit=left, sequences=some)
            left -= outcome.note_moved(report)
            _add(outcome.kept, report.kept)
            if left <= 0:
                return

    def _print(self, outcome: _Outcome, *, would: bool = False) -> None:
        from qflow.queues.redrive import NOT_DUE, NOT_WAITING, PAUSED

        moved, kept = outcome.moved, outcome.kept
        if self.as_json:
            doubt = {"in_doubt": outcome.in_doubt} if outcome.in_doubt else {}
            facts.print_json(
                {"queue": self.queue_name, "would_move" if would else "moved": moved, "kept": kept, **doubt}
            )
            return
        what = "messages that would be moved" if would else "messages moved"
        click.echo(f"{what} from {facts.readable(self.queue_name)}: {sum(moved.values()):,}")
        for name, count in sorted(moved.items()):
            click.echo(f"  {count:,} to {facts.readable(name)}")
        if kept:
            click.echo(f"messages kept: {sum(kept.values()):,}")
            for reason, count in sorted(kept.items()):
                click.echo(f"  {count:,}: {reason}")
            if self.to is None and not kept.keys() <= {NOT_DUE, NOT_WAITING, PAUSED}:
                click.echo("another queue gets them by --to QUEUE")
        if outcome.in_doubt:
            click.echo(f"not known of up to {outcome.in_doubt:,} more: {outcome.why}")


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

    def note_moved(self, report: RedriveReport) -> int:
        """Add what an owner says it moved; return how many."""
        self.in_doubt = 0
        _add(self.moved, report.moved)
        return sum(report.moved.values())


def _add(to: dict[str, int], counts: Mapping[str, int]) -> None:
    """Add counts to others, by their names."""
    for name, count in counts.items():
        to[name] = to.get(name, 0) + count
