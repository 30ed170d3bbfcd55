"""`qflow streams`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from qflow.cli import facts, options, positions
from qflow.cli.exits import Exit
from qflow.cli.options import ListingGroup
from qflow.cli.spool import reached

if TYPE_CHECKING:
    from qflow.inspect import StreamFacts


@click.group(cls=ListingGroup, subcommand_metavar="[list] SPOOL")
def streams() -> None:
    """Show the streams of a spool, declare one, have a group go on elsewhere, or delete it.

    \b
        qflow streams SPOOL
        qflow streams SPOOL --declare plant --topics 'plant/#' --retention-bytes 1GiB
        qflow streams reset SPOOL plant readers --to -1h
        qflow streams unsubscribe SPOOL plant readers

    A spool that has the name of a command is written as `./reset`.
    """


@streams.command("list", short_help="Show streams, or declare one.")
@options.new_or_old_spool
@click.option("--declare", "name", metavar="NAME", help="Make this stream, if there is none of that name.")
@click.option("--topics", metavar="FILTER", multiple=True, help="What it takes, as in MQTT; may be repeated.")
@click.option("--partitions", type=int, help="Lines, each in order, 1 to 64; cannot be changed.  [default: 1]")
@click.option("--retention-s", type=options.Seconds(min=0), metavar="TIME", help="Drop them when older, as 7d.")
@click.option("--retention-bytes", metavar="SIZE", help="Keep the newest of so many bytes, such as 1GiB.")
@click.option("--retention-messages", type=int, metavar="N", help="Keep the newest so many.")
@click.option("--retain-until-consumed", is_flag=True, default=None, help="Keep what a durable subscription is to get.")
@options.as_json
def list_streams(spool: Path, name: str | None, as_json: bool, **settings: Any) -> int:
    """Show the streams of a spool: topics, messages, retention, and positions of their durable subscriptions.

    It only reads, with or without a live owner. Exits with 1 if the log contradicts itself.

    With --declare it asks the owner, or owns the spool meanwhile; it makes one if there is none, and then shows the
    stream. A stream that exists stays as it is; if it was declared differently, that is an error.

    \b
        qflow streams SPOOL --declare plant --topics 'plant/#' --retention-bytes 1GiB
    """
    from qflow import inspect

    given = {setting: value for setting, value in settings.items() if value not in (None, ())}
    if name is not None:
        _declare(spool, name, given)
    elif given:
        raise click.UsageError(f"--{min(given).replace('_', '-')} goes with --declare NAME")
    found = inspect.read_spool(spool)
    if as_json:
        facts.print_json([attrs.asdict(stream) for stream in found.streams])
    else:
        for problem in found.problems:
            click.echo(f"problem: {problem}")
        print_streams(found.streams, in_detail=True)
    return Exit.DIFFERS if found.problems else Exit.FINE


def _declare(spool: Path, name: str, settings: dict[str, Any]) -> None:
    if "topics" not in settings:
        raise click.UsageError("--declare needs --topics FILTER: what is the stream to take?")
    with reached(spool) as broker:
        broker.declare_stream(name, **settings)


def print_streams(streams: list[StreamFacts], *, in_detail: bool = False) -> None:
    """Print a table of streams, and of their partitions and durable subscriptions where there are some."""
    if not streams:
        click.echo("no streams")
        return
    facts.print_table(
        ["stream", "topics", "partitions", "messages", "bytes", "first", "next", "keeps"],
        (
            [
                facts.readable(stream.name),
                " ".join(map(facts.readable, stream.topics)),
                len(stream.partitions),
                stream.messages,
                stream.bytes,
                stream.partitions[0].first_offset if len(stream.partitions) == 1 else None,
                stream.partitions[0].next_offset if len(stream.partitions) == 1 else None,
                _keeps(stream),
            ]
            for stream in streams
        ),
    )
    if not in_detail:
        return
    parts = [
        [facts.readable(stream.name), part.number, part.messages, part.bytes, part.first_offset, part.next_offset]
        for stream in streams
        for part in stream.partitions
        if len(stream.partitions) > 1
    ]
    facts.print_next_table(["stream", "partition", "messages", "bytes", "first", "next"], parts)
    subscriptions = [
        [
            facts.readable(stream.name),
            facts.readable(one.name),
            "group" if one.group else "one",
            facts.readable(one.filter),
            one.committed[0] if len(one.committed) == 1 else " ".join(map(str, one.committed)),
            one.lag_messages,
        ]
        for stream in streams
        for one in stream.subscriptions
    ]
    facts.print_next_table(["stream", "subscription", "of", "filter", "committed", "lag"], subscriptions)


def _keeps(stream: StreamFacts) -> str:
    """Return the retention settings in words."""
    settings = stream.settings
    kept = []
    if settings["retention_s"] is not None:
        kept.append(f"for {settings['retention_s']:,.10g} s")
    if settings["retention_bytes"] is not None:
        kept.append(f"newest {settings['retention_bytes']:,} bytes")
    if settings["retention_messages"] is not None:
        kept.append(f"newest {settings['retention_messages']:,} messages")
    if settings["retain_until_consumed"]:
        kept.append("until consumed")
    return ", ".join(kept) or "all"


streams.add_command(positions.reset)
streams.add_command(positions.unsubscribe)
