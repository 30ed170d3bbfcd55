"""`qflow alter`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qflow.altering import as_typed, dropped_by, keeps_less, parse_change
from qflow.cli import asking, facts, foreseen, options
from qflow.cli.spool import AnyBroker, existing_queue, existing_stream, reached_if_there
from qflow.config import QueueSettings, StreamSettings


@click.command()
@options.existing_spool
@options.queue_name
@click.argument("changes", metavar="NAME=VALUE...", nargs=-1, required=True)
@click.option("--stream", "is_stream", is_flag=True, help="QUEUE is the name of a stream.")
@asking.yes
@foreseen.dry_run
@options.capacity
@options.as_json
def alter(
    spool: Path,
    queue_name: str,
    changes: tuple[str, ...],
    is_stream: bool,
    is_sure: bool,
    dry_run: bool,
    capacity: int,
    as_json: bool,
) -> None:
    """Change settings of QUEUE while it is used, also while another process owns the spool.

    Names and values are those of `Broker.alter_queue`: limit_messages=1000, capacity_bytes=8MiB, on_overflow=reject,
    dead_letter=dead. The value `none` takes a limit away. All settings are printed as they are then.

    A queue with on_overflow=drop_oldest drops down to a lower limit at once; where no process owns the
    spool, when it is opened next. Without --yes it asks then, at a terminal. So it does where a stream is to keep less.

    With --stream, names and values are those of `Broker.alter_stream`; topics have commas between them. --dry-run asks
    the owner; if none answers, it reads the log, which has durable queues alone.

    \b
        qflow alter SPOOL jobs limit_messages=1000 on_overflow=reject
        qflow alter SPOOL plant --stream retention_bytes=2GiB retention_s=7d
        qflow alter SPOOL latest limit_messages=100 --dry-run
    """
    wanted = dict(parse_change(change, StreamSettings if is_stream else QueueSettings) for change in changes)
    if dry_run:
        _foresee(spool, queue_name, wanted, is_stream, as_json)
        return
    if not is_sure:
        with reached_if_there(spool, capacity) as broker:
            dropped = _dropped(broker, queue_name, wanted, is_stream)
        if dropped is not None:
            asking.make_sure(is_sure, f"Alter {facts.readable(queue_name)}, so that it drops {dropped}?")
    with reached_if_there(spool, capacity) as broker:
        if is_stream:
            settings = broker.alter_stream(existing_stream(broker, queue_name).name, **wanted).settings.to_dict()
        else:
            settings = broker.alter_queue(existing_queue(broker, queue_name).name, **wanted).settings.to_dict()
    if as_json:
        facts.print_json({"stream" if is_stream else "queue": queue_name, "settings": settings})
    else:
        facts.print_table(["setting", "value"], ([name, as_typed(value)] for name, value in settings.items()))


def _dropped(broker: AnyBroker, name: str, wanted: dict[str, Any], is_stream: bool) -> str | None:
    """Return what a queue or stream would drop, in words; None if nothing."""
    if is_stream:
        return "what is beyond that" if keeps_less(existing_stream(broker, name).settings, wanted) else None
    queue = existing_queue(broker, name)
    depth = queue.stats()
    dropped = dropped_by(queue.settings, wanted, depth.messages, depth.bytes)
    return None if dropped is None else f"{dropped} at once"


def _foresee(spool: Path, name: str, wanted: dict[str, Any], is_stream: bool, as_json: bool) -> None:
    """Print what would change, unless it would be refused."""
    before: QueueSettings | StreamSettings
    dropped: str | None
    if is_stream:
        before = foreseen.altered_stream(spool, name, wanted)
        dropped = "what is beyond that" if keeps_less(before, wanted) else None
    else:
        before, messages, size_bytes = foreseen.altered_queue(spool, name, wanted)
        dropped = dropped_by(before, wanted, messages, size_bytes)
    now, then = before.to_dict(), before.changed(**wanted).to_dict()
    if as_json:
        kind = "stream" if is_stream else "queue"
        was, would_be = ({setting: those[setting] for setting in wanted} for those in (now, then))
        facts.print_json({kind: name, "before": was, "would_be": would_be, "would_drop": dropped})
        return
    for setting, value in wanted.items():
        click.echo(f"would set {setting} of {facts.readable(name)} to {as_typed(value)}; now {as_typed(now[setting])}")
    at_once = "" if is_stream else ", at once"
    click.echo(f"would drop {dropped}{at_once}" if dropped else "would drop no message")
