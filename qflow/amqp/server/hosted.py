"""A queue of a virtual host while the server runs: who consumes it, how full it is, when it was used last."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from qflow.aio.queue import AsyncQueue
from qflow.aio.transaction import AsyncTransaction
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.model.arguments import DROP_HEAD, QUORUM, QueueArguments
from qflow.amqp.model.queues import Queue
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.server.stores import QueueStore, StreamStore
from qflow.queues.queue import parts_of
from qflow.queues.tending import expire
from qflow.serving.tasks import Tasks

LATE_S = 0.001
"""Moments of expiry are whole milliseconds: the timer is not to be early."""
AGAIN_S = 0.5
"""What has expired and could not leave is tried again after so long."""
CONSUMER_TIMEOUT_S = 1800.0
"""A client settles a message within this time, if its queue says nothing else."""


class Expiring:
    """The timer of one queue: what expires in it is a dead letter when it does, not at the next round of maintenance.

    It stands for what comes next to expire at the head. It is set when a message with a time to live is put by AMQP,
    and when what a client held goes back.
    """

    def __init__(self, queue: AsyncQueue, ttl_s: float | None, tasks: Tasks) -> None:
        """`ttl_s` is the queue's own; None = its messages live as long as they say."""
        self._queue = queue
        self._ttl_s = ttl_s
        self._tasks = tasks
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False

    def lives_s(self, ttl_s: float | None) -> float | None:
        """Return how long a message lives that says so itself; None = for ever."""
        if self._ttl_s is None or ttl_s is None:
            return self._ttl_s if ttl_s is None else ttl_s
        return min(self._ttl_s, ttl_s)

    def look_after(self, seconds: float) -> None:
        """Look in so many seconds for what has expired, if not earlier; not after `end`."""
        if self._has_ended:
            return
        loop = asyncio.get_running_loop()
        moment = loop.time() + seconds + LATE_S
        if self._timer is not None:
            if self._timer.when() <= moment:
                return
            self._timer.cancel()
        self._timer = loop.call_at(moment, self._look)

    def end(self) -> None:
        """Look no more."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if len(self._queue):
            self._tasks.spawn(self._let_go())

    async def _let_go(self) -> None:
        began = time.time()
        next_ms = await asyncio.to_thread(expire, parts_of(self._queue.queue))
        if next_ms is not None:
            moment = next_ms / 1000
            self.look_after(AGAIN_S if moment <= began else max(0.0, moment - time.time()))


def expiring_of(arguments: QueueArguments, store: QueueStore | StreamStore, tasks: Tasks) -> Expiring | None:
    """Return the timer of a queue; None if what expires in it becomes no dead letter."""
    if arguments.dead_letter_exchange is None or not isinstance(store, QueueStore):
        return None
    ttl_ms = arguments.message_ttl_ms
    return Expiring(store.queue, ttl_ms / 1000 if ttl_ms is not None else None, tasks)


class Consuming(Protocol):
    """A consumer, as its queue sees it; see `consuming.Consumer`."""

    @property
    def hosted(self) -> HostedQueue: ...
    @property
    def exclusive(self) -> bool: ...
    @property
    def priority(self) -> int: ...
    @property
    def may_have_more(self) -> bool: ...
    def wake(self) -> None: ...
    def look_again(self) -> None: ...


@attrs.define(eq=False)
class HostedQueue:
    """See the module. Used by the tasks of one event loop."""

    model: Queue
    """How it was declared."""
    where: str
    """As texts name it."""
    store: QueueStore | StreamStore
    """Its messages."""
    _expiring: Expiring | None = None
    """Of a queue with dead letters: it sees to it that they leave when they expire."""
    consumers: dict[Consuming, None] = attrs.field(factory=dict, init=False)
    """In the order they came, those of a higher priority first."""
    used_s: float = attrs.field(factory=time.monotonic, init=False)
    """When it was declared, consumed or got from."""
    _pending: int = attrs.field(default=0, init=False)
    _pending_bytes: int = attrs.field(default=0, init=False)
    _is_woken: bool = attrs.field(default=False, init=False)
    _served: float | None = attrs.field(default=None, init=False)
    """The lowest priority that is served, as it was when somebody asked in this turn of the loop."""

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
        """Have a consumer. Raises AmqpError: ACCESS_REFUSED, since one is exclusive, or is to be beside others."""
        is_alone = not self.consumers and not self.arguments.single_active_consumer
        first = self._first
        if (first is not None and first.exclusive) or (consumer.exclusive and not is_alone):
            raise AmqpError(ReplyCode.ACCESS_REFUSED, f"{self.where} in exclusive use")
        last = next(reversed(self.consumers), None)
        self.consumers[consumer] = None
        if last is not None and last.priority < consumer.priority and not self.arguments.single_active_consumer:
            self.consumers = dict.fromkeys(sorted(self.consumers, key=lambda one: -one.priority))
            self.wake()

    @property
    def _first(self) -> Consuming | None:
        return next(iter(self.consumers), None)

    def remove(self, consumer: Consuming) -> bool:
        """Have a consumer no more; tell whether it was the last one."""
        if consumer not in self.consumers:
            return False
        differed = self._priorities_differ
        del self.consumers[consumer]
        self.used()
        self._wake(differed)  # those that are left may all be of one priority now, and none may have been served
        return not self.consumers

    def wake(self) -> None:
        """Have consumers look, in the next turn of the loop, whether it is theirs: one has as much as it may."""
        self._wake(self._priorities_differ)

    def _wake(self, all_of_them: bool) -> None:
        first = self._first
        if first is None:
            return
        if self.arguments.single_active_consumer:
            first.wake()
        elif all_of_them and not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._look_again)

    def _look_again(self) -> None:
        self._is_woken = False
        self._served = None
        for consumer in self.consumers:
            consumer.look_again()

    @property
    def _priorities_differ(self) -> bool:
        first = self._first
        return first is not None and first.priority != next(reversed(self.consumers)).priority

    def ended(self) -> None:
        """Have consumers notice that the queue is deleted, those too that wait for their turn, or for acks."""
        self.end()
        for consumer in self.consumers:
            consumer.wake()

    def is_served(self, consumer: Consuming) -> bool:
        """Tell whether a consumer gets messages now.

        Of a queue with a single active one, the first does; else all whose priority no other has more than, but those
        that have as much as they may. Cost: once in a turn of the loop, 1 µs for each of those.
        """
        first = self._first
        if self.arguments.single_active_consumer:
            return first is consumer
        if first is None or first.priority <= consumer.priority:
            return True
        if self._served is None:
            self._served = next((one.priority for one in self.consumers if one.may_have_more), -math.inf)
            asyncio.get_running_loop().call_soon(self._forget_served)
        return consumer.priority >= self._served

    def _forget_served(self) -> None:
        self._served = None

    def check_may_get(self) -> None:
        """Refuse a get that would go past the one active consumer, as RabbitMQ does of quorum queues.

        Raises:
            AmqpError: RESOURCE_LOCKED
        """
        if self.arguments.queue_type == QUORUM and self.arguments.single_active_consumer:
            raise AmqpError(
                ReplyCode.RESOURCE_LOCKED,
                f"cannot obtain access to locked {self.where}. basic.get operations are not supported by quorum queues "
                "with single active consumer",
            )

    # Messages ----------------------------------------------------------------------------------------------------

    @property
    def has_limit(self) -> bool:
        """It may be full."""
        arguments = self.arguments
        return not arguments.is_stream and (arguments.max_length is not None or arguments.max_length_bytes is not None)

    @property
    def drops(self) -> bool:
        """When it has too much, what it has had for longest goes."""
        return self.has_limit and self.arguments.overflow == DROP_HEAD

    @property
    def refuses(self) -> bool:
        """It takes no more: one more message would be too many, with those on their way. Cost: 20 µs."""
        if not self.has_limit or self.drops:
            return False
        arguments, ready = self.arguments, self.store.depth()
        if arguments.max_length is not None and ready.messages + self._pending >= arguments.max_length:
            return True
        limit = arguments.max_length_bytes
        return limit is not None and ready.bytes + self._pending_bytes >= limit

    @property
    def may_block(self) -> bool:
        """A message may have to wait for room, as a program declared it so."""
        return isinstance(self.store, QueueStore) and self.store.may_block

    def blocks(self, parcel: Parcel) -> bool:
        """Tell whether a message would have to wait for room."""
        if not isinstance(self.store, QueueStore) or not self.store.may_block:
            return False
        return not self.store.has_room(1 + self._pending, len(parcel.body) + self._pending_bytes)

    def comes(self, parcel: Parcel) -> None:
        """Count a message that is on its way; `came` when it is there, or was refused."""
        self._pending += 1
        self._pending_bytes += len(parcel.body)

    def came(self, parcel: Parcel) -> None:
        """See `comes`."""
        self._pending -= 1
        self._pending_bytes -= len(parcel.body)

    def excess(self) -> int:
        """Return how many messages it has too many; 1 if there are too many bytes. Cost: 20 µs."""
        arguments, ready = self.arguments, self.store.depth()
        too_many = 0 if arguments.max_length is None else ready.messages - arguments.max_length
        limit = arguments.max_length_bytes
        return max(too_many, int(limit is not None and ready.messages > 0 and ready.bytes > limit))

    def store_of_runs(self, parcel: Parcel) -> QueueStore | None:
        """Return where messages like this one may be put many at once; None: a limit may turn some of them away."""
        if self.has_limit or self.lives_no_time(parcel):
            return None
        return self.store.store_of_runs(parcel)

    def submit(self, parcel: Parcel) -> asyncio.Future[Any]:
        """Put a message; the future is a task if it has to wait for room."""
        parcel = self._as_put(parcel)
        return self._submitted(self.store.submit(parcel), parcel)

    async def put_in(self, transaction: AsyncTransaction, parcel: Parcel) -> None:
        """Put a message when a transaction commits."""
        await self.store.put_in(transaction, self._as_put(parcel))

    def lives_no_time(self, parcel: Parcel) -> bool:
        """Tell whether a message expires unless a consumer waits for it."""
        return parcel.ttl_s == 0 or self.arguments.message_ttl_ms == 0

    def _as_put(self, parcel: Parcel) -> Parcel:
        if not self.lives_no_time(parcel):
            return parcel
        return parcel.at_once(any(consumer.may_have_more for consumer in self.consumers))

    def submit_run(self, store: QueueStore, parcel: Parcel, bodies: Sequence[bytes]) -> asyncio.Future[Any]:
        """Put messages that differ in their bodies alone into its store, all or none."""
        return self._submitted(store.submit_run(parcel, bodies), parcel)

    def _submitted(self, put: asyncio.Future[Any], parcel: Parcel) -> asyncio.Future[Any]:
        if self._expiring is not None and self._expiring.lives_s(parcel.ttl_s) is not None:
            put.add_done_callback(lambda _: self.expects(parcel))
        return put

    def expects(self, parcel: Parcel) -> None:
        """Have a message that was put now leave when it expires, if it becomes a dead letter then."""
        if self._expiring is not None:
            lives_s = self._expiring.lives_s(parcel.ttl_s)
            if lives_s is not None:
                self._expiring.look_after(lives_s + (parcel.delay_s or 0.0))

    def look_for_expired(self) -> None:
        """Have messages leave that expired while they could not: a client held them, or no server ran."""
        if self._expiring is not None:
            self._expiring.look_after(0.0)

    def end(self) -> None:
        """Look for nothing that expires any more: the server ends, or the queue is gone."""
        if self._expiring is not None:
            self._expiring.end()
