"""A queue of a virtual host while the server runs: who consumes it, how full it is, when it was used last."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.arguments import DROP_HEAD

if TYPE_CHECKING:
    from qflow.amqp.model.arguments import QueueArguments
    from qflow.amqp.model.queues import Queue
    from qflow.amqp.server.parcels import Parcel
    from qflow.amqp.server.stores import QueueStore, StreamStore

CONSUMER_TIMEOUT_S = 1800.0
"""A client settles a message within this time, if its queue says nothing else."""


class Consuming(Protocol):
    """A consumer, as its queue sees it."""

    @property
    def exclusive(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def may_have_more(self) -> bool:
        """Its client may be sent a message now."""

    def wake(self) -> None: ...
    def look_again(self) -> None:
        """Look whether it is still its turn, also if it waits for a message already."""


class HostedQueue:
    """See the module. Used by the tasks of one event loop."""

    __slots__ = ("consumers", "model", "pending", "pending_bytes", "store", "used_s", "where")

    def __init__(self, model: Queue, where: str, store: QueueStore | StreamStore) -> None:
        self.model = model
        """How it was declared."""
        self.where = where
        """As texts name it."""
        self.store = store
        """Its messages."""
        self.consumers: list[Consuming] = []
        """In the order they came, those of a higher priority first."""
        self.used_s = time.monotonic()
        """When it was declared, consumed or got from."""
        self.pending = 0
        """Of a queue with a limit: messages that are on their way into it."""
        self.pending_bytes = 0

    @property
    def name(self) -> str:
        """Its name in AMQP."""
        return self.model.name

    @property
    def arguments(self) -> QueueArguments:
        """What its arguments say."""
        return self.model.settled

    @property
    def consumer_timeout_s(self) -> float:
        """How long a client may hold a message."""
        timeout_ms = self.arguments.consumer_timeout_ms
        return CONSUMER_TIMEOUT_S if timeout_ms is None else timeout_ms / 1000

    def used(self) -> None:
        """Begin anew to count the time for which nobody uses it."""
        self.used_s = time.monotonic()

    def is_unused(self, now: float) -> bool:
        """Tell whether nobody has used it for as long as its arguments say."""
        expires_ms = self.arguments.expires_ms
        return expires_ms is not None and not self.consumers and (now - self.used_s) * 1000 >= expires_ms

    # Consumers ---------------------------------------------------------------------------------------------------

    def add(self, consumer: Consuming) -> None:
        """Have a consumer.

        Raises:
            AmqpError: ACCESS_REFUSED, since one of them is exclusive.
        """
        self.check_not_exclusive()
        if consumer.exclusive and self.consumers:
            raise self._in_use()
        self.consumers.append(consumer)
        if consumer.priority and not self.arguments.single_active_consumer:
            self.consumers.sort(key=lambda one: -one.priority)
            self.wake()

    def remove(self, consumer: Consuming) -> bool:
        """Have a consumer no more; tell whether it was the last one."""
        if consumer not in self.consumers:
            return False
        self.consumers.remove(consumer)
        self.used()
        self.wake()
        return not self.consumers

    def wake(self) -> None:
        """Have consumers look whether it is their turn: one before them has as much as it may."""
        if self.arguments.single_active_consumer:
            if self.consumers:
                self.consumers[0].wake()
        elif self.consumers and self.consumers[0].priority != self.consumers[-1].priority:
            for consumer in self.consumers:
                consumer.look_again()

    def ended(self) -> None:
        """Have consumers notice that the queue is deleted, those too that wait for their turn, or for acks."""
        for consumer in self.consumers:
            consumer.wake()

    def is_served(self, consumer: Consuming) -> bool:
        """Tell whether a consumer gets messages now.

        Of a queue with a single active one, the first does; else all whose priority no other has more than, but those
        that have as much as they may.
        """
        if self.arguments.single_active_consumer:
            return self.consumers[:1] == [consumer]
        for other in self.consumers:
            if other.priority <= consumer.priority:
                return True
            if other.may_have_more:
                return False
        return True

    def check_not_exclusive(self) -> None:
        """Refuse who comes beside an exclusive consumer."""
        if any(consumer.exclusive for consumer in self.consumers):
            raise self._in_use()

    def _in_use(self) -> AmqpError:
        return AmqpError(ReplyCode.ACCESS_REFUSED, f"{self.where} in exclusive use")

    # Messages ----------------------------------------------------------------------------------------------------

    @property
    def has_limit(self) -> bool:
        """It may be full."""
        arguments = self.arguments
        return not arguments.is_stream and (arguments.max_length is not None or arguments.max_length_bytes is not None)

    @property
    def rejects(self) -> bool:
        """It refuses what comes when it is full; else what it has had for longest goes."""
        return self.arguments.overflow != DROP_HEAD

    @property
    def is_full(self) -> bool:
        """One more message would be too many, with those on their way. Cost: 20 µs."""
        arguments, ready = self.arguments, self.store.depth()
        if arguments.max_length is not None and ready.messages + self.pending >= arguments.max_length:
            return True
        limit = arguments.max_length_bytes
        return limit is not None and ready.bytes + self.pending_bytes >= limit

    def excess(self) -> int:
        """Return how many messages it has too many; 1 if there are too many bytes. Cost: 20 µs."""
        arguments, ready = self.arguments, self.store.depth()
        too_many = 0 if arguments.max_length is None else ready.messages - arguments.max_length
        limit = arguments.max_length_bytes
        return max(too_many, int(limit is not None and ready.messages > 0 and ready.bytes > limit))

    def submit(self, parcel: Parcel) -> asyncio.Future[Any]:
        """Put a message; the future is a task if it has to wait for room."""
        if parcel.ttl_s == 0 or self.arguments.message_ttl_ms == 0:
            parcel = parcel.at_once(any(consumer.may_have_more for consumer in self.consumers))
        return self.store.submit(parcel)
