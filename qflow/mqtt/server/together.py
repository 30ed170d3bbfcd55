"""Messages that clients publish in one turn of the loop, stored as one; all messages in the order they came in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from qflow.aio.broker import AsyncBroker, submit_all
from qflow.errors import BrokerClosed, QflowError, StorageError

MOST_MESSAGES = 1_000
MOST_BYTES = 512 * 1024
LARGE_BYTES = 16 * 1024
"""A message of so many bytes goes alone."""

Submit = Callable[[], asyncio.Future[Any]]


class Stored(NamedTuple):
    """What tells when a message is stored."""

    future: asyncio.Future[Any]
    number: int = -1
    """Among those that share the future, whose result are the errors of those that are refused, by number; or -1."""

    def error(self) -> BaseException | None:
        """Return why it is not stored, once the future is done."""
        error = self.future.exception()
        return self.future.result().get(self.number) if error is None and self.number >= 0 else error


class Together:
    """See the module. One a hub, in the loop alone."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._messages: list[tuple[str, bytes]] = []
        self._bytes = 0
        self._stored: asyncio.Future[Any] | None = None
        self._last: asyncio.Task[Any] | None = None
        """What was handed over last, where the log did not take it at once: the next waits for it."""

    def store(self, topic: str, payload: bytes) -> Stored:
        """Store a message soon; the future is that of all who come in the same turn of the loop."""
        stored = self._stored
        if stored is None:
            loop = asyncio.get_running_loop()
            stored = self._stored = loop.create_future()
            loop.call_soon(self._send, stored)
        self._messages.append((topic, payload))
        self._bytes += len(payload)
        told = Stored(stored, len(self._messages) - 1)
        if len(self._messages) >= MOST_MESSAGES or self._bytes >= MOST_BYTES:
            self.send()
        return told

    def alone(self, submit: Submit) -> Stored:
        """Store a message by itself, behind what came before it."""
        self.send()
        return Stored(self._hand_over(submit))

    def send(self) -> None:
        """Hand over what there is: something else is to be stored behind it."""
        if self._stored is not None:
            self._send(self._stored)

    def _hand_over(self, submit: Submit) -> asyncio.Future[Any]:
        """Give something to the log, behind what it has not taken yet, as it waits for memory, or goes to a queue."""
        if self._last is not None and not self._last.done():
            self._last = asyncio.get_running_loop().create_task(_behind(self._last, submit))
            return self._last
        future = submit()
        self._last = future if isinstance(future, asyncio.Task) else None
        return future

    def _send(self, stored: asyncio.Future[Any]) -> None:
        if stored is not self._stored:
            return  # handed over before
        messages, self._messages = self._messages, []
        self._stored = None
        self._bytes = 0
        sent: asyncio.Future[Any] | None = None
        with suppress(QflowError):  # that of one of them: each is told of by itself
            sent = self._hand_over(partial(submit_all, self._broker, messages))
        if sent is None or isinstance(sent, asyncio.Task):
            sent = self._last = asyncio.get_running_loop().create_task(self._each(sent, messages))
        sent.add_done_callback(partial(_resolve, stored))

    async def _each(
        self, sent: asyncio.Future[Any] | None, messages: list[tuple[str, bytes]]
    ) -> dict[int, BaseException]:
        """Store one by one what is refused together; return the errors, by number."""
        try:
            if sent is not None:
                await sent
                return {}
        except (BrokerClosed, StorageError):
            raise
        except QflowError:
            pass  # of one of them
        refused: dict[int, BaseException] = {}
        futures: dict[int, asyncio.Future[Any]] = {}
        for number, (topic, payload) in enumerate(messages):
            try:
                future = futures[number] = self._broker.submit_publish(topic, payload)
            except QflowError as error:
                refused[number] = error
            else:
                if isinstance(future, asyncio.Task):
                    await asyncio.wait([future])
        for number, future in futures.items():
            try:
                await future
            except QflowError as error:
                refused[number] = error
        return refused


async def _behind(last: asyncio.Task[Any], submit: Submit) -> Any:
    await asyncio.wait([last])
    return await submit()


def _resolve(stored: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
    error = BrokerClosed("the loop ends") if done.cancelled() else done.exception()
    if error is not None:
        stored.set_exception(error)
    else:
        result = done.result()
        stored.set_result(result if isinstance(result, dict) else {})
