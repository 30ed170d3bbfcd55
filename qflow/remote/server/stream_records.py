"""Messages of streams as they go over the wire: facts in the head, bodies and what is packed with them in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from qflow.message import LANE_SHIFT, Message, Record, body_of, offset_of
from qflow.streams.batches import StreamBatch
from qflow.streams.deliveries import StreamMessage, key_of, record_of


def describe_batch(batch: StreamBatch) -> tuple[dict[str, Any], list[Any]]:
    """Return what the head of an answer says of a batch, and the columns. Cost: 1 µs a message."""
    shares = batch.shares
    sequences = [sequence for share in shares for sequence in share.piece.sequences]
    told = {
        "offsets": runs(sequences),
        "counts": _alike([(share.marks >> 1) + 1 for share in shares for _ in share.piece.records]),
        "redelivered": _alike([share.marks != 0 for share in shares for _ in share.piece.records]),
        "times": _alike([time_ms for share in shares for time_ms in share.piece.times_ms]),
    }
    records = [record for share in shares for record in share.piece.records]
    return told, columns_of(records, [topic for share in shares for topic in share.piece.topics])


def describe_messages(messages: Sequence[StreamMessage]) -> tuple[dict[str, Any], list[Any]]:
    """Return the same of messages of a query."""
    told = {
        "offsets": runs(one.partition << LANE_SHIFT | one.offset for one in messages),
        "times": _alike([one.time_ms for one in messages]),
    }
    return told, columns_of([record_of(one) for one in messages], [one.topic for one in messages])


def columns_of(records: list[Record], topics: list[str]) -> list[Any]:
    """Return bodies, headers, topics and keys; headers and keys are empty columns where no message has any."""
    headers = [record.header_bytes if isinstance(record, Message) else b"" for record in records]
    keys = [key_of(record) or b"" for record in records]
    return [
        [body_of(record) for record in records],
        headers if any(headers) else [],
        [topic.encode() for topic in topics],
        keys if any(keys) else [],
    ]


def runs(sequences: Iterable[int]) -> list[list[int]]:
    """Return sequences of a stream as runs [partition, first offset, how many]."""
    found: list[list[int]] = []
    after = -1
    for sequence in sequences:
        if sequence == after:
            found[-1][2] += 1
        else:
            found.append([sequence >> LANE_SHIFT, offset_of(sequence), 1])
        after = sequence + 1
    return found


def _alike(values: list[Any]) -> Any:
    """Return one value for all messages, or a list with one for each."""
    return values[0] if values and values.count(values[0]) == len(values) else values
