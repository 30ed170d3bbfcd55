"""Where groups and durable subscriptions of a stream go on, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import asking, facts, foreseen, options
from qflow.cli.options import START_HELP, parse_start
from qflow.cli.spool import AnyBroker, asked_if_there, named, reached
from qflow.errors import NotFound, SettingsConflict
from qflow.names import choices

if TYPE_CHECKING:
    from qflow.inspect import StreamFacts, SubscriptionFacts


@click.command(short_help="Have a group, or a durable subscription, go on elsewhere.")
@options.existing_spool
@click.argument("stream", shell_complete=options.streams)
@click.argument("group")
@click.option("--to", metavar="START", required=True, callback=parse_start, help=START_HELP)
@click.option("--partition", type=click.IntRange(min=0), help="Only in this partition; an offset needs one of several.")
@asking.yes
@foreseen.dry_run
@options.as_json
def reset(
    spool: Path,
    stream: str,
    group: str,
    to: str | int | datetime,
    partition: int | None,
    is_sure: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Have GROUP, a group or a durable subscription of STREAM, go on at START, also while another process owns the
    spool.

    What its members hold is taken back: acks of that do nothing. A durable subscription that is open cannot be moved
    from here. Without --yes it asks, at a terminal.

    \b
        qflow streams reset SPOOL plant readers --to earliest --dry-run
        qflow streams reset SPOOL plant readers --to 2026-01-31T12:00Z --yes
    """
    facts_of, member = _found(spool, stream, group)
    if partition is not None and partition >= len(facts_of.partitions):
        raise click.UsageError(f"stream {stream!r} has partitions 0 to {len(facts_of.partitions) - 1}, not {partition}")
    if isinstance(to, int) and partition is None and len(facts_of.partitions) > 1:
        count = len(facts_of.partitions)
        raise click.UsageError(f"stream {stream!r} has {count} partitions, and each its own offsets: give --partition")
    name = facts.readable(group)
    meant = to.isoformat() if isinstance(to, datetime) else str(to)
    if dry_run:
        there = _foreseen(spool, stream, member, to, partition)
        if as_json:
            facts.print_json({"stream": stream, "group": group, "before": member.committed, "would_be": there})
        else:
            click.echo(f"would move {name} to {meant}: at {_shown(there)}; now at {_shown(member.committed)}")
        return
    asking.make_sure(is_sure, f"Move {name} of {facts.readable(stream)} to {meant}?")
    facts_of, member = _found(spool, stream, group)  # an end may be another one by now
    with reached(spool) as broker:
        now_at = _moved(broker, facts_of, member, to, partition)
    if as_json:
        facts.print_json({"stream": stream, "group": group, "before": member.committed, "now": now_at})
    else:
        click.echo(f"{name}: at {_shown(member.committed)} before, at {_shown(now_at)} now")


@click.command(short_help="Delete a group, or a durable subscription.")
@options.existing_spool
@click.argument("stream", shell_complete=options.streams)
@click.argument("group")
@asking.yes
@foreseen.dry_run
@options.as_json
def unsubscribe(spool: Path, stream: str, group: str, is_sure: bool, dry_run: bool, as_json: bool) -> None:
    """Delete GROUP, a group or a durable subscription of STREAM, with its place, also while another process owns the
    spool.

    The stream keeps nothing for it any more, and all for the others. Who has it open gets an error. Without --yes it
    asks, at a terminal.

    \b
        qflow streams unsubscribe SPOOL plant readers --dry-run
        qflow streams unsubscribe SPOOL plant readers --yes
    """
    _, member = _found(spool, stream, group)
    told = {"stream": stream, "group": group, "lag": member.lag_messages}
    what = (
        f"{facts.readable(group)} of {facts.readable(stream)}, {facts.counted(member.lag_messages, 'message')} behind"
    )
    if not dry_run:
        asking.make_sure(is_sure, f"Delete {what}?")
        with reached(spool) as broker:
            broker.delete_subscription(stream, group)
    if as_json:
        facts.print_json({**told, "would_delete" if dry_run else "deleted": True})
    else:
        click.echo(f"would delete {what}" if dry_run else f"deleted: {what}")


def _found(spool: Path, stream: str, group: str) -> tuple[StreamFacts, SubscriptionFacts]:
    from qflow import inspect

    read = inspect.read_spool(spool)
    streams = {one.name: one for one in read.streams}
    found = named(spool, stream, "stream", streams, queues=[one.name for one in read.queues])
    members = {one.name: one for one in found.subscriptions}
    if group not in members:
        raise NotFound(
            f"stream {stream!r} has no group and no durable subscription {group!r}; {choices(group, members)}"
        )
    return found, members[group]


def _foreseen(
    spool: Path, stream: str, member: SubscriptionFacts, to: str | int | datetime, partition: int | None
) -> list[int]:
    """Return where it would be. Raises InvalidArgument: there is no such place. SettingsConflict: it is open."""
    from qflow import inspect

    with asked_if_there(spool) as owner:
        open_now = [] if owner is None or member.group else owner.stream(stream).stats().subscriptions
        if any(one.name == member.name and one.members for one in open_now):
            raise SettingsConflict(f"subscription {member.name!r} of stream {stream!r} is open already: close it first")
    with inspect.read_stream(
        spool, stream, member.filter, partition=partition, start=to, on_gap=lambda _gap: None
    ) as reader:
        return [reader.offsets.get(number, offset) for number, offset in enumerate(member.committed)]


def _moved(
    broker: AnyBroker, stream: StreamFacts, member: SubscriptionFacts, to: str | int | datetime, partition: int | None
) -> list[int]:
    """Seek, and return where it is then."""
    joined = {"group": member.name} if member.group else {"name": member.name}
    options_ = {"start": "committed", **joined}
    with broker.subscribe(stream.name, member.filter, **options_) as subscription:  # type: ignore[arg-type]
        if isinstance(to, datetime):
            subscription.seek(to, partition=partition)
        else:
            for part in stream.partitions:
                if partition in (None, part.number):
                    ends = {"earliest": part.first_offset, "latest": part.next_offset}
                    place = to if isinstance(to, int) else ends[to]
                    subscription.seek(place, partition=part.number)
        return list(subscription.positions)


def _shown(offsets: Sequence[int]) -> str:
    return ", ".join(f"{offset:,}" for offset in offsets)
