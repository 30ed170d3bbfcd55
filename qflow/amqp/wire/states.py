"""The states of a connection and of a channel: tables of state and event.

What is not in a table is refused. The machines call `step`, and nothing else changes a state.
"""

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


class Step(IntEnum):
    """What happens to a connection."""

    HEADER = 0
    START_OK = auto()
    ACCEPT = auto()
    TUNE_OK = auto()
    ASK_VHOST = auto()
    OPEN_OK = auto()
    SEND_CLOSE = auto()
    END = auto()
    """`close` or `close-ok` has come, or there is nobody to tell."""


CONNECTION: dict[State, dict[Step, State]] = {
    State.WAITING: {Step.HEADER: State.STARTING, Step.END: State.OVER},
    State.STARTING: {Step.START_OK: State.LOGIN, Step.END: State.OVER},
    State.LOGIN: {
        Step.ACCEPT: State.TUNING,
        Step.SEND_CLOSE: State.CLOSING,
        Step.END: State.OVER,
    },
    State.TUNING: {Step.TUNE_OK: State.TUNED, Step.SEND_CLOSE: State.CLOSING, Step.END: State.OVER},
    State.TUNED: {Step.ASK_VHOST: State.OPENING, Step.SEND_CLOSE: State.CLOSING, Step.END: State.OVER},
    State.OPENING: {Step.OPEN_OK: State.OPEN, Step.SEND_CLOSE: State.CLOSING, Step.END: State.OVER},
    State.OPEN: {Step.SEND_CLOSE: State.CLOSING, Step.END: State.OVER},
    State.CLOSING: {Step.END: State.OVER},
    State.OVER: {},
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
    CLOSED = auto()


class ChannelStep(IntEnum):
    """What happens to a channel."""

    METHOD = 0
    PUBLISH = auto()
    HEADER = auto()
    """A content header with a body to come."""
    FRAGMENT = auto()
    """A body frame that is not the last one."""
    WHOLE = auto()
    """The header of an empty message, or the last body frame."""
    SEND_CLOSE = auto()
    CLOSED = auto()
    """`close` has come while the channel was open, or `close-ok`."""


CHANNEL: dict[ChannelState, dict[ChannelStep, ChannelState]] = {
    ChannelState.IDLE: {
        ChannelStep.METHOD: ChannelState.IDLE,
        ChannelStep.PUBLISH: ChannelState.WANTS_HEADER,
        ChannelStep.SEND_CLOSE: ChannelState.CLOSING,
        ChannelStep.CLOSED: ChannelState.CLOSED,
    },
    ChannelState.WANTS_HEADER: {
        ChannelStep.HEADER: ChannelState.WANTS_BODY,
        ChannelStep.WHOLE: ChannelState.IDLE,
        ChannelStep.SEND_CLOSE: ChannelState.CLOSING,
    },
    ChannelState.WANTS_BODY: {
        ChannelStep.FRAGMENT: ChannelState.WANTS_BODY,
        ChannelStep.WHOLE: ChannelState.IDLE,
        ChannelStep.SEND_CLOSE: ChannelState.CLOSING,
    },
    ChannelState.CLOSING: {ChannelStep.CLOSED: ChannelState.CLOSED},
    ChannelState.CLOSED: {},
}


class WrongState(QflowError):
    """An answer was given that the state of the connection does not allow; nothing was done."""
