"""What a message is as a dead letter: the header `x-death` of RabbitMQ, which says where it was, and why it left."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from qflow.amqp.server.content import Properties, headers_of, read_properties
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.methods import decode_properties
from qflow.amqp.wire.properties import changed
from qflow.named_tuples import NamedTuple

MOST_DEATHS = 100
"""Entries that `x-death` keeps: a message that a client invents with more does not grow."""
MOST_COUNTED = 2**63 - 1
"""What a table has room for; a client may invent entries that make more together."""
REJECTED, TOO_MANY = "rejected", "maxlen"


class Dead(NamedTuple):
    """A message that left its queue."""

    parcel: Parcel
    properties: Properties
    keys: list[str]
    """What it is routed by."""
    deaths: list[dict[str, Any]]
    """Its `x-death`, the latest first."""

    def comes_round_to(self, queue: str) -> bool:
        """Tell whether it has been in a queue before, and nobody rejected it on the way from there."""
        for index, entry in enumerate(self.deaths):
            if entry.get("queue") == queue:
                return all(one.get("reason") != REJECTED for one in self.deaths[: index + 1])
        return False


def dead(content: Content, queue: str, reason: str, exchange: str, new_key: str | None) -> Dead:
    """Return a message as it goes from a queue to its dead-letter exchange; without `new_key` by the keys it had."""
    properties = decode_properties(content.properties)
    table: Mapping[str, Any] = properties.headers or {}
    keys = [content.routing_key, *_texts(table.get("CC"))]
    deaths = _deaths(table, content.exchange, queue, reason, keys, properties.expiration)
    entries: dict[str, Any] = {"x-death": deaths}
    for what, value in (("exchange", content.exchange), ("queue", queue), ("reason", reason)):
        entries[f"x-last-death-{what}"] = value
        if f"x-first-death-{what}" not in table:
            entries[f"x-first-death-{what}"] = value
    raw = changed(content.properties, entries, dropped=["CC"] if new_key is not None else [], expires=False)
    read = read_properties(raw)
    keys = keys if new_key is None else [new_key]
    parcel = Parcel(content.body, headers_of(read, exchange, keys[0]), read.durable, read.priority, read.ttl_s, None)
    return Dead(parcel, read, keys, deaths)


def _deaths(
    table: Mapping[str, Any], exchange: str, queue: str, reason: str, keys: list[str], expiration: str | None
) -> list[dict[str, Any]]:
    """Return `x-death`, latest first: an entry for each queue and reason, which counts, and else stays as it was."""
    before = table.get("x-death")
    known = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
    count = 1
    rest, same = [], None
    for entry in known[:MOST_DEATHS]:
        if entry.get("queue") == queue and entry.get("reason") == reason:
            earlier = entry.get("count")
            count += earlier if isinstance(earlier, int) and 0 <= earlier < 2**62 else 0
            same = entry if same is None else same
        else:
            rest.append(entry)
    if same is not None:
        return [{**same, "count": min(count, MOST_COUNTED)}, *rest]
    latest: dict[str, Any] = {
        "count": 1,
        "reason": reason,
        "queue": queue,
        "time": datetime.now(UTC).replace(microsecond=0),
        "exchange": exchange,
        "routing-keys": keys,
    }
    if expiration is not None:
        latest["original-expiration"] = expiration
    return [latest, *rest]


def _texts(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
