"""`qflow compact`."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.damage import tell_of_examination
from qflow.cli.progress import working
from qflow.cli.spool import reached


@click.command()
@options.existing_spool
@options.as_json
def compact(spool: Path, as_json: bool) -> int:
    """Replace the log of a spool by a copy without free pages.

    Needs room for the copy beside the log. A process that owns the spool is asked to do it. Spill files left by an
    owner that was killed are removed.

    The log is checked first, as by `qflow check`. Damaged data is copied as it is, and the exit code is 1.

    \b
    Examples:
      qflow compact spool
    """
    from qflow import inspect
    from qflow.broker import Broker

    with working("checking the log"):
        found = inspect.examine(spool)  # raises if there is no spool, where opening it would make one
    with reached(spool) as broker, working("copying the log"):
        report = broker.compact()
        if isinstance(broker, Broker):
            broker.engine.upkeep.finish_wiping()  # however long it takes: the disk is to be given back
    if as_json:
        facts.print_json({"spool": str(spool), **attrs.asdict(report), **attrs.asdict(found)})
    else:
        click.echo(f"log: {facts.mebibytes(report.bytes_before)} before, {facts.mebibytes(report.bytes_after)} now")
    return tell_of_examination(spool, found.problems, found.lost)
