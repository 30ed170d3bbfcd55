"""A transaction of a channel: publishes and settles that are committed together, in one commit of the log."""

from __future__ import annotations

import asyncio
from typing import Protocol

from qflow.amqp.errors import AmqpError, ReplyCode, as_amqp_error
from qflow.amqp.server.client import Client, until_done
from qflow.amqp.server.content import Properties
from qflow.amqp.server.holding import SETTLED_AT_ONCE, Held, Holding, lots
from qflow.amqp.server.host import Host
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.parcels import Parcel
from qflow.errors import AlreadySettled, InDoubt, InvalidArgument, QflowError, QueueDeleted, QueueFull, StreamDeleted
from qflow.named_tuples import NamedTuple

OVERHEAD_BYTES = 1024
"""What a message is counted to have beside its body and its properties."""
COPIES = 4
"""Of its properties: as they came, and in the headers of a message of qflow."""
PUT_AT_ONCE = 500
"""Messages that a commit puts before other clients have their turn: 20 µs each."""


class _Mandatory(NamedTuple):
    """A message that goes back when the transaction commits, if no queue takes it: there was none, or all are gone."""

    queues: list[HostedQueue]
    exchange: str
    routing_key: str
    properties: Properties
    body: bytes


class UnitChannel(Protocol):
    """A channel, as far as its transaction sees it; see `channel.Channel`."""

    @property
    def client(self) -> Client: ...
    @property
    def host(self) -> Host: ...
    @property
    def holding(self) -> Holding: ...
    @property
    def publishing(self) -> Returning: ...
    async def settled(self, taken: dict[int, Held]) -> None: ...
    async def give_back(self, taken: dict[int, Held], requeue: bool) -> None: ...


class Returning(Protocol):
    """What sends a message back that no queue takes."""

    def return_(self, exchange: str, routing_key: str, properties: Properties, body: bytes) -> None: ...


class Unit:
    """See the module. The next one begins when one is committed or rolled back."""

    def __init__(self, channel: UnitChannel) -> None:
        self._channel = channel
        self._committing: asyncio.Task[set[HostedQueue]] | None = None
        self._size = 0
        self._clear()

    def _clear(self) -> None:
        self._channel.client.share.hold(-self._size)
        self._puts: list[tuple[HostedQueue, Parcel]] = []
        self._size = 0
        self._mandatory: list[_Mandatory] = []
        self._acked: dict[int, Held] = {}
        self._nacked: dict[bool, dict[int, Held]] = {}
        """What goes back: to its queues, or to where dead letters go."""

    def publish(
        self, queues: list[HostedQueue], parcel: Parcel, mandatory: bool, where: tuple[str, str, Properties]
    ) -> None:
        """Put a message into its queues when the transaction commits."""
        _, _, properties = where
        size = (len(parcel.body) + COPIES * len(properties.raw) + OVERHEAD_BYTES) * max(1, len(queues))
        self._size += size
        self._channel.client.share.hold(size)
        most = self._channel.client.max_unit_bytes
        if self._size > most:
            raise AmqpError(ReplyCode.RESOURCE_ERROR, f"a transaction holds at most {most:,} bytes")
        self._puts += [(hosted, parcel) for hosted in queues]
        if mandatory:
            self._mandatory.append(_Mandatory(queues, *where, parcel.body))

    def ack(self, taken: dict[int, Held]) -> None:
        """Settle messages when the transaction commits."""
        self._acked |= taken

    def nack(self, taken: dict[int, Held], requeue: bool) -> None:
        """Have messages go back when the transaction has committed."""
        self._nacked.setdefault(requeue, {}).update(taken)

    async def commit(self) -> None:
        """Commit; nothing of it is done if that fails, which ends the channel, or that is not known."""
        channel = self._channel
        puts, acked, nacked, mandatory = self._puts, self._acked, self._nacked, self._mandatory
        queues = dict.fromkeys(hosted for hosted, _ in puts)
        try:
            for hosted in queues:
                if hosted.refuses and not hosted.store.is_gone:
                    raise QueueFull(f"{hosted.where} is full")
            there = await self._until_committed(puts, acked)
        except (QueueFull, QueueDeleted, StreamDeleted, AlreadySettled, InvalidArgument) as error:
            self.rollback()
            raise AmqpError(ReplyCode.PRECONDITION_FAILED, f"not committed: {error}") from error
        except InDoubt as error:
            self.rollback()
            text = f"it is not known whether the transaction is committed: {error}"
            raise AmqpError(ReplyCode.INTERNAL_ERROR, text) from error
        except QflowError as error:
            self.rollback()
            raise AmqpError(as_amqp_error(error).code, f"not committed: {error}") from error
        self._clear()
        for hosted, parcel in puts:
            if not hosted.store.is_gone:
                hosted.expects(parcel)
        for hosted in queues:
            if not hosted.store.is_gone:
                channel.host.trim_soon(hosted)
        try:
            await channel.settled(acked)
            while nacked:
                requeue, taken = nacked.popitem()
                await channel.give_back(taken, requeue)
        finally:
            for taken in nacked.values():  # it failed, or was cancelled
                channel.holding.restore(taken)
        for one in mandatory:
            if there.isdisjoint(one.queues):
                channel.publishing.return_(one.exchange, one.routing_key, one.properties, one.body)

    async def _until_committed(
        self, puts: list[tuple[HostedQueue, Parcel]], acked: dict[int, Held]
    ) -> set[HostedQueue]:
        self._committing = task = asyncio.ensure_future(self._commit(puts, acked))
        try:
            await until_done(self._channel.client, [task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        finally:
            self._committing = None
        if task.cancelled():
            raise InvalidArgument("the channel is closed")
        return task.result()

    async def _commit(self, puts: list[tuple[HostedQueue, Parcel]], acked: dict[int, Held]) -> set[HostedQueue]:
        """Commit what concerns queues that are there, and return these: one that is gone takes its messages along."""
        concerned = {hosted for hosted, _ in puts} | {held.hosted for held in acked.values()}
        while True:
            there = {hosted for hosted in concerned if not hosted.store.is_gone}
            try:
                async with self._channel.host.broker.transaction() as transaction:
                    for count, (hosted, parcel) in enumerate(puts):
                        if count and count % PUT_AT_ONCE == 0:
                            await asyncio.sleep(0)
                        if hosted in there:
                            await hosted.put_in(transaction, parcel)
                    async for hosted, tags in lots(acked, SETTLED_AT_ONCE):
                        if hosted in there:
                            await transaction.ack_many([acked[tag].delivery for tag in tags])
                return there
            except (QueueDeleted, StreamDeleted):
                if not any(hosted.store.is_gone for hosted in there):
                    raise

    async def end(self) -> None:
        """Give up what is not committed; what was settled is held again."""
        if self._committing is not None:
            self._committing.cancel()
            await asyncio.wait([self._committing])
        self.rollback()

    def rollback(self) -> None:
        """Drop the publishes; what was settled is held again."""
        self._channel.holding.restore(self._acked)
        for taken in self._nacked.values():
            self._channel.holding.restore(taken)
        self._clear()
