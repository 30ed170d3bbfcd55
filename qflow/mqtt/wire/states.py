"""The states of a connection, and which follows which."""

from __future__ import annotations

from enum import IntEnum

from qflow.errors import QflowError


class State(IntEnum):
    """Of a connection."""

    WAITING = 0
    """For CONNECT."""
    CONNECTING = 1
    """CONNECT has come; this side decides."""
    OPEN = 2
    CLOSED = 3
    """Nothing is read any more; what is to be sent still is."""


NEXT = {
    State.WAITING: frozenset({State.CONNECTING, State.CLOSED}),
    State.CONNECTING: frozenset({State.OPEN, State.CLOSED}),
    State.OPEN: frozenset({State.CLOSED}),
    State.CLOSED: frozenset[State](),
}


class WrongState(QflowError):
    """An answer was given that the state of the connection does not allow; nothing was done."""
