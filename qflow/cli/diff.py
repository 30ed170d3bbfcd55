"""`qflow diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit
from qflow.cli.progress import working
from qflow.cli.standard import complain

if TYPE_CHECKING:
    from qflow.inspect import Difference


@click.command()
@click.argument("a", type=options.SpoolPath(exists=True))
@click.argument("b", type=options.SpoolPath(exists=True))
@click.option("--counts", is_flag=True, help="Compare how many messages there are, not the messages.")
@click.option("--json", "as_json", is_flag=True, help="Print each difference as a line of JSON.")
def diff(a: Path, b: Path, counts: bool, as_json: bool) -> int:
    """Compare two spools, as a spool and its snapshot: queues and streams, settings, and messages by their sequence.

    Messages are the same if body, headers and topic are. Those in a row that differ in the same way are one line. Exits
    with 0 if both hold the same, with 1 if not. Changes nothing; either may be in use.

    \b
    Examples:
      qflow diff spool snapshot
      qflow diff spool snapshot --counts
      qflow diff spool snapshot --json | jq -r 'select(.what == "only in a") | .name'
    """
    from qflow.inspect.comparing import MOST, compare

    with working("comparing"):
        found = compare(a, b, messages=not counts)
    for difference in found:
        click.echo(json.dumps(attrs.asdict(difference)) if as_json else _line(difference))
    if len(found) == MOST:
        complain(f"qflow: only the first {MOST:,} differences are shown")
    elif not found and not as_json:
        click.echo("no differences")
    return Exit.DIFFERS if found else Exit.FINE


def _line(difference: Difference) -> str:
    where = f"{difference.kind} {facts.readable(difference.name)}"
    if difference.partition is not None and difference.kind == "stream":
        where += f", partition {difference.partition}"
    if difference.first is not None and difference.last is not None:
        number = "offset" if difference.kind == "stream" else "sequence"
        count = facts.counted(difference.last - difference.first + 1, "message")
        one = difference.first == difference.last
        numbers = f"{number} {difference.first}" if one else f"{number}s {difference.first} to {difference.last}"
        return f"{where}: {count} {difference.what}: {numbers}"
    if difference.what in ("only in a", "only in b"):
        return f"{where}: {difference.what}"
    return f"{where}: {difference.what}: {_value(difference.a)} in a, {_value(difference.b)} in b"


def _value(value: object) -> str:
    return facts.readable(value) if isinstance(value, str) else "none" if value is None else str(value)
