"""Messages that clients publish in one turn of the loop, stored as one; those of a topic in the order they came in."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from qflow.aio.broker import AsyncBroker, has_room, room_of, submit_all
from qflow.errors import BrokerClosed, QflowError, StorageError
from qflow.named_tuples import NamedTuple

MOST_MESSAGES = 1_000
MOST_BYTES = 512 * 1024
LARGE_BYTES = 16 * 1024
"""A message of so many bytes goes alone."""

Submit = Callable[[], asyncio.Future[Any]]
Lot = list[tuple[str, bytes] | None]
"""Messages that are stored as one; None: it was withdrawn."""


class Stored(NamedTuple):
    """What tells when a message is stored."""

    future: asyncio.Future[Any]
    number: int = -1
    """Among those that share the future, whose result are the errors of those that are refused, by number; or -1."""
    lot: Lot | None = None
    """Those that share the future."""
    is_in_line: bool = False
    """It waited for others when it came."""

    @property
    def waits(self) -> bool:
        """The log does not have it, as far as that is known: it waits for room, or for others that do."""
        return self.is_in_line or isinstance(self.future, asyncio.Task)

    def error(self) -> BaseException | None:
        """Return why it is not stored, once the future is done."""
        if self.future.cancelled():
            return BrokerClosed("it was withdrawn")
        error = self.future.exception()
        return self.future.result().get(self.number) if error is None and self.number >= 0 else error

    def withdraw(self) -> None:
        """Have it not stored, if it waits; nobody is told. What waits for room together with others may be stored."""
        if self.lot is not None:
            self.lot[self.number] = None
        if self.lot is None or not any(self.lot):
            self.future.cancel()


class Together:
    """See the module. One a hub, in the loop alone.

    What goes to queues waits where they are full: so messages have a lane for each set of queues that they go to, and
    one for those that go to streams alone. Those of one topic are in order, also where bindings change meanwhile.
    """

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._routing = broker.broker.engine.routing
        self._plain = Lane(broker)
        self._lanes: dict[tuple[Any, ...], Lane] = {}
        """By queues: those that have something."""
        self._lane_of: dict[str, Lane] = {}
        """By topic, of what waits in `_lanes`."""

    def store(self, topic: str, payload: bytes) -> Stored:
        """Store a message soon; the future is shared by those who come in the same turn of the loop."""
        lane = self._lane(topic)
        stored = lane.store(topic, payload)
        if lane is not self._plain:
            self._note(lane, topic, stored)
        return stored

    def alone(self, topic: str, submit: Submit) -> Stored:
        """Store a message by itself, behind those with its topic that came before it."""
        lane = self._lane(topic)
        stored = lane.alone(submit)
        if lane is not self._plain:
            self._note(lane, topic, stored)
        return stored

    def send(self) -> None:
        """Hand over what goes to streams alone: something else is to be stored behind it."""
        self._plain.send()

    def end(self) -> None:
        """Store nothing more of what waits: nobody was told of it."""
        for lane in (self._plain, *self._lanes.values()):
            lane.end()

    def _lane(self, topic: str) -> Lane:
        found = self._lane_of.get(topic)
        if found is not None:
            return found
        queues = self._routing.route(topic).queues
        if not queues:
            return self._plain
        found = self._lanes.get(queues)
        if found is None:
            found = self._lanes[queues] = Lane(self._broker, queues, self._plain.passed())
        return found

    def _note(self, lane: Lane, topic: str, stored: Stored) -> None:
        lane.topics[topic] += 1
        self._lane_of[topic] = lane
        stored.future.add_done_callback(partial(self._leaves, lane, topic))

    def _leaves(self, lane: Lane, topic: str, _: object) -> None:
        lane.topics[topic] -= 1
        if not lane.topics[topic]:
            del lane.topics[topic], self._lane_of[topic]
        if not lane.topics:
            del self._lanes[lane.queues]


class Lane:
    """Messages that are handed over in the order in which they came."""

    def __init__(
        self, broker: AsyncBroker, queues: tuple[Any, ...] = (), before: asyncio.Future[Any] | None = None
    ) -> None:
        self.queues = queues
        self.topics: Counter[str] = Counter()
        """How many messages of each are not stored; of those that go to queues."""
        self._broker = broker
        self._lot: Lot = []
        self._bytes = 0
        self._stored: asyncio.Future[Any] | None = None
        """Of the lot that is collected."""
        self._under_way = before
        """What the log did not take at once, as it waits for memory, or goes to a queue: all others wait for that."""
        self._waiting: deque[tuple[Submit, asyncio.Future[Any]]] = deque()
        if before is not None:
            before.add_done_callback(self._go_on)

    def store(self, topic: str, payload: bytes) -> Stored:
        """Store a message soon; the future is that of all who come in the same turn of the loop."""
        stored = self._stored
        if stored is None:
            loop = asyncio.get_running_loop()
            stored = self._stored = loop.create_future()
            loop.call_soon(self._send, stored)
        lot = self._lot
        lot.append((topic, payload))
        self._bytes += len(payload)
        told = Stored(stored, len(lot) - 1, lot)
        if len(lot) >= MOST_MESSAGES or self._bytes >= MOST_BYTES:
            self.send()
        return told

    def alone(self, submit: Submit) -> Stored:
        """Store a message by itself, behind what came before it."""
        self.send()
        if self._under_way is not None:
            return Stored(self._wait(submit), is_in_line=True)
        return Stored(self._hand_over(submit))

    def send(self) -> None:
        """Hand over what there is: something else is to be stored behind it."""
        if self._stored is not None:
            self._send(self._stored)

    def end(self) -> None:
        """Store nothing more of what waits: nobody was told of it."""
        waiting, self._waiting = self._waiting, deque()
        for _, told in waiting:
            told.cancel()
        if self._under_way is not None:
            self._under_way.cancel()

    def _send(self, stored: asyncio.Future[Any]) -> None:
        if stored is not self._stored:
            return  # handed over before
        lot, self._lot = self._lot, []
        self._stored = None
        self._bytes = 0
        submit = partial(self._submit_lot, lot)
        if self._under_way is not None:
            self._waiting.append((submit, stored))
        else:
            self._tell(self._hand_over(submit), stored)

    def passed(self) -> asyncio.Future[Any] | None:
        """Return what is done when all is handed over that came until now; None if it is."""
        self.send()
        return None if self._under_way is None else self._wait(_nothing)

    # Handing over ----------------------------------------------------------------------------------------------------

    def _hand_over(self, submit: Submit) -> asyncio.Future[Any]:
        """Give something to the log; what it does not take at once is under way, and the future tells what it refuses.

        So that is told in order: behind what was handed over before.
        """
        try:
            future = submit()
        except Exception as error:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(error)
            future.exception()  # as in `_resolve`
        if isinstance(future, asyncio.Task):
            self._under_way = future
            room_of(self._broker, future).add_done_callback(self._go_on)
        return future

    def _wait(self, submit: Submit) -> asyncio.Future[Any]:
        """Have something handed over behind all that waits."""
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((submit, told))
        return told

    def _go_on(self, _: object) -> None:
        """Hand over what waits, up to the next that the log does not take at once."""
        self._under_way = None
        while self._waiting and self._under_way is None:
            submit, told = self._waiting.popleft()
            if told.done():
                continue  # it was withdrawn
            self._tell(self._hand_over(submit), told)

    def _tell(self, future: asyncio.Future[Any], told: asyncio.Future[Any]) -> None:
        """Have one future be done as another is, which is cancelled with it if it waits."""
        future.add_done_callback(partial(_resolve, told))
        if isinstance(future, asyncio.Task):
            told.add_done_callback(partial(_give_up, future))

    def _submit_lot(self, lot: Lot) -> asyncio.Future[Any]:
        messages = [message for message in lot if message is not None]
        sent: asyncio.Future[Any] | None = None
        with suppress(QflowError):  # that of one of them: each is told of by itself
            sent = submit_all(self._broker, messages)
        if sent is None or isinstance(sent, asyncio.Task):
            each = asyncio.get_running_loop().create_task(self._each(sent, lot))
            if sent is not None:
                room_of(self._broker, sent).add_done_callback(partial(self._pass_on, each))
            return each
        return sent

    def _pass_on(self, each: asyncio.Future[Any], room: asyncio.Future[bool]) -> None:
        """Those behind a lot go on if the log has it, and not where its messages are still to be stored one by one."""
        if room.result():
            has_room(self._broker, each)

    async def _each(self, sent: asyncio.Future[Any] | None, lot: Lot) -> dict[int, BaseException]:
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
        for number, message in enumerate(lot):
            if message is None:
                continue
            try:
                future = futures[number] = self._broker.submit_publish(*message)
            except QflowError as error:
                refused[number] = error
            else:
                if isinstance(future, asyncio.Task):
                    with suppress(QflowError):  # it is told of below
                        await future
        for number, future in futures.items():
            try:
                await future
            except QflowError as error:
                refused[number] = error
        return refused


def _give_up(future: asyncio.Future[Any], told: asyncio.Future[Any]) -> None:
    if told.cancelled():
        future.cancel()


def _nothing() -> asyncio.Future[None]:
    future = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future


def _resolve(stored: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
    error = BrokerClosed("the loop ends") if done.cancelled() else done.exception()
    if stored.done():
        return  # it was withdrawn
    if error is not None:
        stored.set_exception(error)
        stored.exception()  # nobody may wait for it any more: that is no fault
    else:
        result = done.result()
        stored.set_result(result if isinstance(result, dict) else {})
