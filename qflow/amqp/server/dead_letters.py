"""Dead letters: what left its queue goes to the queue's dead-letter exchange, with the header `x-death` of RabbitMQ.

A queue that has a dead-letter exchange has, in qflow, one dead-letter queue with all others that have one: a message
gets there in the commit that takes it out of its queue, and from there, in one commit again, to where the exchange
sends it. So a dead letter is never lost and never doubled, whatever is killed when.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from qflow.amqp.errors import AmqpError
from qflow.amqp.server.content import content_of, headers_of, read_properties
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.wire.methods import decode_properties
from qflow.amqp.wire.properties import changed
from qflow.errors import (
    BrokerClosed,
    InvalidArgument,
    MessageTooLarge,
    QflowError,
    QueueDeleted,
    QueueFull,
    StreamDeleted,
)
from qflow.memory.waiting import in_place
from qflow.queues.dead_letters import PREFIX, QUEUE, REASON

if TYPE_CHECKING:
    from qflow.aio.broker import AsyncBroker
    from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery
    from qflow.aio.queue import AsyncQueue
    from qflow.amqp.server.content import Properties
    from qflow.amqp.server.hosted import HostedQueue
    from qflow.amqp.wire.frames import Content

DEAD_LETTERS = "amqp:dead-letters"
"""The queue of qflow in which they are on their way."""
AT_ONCE = 100
AGAIN_S = 1.0
"""After a failure, they are looked at again after so long."""
PATIENCE_S = 2.0
"""A queue is deleted after so long, whether or not its dead letters could be carried."""
LOOK_S = 0.002
POISON_S = 60.0
"""One that cannot be made sense of is looked at again after so long."""
MOST_DEATHS = 100
"""Entries that `x-death` keeps: a message that a client invents with more does not grow."""
REJECTED, TOO_MANY = "rejected", "maxlen"
_REASONS = {"max_deliveries": "delivery_limit", "limit": TOO_MANY, "expired": "expired", "rejected": REJECTED}

_logger = logging.getLogger("qflow.amqp")


class Place(Protocol):
    """A virtual host."""

    def find(self, name: str) -> HostedQueue | None: ...
    def trim_soon(self, hosted: HostedQueue) -> None: ...
    def route(
        self, exchange: str, keys: Sequence[str], properties: Properties, *, inside: bool = False
    ) -> list[HostedQueue]: ...


class DeadLetters:
    """See the module. One a server."""

    def __init__(self, broker: AsyncBroker, place_of: Callable[[str], tuple[Place | None, str]]) -> None:
        """`place_of` returns the virtual host and the name of a queue, given its name in the broker."""
        self._broker = broker
        self._place_of = place_of
        self._queue: AsyncQueue | None = None
        self._carried = 0

    async def run(self) -> None:
        """Carry those that the broker made, until it is closed."""
        self._queue = queue = await self._broker.declare_queue(DEAD_LETTERS)
        while True:
            try:
                await _each(await queue.get_many(AT_ONCE), self._carry)
            except (BrokerClosed, QueueDeleted):
                return
            except QflowError as error:
                _logger.warning("dead letters wait where they are: %s", error)
                await asyncio.sleep(AGAIN_S)

    async def _carry(self, delivery: AsyncDelivery) -> None:
        headers = delivery.headers
        host, name = self._place_of(str(headers.get(QUEUE, "")))
        reason = str(headers.get(REASON))
        try:
            await self.carry(delivery, host, name, _REASONS.get(reason, reason))
        except QflowError:
            raise
        except Exception as error:
            _logger.error("a dead letter of queue %r waits, those behind it do not: %r", name, error)
            await delivery.nack(delay_s=POISON_S)
        self._carried += 1

    async def caught_up(self) -> None:
        """Return when those that wait now have been carried, or could not be for a while."""
        if self._queue is None:
            return
        await asyncio.to_thread(self._broker.broker.engine.log.drain)  # some are on their way into the queue
        stats = in_place(self._queue.queue.stats)
        last = self._carried + stats.lag_messages + stats.acquired_messages - stats.delayed_messages
        end = time.monotonic() + PATIENCE_S
        while self._carried < last and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)

    async def carry_all(self, batch: AsyncDeliveries, host: Place, queue: str, reason: str) -> None:
        """`carry` messages of one queue; those that could not be carried are back in it if that fails."""
        await _each(batch, lambda delivery: self.carry(delivery, host, queue, reason))

    async def carry(self, delivery: AsyncDelivery, host: Place | None, queue: str, reason: str) -> None:
        """Have a message go where the exchange of its queue sends it; where nobody takes it, it is dropped."""
        headers = {name: value for name, value in delivery.headers.items() if not name.startswith(PREFIX)}
        targets, parcel = _targets(host, queue, content_of(headers, queue, delivery.body), reason)
        await self._move(host, targets, parcel, delivery)

    async def bury(self, host: Place, queue: str, content: Content, reason: str) -> None:
        """Have a message that its queue did not take go where the exchange of the queue sends it."""
        targets, parcel = _targets(host, queue, content, reason)
        await self._move(host, targets, parcel, None)

    async def _move(
        self, host: Place | None, targets: list[HostedQueue], parcel: Parcel, delivery: AsyncDelivery | None
    ) -> None:
        targets = [hosted for hosted in targets if not (hosted.has_limit and hosted.rejects and hosted.is_full)]
        while True:
            try:
                async with self._broker.transaction() as transaction:
                    if delivery is not None:
                        await transaction.ack(delivery)
                    for hosted in targets:
                        await hosted.store.put_in(transaction, parcel)
                break
            except (QueueFull, QueueDeleted, StreamDeleted, MessageTooLarge, InvalidArgument):
                if not targets:
                    raise
                taking = [hosted for hosted in targets if hosted.store.has_room(parcel)]
                targets = taking if len(taking) < len(targets) else targets[1:]
        for hosted in targets:
            if host is not None and hosted.has_limit and not hosted.rejects:
                host.trim_soon(hosted)


def _targets(host: Place | None, name: str, content: Content, reason: str) -> tuple[list[HostedQueue], Parcel]:
    """Return where a dead letter goes, and what it is there."""
    source = host.find(name) if host is not None else None
    exchange = None if source is None else source.arguments.dead_letter_exchange
    new_key = None if source is None else source.arguments.dead_letter_routing_key
    properties = decode_properties(content.properties)
    table: Mapping[str, Any] = properties.headers or {}
    keys = [content.routing_key, *_texts(table.get("CC"))]
    deaths = _deaths(table, content.exchange, name, reason, keys, properties.expiration)
    entries: dict[str, Any] = {"x-death": deaths}
    for what, value in (("exchange", content.exchange), ("queue", name), ("reason", reason)):
        entries[f"x-last-death-{what}"] = value
        if f"x-first-death-{what}" not in table:
            entries[f"x-first-death-{what}"] = value
    raw = changed(content.properties, entries, dropped=["CC"] if new_key is not None else [], expires=False)
    read = read_properties(raw)
    key = content.routing_key if new_key is None else new_key
    headers = headers_of(read, exchange or "", key)
    parcel = Parcel(content.body, headers, read.durable, read.priority, read.ttl_s, None)
    if host is None or exchange is None:
        return [], parcel
    try:
        queues = host.route(exchange, keys if new_key is None else [key], read, inside=True)
    except AmqpError:
        return [], parcel  # there is no such exchange: as in RabbitMQ, the message is dropped
    return [hosted for hosted in queues if not _is_cycle(hosted.name, deaths)], parcel


def _deaths(
    table: Mapping[str, Any], exchange: str, queue: str, reason: str, keys: list[str], expiration: str | None
) -> list[dict[str, Any]]:
    """Return `x-death`, the latest first: one entry for each queue and reason, which counts."""
    before = table.get("x-death")
    known = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
    count = 1
    rest = []
    for entry in known[:MOST_DEATHS]:
        if entry.get("queue") == queue and entry.get("reason") == reason:
            earlier = entry.get("count")
            count += earlier if isinstance(earlier, int) and 0 <= earlier < 2**62 else 0
        else:
            rest.append(entry)
    latest: dict[str, Any] = {
        "count": count,
        "reason": reason,
        "queue": queue,
        "time": datetime.now(UTC).replace(microsecond=0),
        "exchange": exchange,
        "routing-keys": keys,
    }
    if expiration is not None:
        latest["original-expiration"] = expiration
    return [latest, *rest]


def _is_cycle(queue: str, deaths: list[dict[str, Any]]) -> bool:
    """Tell whether a message came round to a queue without that anybody rejected it on the way."""
    for index, entry in enumerate(deaths):
        if entry.get("queue") == queue:
            return all(one.get("reason") != REJECTED for one in deaths[: index + 1])
    return False


def _texts(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


async def _each(batch: AsyncDeliveries, carry: Callable[[AsyncDelivery], Awaitable[None]]) -> None:
    """Carry messages one after the other; where that fails, this one and those behind it go back."""
    deliveries = list(batch)
    carried = 0
    try:
        for delivery in deliveries:
            await carry(delivery)
            carried += 1
    finally:
        for delivery in deliveries[carried:]:
            with suppress(QflowError):  # it was settled
                await delivery.nack()
