"""What a client has and has not settled, by delivery tag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from qflow.amqp.errors import AmqpError, ReplyCode

if TYPE_CHECKING:
    from qflow.aio.delivery import AsyncDelivery
    from qflow.amqp.server.consuming import Consumer
    from qflow.amqp.server.hosted import HostedQueue

SHORTEST_TIMEOUT_S = 1.0
"""No message is looked at before."""


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

    def __len__(self) -> int:
        return len(self.held)

    def add(self, held: Held | None) -> None:
        """Have the next tag be that of a message that was sent; None: the client has settled it already."""
        self.last_tag += 1
        if held is not None:
            self.held[self.last_tag] = held

    def take(self, tag: int, multiple: bool) -> dict[int, Held]:
        """Take what a tag names; 0 and `multiple`: all.

        Raises:
            AmqpError: PRECONDITION_FAILED; there is no such tag.
        """
        held = self.held
        if not multiple:
            one = held.pop(tag, None)
            if one is None:
                raise _unknown(tag)
            return {tag: one}
        if tag == 0:
            return self.take_all()
        tags = list(_until(held, tag)) if tag <= self.last_tag else []
        if not tags:
            raise _unknown(tag)
        return {one: held.pop(one) for one in tags}

    def take_all(self) -> dict[int, Held]:
        """Take everything."""
        taken, self.held = self.held, {}
        return taken

    def restore(self, taken: dict[int, Held]) -> None:
        """Have what was taken again."""
        self.held = dict(sorted({**taken, **self.held}.items()))

    def overdue(self, now: float) -> tuple[int, float] | None:
        """Return tag and time limit, in seconds, of a message that is held for too long. Cost: 1 µs."""
        for tag, held in self.held.items():
            timeout_s = held.hosted.consumer_timeout_s
            if now - held.since_s >= timeout_s:
                return tag, timeout_s
            if now - held.since_s < SHORTEST_TIMEOUT_S:
                return None
        return None


def _unknown(tag: int) -> AmqpError:
    return AmqpError(ReplyCode.PRECONDITION_FAILED, f"unknown delivery tag {tag}")


def _until(held: dict[int, Held], tag: int) -> Iterator[int]:
    for one in held:
        if one > tag:
            return
        yield one
