"""`qflow du`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from qflow.cli import facts, options
from qflow.cli.progress import working

if TYPE_CHECKING:
    from qflow.inspect import Usage


@click.command()
@options.existing_spool
@options.as_json
def du(spool: Path, as_json: bool) -> None:
    """Show what a spool takes of the disk, and how much of that is still wanted, by store and by queue.

    Dead bytes of the log are pages that are kept for reuse; `qflow compact` gives them back. Dead bytes of a queue lie
    in blocks where some messages are settled and others are not. Without an owner, spill files are dead: what they hold
    is in the log, or was transient. Reads the log once.

    \b
    Examples:
      qflow du spool
      qflow du spool --json | jq '.stores[] | {name, disk_bytes, live_bytes}'
    """
    from qflow.inspect import read_usage

    with working("reading the log"):
        found = read_usage(spool)
    if as_json:
        facts.print_json(attrs.asdict(found))
    else:
        _print(found)


def _print(found: Usage) -> None:
    from qflow.doctor.words import size

    facts.print_table(
        ["store", "on disk", "live", "dead", "files"],
        (
            [
                store.name,
                size(store.disk_bytes),
                None if store.live_bytes is None else size(store.live_bytes),
                None if store.live_bytes is None else size(max(0, store.disk_bytes - store.live_bytes)),
                store.files,
            ]
            for store in found.stores
        ),
    )
    facts.print_next_table(
        ["queue", "log", "live", "dead", "spilled", "kind"],
        (
            [
                facts.readable(lane.name),
                *map(size, (lane.log_bytes, lane.live_bytes, lane.dead_bytes, lane.spill_bytes)),
                lane.kind,
            ]
            for lane in found.lanes
        ),
    )
