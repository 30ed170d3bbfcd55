"""`qflow doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit

if TYPE_CHECKING:
    from qflow.doctor import Finding

_CODES = (Exit.FINE, Exit.DIFFERS, Exit.DIFFERS, Exit.URGENT)


@click.command(short_help="Say what is wrong with a spool, and what to do.")
@options.existing_spool
@options.as_json
def doctor(spool: Path, as_json: bool) -> int:
    """Say what is wrong with a spool, worst first, and what to do about it; whether somebody owns it or nobody does.

    Each finding has a kind, which is a section of docs/howto/runbook.md. Changes nothing, and does not read the
    messages: `qflow check` does. Exits with 0 if nothing was found, 1 for notices and problems, 6 for what is urgent.

    \b
    Examples:
      qflow doctor spool
      qflow doctor spool --json | jq -r '.findings[] | select(.severity == "urgent") | .remedy'
    """
    from qflow.doctor import examine

    found = examine(spool)
    if as_json:
        facts.print_json({"spool": str(spool), "findings": [finding.to_dict() for finding in found]})
    else:
        _print(found)
    return max((_CODES[finding.severity] for finding in found), default=Exit.FINE)


def _print(found: list[Finding]) -> None:
    if not found:
        click.echo("nothing is wrong as far as can be seen without reading the messages")
    for finding in found:
        severity = finding.severity.name.lower()
        click.echo(f"{severity} ({finding.kind}): {finding.sentence}")
        click.echo(f"    {finding.remedy}")
