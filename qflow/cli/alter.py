"""`qflow alter`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qflow.altering import dropped_by, parse_change
from qflow.cli import asking, facts, foreseen, options
from qflow.cli.spool import existing_queue, reached_if_there


@click.command(short_help="Change settings of a queue.")
@options.existing_spool
@options.queue_name
@click.argument("changes", metavar="NAME=VALUE...", nargs=-1, required=True)
@asking.yes
@foreseen.dry_run
@options.capacity
@options.as_json
def alter(
    spool: Path,
    queue_name: str,
    changes: tuple[str, ...],
    is_sure: bool,
    dry_run: bool,
    capacity: int,
    as_json: bool,
) -> None:
    """Change settings of QUEUE while it is used, also while another process owns the spool.

    Names and values are those of `Broker.alter_queue`: limit_messages=1000, capacity_bytes=8MiB, on_overflow=reject,
    dead_letter=dead. The value `none` takes a limit away. All settings are printed as they are then.

    A queue with on_overflow=drop_oldest drops down to a lower limit with the next put: without --yes it asks then, at
    a terminal.

    \b
        qflow alter SPOOL jobs limit_messages=1000 on_overflow=reject
        qflow alter SPOOL latest limit_messages=100 --dry-run
    """
    wanted = dict(map(parse_change, changes))
    with reached_if_there(spool, capacity) as broker:
        queue = existing_queue(broker, queue_name)
        depth = queue.stats()
        dropped = dropped_by(queue.settings, wanted, depth.messages, depth.bytes)
        name = facts.readable(queue_name)
        if dry_run:
            _foresee(name, queue.settings.to_dict(), wanted, dropped)
            return
        if dropped is not None:
            asking.make_sure(is_sure, f"Alter {name}, so that the next put drops {dropped}?")
        settings = broker.alter_queue(queue_name, **wanted).settings.to_dict()
    if as_json:
        facts.print_json({"queue": queue_name, "settings": settings})
    else:
        facts.print_table(["setting", "value"], ([name, _shown(value)] for name, value in settings.items()))


def _foresee(name: str, before: dict[str, Any], wanted: dict[str, Any], dropped: str | None) -> None:
    """Print what would change. A value that makes no sense is found when it is set."""
    for setting, value in wanted.items():
        click.echo(f"would set {setting} of {name} to {_shown(value)}; now {_shown(before[setting])}")
    click.echo(f"the next put would drop {dropped}" if dropped else "would drop no message")


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
