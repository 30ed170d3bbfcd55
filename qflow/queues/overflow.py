"""What a put does at a queue's limit: pure decisions. The queue acts on them."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from qflow.config import Overflow, QueueSettings
from qflow.errors import InvalidArgument
from qflow.memory.gate import ALWAYS
from qflow.named_tuples import NamedTuple

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Placed = TypeVar("Placed", covariant=True, default=int | None)  # noqa: PLC0105 - `help` shows it
    """What a put returns: int where the overflow policy appends every message it takes, else int or None."""
else:
    from typing import TypeVar

    Placed = TypeVar("Placed", covariant=True)  # noqa: PLC0105


class Decision(enum.Enum):
    ADMIT = "admit"
    WAIT = "wait"
    """Until something is settled, as long as the caller's time-out allows."""
    REFUSE = "refuse"
    MAKE_ROOM = "make room"
    """By dropping messages; see `ring`."""
    DROP = "drop"
    """What arrives."""
    DEAD_LETTER = "dead letter"
    """What arrives."""


AT_LIMIT = {
    Overflow.BLOCK: Decision.WAIT,
    Overflow.REJECT: Decision.REFUSE,
    Overflow.DROP_OLDEST: Decision.MAKE_ROOM,
    Overflow.DROP_NEWEST: Decision.DROP,
    Overflow.DEAD_LETTER: Decision.DEAD_LETTER,
}


class Depth(NamedTuple):
    """How deep a queue is: everything not settled, and what is on its way in."""

    messages: int
    bytes: int


def plus(one: Depth, other: Depth) -> Depth:
    """Return the depth of both together."""
    return Depth(one.messages + other.messages, one.bytes + other.bytes)


def decide(settings: QueueSettings, depth: Depth, arriving: Depth) -> Decision:
    """Decide about messages that arrive at a queue of this depth."""
    fits = may_hold(settings, depth.messages + arriving.messages, depth.bytes + arriving.bytes)
    return Decision.ADMIT if fits else when_full(settings)


def when_full(settings: QueueSettings) -> Decision:
    """Return what is decided about a put that the limits do not admit."""
    return AT_LIMIT[settings.on_overflow]


def may_hold(settings: QueueSettings, messages: int, size: int) -> bool:
    """Tell whether so many messages, of so many bytes together, are within the limits."""
    most_messages, most_bytes = settings.limit_messages, settings.limit_bytes
    return (most_messages is None or messages <= most_messages) and (most_bytes is None or size <= most_bytes)


def room(settings: QueueSettings, depth: Depth) -> tuple[int, int]:
    """Return by how many messages and bytes a queue of this depth may become deeper; `ALWAYS` where nothing limits."""
    messages, size = settings.limit_messages, settings.limit_bytes
    return ALWAYS if messages is None else messages - depth.messages, ALWAYS if size is None else size - depth.bytes


def excess(settings: QueueSettings, depth: Depth, arriving: Depth) -> Depth:
    """Return by how much the limits would be passed; not above 0 where they are not."""
    messages, size = settings.limit_messages, settings.limit_bytes
    return Depth(
        0 if messages is None else depth.messages + arriving.messages - messages,
        0 if size is None else depth.bytes + arriving.bytes - size,
    )


def may_resume(settings: QueueSettings, depth: Depth) -> bool:
    """Tell whether a queue that was at its limit has come down so far that blocked puts go on."""
    messages, size, ratio = settings.limit_messages, settings.limit_bytes, settings.resume_ratio
    return (messages is None or depth.messages <= messages * ratio) and (size is None or depth.bytes <= size * ratio)


def check_can_ever_fit(name: str, settings: QueueSettings, messages: int, size: int) -> None:
    """Refuse messages that would wait for ever. Raises InvalidArgument: not even the empty queue takes so much."""
    if settings.limit_messages is not None and messages > settings.limit_messages:
        raise InvalidArgument(
            f"{messages} messages can never fit queue {name!r} with limit_messages={settings.limit_messages}: "
            "put fewer at once"
        )
    if settings.limit_bytes is not None and size > settings.limit_bytes:
        raise InvalidArgument(
            f"{size} bytes can never fit queue {name!r} with limit_bytes={settings.limit_bytes}: put less"
        )
