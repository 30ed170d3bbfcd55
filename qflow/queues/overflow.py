"""What a put does at a queue's limit: pure decisions. The queue acts on them."""

from __future__ import annotations

import enum
from typing import NamedTuple

from qflow.config import Overflow, QueueSettings
from qflow.errors import InvalidArgument


class Decision(enum.Enum):
    ADMIT = "admit"
    WAIT = "wait"
    """Until something is settled, as long as the caller's time-out allows."""
    REFUSE = "refuse"


class Depth(NamedTuple):
    """How deep a queue is: everything not settled, and what is on its way in."""

    messages: int
    bytes: int


def decide(settings: QueueSettings, depth: Depth, arriving: Depth) -> Decision:
    """Decide about messages that arrive at a queue of this depth."""
    limit_messages, limit_bytes = settings.limit_messages, settings.limit_bytes
    if (limit_messages is None or depth.messages + arriving.messages <= limit_messages) and (
        limit_bytes is None or depth.bytes + arriving.bytes <= limit_bytes
    ):
        return Decision.ADMIT
    if settings.on_overflow is Overflow.REJECT:
        return Decision.REFUSE
    return Decision.WAIT


def check_can_ever_fit(name: str, settings: QueueSettings, arriving: Depth) -> None:
    """Refuse what would wait for ever.

    Raises:
        InvalidArgument: even the empty queue would not admit it.
    """
    if settings.limit_messages is not None and arriving.messages > settings.limit_messages:
        raise InvalidArgument(
            f"{arriving.messages} messages can never fit queue {name!r} with limit_messages={settings.limit_messages}: "
            "put fewer at once"
        )
    if settings.limit_bytes is not None and arriving.bytes > settings.limit_bytes:
        raise InvalidArgument(
            f"{arriving.bytes} bytes can never fit queue {name!r} with limit_bytes={settings.limit_bytes}: put less"
        )
