"""What an export writes: queues and streams as the log has them, with or without a live owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from qflow.cli import messages, stream_messages
from qflow.cli.portable.items import Declared
from qflow.cli.spool import not_there
from qflow.restoring import Item

if TYPE_CHECKING:
    from qflow.inspect import QueueFacts
    from qflow.inspect.pages import Page


@attrs.define
class Contents:
    """Chosen queues and streams of a spool."""

    spool: Path
    declared: list[Declared]
    queues: list[QueueFacts]
    messages: int
    """About so many."""
    problems: list[str] = attrs.field(factory=list)
    """Of what cannot be read, as it is come upon."""

    def batches(self) -> Iterator[list[Item]]:
        """Yield the messages, one queue or stream after the other, in the order of delivery."""
        queues = messages.pages_of(self.spool, self.queues)
        for one in self.declared:
            yield from self._queue(*next(queues)) if one.kind == "queue" else self._stream(one.name)

    def _queue(self, queue: QueueFacts, pages: Iterator[Page]) -> Iterator[list[Item]]:
        for page in pages:
            self.problems += page.problems
            yield [
                Item(
                    kind="queue",
                    name=queue.name,
                    number=one.sequence,
                    **{part: getattr(one, part) for part in _OF_MESSAGE},
                )
                for one in page.messages
            ]

    def _stream(self, name: str) -> Iterator[list[Item]]:
        for batch in stream_messages.batches(self.spool, name, self.problems):
            yield [
                Item(
                    kind="stream",
                    name=name,
                    number=one.offset,
                    partition=one.partition,
                    time_ms=one.time_ms,
                    topic=one.topic,
                    key=one.key or b"",
                    headers=dict(one.headers),
                    body=one.body,
                )
                for one in batch
            ]


_OF_MESSAGE = ("time_ms", "priority", "expires_ms", "due_ms", "topic", "key", "headers", "body")


def contents(spool: Path, names: tuple[str, ...]) -> Contents:
    """Return the queues and streams of these names, or all. Raises NotFound: there is no spool, or none of a name."""
    from qflow import inspect

    found = inspect.read_spool(spool)
    there = {*(one.name for one in found.queues), *(one.name for one in found.streams)}
    for name in names:
        if name not in there:
            raise not_there(spool, name, "durable queue and no stream", there)
    wanted = set(names) or there
    queues = [one for one in found.queues if one.name in wanted]
    streams = [one for one in found.streams if one.name in wanted]
    declared = [
        *(Declared(kind="queue", name=one.name, settings=one.settings) for one in queues),
        *(Declared(kind="stream", name=one.name, settings=one.settings) for one in streams),
    ]
    count = sum(queue.messages for queue in queues) + sum(stream.messages for stream in streams)
    return Contents(spool, declared, queues, count)
