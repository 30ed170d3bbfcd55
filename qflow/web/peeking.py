"""The first messages of a queue, and the last of a stream, with as much of their bodies as is shown."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from functools import partial
from itertools import islice
from typing import Any

import attrs

from qflow.aio.broker import AsyncBroker, at_length
from qflow.errors import InvalidArgument
from qflow.queues.queue import Queue
from qflow.streams.deliveries import StreamMessage
from qflow.streams.stream import Stream
from qflow.streams.topic_filter import check_filter
from qflow.web.reading import KEPT_BYTES, first_messages
from qflow.web.text import plain

MOST = 100


@attrs.frozen
class Shown:
    """One message."""

    place: str
    """Its sequence, or its partition and offset."""
    size_bytes: int | None
    body: bytes | None
    """The beginning of it, 64 KiB at most; None where it is not read."""
    headers: dict[str, Any]
    time_ms: int | None = None
    topic: str = ""
    state: str = ""
    """Where it lies, if its body is not read."""


async def first_of_queue(broker: AsyncBroker, name: str, most: int, turn: asyncio.Semaphore) -> list[Shown]:
    """Return the first messages of a queue that nobody has settled; nothing is taken.

    Of a queue that is not durable there are places and sizes alone.

    Args:
        turn: how many may read at once.

    Raises:
        NotFound, InvalidArgument.
    Cost: a process for 0.3 s, and the blocks that hold them.
    """
    _check(most)
    queue = broker.queue(name).queue
    work = partial(_logged if queue.settings.durable else _waiting, broker.path, queue, most)
    async with turn:
        return await at_length(broker, work)


def _logged(path: str, queue: Queue, most: int) -> list[Shown]:
    return [
        Shown(str(one["sequence"]), one["size_bytes"], base64.b64decode(one["body"]), one["headers"], one["time_ms"])
        for one in first_messages(path, queue.name, most)
    ]


def _waiting(_path: str, queue: Queue, most: int) -> list[Shown]:
    return [
        Shown(str(entry.sequence), entry.size_bytes, None, {}, entry.due_ms, state=entry.state)
        for entry in islice(queue.browse(), most)
    ]


async def last_of_stream(broker: AsyncBroker, name: str, most: int, topic_filter: str = "#") -> list[Shown]:
    """Return the last messages of a stream that a filter matches, newest first. Raises NotFound, InvalidArgument.

    Cost: as `Stream.query`, and the memory of what is shown of them.
    """
    _check(most)
    return await at_length(broker, partial(_newest, broker.stream(name).stream, most, topic_filter))


def _newest(stream: Stream, most: int, topic_filter: str) -> list[Shown]:
    check_filter(topic_filter)
    found: list[Shown] = []
    stats = stream.stats()
    for number, low in enumerate(stats.first_offsets):
        here: deque[Shown] = deque()
        high, width = stats.next_offsets[number], most
        while high > low and len(here) < most:
            start = max(low, high - width)
            stretch = map(_published, stream.query(topic_filter, partition=number, start=start, end=high))
            here.extendleft(reversed(deque(stretch, maxlen=most - len(here))))
            high, width = start, 2 * width
        found = sorted([*found, *here], key=lambda one: one.time_ms or 0)[-most:]
    return found[::-1]


def _published(one: StreamMessage) -> Shown:
    headers = {key: plain(value) for key, value in one.headers.items()}
    body = one.body
    return Shown(f"{one.partition}:{one.offset}", len(body), body[:KEPT_BYTES], headers, one.time_ms, one.topic)


def _check(most: int) -> None:
    if not 1 <= most <= MOST:
        raise InvalidArgument(f"most is how many messages to show, 1 to {MOST}, not {most}")
