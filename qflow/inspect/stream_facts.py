"""Streams and durable subscriptions as the log has them: plain values."""

from __future__ import annotations

from typing import Any

import attrs

from qflow.message import offset_of
from qflow.storage.log.recovery import QueueRecord, Recovery
from qflow.storage.log.rows import Row, new_row


@attrs.frozen(kw_only=True)
class PartitionFacts:
    """One partition of a stream."""

    number: int
    messages: int
    """Retained messages."""
    bytes: int
    first_offset: int
    """The lowest retained offset."""
    next_offset: int


@attrs.frozen(kw_only=True)
class SubscriptionFacts:
    """One durable subscription, or one group, open or not."""

    name: str
    group: bool
    filter: str
    committed: list[int]
    """By partition: offsets below are settled; some above may be, too."""
    lag_messages: int
    """Retained messages from there on, of all topics."""
    session_expiry_s: float | None
    problem: str | None


@attrs.frozen(kw_only=True)
class StreamFacts:
    """One stream as the log has it."""

    name: str
    topics: list[str]
    """The filters of the topics it takes."""
    messages: int
    bytes: int
    partitions: list[PartitionFacts]
    settings: dict[str, Any]
    subscriptions: list[SubscriptionFacts]
    problem: str | None


def streams_of(found: Recovery) -> list[StreamFacts]:
    """Return all streams with their durable subscriptions. Cost: O(partitions x subscriptions)."""
    cursors: dict[int, list[QueueRecord]] = {}
    for record in found.cursors:
        if not record.deleted:
            cursors.setdefault(record.settings["stream"], []).append(record)
    return [_stream(record, cursors.get(record.owner, [])) for record in found.streams if not record.deleted]


def rows_of(record: QueueRecord, partitions: int) -> list[Row]:
    """Return the row of each partition; an empty one for a partition never used, or if rows are damaged."""
    rows = record.rows or {}
    return [rows.get(number) or new_row(number) for number in range(partitions)]


def _stream(record: QueueRecord, cursors: list[QueueRecord]) -> StreamFacts:
    settings = record.settings
    rows = rows_of(record, settings["partitions"])
    return StreamFacts(
        name=record.name,
        topics=list(settings["topics"]),
        messages=sum(row.messages for row in rows),
        bytes=sum(row.bytes for row in rows),
        partitions=[
            PartitionFacts(
                number=number,
                messages=row.messages,
                bytes=row.bytes,
                first_offset=offset_of(row.floor),
                next_offset=offset_of(row.next),
            )
            for number, row in enumerate(rows)
        ],
        settings=settings,
        subscriptions=[_subscription(cursor, rows) for cursor in cursors],
        problem=None if record.rows is not None else "its row is damaged",
    )


def _subscription(record: QueueRecord, rows: list[Row]) -> SubscriptionFacts:
    facts = record.settings
    floors = [row.floor for row in rows_of(record, len(rows))]
    return SubscriptionFacts(
        name=record.name,
        group=facts["group"],
        filter=facts["filter"],
        committed=[offset_of(floor) for floor in floors],
        lag_messages=sum(max(0, row.next - max(row.floor, floor)) for row, floor in zip(rows, floors, strict=True)),
        session_expiry_s=facts["expiry_s"],
        problem=None if record.rows is not None else "its row is damaged",
    )


def find_stream(found: Recovery, name: str) -> QueueRecord | None:
    """Return the record of a stream that exists."""
    return next((record for record in found.streams if record.name == name and not record.deleted), None)
