"""What a client has and has not settled, by delivery tag."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from qflow.aio.delivery import AsyncDelivery
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.server.consuming import Consumer
from qflow.amqp.server.hosted import HostedQueue
from qflow.delivery import Delivery
from qflow.named_tuples import NamedTuple
from qflow.serving.tasks import attempt, ending

AT_ONCE = 100
"""Messages that go back together."""
REJECTED_AT_ONCE = 1000
"""Messages that go to the dead letters together: they share a commit."""
SETTLED_AT_ONCE = 1000
"""Messages that are settled before other clients have their turn: 2 to 10 µs each."""


class Held(NamedTuple):
    """A message that the client has."""

    delivery: AsyncDelivery
    hosted: HostedQueue
    consumer: Consumer | None
    """None: it was got, not consumed."""
    since_s: float
    """On the monotonic clock."""


class Holding:
    """See the module. One for each channel."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        """In the order of their tags."""
        self.last_tag = 0
        self._tags: defaultdict[HostedQueue, dict[int, None]] = defaultdict(dict)
        """The same by queue: the first of each has been held for longest, and all of a queue for as long at most."""

    def __len__(self) -> int:
        return len(self.held)

    def add(self, held: Held | None) -> None:
        """Have the next tag be that of a message that was sent; None: the client has settled it already."""
        self.last_tag += 1
        if held is not None:
            self.held[self.last_tag] = held
            self._tags[held.hosted][self.last_tag] = None

    def take(self, tag: int, multiple: bool) -> dict[int, Held]:
        """Take what a tag names; 0 and `multiple`: all. Raises AmqpError: PRECONDITION_FAILED; there is no such tag."""
        if not multiple:
            if tag not in self.held:
                raise _unknown(tag)
            return {tag: self._take(tag)}
        if tag == 0 or (self.held and next(reversed(self.held)) <= tag <= self.last_tag):
            return self.take_all()
        tags = list(_until(self.held, tag)) if tag <= self.last_tag else []
        if not tags:
            raise _unknown(tag)
        return {one: self._take(one) for one in tags}

    def _take(self, tag: int) -> Held:
        held = self.held.pop(tag)
        tags = self._tags[held.hosted]
        del tags[tag]
        if not tags:
            del self._tags[held.hosted]
        return held

    def take_all(self) -> dict[int, Held]:
        """Take everything."""
        taken, self.held = self.held, {}
        self._tags.clear()
        return taken

    def restore(self, taken: dict[int, Held]) -> None:
        """Have what was taken again."""
        self.held = dict(sorted({**taken, **self.held}.items()))
        self._tags.clear()
        for tag, held in self.held.items():
            self._tags[held.hosted][tag] = None

    async def give_back(self, taken: dict[int, Held], requeue: bool, left: Callable[[Held], None]) -> None:
        """Have what was taken go back, or to the dead letters, and tell of each; what is left over is held again."""
        try:
            async for hosted, tags in lots(taken, AT_ONCE if requeue else REJECTED_AT_ONCE):
                await hosted.store.give_back([taken[tag].delivery for tag in tags], requeue)
                for tag in tags:
                    left(taken.pop(tag))
                hosted.look_for_expired()
        finally:
            if taken:  # it failed, or was cancelled
                self.restore(taken)

    @ending
    async def settle(self, taken: dict[int, Held], left: Callable[[Held], None]) -> None:
        """Settle what was taken, a thousand in one commit, and tell of each, also if the client goes meanwhile.

        What it fails for is held again.
        """
        try:
            async for hosted, tags in lots(taken, SETTLED_AT_ONCE):
                hosted.store.settle([taken[tag].delivery.delivery for tag in tags])
                for tag in tags:
                    left(taken.pop(tag))
        finally:
            if taken:
                self.restore(taken)

    async def end(self, warn: Callable[[str, object], None]) -> None:
        """Have all that is held go back; what cannot is warned of."""
        taken = self.take_all()
        async for hosted, tags in lots(taken, AT_ONCE):
            await attempt(hosted.store.give_back([taken[tag].delivery for tag in tags], True), warn)
            hosted.look_for_expired()

    def overdue(self, now: float) -> tuple[int, float] | None:
        """Return tag and time limit, in seconds, of a message that is held for too long. Cost: 0.2 µs a queue."""
        for hosted, tags in self._tags.items():
            first, timeout_s = next(iter(tags)), hosted.consumer_timeout_s
            if now - self.held[first].since_s >= timeout_s:
                return first, timeout_s
        return None


async def lots(taken: dict[int, Held], most: int) -> AsyncIterator[tuple[HostedQueue, list[int]]]:
    """Yield what is settled, or goes back, together, as (queue, tags); others have their turn between two lots."""
    of_queue: dict[HostedQueue, list[int]] = {}
    for tag, held in taken.items():
        of_queue.setdefault(held.hosted, []).append(tag)
    is_first = True
    for hosted, tags in of_queue.items():
        for first in range(0, len(tags), most):
            if not is_first:
                await asyncio.sleep(0)
            is_first = False
            yield hosted, tags[first : first + most]


def settle_all(held: Iterable[Held]) -> None:
    """Settle what was held: those of one queue in one step, and one commit."""
    of_queue: dict[HostedQueue, list[Delivery]] = {}
    for one in held:
        of_queue.setdefault(one.hosted, []).append(one.delivery.delivery)
    for hosted, deliveries in of_queue.items():
        hosted.store.settle(deliveries)


def _unknown(tag: int) -> AmqpError:
    return AmqpError(ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}")


def _until(held: dict[int, Held], tag: int) -> Iterator[int]:
    for one in held:
        if one > tag:
            return
        yield one
