"""Who takes messages: a name, and the process it belongs to. Noted with each delivery, told by `stats()`.

What a get notes is the name it was given, or the thread it is called by: an attribute of that thread, so that this
costs a get next to nothing, and is right also when the thread has ended. Its name is asked for when somebody looks.
"""

from __future__ import annotations

import os
import threading
from typing import Any, TypeAlias

from qflow.errors import InvalidArgument, QflowError

NAME_BYTES = 255
"""Of a consumer's name, in UTF-8, at most."""


class ConsumerClosed(QflowError):
    """A queue that is watched for slow consumers has closed this one."""


class Taker:
    """One that is more than a name: a consumer, or what came from another process."""

    __slots__ = ("in_hand", "is_closed", "kind", "name", "pid", "since_s")

    def __init__(self, name: str, kind: str, pid: int | None = None, in_hand: int | None = None) -> None:
        self.name = name
        self.kind = kind
        """As `ConsumerStats.kind`."""
        self.since_s = 0.0
        """When it came, on the monotonic clock."""
        self.pid = os.getpid() if pid is None else pid
        self.is_closed = False
        """It was too slow: a consumer of another process is told so by its next get."""
        self.in_hand = in_hand
        """Of what is left of a batch, so many at most, the first, were handed out, to callbacks or in a loop.

        The others were fetched ahead, and nobody has seen them. None: all were handed out.
        """


Noted: TypeAlias = Taker | threading.Thread | str
here = threading.local()
"""Each thread's own: `thread`, which is noted of it, and `loop`, that of the last of its tasks that took.

Of no class of ours, of which an attribute takes longer; so there is neither before its first use.
"""


def this_thread() -> Noted:
    """Return what is noted of the running thread."""
    try:
        return here.thread  # type: ignore[no-any-return]
    except AttributeError:
        here.thread = threading.current_thread()
        return here.thread  # type: ignore[no-any-return]


def named(taker: Noted) -> tuple[str, int]:
    """Return the name and the process of what was noted."""
    if isinstance(taker, str):
        return taker, os.getpid()
    if isinstance(taker, Taker):
        return taker.name, taker.pid
    return taker.name, os.getpid()


def kind_of(taker: Noted) -> str:
    """Return what was noted is, as `ConsumerStats.kind`."""
    return taker.kind if isinstance(taker, Taker) else "get"


def parse_name(value: Any, argument: str = "consumer") -> str:
    """Return the name of a consumer. Raises InvalidArgument: it is no text, empty, or too long."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{argument} must be str, or None, not {type(value).__name__}")
    encoded = value.encode("utf-8", "backslashreplace")
    if not 0 < len(encoded) <= NAME_BYTES:
        raise InvalidArgument(f"{argument} must have 1 to {NAME_BYTES} bytes in UTF-8, got {len(encoded)}")
    return encoded.decode()


def cut_name(text: str) -> str:
    """Return what somebody else has named as the name of a consumer."""
    return text.encode("utf-8", "backslashreplace")[:NAME_BYTES].decode("utf-8", "ignore") or "?"
