"""`qflow snapshot`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.progress import working
from qflow.cli.stop import interrupting
from qflow.errors import CorruptionError

if TYPE_CHECKING:
    from qflow.inspect import Examination
    from qflow.stats import SnapshotReport


@click.group()
def snapshot() -> None:
    """Copy the log of a spool, as of one moment, to a directory that is a spool of its own.

    The copy is checked as by `qflow check`. Damaged data is copied as it is, and the exit code is 1. A signal that
    comes before the end of the check has the copy removed.
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
    from qflow.doctor.words import size

    with interrupting():
        report, found = _copied(source, destination)
    problems = [*report.problems, *(problem for problem in found.problems if problem not in report.problems)]
    if as_json:
        facts.print_json({**attrs.asdict(found), **attrs.asdict(report), "problems": problems})
    else:
        click.echo(
            f"{facts.readable(report.path)}: {facts.counted(report.queues, 'queue')}, "
            f"{facts.counted(report.streams, 'stream')}, {facts.counted(report.messages, 'message')} of "
            f"{facts.counted(report.bytes, 'byte')}; {size(report.log_bytes)} on disk"
        )
    return tell_of_examination(source if report.problems else destination, problems, found.lost)


def _copied(source: Path, destination: Path) -> tuple[SnapshotReport, Examination]:
    """Copy a spool and check the copy. One whose check does not come to its end is removed, unless it is damaged."""
    from qflow import inspect
    from qflow.inspect.copying import remove_copy

    existed = os.path.lexists(destination)
    report = None
    try:
        with working("copying the log"):
            report = inspect.copy_spool(source, destination)
        with working("checking the copy"):
            return report, inspect.examine(destination)
    except BaseException as error:
        if report is not None and not isinstance(error, CorruptionError):
            remove_copy(report, existed=existed)
        raise
