"""`qflow check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit
from qflow.cli.progress import working

if TYPE_CHECKING:
    from qflow.inspect import Loss


@click.command()
@options.existing_spool
@click.option(
    "--repair",
    "to",
    metavar="TO",
    type=options.SpoolPath(),
    help="Bring what can be read into a new spool, TO; SPOOL is not touched.",
)
@options.as_json
def check(spool: Path, to: Path | None, as_json: bool) -> int:
    """Read the whole log of a spool and check every checksum, row and block; print a line for each problem.

    Blocks in a row with the same damage are one problem. Exits with 1 if there is a problem. Changes nothing.

    With --repair, all that can be read is brought into a new spool, with its sequences, offsets, settings and
    positions, and what is lost is listed. Nobody may own the damaged one meanwhile. Exits with 1 if something is lost.

    \b
    Examples:
      qflow check spool
      qflow check spool --repair spool.new --json | jq .lost
    """
    return _check(spool, as_json) if to is None else _repair(spool, to, as_json)


def _check(spool: Path, as_json: bool) -> int:
    from qflow import inspect

    with working("checking the log"):
        found = inspect.examine(spool)
    if as_json:
        facts.print_json({"spool": str(spool), **attrs.asdict(found)})
    else:
        for problem in found.problems:
            click.echo(" ".join(problem.split()))
        if found.journal_records:
            click.echo(f"{facts.of_journal(found.journal_records)}; they were checked with it")
        lost = ", ".join(f"{count:,} of {facts.readable(name)}" for name, count in found.lost.items())
        click.echo(f"{facts.counted(len(found.problems), 'problem')} found" if found.problems else "no problems found")
        if lost:
            click.echo(f"messages that cannot be read: {lost}")
    return Exit.DIFFERS if found.problems else Exit.FINE


def _repair(spool: Path, to: Path, as_json: bool) -> int:
    from qflow import inspect

    with working("bringing over what can be read"):
        done = inspect.repair_spool(spool, to)
    if as_json:
        facts.print_json({"spool": str(spool), **attrs.asdict(done)})
    else:
        for loss in done.lost:
            click.echo(f"lost: {_in_words(loss)}")
        for problem in done.problems:
            click.echo(f"left as it is: {' '.join(problem.split())}")
        what = [facts.counted(count, thing) for count, thing in ((done.queues, "queue"), (done.streams, "stream"))]
        messages = facts.counted(done.messages, "message")
        click.echo(f"{facts.readable(str(to))} has {' and '.join(what)} with {messages}")
    return Exit.DIFFERS if done.lost else Exit.FINE


def _in_words(loss: Loss) -> str:
    reason = " ".join(loss.reason.split())
    if loss.first is None:
        return f"{loss.name}: {reason}"
    numbers = str(loss.first) if loss.first == loss.last else f"{loss.first} to {loss.last}"
    return f"{loss.name}: up to {facts.counted(loss.messages or 0, 'message')}, {numbers}: {reason}"
