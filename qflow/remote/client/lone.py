"""Lone puts: sent and answered on a connection of their own, by whoever puts.

So a put need not go through the thread that reads answers: two hand-overs less. The connection is taken from a list,
used, and put back; a signal handler, or another thread, that comes meanwhile finds another one, or goes the long way.
One that was interrupted is closed, for its answer is still to come. What the owner could not put at once goes the long
way, too, where it may wait and be given up.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from qflow.errors import QflowError
from qflow.remote.client import requests
from qflow.remote.client.link import Link, Reply, Request

SOON = 16
"""After so many puts that found no connection one is made: many programs make fewer."""
MOST = 8
"""Connections: as many threads put at the same time on those."""
REST = 100
"""So many go the long way after one that could not be put at once."""
LATER = 10_000
"""After so many where the owner makes none."""
MOST_BYTES = 2**19
"""Of the messages of a request."""
READ_BYTES = 2**12
HELLO_S = 10.0


class _Outcome:
    """See `Waiting`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Reply | Exception | None = None

    def answered(self, outcome: Reply | Exception) -> None:
        self.value = outcome


class Line:
    """A connection on which one call follows the other. Not thread-safe."""

    def __init__(self, one: socket.socket, target: str) -> None:
        self.socket = one
        self._link = Link(target)
        self._buffer = memoryview(bytearray(READ_BYTES))

    def ask(self, request: Request) -> Reply | Exception:
        """Return the outcome; raises what cannot be sent."""
        outcome = _Outcome()
        self._link.begin(request, outcome)
        try:
            self.socket.sendall(b"".join(self._link.take()))
            while outcome.value is None:
                count = self.socket.recv_into(self._buffer)
                if not count:
                    self._link.end()
                else:
                    self._link.feed(self._buffer[:count])
        except OSError:
            self._link.end()
        assert outcome.value is not None
        return outcome.value

    @property
    def ended(self) -> bool:
        return self._link.ended is not None

    def begin(self, uuid: str, limits: dict[str, int]) -> bool:
        """Tell whether the owner of this spool takes it for lone puts."""
        self.socket.settimeout(HELLO_S)
        welcome = self.ask(requests.hello())
        if not isinstance(welcome, Reply) or welcome.result["uuid"] != uuid:
            return False
        self._link.welcomed(limits)
        taken = self.ask(Request({"op": "lone"}))
        self.socket.settimeout(None)
        return isinstance(taken, Reply) and taken.result is True


class LonePuts:
    """See the module. Thread-safe, without a lock."""

    def __init__(self, make: Callable[[], Line | None], later: Callable[[Callable[[], object]], object]) -> None:
        """
        Args:
            make: makes a connection; None: there is to be none.
            later: has a function called in another thread.
        """
        self._make = make
        self._later = later
        self._idle: list[Line] = []
        self._lines: set[Line] = set()
        self._missed = SOON
        """So many more find no line, and another one is made."""
        self._rest = 0
        """So many more go the long way."""
        self._is_over = False

    def ask(self, request: Request) -> Reply | Exception | None:
        """Return the outcome of a put; None if it was not made, and is to go the long way."""
        if self._rest > 0:
            self._rest -= 1
            return None
        line: Line | None = None
        try:
            line = self._idle.pop()
            outcome = line.ask(request)
            if not line.ended:
                self._idle.append(line)
        except BaseException as error:
            self._close(line)
            if line is not None or not isinstance(error, IndexError):
                raise
            self._miss()
            return None
        if line.ended or self._is_over:
            self._close(line)
        if isinstance(outcome, Reply) and outcome.result is None:
            self._rest = REST
            return None
        return outcome

    def _miss(self) -> None:
        self._missed -= 1
        if self._missed <= 0 and len(self._lines) < MOST and not self._is_over:
            self._missed = SOON
            self._later(self._open)

    def _open(self) -> None:
        """Make a connection. In another thread, one after the other."""
        if self._idle or len(self._lines) >= MOST:
            return
        try:
            line = self._make()
        except (OSError, QflowError):
            line = None
        if line is None:
            self._missed = LATER
            return
        self._lines.add(line)
        self._idle.append(line)
        if self._is_over:
            self.close()

    def _close(self, line: Line | None) -> None:
        if line is not None:
            line.socket.close()
            self._lines.discard(line)
            with suppress(ValueError):
                self._idle.remove(line)

    def close(self) -> None:
        """End all connections; who waits for an answer is told so. Twice is fine."""
        self._is_over = True
        for line in list(self._lines):
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)
        while self._idle:
            with suppress(IndexError):
                self._close(self._idle.pop())

    def leave(self) -> None:
        """In a forked child: close the copies of everything."""
        self._is_over = True
        self._idle.clear()
        for line in self._lines:
            line.socket.close()


def make_line(one: socket.socket, target: str, uuid: str, limits: dict[str, int]) -> Line | None:
    """Return a connection for lone puts to the owner of a spool; None if it makes none."""
    try:
        line = Line(one, target)
        if line.begin(uuid, limits):
            return line
    except BaseException:
        one.close()
        raise
    one.close()
    return None
