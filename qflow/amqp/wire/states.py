"""The states of a connection, and which follows which; those of a channel."""

from __future__ import annotations

from enum import IntEnum, auto

from qflow.errors import QflowError


class State(IntEnum):
    """Of a connection."""

    WAITING = 0
    """For the protocol header."""
    STARTING = auto()
    """`start` is sent."""
    LOGIN = auto()
    """This side decides about the login."""
    TUNING = auto()
    """`tune` is sent."""
    TUNED = auto()
    """`tune-ok` has come."""
    OPENING = auto()
    """This side decides about the virtual host."""
    OPEN = auto()
    CLOSING = auto()
    """`close` is sent: what comes is ignored, up to `close-ok`."""
    OVER = auto()
    """Nothing is read any more; what is to be sent still is."""


NEXT = {
    State.WAITING: frozenset({State.STARTING, State.OVER}),
    State.STARTING: frozenset({State.LOGIN, State.OVER}),
    State.LOGIN: frozenset({State.TUNING, State.CLOSING, State.OVER}),
    State.TUNING: frozenset({State.TUNED, State.CLOSING, State.OVER}),
    State.TUNED: frozenset({State.OPENING, State.CLOSING, State.OVER}),
    State.OPENING: frozenset({State.OPEN, State.CLOSING, State.OVER}),
    State.OPEN: frozenset({State.CLOSING, State.OVER}),
    State.CLOSING: frozenset({State.OVER}),
    State.OVER: frozenset[State](),
}

TRUSTED = frozenset({State.TUNING, State.TUNED, State.OPENING, State.OPEN, State.CLOSING})
"""A client that has logged in is told what was wrong; any other one finds its connection closed."""


class ChannelState(IntEnum):
    """Of a channel that is open, or is being closed by this side."""

    IDLE = 0
    """Methods are taken."""
    WANTS_HEADER = auto()
    """A publish has come: its content header follows."""
    WANTS_BODY = auto()
    CLOSING = auto()
    """`close` is sent: what comes is ignored, up to `close-ok`."""


class WrongState(QflowError):
    """An answer was given that the state of the connection does not allow; nothing was done."""
