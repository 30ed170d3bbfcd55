"""Replies about streams, read: the classes that the same calls return beside the owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qflow.config import StreamSettings
from qflow.message import LANE_SHIFT, Message, Record
from qflow.named_tuples import NamedTuple
from qflow.remote.client.link import Reply
from qflow.streams.deliveries import StreamMessage, message_of, piece_of


def settings(reply: Reply) -> StreamSettings:
    return StreamSettings.from_dict(reply.result)


class Opened(NamedTuple):
    """A subscription that was opened."""

    number: int
    stream: str
    name: str | None
    filter: str
    leased: bool
    """What is held may be taken back, so that whoever settles it must hear of it."""
    settings: StreamSettings
    """Of the stream."""


def opened(reply: Reply) -> Opened:
    told = reply.result
    known = told["stream"], told["name"], told["filter"], told["leased"]
    return Opened(told["subscription"], *known, StreamSettings.from_dict(told["settings"]))


class Granted(NamedTuple):
    """Messages that were delivered to a subscriber."""

    number: int
    """Of the grant; 0 where nothing came."""
    shares: list[tuple[int, Any, int]]
    """Partition, messages and marks."""


def granted(reply: Reply) -> Granted:
    told = reply.result
    if not told["offsets"]:
        return Granted(0, [])
    records, topics = _records(reply.columns)
    total = len(records)
    sequences, times = _sequences(told["offsets"]), _each(told["times"], total)
    known = zip(_each(told["counts"], total), _each(told["redelivered"], total), strict=True)
    marks = [(count - 1) << 1 | (again and count == 1) for count, again in known]
    shares: list[tuple[int, Any, int]] = []
    start = 0
    for place in range(1, total + 1):
        if place == total or not _goes_on(sequences, marks, place):
            part = slice(start, place)
            piece = piece_of(sequences[part], records[part], topics[part], times[part])
            shares.append((sequences[start] >> LANE_SHIFT, piece, int(marks[start])))
            start = place
    return Granted(told["grant"], shares)


def _goes_on(sequences: list[int], marks: list[int], place: int) -> bool:
    """Tell whether a message follows the one before in its partition, and is marked as that."""
    before, this = sequences[place - 1 : place + 1]
    return before < this and before >> LANE_SHIFT == this >> LANE_SHIFT and marks[place - 1] == marks[place]


class Page(NamedTuple):
    """Some messages of a query."""

    messages: list[StreamMessage]
    query: int | None
    """Which query goes on; None at its end."""


def page(stream: str) -> Callable[[Reply], Page]:
    """Return what reads a page of a query."""
    return lambda reply: Page(_messages(stream, reply), reply.result["query"])


def by_topic(stream: str) -> Callable[[Reply], dict[str, StreamMessage]]:
    """Return what reads messages by their topics."""
    return lambda reply: {message.topic: message for message in _messages(stream, reply)}


def _messages(stream: str, reply: Reply) -> list[StreamMessage]:
    records, topics = _records(reply.columns)
    sequences, times = _sequences(reply.result["offsets"]), _each(reply.result["times"], len(records))
    return [
        message_of(stream, sequence, record, topic, time_ms)
        for sequence, record, topic, time_ms in zip(sequences, records, topics, times, strict=True)
    ]


def _sequences(runs: list[list[int]]) -> list[int]:
    return [
        sequence
        for partition, first, count in runs
        for sequence in range(partition << LANE_SHIFT | first, (partition << LANE_SHIFT | first) + count)
    ]


def _each(values: Any, total: int) -> list[Any]:
    return values if isinstance(values, list) else [values] * total


def _records(columns: list[list[Any]]) -> tuple[list[Record], list[str]]:
    """Return messages with their headers and keys, and their topics."""
    bodies, headers, topics, keys = columns
    names = [topic.decode() for topic in topics]
    if not headers and not keys:
        return bodies, names
    total = len(bodies)
    packed = zip(bodies, headers or [b""] * total, keys or [b""] * total, strict=True)
    return [Message(body, head, key=key) if head or key else body for body, head, key in packed], names
