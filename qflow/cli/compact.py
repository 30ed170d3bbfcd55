"""`qflow compact`."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.spool import owned
from qflow.config import parse_size


@click.command(short_help="Give the disk back that the log does not need.")
@options.existing_spool
@options.as_json
def compact(spool: Path, as_json: bool) -> None:
    """Write the log of a spool anew, without its free pages, and put it in the place of the old one.

    Needs room for the new one beside the old one. A program that owns the spool calls `Broker.compact` instead.
    """
    from qflow import inspect

    inspect.read_spool(spool)  # no spool is made where there is none
    with owned(spool, parse_size(options.DEFAULT_CAPACITY, "capacity"), None) as broker:
        report = broker.compact()
    if as_json:
        facts.print_json({"spool": str(spool), **attrs.asdict(report)})
    else:
        click.echo(f"log: {facts.mebibytes(report.bytes_before)} before, {facts.mebibytes(report.bytes_after)} now")
