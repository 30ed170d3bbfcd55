"""Connections for lone puts, served by one thread: on each of them a put is answered before the next one comes.

The thread reads puts and hands them to the log; the log's writer sends the answers itself, as soon as they are synced.
So neither waits for an event loop, or for a thread. Where one caller puts alone, the thread confirms its puts itself,
if nobody else is at the log. A put that something stands in the way of, as a limit does, is not done, and answered with
null: its caller asks again on the other connection, where it may wait.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from qflow.broker import Broker
from qflow.errors import QflowError
from qflow.queues.queue import parts_of
from qflow.remote.wire.errors import encode_error
from qflow.remote.wire.frames import Frame, FrameReader, Head, WireError, encode_frame

MOST_BYTES = 2**19 + 2**17
"""Of a frame."""
MOST_LONE = 128
"""Connections of one broker."""
FEW = 2
"""As many answers are sent by the writer; others by the thread, which it would get in the way of."""
READ_BYTES = 2**18
PLAIN_PUT = frozenset({"op", "queue", "single"})
"""What the head of a put has where the messages are their bodies, and wait for room as long as it takes."""

_logger = logging.getLogger("qflow")


class Lone:
    """One connection. Nothing is written to its socket, or read, when `over` is called."""

    def __init__(self, broker: Broker, thread: LoneThread, one: socket.socket, over: Callable[[], object]) -> None:
        self.socket = one
        self._thread = thread
        self._broker = broker
        self._over = over
        self._reader = FrameReader(MOST_BYTES)
        self._answered = threading.Lock()
        """Held while a put is under way, and from the end on."""
        self._under_way: list[int] = []
        """Its number: who takes it from here answers."""
        self._has_ended = False

    def stop(self) -> None:
        """Read nothing more; what is under way is answered."""
        with suppress(OSError):  # the other side has gone
            self.socket.shutdown(socket.SHUT_RD)

    # In the thread ---------------------------------------------------------------------------------------------------

    def read(self, buffer: memoryview) -> None:
        """Take what has come; raises OSError, WireError: that was all."""
        count = self.socket.recv_into(buffer)
        if not count:
            raise ConnectionResetError
        for frame in self._reader.feed(buffer[:count]):
            if self._under_way:
                raise WireError("a lone put is sent when the one before is answered")
            self._answered.acquire()  # the writer may still be about to let go of it
            self._serve(frame)

    def end(self) -> None:
        """Nothing more is read."""
        self._has_ended = True
        self._look()

    def _look(self) -> None:
        if self._answered.acquire(blocking=False):
            self._over()

    def _serve(self, frame: Frame) -> None:
        self._under_way.append(frame.number)
        self._thread.under_way.add(self)
        try:
            begun = self._put(frame)
        except QflowError:
            begun = False  # asked again, it is raised where it is waited for
        except Exception:
            _logger.exception("%s: a put of a connection failed", self._broker.path)
            self._answer(None)
            return
        if not begun:
            self._answer(b'{"result":null}')

    def _put(self, frame: Frame) -> bool:
        """Have messages put if nothing stands in the way; the answer is sent when they are synced."""
        _, head, columns, _ = frame
        name, bodies = head.get("queue"), columns[0] if len(columns) == 1 else []
        if head.get("op") != "put" or not PLAIN_PUT.issuperset(head) or type(name) is not str:
            return False
        if not bodies or None in bodies:
            return False
        puts = parts_of(self._broker.queue(name)).puts
        if puts.settings.ttl_s is not None or puts.admission.line:
            return False
        put = puts.draft(bodies, True, 0)
        if not puts.enter_at_once(put, waits=self._thread.is_alone):
            return False
        log = puts.context.log
        if log is None or not put.lane.is_logged:
            self._done(put)
            return True
        if log.turn.request is put:
            log.wait(put)
            self._done(put)
            return True
        self._thread.log = log
        log.tell(put, partial(self._thread.tell, partial(self._done, put)))
        return True

    # And in the writer -----------------------------------------------------------------------------------------------

    def _done(self, put: Any) -> None:
        """Tell what became of a put."""
        if put.error is not None:
            self._answer(encode_error(put.error))
        else:
            self._answer(b'{"result":{"first":%d,"count":%d}}' % (put.first, len(put.records)))

    def _answer(self, head: Head | bytes | None) -> None:
        """Answer what is under way, once; None ends the connection, and so does a caller that does not read."""
        try:
            number = self._under_way.pop()
        except IndexError:
            return
        data = b"" if head is None else b"".join(encode_frame(number, head))
        try:
            sent = self.socket.send(data) if data else -1
        except OSError:
            sent = -1
        if sent < len(data):
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.under_way.discard(self)
        self._answered.release()
        if self._has_ended:
            self._look()


class LoneThread:
    """The thread; started for the first connection."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._all: dict[int, Lone] = {}
        self.under_way: set[Lone] = set()
        """Those that wait for an answer."""
        self.is_alone = False
        """One connection puts, and others have not done so just before."""
        self._answers: deque[Callable[[], object]] = deque()
        self._has_answers = False
        self._is_ending = False
        self.log: Any = None
        """To be told that puts were handed over."""
        self._poll: select.epoll | None = None
        self._told = -1
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._all)

    def add(self, lone: Lone) -> None:
        """Serve a connection; raises RuntimeError, OSError: there can be no thread, or no more of these."""
        if self._is_ending:
            raise RuntimeError("the thread has ended")
        if self._poll is None:
            self._start()
        assert self._poll is not None
        file = lone.socket.fileno()
        self._all[file] = lone
        try:
            self._poll.register(file, select.EPOLLIN)
        except BaseException:
            del self._all[file]
            raise

    def _start(self) -> None:
        poll = select.epoll()
        told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            poll.register(told, select.EPOLLIN)
            thread = threading.Thread(target=self._run, args=(poll, told), name="qflow-door-puts", daemon=True)
            thread.start()
        except BaseException:
            os.close(told)
            poll.close()
            raise
        self._poll, self._told, self._thread = poll, told, thread

    def tell(self, answer: Callable[[], object]) -> None:
        """Have an answer sent: by the caller, which is the writer, or by the thread where there are many."""
        if len(self.under_way) <= FEW or self._is_ending:
            answer()
            return
        self._answers.append(answer)
        if not self._has_answers:
            self._has_answers = True
            with suppress(OSError):  # it has ended
                os.eventfd_write(self._told, 1)

    def _answer(self) -> None:
        """Send what the writer has left here."""
        self._has_answers = False
        while self._answers:
            self._answers.popleft()()

    def close(self) -> None:
        """End the thread, when all connections have ended."""
        if self._thread is None:
            return
        self._is_ending = True
        os.eventfd_write(self._told, 1)
        self._thread.join()
        self._answer()
        assert self._poll is not None
        self._poll.close()
        told, self._told = self._told, -1
        os.close(told)
        self._poll = self._thread = None

    def _run(self, poll: select.epoll, told: int) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        try:
            before = 0
            while not self._is_ending:
                events = poll.poll()
                self.is_alone, before = before == len(events) == 1 and not self.under_way, len(events)
                for file, _ in events:
                    if file == told:
                        os.eventfd_read(told)
                        self._answer()
                    else:
                        self._read(file, poll, buffer)
                log, self.log = self.log, None
                if log is not None:
                    log.now()
        except BaseException:
            _logger.exception("%s: the thread for puts failed", self._name)
        finally:
            self._is_ending = True
            for file in list(self._all):
                self._end(file, poll)

    def _read(self, file: int, poll: select.epoll, buffer: memoryview) -> None:
        try:
            self._all[file].read(buffer)
        except BlockingIOError:
            pass
        except (OSError, WireError):  # its caller has gone, or asks on the other connection
            self._end(file, poll)

    def _end(self, file: int, poll: select.epoll) -> None:
        with suppress(OSError):
            poll.unregister(file)
        self._all.pop(file).end()
