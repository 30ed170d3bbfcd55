"""Which retained messages a new subscription gets live as well: those are not sent to it twice.

A search among retained messages takes its time, and may find what was published since it was asked for. Each message
that is to be retained has a mark, its number in this run of the server, and passes by the hub in that order.
"""

from __future__ import annotations

import secrets

from qflow.mqtt.model.messages import Message

_RUN_BYTES = 4


class Marks:
    """See the module. One a hub."""

    def __init__(self) -> None:
        self.passed = 0
        """The highest number that has passed by the hub."""
        self._run = secrets.token_hex(_RUN_BYTES)
        self._last = 0

    def give(self, message: Message) -> None:
        """Mark a message that is to be retained."""
        self._last += 1
        message.mark = f"{self._run}{self._last}"

    def passes(self, message: Message) -> None:
        """Note that a message has passed by the hub."""
        self.passed = max(self.passed, self._number(message))

    def is_later(self, message: Message, passed: int) -> bool:
        """Tell whether a message passes by after those up to this number."""
        return self._number(message) > passed

    def _number(self, message: Message) -> int:
        """Return the number of a message; 0 if it is of another run, or has none."""
        run, number = message.mark[: 2 * _RUN_BYTES], message.mark[2 * _RUN_BYTES :]
        return int(number) if run == self._run and number.isdecimal() else 0
