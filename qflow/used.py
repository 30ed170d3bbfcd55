"""What the doors of a process use of a broker for themselves, so that nobody takes it from them meanwhile."""

from __future__ import annotations

from contextlib import AbstractContextManager

from qflow.errors import InvalidArgument


class Used:
    """See the module. By kind and name: ("queue", "q"), ("stream", "s"), ("subscription", "s", "r")."""

    def __init__(self, changing: AbstractContextManager[object]) -> None:
        self._changing = changing
        """Held by who deletes."""
        self._doors: dict[tuple[str, ...], str] = {}

    def begin(self, door: str, *what: str) -> None:
        """Have something deleted by nobody until `end`; it need not be there yet. Waits for changes under way."""
        with self._changing:
            self._doors[what] = door

    def end(self, *what: str) -> None:
        """Use it no more; twice is fine."""
        self._doors.pop(what, None)

    def check(self, *what: str) -> None:
        """Refuse to delete what a door uses, or to take topics from it. Holding `changing`. Raises InvalidArgument."""
        door = self._doors.get(what)
        if door is not None:
            kind, *names = what
            raise InvalidArgument(
                f"{kind} {names[-1]!r} is used by {door} of the process that owns the spool: end that first"
            )
