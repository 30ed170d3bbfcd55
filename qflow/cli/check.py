"""`qflow check`."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit


@click.command(short_help="Verify every checksum of the log.")
@options.existing_spool
@options.as_json
def check(spool: Path, as_json: bool) -> int:
    """Read the whole log of a spool and check every checksum, row and block; print a line for each problem.

    Blocks in a row with the same damage are one problem. Exits with 1 if there is a problem. Changes nothing.
    """
    from qflow import inspect

    found = inspect.examine(spool)
    if as_json:
        facts.print_json({"spool": str(spool), **attrs.asdict(found)})
    else:
        for problem in found.problems:
            click.echo(" ".join(problem.split()))
        lost = ", ".join(f"{count:,} of {facts.readable(name)}" for name, count in found.lost.items())
        click.echo(f"{facts.counted(len(found.problems), 'problem')} found" if found.problems else "no problems found")
        if lost:
            click.echo(f"messages that cannot be read: {lost}")
    return Exit.DIFFERS if found.problems else Exit.FINE
