"""The socket of a connection for threads: requests are sent on it, and one thread reads the answers.

It refers to none who ask but those who wait for an answer. A request is handed to the socket as far as that takes it;
the reader sends the rest. The main thread asks out of reach of its signal handlers (see `memory.waiting`).
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from qflow.errors import BrokerClosed, ForkedProcess, QflowError, StorageError
from qflow.loggers import get_logger
from qflow.memory.line import Wake
from qflow.memory.waiting import in_place, is_main, shelter
from qflow.remote.client.link import CLOSE_S, Link, Reason, Request, cut
from qflow.remote.client.lone import LARGE, Line, LonePuts
from qflow.remote.client.promises import Call, JobThread
from qflow.remote.client.sockets import WakePipe, hand_in, send_some, wake_pipe
from qflow.remote.wire.frames import WireError
from qflow.starting import start

T = TypeVar("T")
READ_BYTES = 2**18
"""Read at once, into a buffer that is kept: to allocate as much for each answer would cost more than to read it."""
MOST_UNSENT_BYTES = 2**17
"""Acks that nobody waits for wait while more than that is not sent: the owner reads no more for now."""
_logger = get_logger("qflow")
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class Channel:
    """See the module. Thread-safe, but for what says that it is called under the lock."""

    def __init__(self, one: socket.socket, target: str, reason: Reason | None) -> None:
        """Take over a connected socket; start the reader. `reason`: see `Link`."""
        self.target = target
        self.lock: Any = threading.Lock()
        """Held for a moment: of the link, and of what callers hold of it."""
        self._process = os.getpid()
        self.link = Link(target, reason)
        self._socket = one
        one.setblocking(False)
        self._wake_pipe: WakePipe | None = wake_pipe(one, target)
        """None: the reader has ended."""
        self._out: deque[memoryview] = deque()
        self._unsent = 0
        """Bytes in there."""
        self._waking: list[Wake] = []
        """Of threads that wait until there are few."""
        self._is_ending = False
        self._asked: deque[tuple[Request, Call]] = deque()
        """Of the main thread, for the reader to begin."""
        self.futures = JobThread("qflow-remote-futures")
        self._opener = JobThread("qflow-remote-opener")
        """Makes connections for lone puts, for which the owner may let it wait."""
        self._ended: list[Callable[[], object]] = []
        """Called at the end."""
        self.lone: LonePuts | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._reader = threading.Thread(target=self._read, name="qflow-remote", daemon=True)
        _channels.add(self)
        try:
            start(self._reader)
        except BaseException:
            one.close()
            raise

    @property
    def closed(self) -> bool:
        """No call can be made."""
        return self._is_ending or self.link.refuses

    @property
    def is_cut(self) -> bool:
        """No call can be made, and nobody has closed it here."""
        return self.link.refuses and not self._is_ending

    # Asking ----------------------------------------------------------------------------------------------------------

    def hand_over(self, request: Request, call: Call) -> None:
        """Have a request sent: by this thread, or if it runs signal handlers, by the reader."""
        if is_main():
            self._asked.append((request, call))  # an interrupt comes before this or after
            self._rouse()
        else:
            in_place(partial(self._begin, request, call))

    def _rouse(self) -> None:
        """Have the reader look what there is to be done."""
        pipe = self._wake_pipe
        if pipe is not None:
            pipe.ring()
        if self.closed or os.getpid() != self._process:
            shelter(self._begin_asked)  # nobody else may

    def _begin(self, request: Request, call: Call) -> None:
        with self.lock:
            self._begin_locked(request, call)
            self.send()

    def _begin_locked(self, request: Request, call: Call) -> None:
        self._check()
        call.number = number = self.link.begin(request, call)
        more = None if call.begun is None else call.begun(number)
        if more is not None:
            self.link.tell(more)

    def _begin_asked(self) -> None:
        """Begin what the main thread has asked for."""
        with self.lock:
            while self._asked:
                request, call = self._asked.popleft()
                if call.given_up:
                    continue
                try:
                    self._begin_locked(request, call)
                except Exception as error:
                    call.answered(error)
            self.send()

    def check_open(self) -> None:
        """Raises BrokerClosed: it has ended. ForkedProcess: it is another process's."""
        self._check()
        self.link.check()

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"this connection to {self.target} belongs to process {self._process}: connect after the fork"
            )
        if self._is_ending:
            raise BrokerClosed(f"the connection to the owner of {self.target} was closed: connect again")

    def locked(self, function: Callable[[], T]) -> T:
        """Return what a function returns that looks at, or changes, what callers hold."""

        def work() -> T:
            with self.lock:
                return function()

        return shelter(work)

    def open_lone(self, make: Callable[[], Line | None]) -> None:
        """Have lone puts made on a connection of their own, made when there are many."""
        self.lone = LonePuts(make, self._do_later)

    def _do_later(self, job: Callable[[], object]) -> None:
        self.locked(self._opener.start)
        self._opener.do(job)

    # Sending, under the lock -----------------------------------------------------------------------------------------

    def must_wait(self, wake: Wake) -> bool:
        """Tell whether much is not sent yet; `wake` is called then when it is. Under the lock."""
        if self._unsent <= MOST_UNSENT_BYTES:
            return False
        self._waking.append(wake)
        return True

    def send(self) -> None:
        """Send what the socket takes now; the reader sends the rest."""
        if self.link.has_output:
            parts, waits = self.link.take(), bool(self._out)
            size = sum(map(len, parts))
            self._out += map(memoryview, [b"".join(parts)] if size < LARGE * len(parts) else parts)
            self._unsent += size
            if waits:
                return  # the reader is at it
        self._flush()
        if self._out and self._wake_pipe is not None:
            self._wake_pipe.ring()

    def _flush(self) -> None:
        try:
            self._unsent -= send_some(self._socket, self._out)
        except OSError:
            self._out.clear()  # the reader hears of it, too
            self._unsent = 0
        if self._waking and self._unsent <= MOST_UNSENT_BYTES // 2:
            self._wake()

    def _wake(self) -> None:
        """Have those look again who wait until there is less to be sent. Under the lock."""
        waking, self._waking = self._waking, []
        for wake in waking:
            wake()

    # Reading ---------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read until the end, and tell everybody then, whatever it was. In the thread."""
        why: QflowError | None = None
        try:
            self._read_all()
        except WireError as error:
            why = StorageError(f"{self.target}: {error}; the connection was ended: connect again")
        except ConnectionError:
            pass  # ended by the owner, which has not read all, or never let this one in
        except OSError as error:
            why = BrokerClosed(cut(self.target, error.strerror or repr(error)))
        except BaseException as error:
            _logger.exception("the reader of the connection to %s failed", self.target)
            why = StorageError(f"{self.target}: reading failed: {error!r}; the connection was ended: connect again")
        left = in_place(partial(self._end, why))
        if left is not None:
            hand_in(self._socket, left, CLOSE_S)
        self._socket.close()

    def _read_all(self) -> None:
        assert self._wake_pipe is not None
        poll, told = select.poll(), self._wake_pipe.told
        poll.register(told, select.POLLIN)
        file, wanted = self._socket.fileno(), 0
        while True:
            if wanted != (wants := select.POLLIN | select.POLLOUT if self._out else select.POLLIN):
                wanted = wants
                poll.register(file, wanted)
            events = dict(poll.poll())
            if told in events:
                os.read(told, 4096)
                if self._is_ending:
                    return
                if self._asked:
                    in_place(self._begin_asked)
            if events.get(file, 0) & select.POLLOUT:
                in_place(self._flush_locked)
            if events.get(file, 0) & ~select.POLLOUT and not self._receive():
                return

    def _flush_locked(self) -> None:
        with self.lock:
            self._flush()

    def _receive(self) -> bool:
        try:
            count = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return True
        in_place(partial(self._take, self._buffer[:count]))
        return count > 0

    def _take(self, data: memoryview) -> None:
        with self.lock:
            self.link.feed(data)
            if self.link.has_output:
                self.send()

    def _end(self, why: QflowError | None) -> deque[memoryview] | None:
        """Tell everybody; return what is to be sent before the socket is closed, None where the owner need not hear."""
        with self.lock:
            left = self._out if self._is_ending and self.link.must_be_heard else None
            self._out, self._wake_pipe = deque(), None
            if self._is_ending and why is None:
                why = BrokerClosed(f"the connection to the owner of {self.target} was closed: connect again")
            self.link.end(why)
            if self.lone is not None:
                self.lone.close()
            self.futures.end()
            self._opener.end()
            for ended in self._ended:
                ended()
            self._wake()
        self._begin_asked()
        return left

    # The end ---------------------------------------------------------------------------------------------------------

    def welcomed(self, limits: dict[str, int]) -> None:
        """The owner has told its limits."""
        self.locked(partial(self.link.welcomed, limits))

    def listen(self, call: Callable[[dict[str, Any]], object], ended: Callable[[], object]) -> None:
        """Have the heads of notices given to a function, and have one called at the end. All under the lock."""
        self.link.notices.append(call)
        self._ended.append(ended)

    def close(self) -> None:
        """End it; see `Connection.close`."""
        if os.getpid() == self._process:
            shelter(self._tell_end)
            if threading.current_thread() is not self._reader:
                self._reader.join()

    def _tell_end(self) -> None:
        with self.lock:
            if not self._is_ending and self.link.ended is None:
                self._is_ending = True
                if self.lone is not None:
                    self.lone.close()
                if self._wake_pipe is not None:
                    self._wake_pipe.ring()

    def let_go(self) -> None:
        """End it, for nobody has its connection any more. A finalizer, which comes in the middle of anything."""
        self._is_ending = True
        if (pipe := self._wake_pipe) is not None:
            pipe.ring()

    def leave(self) -> None:
        """In a forked child: close the copies of everything."""
        self.lock = threading.Lock()
        self._socket.close()
        if self.lone is not None:
            self.lone.leave()
        if self._wake_pipe is not None:
            self._wake_pipe.close()
            self._wake_pipe = None


def _after_fork() -> None:
    for one in list(_channels):
        one.leave()
    _channels.clear()


os.register_at_fork(after_in_child=_after_fork)
