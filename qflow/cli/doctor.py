"""`qflow doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit
from qflow.names import command

if TYPE_CHECKING:
    from qflow.doctor import Finding, Look

_CODES = (Exit.FINE, Exit.DIFFERS, Exit.DIFFERS, Exit.URGENT)


@click.command()
@options.existing_spool
@options.as_json
def doctor(spool: Path, as_json: bool) -> int:
    """Say what is wrong with a spool, worst first, and what to do about it; whether somebody owns it or nobody does.

    Each finding has a kind, which is a section of docs/howto/runbook.md. Changes nothing. Of a log with more than
    64 MiB in use it does not read the messages, and says so: `qflow check` does. Exits with 0 if nothing was found, 1
    for notices and problems, 6 for what is urgent.

    \b
    Examples:
      qflow doctor spool
      qflow doctor spool --json | jq -r '.findings[] | select(.severity == "urgent") | .remedy'
    """
    from qflow.doctor import judge, look_at

    look = look_at(spool)
    found = judge(look)
    if as_json:
        findings = [finding.to_dict() for finding in found]
        facts.print_json({"spool": str(spool), "owner_pid": look.owner_pid, "read": look.is_read, "findings": findings})
    else:
        _print(found, look)
    return max((_CODES[finding.severity] for finding in found), default=Exit.FINE)


def _print(found: list[Finding], look: Look) -> None:
    if not found:
        click.echo("nothing is wrong" if look.is_read else "nothing is wrong as far as was looked")
    for finding in found:
        severity = finding.severity.name.lower()
        click.echo(f"{severity} ({finding.kind}): {finding.sentence}")
        click.echo(f"    {finding.remedy}")
    if look.owner_pid is None and look.failure is None:
        click.echo("nobody owns the spool: its log was judged, and not who puts, takes, holds and reads")
    if look.is_standing:
        click.echo("the log was not read, which would wait for the same disk")
    elif not look.is_read and look.failure is None:
        click.echo(f"the log is long, and the messages were not read: {command('check', look.path)} reads everything")
