"""`qflow snapshot`."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.exits import Exit
from qflow.cli.progress import working


@click.group(short_help="Copy a spool, also while it is used; bring a copy back.")
def snapshot() -> None:
    """Copy the log of a spool, as of one moment, to a directory that is a spool of its own.

    The copy is checked as by `qflow check`. Damaged data is copied as it is, and the exit code is 1.
    """


@snapshot.command(short_help="Copy a spool, also while another process owns it.")
@options.existing_spool
@click.argument("destination", metavar="DEST", type=options.SpoolPath())
@options.as_json
def create(spool: Path, destination: Path, as_json: bool) -> int:
    """Copy SPOOL to DEST, a directory that does not exist or is empty; the owner of SPOOL goes on meanwhile.

    \b
    Examples:
      qflow snapshot create spool backup
    """
    return _copy(spool, destination, as_json)


@snapshot.command(short_help="Make a spool of a snapshot.")
@click.argument("source", metavar="SNAPSHOT", type=options.SpoolPath(exists=True))
@options.new_or_old_spool
@options.as_json
def load(source: Path, spool: Path, as_json: bool) -> int:
    """Copy SNAPSHOT to SPOOL, a directory that does not exist or is empty; SNAPSHOT stays as it is.

    The registry of SNAPSHOT is read first: if it is not a spool, or a newer qflow wrote it, nothing is made.

    \b
    Examples:
      qflow snapshot load backup spool.again
    """
    return _copy(source, spool, as_json)


def _copy(source: Path, destination: Path, as_json: bool) -> int:
    from qflow import inspect

    with working("copying the log"):
        report = inspect.copy_spool(source, destination)
    with working("checking the copy"):
        found = inspect.examine(destination)
    problems = [*report.problems, *(problem for problem in found.problems if problem not in report.problems)]
    if as_json:
        facts.print_json({**attrs.asdict(found), **attrs.asdict(report), "problems": problems})
    else:
        click.echo(
            f"{facts.readable(report.path)}: {facts.counted(report.queues, 'queue')}, "
            f"{facts.counted(report.streams, 'stream')}, {facts.counted(report.messages, 'message')} of "
            f"{facts.counted(report.bytes, 'byte')}; {facts.mebibytes(report.log_bytes)} on disk"
        )
    tell_of_examination(source if report.problems else destination, problems, found.lost)
    return Exit.DIFFERS if problems else Exit.FINE
