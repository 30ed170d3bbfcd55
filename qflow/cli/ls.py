"""`qflow ls`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.exits import Exit

_SORTS = {"name": False, "messages": True, "bytes": True}
"""Column -> the largest first."""


@click.command()
@options.existing_spool
@click.argument("patterns", nargs=-1, metavar="[PATTERN]...")
@click.option("--sort", type=click.Choice(list(_SORTS)), default="name", show_default=True, help="What to order by.")
@options.as_json
def ls(spool: Path, patterns: tuple[str, ...], sort: str, as_json: bool) -> int:
    """List the queues and streams of a spool with what is in them, those that match a pattern if one is given.

    Takes as long for ten million messages as for none. What is in no log (transient queues and messages, how many are
    held) is as the owner told last, within ten seconds, if it did: it cannot on a full disk. Exits with 1 if something
    of the log is damaged.

    \b
    Examples:
      qflow ls spool
      qflow ls spool 'mail-*' --sort messages
      qflow ls spool --json | jq -r '.entries[] | select(.messages > 1000) | .name'
    """
    from qflow.inspect import list_spool

    found = list_spool(spool)
    entries = [
        entry for entry in found.entries if not patterns or any(fnmatchcase(entry.name, one) for one in patterns)
    ]
    if sort != "name":
        entries.sort(key=lambda entry: getattr(entry, sort) or 0, reverse=_SORTS[sort])
    if as_json:
        facts.print_json(attrs.asdict(attrs.evolve(found, entries=entries)))
    else:
        for problem in found.problems:
            click.echo(f"problem: {' '.join(problem.split())}")
        facts.print_table(
            ["name", "messages", "bytes", "held", "kind"],
            (
                [
                    facts.readable(entry.name),
                    entry.messages,
                    entry.bytes,
                    entry.held_messages,
                    entry.kind if entry.durable else "transient queue",
                ]
                for entry in entries
            ),
        )
    return Exit.DIFFERS if found.problems else Exit.FINE
