"""Transactions over a spool that another process owns, for tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from qflow.aio.delivery import AsyncDeliveries, AsyncDelivery, held_by
from qflow.delivery import each_of
from qflow.message import Headers, bodies_bytes
from qflow.options import Body, Key, PutOptions
from qflow.pickling import Unpicklable
from qflow.remote.client.task_queue import AsyncRemoteQueue
from qflow.remote.client.tasks import TaskConnection
from qflow.remote.client.transaction_requests import Draft


class AsyncRemoteTransaction(Unpicklable):
    """Puts, publishes and acks of a spool that another process owns, all or none; see `qflow.aio.AsyncTransaction`.

    What it holds is sent when it commits: whether queues are there, and take the messages, is looked at then. Cancelled
    meanwhile, it may be done all the same.
    """

    _connection: TaskConnection
    _draft: Draft

    async def put(self, queue: AsyncRemoteQueue | str, body: Body, **options: Unpack[PutOptions]) -> None:
        """Put a message when the transaction commits."""
        self._draft.put(queue, body, options)

    async def put_many(
        self, queue: AsyncRemoteQueue | str, bodies: Iterable[Body], **options: Unpack[PutOptions]
    ) -> None:
        """Put messages when the transaction commits."""
        self._draft.put_many(queue, bodies_bytes(bodies), options)

    async def publish(self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None) -> None:
        """Publish when the transaction commits, to what the topic leads to then."""
        self._draft.publish(topic, body, key, headers)

    async def ack(self, delivery: AsyncDelivery) -> None:
        """Settle a delivery when the transaction commits."""
        self._draft.ack([held_by(delivery)])

    async def ack_many(self, deliveries: AsyncDeliveries | Iterable[AsyncDelivery]) -> None:
        """Settle deliveries when the transaction commits, all or none."""
        if isinstance(deliveries, AsyncDeliveries):
            self._draft.ack(deliveries.deliveries)
        else:
            self._draft.ack([held_by(one) for one in each_of(deliveries)])

    @property
    def result(self) -> list[Any]:
        """What each put, put_many and publish returned, in order, once it is committed."""
        return self._draft.result

    async def commit(self) -> list[Any]:
        """Commit now; returns `result`. The end of the `async with` block does it, too.

        Raises:
            InDoubt: the connection ended before the answer came; it may hold, all of it.
        """
        try:
            request = self._draft.request()
            return self._draft.committed([] if request is None else await self._connection.call(request))
        except BaseException as error:
            if self._draft.state == "being committed":
                self._draft.failed(error)
            elif self._draft.state == "open":
                self._draft.end("rolled back")
            raise

    async def rollback(self) -> None:
        """Give all of it up. Its deliveries are acquired as before."""
        self._draft.rollback()

    async def __aenter__(self) -> AsyncRemoteTransaction:
        self._draft.check_open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._draft.state != "open":
            return  # the block ended it itself
        if kind is None:
            await self.commit()
        else:
            await self.rollback()

    def __repr__(self) -> str:
        return f"<AsyncRemoteTransaction, {self._draft.state}, {len(self._draft)} puts>"


def transaction_of(connection: TaskConnection, most_bytes: int, timeout_s: float | None) -> AsyncRemoteTransaction:
    """Return a transaction of a connection."""
    made = AsyncRemoteTransaction()
    made._connection, made._draft = connection, Draft(connection, most_bytes, timeout_s)
    return made
