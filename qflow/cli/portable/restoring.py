"""Puts exported messages into a spool as they were: headers, priority, times, topic and key, in whole batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import attrs

from qflow.broker import Broker
from qflow.cli.portable.items import Declared, Item
from qflow.config import QueueSettings, StreamSettings
from qflow.errors import InvalidArgument, NotFound
from qflow.message import Message, Record, encode_headers
from qflow.queues.queue import parts_of
from qflow.queues.together import Insert
from qflow.queues.transaction import gathering_of

BATCH_MESSAGES, BATCH_BYTES = 500, 4 * 2**20
"""A batch, which is one commit, ends with the message that reaches one of these."""


def declare(broker: Broker, one: Declared) -> None:
    """Make a queue or stream as it was, a queue with its bindings, unless there is one of that name."""
    if one.kind == "stream":
        if one.name not in broker.streams():
            broker.declare_stream(one.name, **StreamSettings.from_dict(one.settings).to_dict())
    elif one.name not in broker.queues():
        settings = QueueSettings.from_dict(one.settings)
        broker.declare_queue(one.name, **{**settings.to_dict(), "on_overflow": settings.on_overflow})
        bindings = one.settings.get("bindings") or []
        if not isinstance(bindings, list):
            raise InvalidArgument(f"bindings are a list of topic filters, not {bindings!r:.40}")
        for topic_filter in bindings:
            broker.bind(one.name, topic_filter)


@attrs.define
class Batch:
    """Messages as they are committed together."""

    messages: int = 0
    size_bytes: int = 0
    expired: int = 0
    """Of the messages; they are left out."""
    inserts: list[Insert] = attrs.field(factory=list)


def batches(broker: Broker, items: Iterator[Item]) -> Iterator[Batch]:
    """Yield batches of messages, of which each was looked at as it came.

    Raises:
        NotFound: a queue or stream is not there. InvalidArgument: it takes no such message.
    """
    batch = Batch()
    for item in items:
        _add(broker, batch, item, int(time.time() * 1000))
        if batch.messages >= BATCH_MESSAGES or batch.size_bytes >= BATCH_BYTES:
            yield batch
            batch = Batch()
    if batch.messages:
        yield batch


def _add(broker: Broker, batch: Batch, item: Item, now_ms: int) -> None:
    if 0 < item.expires_ms <= now_ms:
        batch.expired += 1
    else:
        insert = (_into_queue if item.kind == "queue" else _into_stream)(broker, item, now_ms)
        last = batch.inserts[-1] if batch.inserts else None
        if last is not None and last.queue is insert.queue and last.number == insert.number:
            last.records.extend(insert.records)
        else:
            batch.inserts.append(insert)
    batch.messages += 1
    batch.size_bytes += len(item.body)


def put(broker: Broker, batch: Batch) -> None:
    """Put a batch in one commit.

    Raises:
        QueueFull: a queue is at its limit. All that a put raises.
    """
    gathering = gathering_of(broker.transaction(0))
    try:
        gathering.publish(batch.inserts)
        gathering.commit()
    finally:
        if gathering.state == "open":
            gathering.rollback()


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
    headers = encode_headers(item.headers)
    return Message(item.body, headers, expires_ms=expires_ms, due_ms=due_ms, topic=item.topic, key=item.key)
