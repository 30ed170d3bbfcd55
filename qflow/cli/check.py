"""`qflow check`."""

from __future__ import annotations

from pathlib import Path

import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit


@click.command(short_help="Verify every checksum of the log.")
@options.existing_spool
@options.as_json
def check(spool: Path, as_json: bool) -> int:
    """Read the whole log of a spool and compare every checksum, row and block; a line for each problem.

    Exits with 1 if there is a problem. Changes nothing.
    """
    from qflow import inspect

    problems = inspect.check_spool(spool)
    if as_json:
        facts.print_json({"spool": str(spool), "problems": problems})
    else:
        for problem in problems:
            click.echo(" ".join(problem.split()))
        click.echo(f"{len(problems)} problems found" if problems else "no problems found")
    return Exit.DIFFERS if problems else Exit.FINE
