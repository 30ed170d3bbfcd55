"""Lone puts: sent and answered on connections of their own, by whoever puts.

So a put need not go through the thread that reads answers: two hand-overs less. What the owner could not put at once
goes the long way, where it may wait and be given up.

The main thread takes its connection, uses it, and puts it back; a signal handler that comes meanwhile goes the long
way. Interrupted, the connection is closed, for its answer is still to come. All other threads share one: who comes
while it is in use is asked for by the next who has it, together with all others who came. A finalizer that comes while
its thread is at that line goes the long way.
"""

from __future__ import annotations

import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from threading import get_ident
from typing import Any

from qflow.errors import InDoubt, QflowError
from qflow.handlers import is_of_handler
from qflow.memory.waiting import is_main
from qflow.remote.client import requests
from qflow.remote.client.gathering import Gathering
from qflow.remote.client.link import ANSWER_BYTES, Link, Reply, Request, cut
from qflow.remote.wire.columns import lengths_of, total_of
from qflow.remote.wire.errors import decode_error
from qflow.remote.wire.frames import FrameReader, Head, WireError, encode_frame

SOON = 16
"""After so many puts that found no connection one is made: many programs make fewer."""
REST = 100
"""So many go the long way after one that could not be put at once."""
LATER = 10_000
"""After so many where the owner makes none."""
MOST_BYTES = 2**19
"""Of the requests that are asked together, or of one."""
FRAME_BYTES = 64
"""Of a request, beside its head and its messages."""
ITEM_BYTES = 4
"""Of a message, beside its body."""
LARGE = 2**14
"""Buffers that are so large, one with another, are not joined to be sent: that would take new pages each time."""
READ_BYTES = 2**12
HELLO_S = 10.0
_placed = re.compile(rb'.{4}\x01\0\0\0.{4}\{"result":\{"first":(\d+),"count":(\d+)\}\}', re.DOTALL).fullmatch
"""The most frequent answer, to one put, or several that were sent as one: a fifth of the time of a frame and JSON."""
NOT_MADE = Reply(None, [])
"""The outcome of a put that is to go the long way."""


class Asked:
    """A put, and what became of it; see `Waiting`."""

    __slots__ = ("behind", "gate", "is_sent", "lengths", "outcome", "request", "size")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.size = FRAME_BYTES + len(request.head)
        """At most so many bytes are sent."""
        self.lengths: list[int] | None = None
        """Of its bodies, if there are any."""
        for bodies in request.columns:
            self.lengths = lengths_of(bodies)
            self.size += ITEM_BYTES * len(bodies) + total_of(self.lengths)
        self.is_sent = False
        """The owner may have heard of it."""
        self.outcome: Reply | Exception | None = None
        self.gate = threading.Lock()
        """Opened for a thread that waits at it: it has an outcome, or is to ask."""
        self.behind: Asked | None = None
        """Who is let go of next, by this one."""

    def answered(self, outcome: Reply | Exception) -> None:
        self.outcome = outcome


def _grouped(together: Sequence[Asked]) -> list[Sequence[Asked]]:
    """Return those whose puts are sent as one."""
    if len(together) == 1:
        return [together]
    return [list(group) for _, group in groupby(together, lambda one: one.request.head)]


def _columns(group: Sequence[Asked]) -> Sequence[Sequence[Any]]:
    """Return the columns of one put in place of several."""
    if len(group) == 1:
        return group[0].request.columns
    return [[body for one in group for body in one.request.columns[0]]]


def _tell(group: Sequence[Asked], head: Head) -> None:
    """Give those whose puts were sent as one what became of them."""
    if "error" in head:
        for one in group:
            one.outcome = decode_error(head)
        return
    result, first = head["result"], 0
    for one in group:
        if result is None or len(group) == 1:
            one.outcome = Reply(result, [])
        else:
            count = len(one.request.columns[0])
            one.outcome = Reply({"first": result["first"] + first, "count": count}, [])
            first += count


class Line:
    """A connection on which puts are asked together, and all answered before others are. Not thread-safe.

    Puts into one queue that follow each other are sent as one, which is done or not done as a whole.
    """

    def __init__(self, one: socket.socket, target: str) -> None:
        self.socket = one
        self.most = 0
        """Puts that the owner takes together."""
        self.ended = False
        self._target = target
        self._reader = FrameReader(ANSWER_BYTES)
        self._buffer = memoryview(bytearray(READ_BYTES))

    def begin(self, uuid: str) -> bool:
        """Tell whether the owner of this spool takes it for lone puts."""
        self.socket.settimeout(HELLO_S)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        link = Link(self._target)
        welcome = self._told(link, requests.hello())
        if not isinstance(welcome, Reply) or welcome.result["uuid"] != uuid:
            return False
        taken = self._told(link, Request({"op": "lone"}))
        if not isinstance(taken, Reply):
            return False
        self.most = int(taken.result)
        self.socket.settimeout(None)
        return self.most > 0

    def _told(self, link: Link, request: Request) -> Reply | Exception | None:
        """Return the outcome of a request that begins."""
        one = Asked(request)
        link.begin(request, one)
        self.socket.sendall(b"".join(link.take()))
        while one.outcome is None:
            count = self.socket.recv_into(self._buffer)
            if count:
                link.feed(self._buffer[:count])
            else:
                link.end()
        return one.outcome

    def ask(self, one: Asked) -> Reply | Exception:
        """Return the outcome of one put."""
        self.ask_all([one])
        assert one.outcome is not None
        return one.outcome

    def ask_all(self, together: Sequence[Asked]) -> None:
        """Have several put at once; each has an outcome when this ends, by an exception, too."""
        try:
            if not self.ended:
                self._ask_all(together)
        except (OSError, WireError, IndexError) as error:
            self.ended = True
            if is_of_handler(error):
                raise
        except BaseException:
            self.ended = True
            raise
        finally:
            for one in together:
                one.outcome = one.outcome or self._doubt(one)

    def _ask_all(self, together: Sequence[Asked]) -> None:
        groups = _grouped(together)
        parts: list[bytes] = []
        for number, group in enumerate(groups, 1):
            lengths = group[0].lengths if len(group) == 1 else None
            parts += encode_frame(number, group[0].request.head, _columns(group), lengths)
        self._send(parts, together)
        answered = 0
        while answered < len(groups):
            count = self.socket.recv_into(self._buffer)
            if not count:
                self.ended = True
                return
            if len(groups) == 1 and (placed := _placed(self._buffer, 0, count)) is not None:
                _tell(groups[0], {"result": {"first": int(placed[1]), "count": int(placed[2])}})
                return
            for number, head, _, _ in self._reader.feed(self._buffer[:count]):
                if number:  # else it says that it ends
                    _tell(groups[number - 1], head)
                    answered += 1

    def _send(self, parts: list[bytes], together: Sequence[Asked]) -> None:
        """Send buffers one after the other. Where the other side had gone, nothing of them was sent."""
        size = sum(map(len, parts))
        for one in together:  # before it is: an interrupt may come when it was
            one.is_sent = True
        try:
            sent = self.socket.sendmsg([b"".join(parts)] if size < LARGE * len(parts) else parts)
        except ConnectionError as error:
            for one in together:
                one.is_sent = is_of_handler(error)
            raise
        if sent < size:  # less was sent where a signal came
            self.socket.sendall(b"".join(parts)[sent:])

    def _doubt(self, one: Asked) -> Reply | Exception:
        """Return the outcome of a put that was not answered."""
        if not one.is_sent:
            return NOT_MADE
        return InDoubt(f"{one.request.doubt} may hold or not: {cut(self._target)}")

    def close(self) -> None:
        """End it. Not while it is in use."""
        self.ended = True
        self.socket.close()


class Shared:
    """A line for many threads; see the module. None of them runs signal handlers."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self._asked: deque[Asked] = deque()
        """Not on their way yet, in order."""
        self._in_use = threading.Lock()
        """Held by the thread that asks; passed on by it to the first who waits."""
        self._gathering = Gathering(self._asked)

    def ask(self, one: Asked) -> Reply | Exception:
        """Return the outcome of a put."""
        one.gate.acquire()
        self._asked.append(one)
        is_free = self._in_use.acquire(blocking=False)  # and yet this one may have been asked for meanwhile
        if not is_free:
            self._gathering.arrived()
            one.gate.acquire()
        if one.behind is not None:
            one.behind.gate.release()
        if is_free or one.outcome is None:
            self._ask_with_others(one)
        assert one.outcome is not None
        return one.outcome

    def _ask_with_others(self, mine: Asked) -> None:
        """Ask for all who came, until what the calling thread asks for has an outcome; then have the next do so."""
        try:
            while mine.outcome is None:
                self._gathering.begin()
                together = self._take()
                try:
                    self.line.ask_all(together)
                finally:
                    self._gathering.end(0 if self.line.ended else len(together))
                    others = [one for one in together if one is not mine]
                    for one, behind in pairwise(others):
                        one.behind = behind
                    if others:
                        others[0].gate.release()
        finally:
            self._pass_on()

    def _take(self) -> list[Asked]:
        """Return who are asked for next: as many as the owner takes together, or one."""
        asked, size = self._asked, 0
        together: list[Asked] = []
        while asked and len(together) < self.line.most:
            size += asked[0].size
            if together and size > MOST_BYTES:
                break
            together.append(asked.popleft())
        return together

    def _pass_on(self) -> None:
        """Have the first who waits ask; it is free where nobody does."""
        while not self._asked:
            self._in_use.release()
            if not self._asked or not self._in_use.acquire(blocking=False):
                return
        self._asked[0].gate.release()

    def close(self) -> None:
        """End it; if it is in use, who uses it does so."""
        if self._in_use.acquire(blocking=False):
            self.line.close()
            self._pass_on()


class LonePuts:
    """See the module. Thread-safe, without a lock of its own."""

    def __init__(self, make: Callable[[], Line | None], later: Callable[[Callable[[], object]], object]) -> None:
        """
        Args:
            make: makes a connection; None: there is to be none.
            later: has a function called in another thread.
        """
        self._make = make
        self._later = later
        self._idle: list[Line] = []
        """Of the main thread, while it does not use it."""
        self._shared: Shared | None = None
        self._asking: set[int] = set()
        """Threads that are at that line."""
        self._lines: set[Line] = set()
        self._missed = SOON
        """So many more find no line, and one is made."""
        self._rest = 0
        """So many more go the long way."""
        self._is_over = False

    def ask(self, request: Request) -> Reply | Exception | None:
        """Return the outcome of a put; None if it was not made, and is to go the long way."""
        if self._rest > 0:
            self._rest -= 1
            return None
        one = Asked(request)
        if one.size > MOST_BYTES:
            return None
        outcome = self._ask_alone(one) if is_main() else self._ask_shared(one)
        if isinstance(outcome, Reply) and outcome.result is None:
            self._rest = REST
            return None
        return outcome

    def _ask_alone(self, one: Asked) -> Reply | Exception | None:
        """Ask on the line of the main thread."""
        line: Line | None = None
        try:
            line = self._idle[-1]
            del self._idle[-1]  # no call, so that an interrupt finds it here or there
            outcome = line.ask(one)
            if not line.ended:
                self._idle.append(line)
        except BaseException as error:
            self._close(line)
            if line is not None or not isinstance(error, IndexError):
                raise
            self._miss(self._open_alone)
            return None
        if line.ended or self._is_over:
            self._close(line)
        return outcome

    def _ask_shared(self, one: Asked) -> Reply | Exception | None:
        """Ask on the line of all other threads."""
        shared, me = self._shared, get_ident()
        if shared is None:
            self._miss(self._open_shared)
            return None
        if me in self._asking:
            return None
        self._asking.add(me)
        try:
            outcome = shared.ask(one)
        finally:
            self._asking.discard(me)
        if shared.line.ended or self._is_over:
            self._drop(shared)
        return outcome

    def _miss(self, make: Callable[[], object]) -> None:
        self._missed -= 1
        if self._missed <= 0 and not self._is_over:
            self._missed = SOON
            self._later(make)

    def _open_alone(self) -> None:
        if not self._idle and (line := self._open()) is not None:
            self._idle.append(line)
            if self._is_over:
                self.close()

    def _open_shared(self) -> None:
        if self._shared is None and (line := self._open()) is not None:
            self._shared = Shared(line)
            if self._is_over:
                self.close()

    def _open(self) -> Line | None:
        """Make a connection. In another thread, one after the other."""
        line: Line | None = None
        with suppress(OSError, QflowError):
            line = self._make()
        if line is None:
            self._missed = LATER
        else:
            self._lines.add(line)
        return line

    def _close(self, line: Line | None) -> None:
        if line is not None:
            line.close()
            self._lines.discard(line)

    def _drop(self, shared: Shared) -> None:
        """End a line of threads, unless one of them is at it: then that does so."""
        if self._shared is shared:
            self._shared = None
        shared.close()
        self._lines.discard(shared.line)

    def close(self) -> None:
        """End all connections; who waits for an answer is told so. Twice is fine."""
        self._is_over = True
        for line in list(self._lines):
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_RDWR)
        if (shared := self._shared) is not None:
            self._drop(shared)
        while self._idle:
            with suppress(IndexError):
                self._close(self._idle.pop())

    def leave(self) -> None:
        """In a forked child: close the copies of everything."""
        self._is_over = True
        self._shared = None
        self._idle.clear()
        for line in self._lines:
            line.socket.close()


def make_line(one: socket.socket, target: str, uuid: str) -> Line | None:
    """Return a connection for lone puts to the owner of a spool; None if it makes none."""
    try:
        line = Line(one, target)
        if line.begin(uuid):
            return line
    except BaseException:
        one.close()
        raise
    one.close()
    return None
