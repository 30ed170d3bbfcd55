"""Puts exported messages into a spool that this process owns, or through the door of its owner, in whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from qflow.broker import Broker
from qflow.cli.portable.items import Declared
from qflow.cli.spool import AnyBroker
from qflow.config import QueueSettings, StreamSettings
from qflow.errors import InvalidArgument
from qflow.remote.client.broker import restore as restore_through
from qflow.restoring import Item, Refused, restore

BATCH_MESSAGES, BATCH_BYTES = 500, 4 * 2**20
"""A batch, which is one commit, ends with the message that reaches one of these."""


def names(broker: AnyBroker) -> dict[str, set[str]]:
    """Return the names that there are, by kind."""
    return {"queue": set(broker.queues()), "stream": set(broker.streams())}


def declare(broker: AnyBroker, one: Declared, there: dict[str, set[str]]) -> int:
    """Make a queue or stream as it was, a queue with its bindings, unless there is one of that name.

    Args:
        there: `names`, asked for once: there may be thousands. What is made is added.

    Returns:
        How many bytes its largest message may have.

    Raises:
        InvalidArgument: a setting is none, as one of a later version, or makes no sense. What declaring raises.
    """
    is_there = one.name in there[one.kind]
    there[one.kind].add(one.name)
    if one.kind == "stream":
        if not is_there:
            broker.declare_stream(one.name, **StreamSettings.from_call(one.settings, "stream").to_dict())
        return broker.stream(one.name).settings.max_message_bytes
    if not is_there:
        given = dict(one.settings)
        bindings = given.pop("bindings", None) or []
        settings = QueueSettings.from_call(given, "queue")
        broker.declare_queue(one.name, **{**settings.to_dict(), "on_overflow": settings.on_overflow})
        if not isinstance(bindings, list):
            raise InvalidArgument(f"bindings are a list of topic filters, not {bindings!r:.40}")
        for topic_filter in bindings:
            broker.bind(one.name, topic_filter)
    return broker.queue(one.name).settings.max_message_bytes


@attrs.define
class Batch:
    """Messages as they are committed together."""

    size_bytes: int = 0
    items: list[Item] = attrs.field(factory=list)
    places: list[str] = attrs.field(factory=list)
    """Where in the file each of them stands."""


def batches(items: Iterator[Item], place: Callable[[], str]) -> Iterator[Batch]:
    """Yield batches of messages; `place` tells where the last one stands."""
    batch = Batch()
    for item in items:
        batch.items.append(item)
        batch.places.append(place())
        batch.size_bytes += len(item.body)
        if len(batch.items) >= BATCH_MESSAGES or batch.size_bytes >= BATCH_BYTES:
            yield batch
            batch = Batch()
    if batch.items:
        yield batch


def put(broker: AnyBroker, batch: Batch) -> int:
    """Put a batch in one commit; return how many of its messages have expired, and are left out.

    Raises:
        Refused: one of them is not taken. QueueFull: a queue is at its limit. All that a put raises.
    """
    return restore(broker, batch.items) if isinstance(broker, Broker) else restore_through(broker, batch.items)


__all__ = ["BATCH_BYTES", "BATCH_MESSAGES", "Batch", "Refused", "batches", "declare", "names", "put"]
