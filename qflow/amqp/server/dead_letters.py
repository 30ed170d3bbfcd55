"""Dead letters: what left its queue goes to the queue's dead-letter exchange, with the header `x-death` of RabbitMQ.

A queue that has a dead-letter exchange has, in qflow, one dead-letter queue with all others that have one: a message
gets there in the commit that takes it out of its queue, and from there, in one commit again, to where the exchange
sends it. So a dead letter is never lost and never doubled, whatever is killed when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from qflow.aio.broker import AsyncBroker, in_thread
from qflow.aio.delivery import AsyncDelivery
from qflow.aio.queue import AsyncQueue
from qflow.amqp.errors import AmqpError
from qflow.amqp.server.content import Properties, content_of, headers_of, read_properties
from qflow.amqp.server.held_up import HeldUp
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.server.stores import DEAD_LETTERS, QueueStore
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.methods import decode_properties
from qflow.amqp.wire.properties import changed
from qflow.errors import (
    AlreadySettled,
    BrokerClosed,
    InvalidArgument,
    MessageTooLarge,
    QflowError,
    QueueDeleted,
    QueueFull,
    StreamDeleted,
    TransactionTooLarge,
)
from qflow.loggers import get_logger
from qflow.memory.waiting import in_place
from qflow.named_tuples import NamedTuple
from qflow.queues.dead_letters import PREFIX, QUEUE, REASON
from qflow.serving.tasks import Tasks, Turn

MOST_DEATHS = 100
"""Entries that `x-death` keeps: a message that a client invents with more does not grow."""
MOST_COUNTED = 2**63 - 1
"""What a table has room for; a client may invent entries that make more together."""
REJECTED, TOO_MANY = "rejected", "maxlen"
AT_ONCE = 100
PUTS_AT_ONCE = 2_000
"""Puts in one commit; a dead letter that goes to more queues is moved alone. Each takes 1.4 KB until then."""
AGAIN_S = 1.0
"""After a failure, they are looked at again after so long."""
PATIENCE_S = 2.0
"""A queue is deleted after so long, whether or not its dead letters could be carried; and after so long, one that waits
for room looks again who has none."""
LOOK_S = 0.002
POISON_S = 60.0
"""One that cannot be made sense of is looked at again after so long."""
TRIMMED_AT_ONCE = 1000
_REASONS = {"max_deliveries": "delivery_limit", "limit": "maxlen", "expired": "expired", "rejected": REJECTED}
_REFUSED = (QueueFull, QueueDeleted, StreamDeleted, MessageTooLarge, InvalidArgument)

_logger = get_logger("qflow.amqp")


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


class Place(Protocol):
    """A virtual host."""

    def find(self, name: str) -> HostedQueue | None: ...
    def trim_soon(self, hosted: HostedQueue) -> None: ...
    def route(
        self, exchange: str, keys: Sequence[str], properties: Properties, *, inside: bool = False
    ) -> list[HostedQueue]: ...


class Letter(NamedTuple):
    """A dead letter, and where it goes."""

    delivery: AsyncDelivery | None
    """What is settled when it is there."""
    host: Place | None
    targets: list[HostedQueue]
    parcel: Parcel
    waits_for: tuple[HostedQueue, ...] = ()
    """Those of its targets that were found to block."""


class DeadLetters:
    """See the module. One a server."""

    def __init__(self, broker: AsyncBroker, place_of: Callable[[str], tuple[Place | None, str]], tasks: Tasks) -> None:
        """`place_of` returns the virtual host and the name of a queue, given its name in the broker."""
        self._broker = broker
        self._place_of = place_of
        self._held_up = HeldUp(broker, tasks)
        self._queue: AsyncQueue | None = None
        self._carried = 0

    async def run(self) -> None:
        """Carry those that the broker made, until it is closed. Nobody deletes the queue meanwhile."""
        used = self._broker.broker.engine.spool.used
        begin, end = partial(used.begin, "the server for AMQP"), partial(used.end, "queue", DEAD_LETTERS)
        await in_thread(self._broker, partial(begin, "queue", DEAD_LETTERS), lambda _: end())
        try:
            await self._carry_all()
        finally:
            end()

    async def _carry_all(self) -> None:
        self._queue = queue = await self._broker.declare_queue(DEAD_LETTERS)
        await self._held_up.find()
        while True:
            try:
                await self._carry(list(await queue.get_many(AT_ONCE)))
            except (BrokerClosed, QueueDeleted):
                return
            except QflowError as error:
                _logger.warning("dead letters wait where they are: %s", error)
                await asyncio.sleep(AGAIN_S)

    async def _carry(self, deliveries: list[AsyncDelivery]) -> None:
        """Carry dead letters together, or, where one of them makes no sense, each alone."""
        try:
            try:
                await self.move(await _in_turns(self._found, deliveries))
            except Exception as error:
                if not _is_of_one(error):
                    raise
                for delivery in deliveries:
                    await self._carry_alone(delivery)
        except BaseException:
            await _give_back(deliveries)
            raise
        self._carried += len(deliveries)

    async def _carry_alone(self, delivery: AsyncDelivery) -> None:
        try:
            await self.move([self._found(delivery)])
        except AlreadySettled:
            return  # it went with those before it
        except Exception as error:
            if not _is_of_one(error):
                raise
            name = delivery.headers.get(QUEUE)
            _logger.error("a dead letter of queue %r waits, those behind it do not: %r", name, error)
            await delivery.nack(delay_s=POISON_S)

    def _found(self, delivery: AsyncDelivery) -> Letter:
        """Return a dead letter that the broker made."""
        headers = delivery.headers
        host, name = self._place_of(str(headers.get(QUEUE, "")))
        reason = str(headers.get(REASON))
        return self.letter(delivery, host, name, _REASONS.get(reason, reason))

    def letter(self, delivery: AsyncDelivery, host: Place | None, queue: str, reason: str) -> Letter:
        """Return a message as a dead letter, on its way to where the exchange of its queue sends it."""
        headers = {name: value for name, value in delivery.headers.items() if not name.startswith(PREFIX)}
        targets, parcel = _targets(host, queue, content_of(headers, queue, delivery.body), reason)
        return Letter(delivery, host, targets, parcel)

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

    async def carry_all(self, batch: Iterable[AsyncDelivery], host: Place, queue: str, reason: str) -> None:
        """Have messages of a queue go where its exchange sends them; they are back in it if that fails.

        Where nobody takes one, it is dropped.
        """
        deliveries = list(batch)
        try:
            await self.move(await _in_turns(lambda delivery: self.letter(delivery, host, queue, reason), deliveries))
        except BaseException:
            await _give_back(deliveries)
            raise

    async def bury(self, host: Place, queue: str, content: Content, reason: str) -> None:
        """Have a message that its queue did not take go where the exchange of the queue sends it."""
        await self.move([Letter(None, host, *_targets(host, queue, content, reason))])

    async def move(self, letters: list[Letter]) -> None:
        """Settle dead letters, and put each where it goes: many in one commit where no target refuses one of them."""
        for lot in _lots(letters):
            await self._move(lot)

    async def _move(self, letters: list[Letter]) -> None:
        try:
            await self._commit(letters)
        except (*_REFUSED, TransactionTooLarge) as error:
            if len(letters) > 1:
                for letter in letters:
                    await self._move([letter])
            elif isinstance(error, TransactionTooLarge):
                raise
            else:
                await self._move_to_others(letters[0], error)

    async def _move_to_others(self, letter: Letter, error: QflowError) -> None:
        """Move a dead letter that was refused to those of its targets that take it, or have it wait for them."""
        while True:
            targets, blocking = letter.targets, tuple(hosted for hosted in letter.targets if hosted.may_block)
            if not targets:
                raise error
            taking = [hosted for hosted in targets if hosted.store.takes(letter.parcel)]
            if len(taking) < len(targets):
                letter = letter._replace(targets=taking)
            elif not isinstance(error, QueueFull):
                letter = letter._replace(targets=targets[1:])
            elif len(letter.waits_for) < len(blocking):
                letter = letter._replace(waits_for=blocking)
            else:
                await asyncio.sleep(AGAIN_S)  # memory is short
            try:
                await self._commit([letter])
                return
            except _REFUSED as again:
                error = again

    async def _commit(self, letters: list[Letter]) -> None:
        """Settle dead letters and put them where they go, in one commit, or have them wait for targets that block."""
        coming: list[tuple[HostedQueue, Parcel]] = []
        try:
            async with self._broker.transaction(PATIENCE_S) as transaction:
                for delivery, _, targets, parcel, waits_for in letters:
                    if delivery is not None:
                        await transaction.ack(delivery)
                    for hosted in targets:
                        if hosted in waits_for or self._held_up.is_for(hosted) or hosted.blocks(parcel):
                            await self._held_up.put_in(transaction, hosted, parcel)
                        elif not hosted.refuses:
                            hosted.comes(parcel)
                            coming.append((hosted, parcel))
                            await hosted.put_in(transaction, parcel)
        finally:
            for hosted, parcel in coming:
                hosted.came(parcel)
        for hosted, parcel in coming:
            hosted.expects(parcel)
        for letter in letters:
            for hosted in letter.targets:
                if letter.host is not None:
                    letter.host.trim_soon(hosted)


async def _in_turns(make: Callable[[AsyncDelivery], Letter], deliveries: list[AsyncDelivery]) -> list[Letter]:
    """Return dead letters as they go; others have their turn meanwhile, for each may have thousands of headers."""
    letters: list[Letter] = []
    turn = Turn()
    for delivery in deliveries:
        letters.append(make(delivery))
        if turn.is_over():
            await turn.next()
    return letters


def _lots(letters: list[Letter]) -> Iterator[list[Letter]]:
    """Yield dead letters that are moved in one commit: they go to `PUTS_AT_ONCE` queues together, or are one."""
    lot: list[Letter] = []
    puts = 0
    for letter in letters:
        puts += len(letter.targets)
        if lot and puts > PUTS_AT_ONCE:
            yield lot
            lot, puts = [], len(letter.targets)
        lot.append(letter)
    if lot:
        yield lot


def _targets(host: Place | None, name: str, content: Content, reason: str) -> tuple[list[HostedQueue], Parcel]:
    """Return where a dead letter goes, and what it is there."""
    source = host.find(name) if host is not None else None
    exchange = None if source is None else source.arguments.dead_letter_exchange
    new_key = None if source is None else source.arguments.dead_letter_routing_key
    letter = dead(content, name, reason, exchange or "", new_key)
    if host is None or exchange is None:
        return [], letter.parcel
    try:
        queues = host.route(exchange, letter.keys, letter.properties, inside=True)
    except AmqpError:
        return [], letter.parcel  # there is no such exchange: as in RabbitMQ, the message is dropped
    return [hosted for hosted in queues if not letter.comes_round_to(hosted.name)], letter.parcel


def _is_of_one(error: Exception) -> bool:
    """Tell whether a dead letter is the reason, which would fail again and again, and not the broker."""
    return isinstance(error, TransactionTooLarge) or not isinstance(error, QflowError)


async def _give_back(deliveries: list[AsyncDelivery]) -> None:
    """Have those go back that were not settled."""
    for delivery in deliveries:
        with suppress(QflowError):
            await delivery.nack()


class Trimming:
    """Queues that have too much: what they have had for longest goes, dropped or as dead letters. One for a host."""

    def __init__(self, place: Place, dead_letters: DeadLetters, tasks: Tasks) -> None:
        self._place = place
        self._dead_letters = dead_letters
        self._tasks = tasks
        self._under_way: set[HostedQueue] = set()

    def soon(self, hosted: HostedQueue) -> None:
        """Have what a queue has held for longest go, while it has too much and its arguments say so."""
        if hosted.drops and hosted not in self._under_way and hosted.excess() > 0:
            self._under_way.add(hosted)
            self._tasks.spawn(self._trim(hosted))

    async def _trim(self, hosted: HostedQueue) -> None:
        try:
            while (excess := hosted.excess()) > 0 and isinstance(hosted.store, QueueStore):
                batch = await hosted.store.queue.get_many(min(excess, TRIMMED_AT_ONCE), 0)
                if not len(batch):
                    return
                if hosted.arguments.dead_letter_exchange is None:
                    await batch.ack()
                else:
                    await self._dead_letters.carry_all(batch, self._place, hosted.name, TOO_MANY)
        except (QueueDeleted, BrokerClosed):
            return
        except QflowError as error:
            _logger.warning("%s has more than it should: %s", hosted.where, error)
        finally:
            self._under_way.discard(hosted)
