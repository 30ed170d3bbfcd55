"""Messages as they go over the wire: facts in the head, bodies and what is packed with them in columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from qflow.delivery import Segment
from qflow.errors import InvalidArgument
from qflow.message import LANE_SHIFT, Message, Record, body_of, decode_headers, expires_of, is_plain, offset_of
from qflow.remote.server.arguments import Columns, Head, column
from qflow.restoring import Item
from qflow.streams.batches import StreamBatch
from qflow.streams.deliveries import StreamMessage, key_of, record_of

MOST_MESSAGES = 1000
"""In one answer."""
MOST_BYTES = 8 * 2**20
"""Of records in one answer; the first is always there."""


_OF_ITEM = {
    "kind": str, "name": str, "partition": int, "priority": int, "expires_ms": int, "due_ms": int, "topic": str
}  # fmt: skip
"""What `items` of a request say of a message, in order."""


def restored_items(head: Head, columns: Columns) -> list[Item]:
    """Return the messages of a request: facts in the head; bodies, headers and keys. Raises InvalidArgument."""
    facts = head.get("items")
    if not isinstance(facts, list) or not all(map(_is_item, facts)):
        raise InvalidArgument(f"items of operation {head.get('op')!r} must be lists of {', '.join(_OF_ITEM)}")
    bodies, headers, keys = (column(head, columns, index, len(facts)) for index in range(3))
    return [
        Item(**dict(zip(_OF_ITEM, one, strict=True)), body=body, headers=_headers(header), key=key)
        for one, body, header, key in zip(facts, bodies, headers, keys, strict=True)
    ]


def _headers(packed: bytes) -> dict[str, Any]:
    try:
        return decode_headers(packed)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"headers of a message are no JSON: {error}") from error


def _is_item(one: object) -> bool:
    if not isinstance(one, list) or len(one) != len(_OF_ITEM):
        return False
    if not all(type(value) is kind for value, kind in zip(one, _OF_ITEM.values(), strict=True)):
        return False
    return one[0] in ("queue", "stream") and all(0 <= value < 2**64 for value in one if isinstance(value, int))


def fitting(segments: list[Segment]) -> int:
    """Return how many of these messages fit in one answer. Cost: 0.02 µs each."""
    if sum(sum(map(len, part.records)) for part in segments) <= MOST_BYTES:
        return sum(len(part.records) for part in segments)
    room, count = MOST_BYTES, 0
    for segment in segments:
        for record in segment.records:
            room -= len(record)
            if room < 0 and count:
                return count
            count += 1
    return count


def describe(segments: list[Segment], most: int) -> tuple[dict[str, Any], list[Any]]:
    """Return what the head of an answer says of the first messages, and the columns: bodies, headers, topics.

    The columns but the first are empty where no message has any. Cost: 0.01 µs a plain message, 1 µs another one.
    """
    segments = list(_first(segments, most))
    records = segments[0].records if len(segments) == 1 else [one for part in segments for one in part.records]
    told: dict[str, Any] = {
        "sequences": [[part.first, len(part.records)] for part in segments],
        "counts": _alike([(part.marks >> 1) + 1 for part in segments], segments),
        "redelivered": _alike([part.marks != 0 for part in segments], segments),
        "expires": None,
    }
    if is_plain(records):
        return told, [records]
    expires = [(moment / 1000 if moment else None) for moment in map(expires_of, records)]
    told["expires"] = expires[0] if len(set(expires)) == 1 else expires
    packed = [one.head_and_body() if isinstance(one, Message) else (b"", one) for one in records]
    topics = [one.topic.encode() if isinstance(one, Message) else b"" for one in records]
    headers = [head for head, _ in packed]
    columns = [[body for _, body in packed], headers if any(headers) else [], topics if any(topics) else []]
    return told, columns


def _first(segments: list[Segment], most: int) -> Any:
    for first, records, marks in segments:
        if most <= 0:
            return
        yield Segment(first, records if len(records) <= most else list(islice(records, most)), marks)
        most -= len(records)


def _alike(values: Sequence[Any], segments: list[Segment]) -> Any:
    """Return one value for all messages, or a list with one for each."""
    if len(set(values)) <= 1:
        return values[0] if values else None
    return [value for value, part in zip(values, segments, strict=True) for _ in part.records]


def describe_batch(batch: StreamBatch) -> tuple[dict[str, Any], list[Any]]:
    """Return what the head of an answer says of a batch, and the columns. Cost: 1 µs a message."""
    shares = batch.shares
    sequences = [sequence for share in shares for sequence in share.piece.sequences]
    told = {
        "offsets": runs(sequences),
        "counts": _one_or_all([(share.marks >> 1) + 1 for share in shares for _ in share.piece.records]),
        "redelivered": _one_or_all([share.marks != 0 for share in shares for _ in share.piece.records]),
        "times": _one_or_all([time_ms for share in shares for time_ms in share.piece.times_ms]),
    }
    records = [record for share in shares for record in share.piece.records]
    return told, columns_of(records, [topic for share in shares for topic in share.piece.topics])


def describe_messages(messages: Sequence[StreamMessage]) -> tuple[dict[str, Any], list[Any]]:
    """Return the same of messages of a query."""
    told = {
        "offsets": runs(one.partition << LANE_SHIFT | one.offset for one in messages),
        "times": _one_or_all([one.time_ms for one in messages]),
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


def _one_or_all(values: list[Any]) -> Any:
    """Return one value for all messages, or a list with one for each."""
    return values[0] if values and values.count(values[0]) == len(values) else values
