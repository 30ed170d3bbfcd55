"""Consumers at the door, for tasks: `qflow.aio.AsyncConsumer` over a queue that another process owns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from qflow.errors import NotFound, QueueDeleted
from qflow.held_batch import HeldBatch
from qflow.queues.consumer import Listed
from qflow.remote.client import requests
from qflow.remote.client.consuming import AnyConsumed, Ending
from qflow.remote.client.task_settling import Settles, TaskSettler
from qflow.remote.client.tasks import TaskConnection
from qflow.takers import Taker


class TaskConsumed(AnyConsumed, Settles):
    """What consumers and loops take from, as `aio.consumer.AsyncConsumed` and `AsyncListed` say."""

    def __init__(
        self,
        connection: TaskConnection,
        name: str,
        collect: Callable[[int, float | None, str | int], Awaitable[HeldBatch]] | None = None,
        at_once: int = 1,
    ) -> None:
        AnyConsumed.__init__(self, name, Ending(connection, name))
        Settles.__init__(self, connection)
        self._collect = collect
        self._at_once = at_once
        self._consumer = 0
        """What the owner calls it."""

    async def collect(self, most: int, timeout_s: float | None, taker: Taker) -> HeldBatch:
        """Acquire messages, waiting for the first."""
        assert self._collect is not None
        try:
            if not self._consumer:
                self._consumer = await self._connection.call(requests.consume(self.name, taker.name, self._at_once))
            return await self._collect(most, timeout_s, self._consumer)
        except NotFound as error:
            raise QueueDeleted(f"queue {self.name!r} was deleted: declare it again") from error

    @property
    def consumed(self) -> TaskConsumed:
        """It knows its consumers itself."""
        return self

    def give_up_batch(self, batch: HeldBatch) -> None:
        """Give back what was not handed out, not counted: all that is not settled."""
        self.give_back_from(batch, 0)

    def give_back_from(self, batch: HeldBatch, index: int) -> None:
        """Give back what is left of a batch from a place on, not counted."""
        settler = batch.settler
        assert isinstance(settler, TaskSettler)
        if batch.is_over or not batch.total or self._connection.closed:
            return
        places = batch.unsettled(index)
        if places:
            for place in places:
                batch.note_settled(place)
            self._connection.tell(requests.give_back(settler.grant.number, index))

    def forget_consumer(self, consumer: Listed) -> None:
        """It has ended."""
        if self._consumer and not self._connection.closed:
            self._connection.tell(requests.consume_end(self._consumer))

    def holding(self, held: Iterable[object]) -> list[Listed]:
        """The owner asks for none."""
        return []
