"""Messages put back as they were: headers, priority, times, topic, key and partition, all of a batch in one commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs

from qflow.broker import Broker
from qflow.errors import InvalidArgument, NotFound, QflowError
from qflow.message import HeaderValue, Message, Record, check_key, encode_headers
from qflow.queues.assembly import Insert
from qflow.queues.queue import parts_of
from qflow.queues.transaction import gathering_of
from qflow.streams.topic_filter import check_topic


@attrs.frozen(kw_only=True)
class Item:
    """One message of a queue or a stream."""

    kind: str
    name: str
    number: int = 0
    """Sequence in the queue, or offset in the partition, it had: where it goes it gets a new one."""
    partition: int = 0
    time_ms: int = 0
    priority: int = 0
    expires_ms: int = 0
    due_ms: int = 0
    topic: str = ""
    key: bytes = b""
    headers: dict[str, HeaderValue] = attrs.field(factory=dict)
    body: bytes = b""


class Refused(Exception):
    """A message of a batch is not taken; nothing was put.

    Args:
        index: of the message in the batch.
        why: what a put would have raised.
    """

    def __init__(self, index: int, why: QflowError) -> None:
        super().__init__(f"message {index} of the batch: {why}")
        self.index = index
        self.why = why


def restore(broker: Broker, items: Sequence[Item]) -> int:
    """Put messages in one commit; return how many of them have expired, and are left out.

    Raises:
        Refused: one is not taken. QueueFull: a queue is at its limit. All that a put raises.
    """
    now_ms = int(time.time() * 1000)
    inserts: list[Insert] = []
    expired = 0
    for index, item in enumerate(items):
        if 0 < item.expires_ms <= now_ms:
            expired += 1
            continue
        try:
            insert = (_into_queue if item.kind == "queue" else _into_stream)(broker, item, now_ms)
        except QflowError as error:
            raise Refused(index, error) from error
        last = inserts[-1] if inserts else None
        if last is not None and last.queue is insert.queue and last.number == insert.number:
            last.records.extend(insert.records)
        else:
            inserts.append(insert)
    gathering = gathering_of(broker.transaction(0))
    try:
        gathering.publish(inserts)
        gathering.commit()
    finally:
        if gathering.state == "open":
            gathering.rollback()
    return expired


def _into_queue(broker: Broker, item: Item, now_ms: int) -> Insert:
    puts = parts_of(broker.queue(item.name)).puts
    due_ms = item.due_ms if item.due_ms > now_ms else 0
    expires = 1.0 if item.expires_ms else None
    envelope = puts.envelope(None, None, item.priority, expires, None, due_ms / 1000 if due_ms else None)
    return Insert(puts, envelope.number, [_record(item, item.expires_ms, due_ms)])


def _into_stream(broker: Broker, item: Item, _now_ms: int) -> Insert:
    if not item.topic:
        raise InvalidArgument(f"a message of stream {item.name!r} has no topic")
    stream: Any = broker.stream(item.name)
    if item.partition >= len(stream.partitions):
        raise NotFound(f"stream {item.name!r} has no partition {item.partition}")
    return Insert(stream.partitions[item.partition], 0, [_record(item, 0, 0)])


def _record(item: Item, expires_ms: int, due_ms: int) -> Record:
    if not (item.headers or item.topic or item.key or expires_ms or due_ms):
        return item.body
    if item.topic:
        check_topic(item.topic)
    check_key(item.key or None)
    headers = encode_headers(item.headers)
    return Message(item.body, headers, expires_ms=expires_ms, due_ms=due_ms, topic=item.topic, key=item.key)
