"""`qflow compact`."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.exits import Exit
from qflow.cli.spool import owned
from qflow.config import parse_size


@click.command(short_help="Give the disk back that the log does not need.")
@options.existing_spool
@options.as_json
def compact(spool: Path, as_json: bool) -> int:
    """Write the log of a spool anew, without its free pages, and put it in the place of the old one.

    Needs room for the new one beside the old one. A program that owns the spool calls `Broker.compact` instead. Spill
    files that an owner has left when it was killed are removed.

    The log is read before, as `qflow check` does. What is damaged is copied as it is, and makes the exit code 1.
    """
    from qflow import inspect

    found = inspect.examine(spool)  # no spool is made where there is none
    with owned(spool, parse_size(options.DEFAULT_CAPACITY, "capacity"), None) as broker:
        report = broker.compact()
    if as_json:
        facts.print_json({"spool": str(spool), **attrs.asdict(report), **attrs.asdict(found)})
    else:
        click.echo(f"log: {facts.mebibytes(report.bytes_before)} before, {facts.mebibytes(report.bytes_after)} now")
    tell_of_examination(spool, found.problems, found.lost)
    return Exit.DIFFERS if found.problems else Exit.FINE
