"""Counts the results of published messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qflow.cli import facts
from qflow.errors import NotFound
from qflow.names import argument

if TYPE_CHECKING:
    from qflow import PublishResult


class Tally:
    """Counts of what was confirmed, where it is, and what was not stored. `spool` is for remedies in errors."""

    def __init__(self, spool: Path) -> None:
        self.lines = 0
        """Lines whose result is known."""
        self._spool = spool
        self._confirmed = 0
        self._bytes = 0
        self._duplicates = 0
        self._unrouted = 0
        self._first_unrouted: tuple[int, str] | None = None
        self._in_streams: Counter[str] = Counter()
        self._offsets: dict[str, dict[int, list[int]]] = {}
        self._in_queues: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def count(self, messages: Sequence[tuple[Any, ...]], results: Iterable[PublishResult]) -> None:
        """Count published messages, in order. Cost: 1 µs a message."""
        for (topic, body, *_), result in zip(messages, results, strict=True):
            self.lines += 1
            if result.duplicate:
                self._duplicates += 1
                continue
            if not (result.offsets or result.sequences):
                self._unrouted += 1
                self._first_unrouted = self._first_unrouted or (self.lines, topic)
                continue
            self._confirmed += 1
            self._bytes += len(body)
            for name, offset in result.offsets.items():
                self._in_streams[name] += 1
                known = self._offsets.setdefault(name, {}).setdefault(result.partitions.get(name, 0), [offset, offset])
                known[1] = offset
            for name, sequence in result.sequences.items():
                (self._dropped if sequence is None else self._in_queues)[name] += 1

    def check(self) -> None:
        """Raise `NotFound` if some were taken by no stream and no queue."""
        if self._first_unrouted is None:
            return
        line, topic = self._first_unrouted
        lost = "it was not stored" if self._unrouted == 1 else f"{self._unrouted:,} such messages were not stored"
        where = f"line {line}: " if self.lines > 1 else ""
        declared = f"{argument(str(self._spool))} --declare NAME --topics={argument(topic)}"
        raise NotFound(
            f"{where}nobody takes topic {facts.readable(topic)}: no stream does, and no queue is bound to it; {lost}. "
            f"Make a stream: qflow streams {declared}"
        )

    def print(self, as_json: bool) -> None:
        """Print the counts."""
        if as_json:
            streams = {
                name: {"messages": self._in_streams[name], "offsets": offsets}
                for name, offsets in self._offsets.items()
            }
            facts.print_json(
                {
                    "confirmed": self._confirmed,
                    "bytes": self._bytes,
                    "duplicates": self._duplicates,
                    "unrouted": self._unrouted,
                    "streams": streams,
                    "queues": dict(self._in_queues),
                    "dropped": dict(self._dropped),
                }
            )
            return
        click.echo(f"messages confirmed: {self._confirmed:,} ({facts.counted(self._bytes, 'byte')})")
        for name, offsets in sorted(self._offsets.items()):
            where = f"{len(offsets):,} partitions"
            if offsets.keys() == {0}:
                first, last = offsets[0]
                where = f"offset {first}" if first == last else f"offsets {first} to {last}"
            click.echo(f"  {self._in_streams[name]:,} in stream {facts.readable(name)}, {where}")
        for name, count in sorted(self._in_queues.items()):
            click.echo(f"  {count:,} in queue {facts.readable(name)}")
        for name, count in sorted(self._dropped.items()):
            click.echo(f"  {count:,} dropped by queue {facts.readable(name)}, or made dead letters")
        if self._duplicates:
            click.echo(f"published before, and not stored again: {self._duplicates:,}")
        if self._unrouted:
            click.echo(f"taken by nobody, and not stored: {self._unrouted:,}")
