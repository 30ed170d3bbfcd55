"""Which retained messages a new subscription gets live as well: those are not sent to it twice.

A search among retained messages takes its time, and may find what was published since it was asked for. Each message
that is to be retained has a mark, its number in this run of the server. Those that are stored pass by the hub in that
order, after their commits; those with QoS 0 are numbered apart, below 0, for they pass by at once.
"""

from __future__ import annotations

import secrets

from qflow.mqtt.model.messages import Message
from qflow.named_tuples import NamedTuple

_RUN_BYTES = 4
_MOST_DIGITS = 20
"""Of a number that is one of ours: what programs write as a mark may be anything."""


class Passed(NamedTuple):
    """What has passed by the hub at some moment."""

    stored: int
    at_once: int


class Marks:
    """See the module. One a hub."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(_RUN_BYTES)
        self._last = 0
        self._passed = 0
        self._at_once = 0

    @property
    def passed(self) -> Passed:
        """What has passed by the hub until now."""
        return Passed(self._passed, self._at_once)

    def give(self, message: Message) -> None:
        """Mark a message that is to be stored, and retained."""
        self._last += 1
        message.mark = f"{self._run}{self._last}"

    def give_at_once(self, message: Message) -> None:
        """Mark a message with QoS 0 that is to be retained, and passes by now."""
        self._at_once += 1
        message.mark = f"{self._run}-{self._at_once}"

    def passes(self, message: Message) -> None:
        """Note that a message that was stored has passed by the hub."""
        self._passed = max(self._passed, self._number(message))

    def is_later(self, message: Message, passed: Passed) -> bool:
        """Tell whether a message passes by after those."""
        number = self._number(message)
        return number > passed.stored if number >= 0 else -number > passed.at_once

    def _number(self, message: Message) -> int:
        """Return the number of a message; 0 if it is of another run, or has none."""
        run, number = _taken_apart(message.mark)
        return number if run == self._run else 0


def is_stored(mark: str) -> bool:
    """Tell whether a message with a mark is, or was, in the stream."""
    return _taken_apart(mark)[1] > 0


def comes_behind(mark: str, other: str) -> bool | None:
    """Tell whether a message that is stored comes behind another, or is it; None: they are of different runs."""
    (run, number), (other_run, other_number) = _taken_apart(mark), _taken_apart(other)
    return number >= other_number if run == other_run else None


def _taken_apart(mark: str) -> tuple[str, int]:
    run, number = mark[: 2 * _RUN_BYTES], mark[2 * _RUN_BYTES :]
    is_number = len(number) <= _MOST_DIGITS and number.removeprefix("-").isdecimal()
    return run, int(number) if is_number else 0
