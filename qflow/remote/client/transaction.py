"""Transactions over a spool that another process owns, for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, Unpack

from qflow.deliveries import Deliveries
from qflow.delivery import Delivery, each_of
from qflow.errors import InvalidArgument
from qflow.message import Headers, bodies_bytes
from qflow.options import Body, Key, PutOptions
from qflow.pickling import Unpicklable
from qflow.remote.client.queue import RemoteQueue
from qflow.remote.client.threads import Connection
from qflow.remote.client.transaction_requests import Draft

T = TypeVar("T")


class RemoteTransaction(Unpicklable):
    """Puts, publishes and acks of a spool that another process owns, committed together or not at all.

    Made by `RemoteBroker.transaction`; a context manager; of the thread that made it. What it holds is sent when it
    commits: whether queues are there, and take the messages, is looked at then. The rest is as in `qflow.Transaction`.
    """

    _connection: Connection
    _draft: Draft
    _thread: int

    def put(self, queue: RemoteQueue | str, body: Body, **options: Unpack[PutOptions]) -> None:
        """Put a message when the transaction commits; see `qflow.Transaction.put`."""
        self._locked(partial(self._draft.put, queue, body, options))

    def put_many(self, queue: RemoteQueue | str, bodies: Iterable[Body], **options: Unpack[PutOptions]) -> None:
        """Put messages when the transaction commits; see `qflow.Transaction.put_many`."""
        found = bodies_bytes(bodies)  # the caller's own code, out of the lock
        self._locked(partial(self._draft.put_many, queue, found, options))

    def publish(self, topic: str, body: Body, *, key: Key | None = None, headers: Headers | None = None) -> None:
        """Publish when the transaction commits, to what the topic leads to then; see `qflow.Broker.publish`."""
        self._locked(partial(self._draft.publish, topic, body, key, headers))

    def ack(self, delivery: Delivery) -> None:
        """Settle a delivery when the transaction commits; see `qflow.Transaction.ack`."""
        self.ack_many([delivery])

    def ack_many(self, deliveries: Deliveries | Iterable[Delivery]) -> None:
        """Settle deliveries when the transaction commits, all or none; see `qflow.Transaction.ack_many`."""
        held = deliveries if isinstance(deliveries, Deliveries) else list(each_of(deliveries))
        self._locked(partial(self._draft.ack, held))

    @property
    def result(self) -> list[Any]:
        """What each put, put_many and publish returned, in order, once it is committed."""
        return self._draft.result

    def commit(self) -> list[Any]:
        """Commit now; returns `result`. The end of the `with` block does it, too. See `qflow.Transaction.commit`.

        Raises:
            InDoubt: the connection ended before the answer came; it may hold, all of it.
        """
        try:
            request = self._locked(self._draft.request)
            result: list[Any] = [] if request is None else self._connection.call(request)
            return self._connection.locked(partial(self._draft.committed, result))
        except BaseException as error:
            if self._draft.state == "being committed":
                self._connection.locked(partial(self._draft.failed, error))
            elif self._draft.state == "open":
                self._draft.end("rolled back")
            raise

    def rollback(self) -> None:
        """Give all of it up. Its deliveries are acquired as before."""
        self._locked(self._draft.rollback)

    def _locked(self, function: Callable[[], T]) -> T:
        if threading.get_ident() != self._thread:
            raise InvalidArgument("a transaction belongs to the thread that made it: make one in each thread")
        return self._connection.locked(function)

    def __enter__(self) -> RemoteTransaction:
        self._locked(self._draft.check_open)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._draft.state != "open":
            return  # the block ended it itself
        if kind is None:
            self.commit()
        else:
            self.rollback()

    def __repr__(self) -> str:
        return f"<RemoteTransaction, {self._draft.state}, {len(self._draft)} puts>"


def transaction_of(connection: Connection, most_bytes: int, timeout_s: float | None) -> RemoteTransaction:
    """Return a transaction of a connection."""
    made = RemoteTransaction()
    made._connection, made._thread = connection, threading.get_ident()
    made._draft = Draft(connection, most_bytes, timeout_s)
    return made
