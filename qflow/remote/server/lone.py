"""Connections for lone puts, served by one thread: what comes together is answered before more comes.

The thread reads puts and hands them to the log; the log's writer sends the answers itself, as soon as they are synced.
So neither waits for an event loop, or for a thread. Where one caller puts alone, the thread confirms its puts itself,
if nobody else is at the log. Answers of many are sent by the thread, those of one connection together. A put that
something stands in the way of, as a limit does, is not done, and answered with null: its caller asks again on the other
connection, where it may wait.
"""

from __future__ import annotations

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
from qflow.loggers import get_logger
from qflow.queues.puts import Puts
from qflow.queues.queue import parts_of
from qflow.remote.wire.columns import lengths_of
from qflow.remote.wire.errors import encode_error
from qflow.remote.wire.frames import Frame, FrameReader, Head, WireError, encode_answer

MOST_BYTES = 2**19 + 2**17
"""Of what is under way of a connection."""
MOST_TOGETHER = 256
"""Puts that are under way of a connection."""
MOST_LONE = 128
"""Connections of one broker."""
FEW = 2
"""As many answers are sent by the writer; others by the thread, which it would get in the way of."""
READ_BYTES = MOST_BYTES
PLAIN_PUT = frozenset({"op", "queue", "single"})
"""What the head of a put has where the messages are their bodies, and wait for room as long as it takes."""

_logger = get_logger("qflow")


class Lone:
    """One connection. Nothing is written to its socket, or read, when `over` is called."""

    def __init__(self, broker: Broker, thread: LoneThread, one: socket.socket, over: Callable[[], object]) -> None:
        """`over` is called when nothing is under way any more, behind the end; twice, perhaps."""
        self.socket = one
        self._thread = thread
        self._broker = broker
        self._over = over
        self._reader = FrameReader(MOST_BYTES)
        self._under_way: dict[int, int] = {}
        """How large those are that were not answered, by number."""
        self._out: deque[bytes] = deque()
        """Answers that are to be sent; one that is empty ends the connection."""
        self._sending: list[None] = []
        """An item for each thread that sends some."""
        self._has_ended = False
        self._last: tuple[str, Puts] | None = None
        """The queue that the last one went into."""

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
        frames = tuple(self._reader.feed(buffer[:count]))
        size = sum(self._under_way.values())
        waits = self._thread.is_alone and len(frames) == 1 and not size
        for frame in frames:
            size += frame.size
            if frame.number in self._under_way or len(self._under_way) >= MOST_TOGETHER or size > MOST_BYTES:
                raise WireError("no more lone puts are sent than an owner takes together until it has answered")
            self._serve(frame, waits)

    def end(self) -> None:
        """Nothing more is read."""
        self._has_ended = True
        self._look()

    def _look(self) -> None:
        if self._has_ended and not (self._under_way or self._out or self._sending):
            self._over()

    def _serve(self, frame: Frame, waits: bool) -> None:
        number = frame.number
        self._under_way[number] = frame.size
        self._thread.under_way.add((self, number))
        try:
            begun = self._put(frame, waits)
        except QflowError:
            begun = False  # asked again, it is raised where it is waited for
        except Exception:
            _logger.exception("%s: a put of a connection failed", self._broker.path)
            self.answer(number, None)
            self.send()
            return
        if not begun:
            self.answer(number, b'{"result":null}')
            self.send()

    def _put(self, frame: Frame, waits: bool) -> bool:
        """Have messages put if nothing stands in the way; the answer is sent when they are synced.

        Args:
            waits: the thread has nothing else to do meanwhile.
        """
        number, head, columns, _ = frame
        name, bodies = head.get("queue"), columns[0] if len(columns) == 1 else []
        if head.get("op") != "put" or not PLAIN_PUT.issuperset(head) or type(name) is not str:
            return False
        try:
            sizes = lengths_of(bodies)
        except TypeError:  # there is no body
            return False
        if not sizes:
            return False
        puts = self._puts(name)
        if puts.settings.ttl_s is not None or puts.admission.line:
            return False
        put = puts.draft_one(bodies[0]) if len(bodies) == 1 else puts.draft(bodies, True, 0, sizes=sizes)
        if not puts.enter_at_once(put, waits=waits):
            self._last = None  # it may have been deleted
            return False
        log = puts.context.log
        if log is None or not put.lane.is_logged:
            self.done(number, put)
            self.send()
            return True
        if log.turn.request is put:
            log.wait(put)
            self.done(number, put)
            self.send()
            return True
        self._thread.log = log
        log.tell(put, partial(self._thread.tell, self, number, put))
        return True

    def _puts(self, name: str) -> Puts:
        """Return the way into a queue. Raises NotFound: there is none."""
        last = self._last
        if last is None or last[0] != name:
            last = self._last = name, parts_of(self._broker.queue(name)).puts
        return last[1]

    # And in the writer -----------------------------------------------------------------------------------------------

    def done(self, number: int, put: Any) -> None:
        """Answer what became of a put, with the next `send`."""
        if put.error is not None:
            self.answer(number, encode_error(put.error))
        else:
            self.answer(number, b'{"result":{"first":%d,"count":%d}}' % (put.first, len(put.records)))

    def answer(self, number: int, head: Head | bytes | None) -> None:
        """Answer what is under way, once, with the next `send`; None ends the connection."""
        try:
            self._thread.under_way.remove((self, number))  # who takes it from here answers
        except KeyError:
            return
        self._out.append(b"" if head is None else encode_answer(number, head))
        del self._under_way[number]  # before the caller has the answer, for it may send more then

    def send(self) -> None:
        """Send the answers; a caller that does not read them is ended."""
        self._sending.append(None)
        answers: list[bytes] = []
        try:
            while True:
                answers.append(self._out.popleft())
        except IndexError:
            pass
        data = b"".join(answers)
        try:
            is_whole = all(answers) and (not data or self.socket.send(data) == len(data))
        except OSError:
            is_whole = False
        if not is_whole:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self._sending.pop()
        self._look()


class LoneThread:
    """The thread; started for the first connection."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._all: dict[int, Lone] = {}
        self.under_way: set[tuple[Lone, int]] = set()
        """What waits for an answer, by connection and number."""
        self.is_alone = False
        """One connection puts, and others have not done so just before."""
        self._answers: deque[tuple[Lone, int, Any]] = deque()
        """Of puts that are done, which the writer has left here."""
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
        if not hasattr(select, "epoll"):
            raise RuntimeError("there is no epoll here: gevent takes it away")
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

    def tell(self, lone: Lone, number: int, put: Any) -> None:
        """Have a put answered: by the caller, which is the writer, or by the thread where there are many."""
        if len(self.under_way) <= FEW or self._is_ending:
            lone.done(number, put)
            lone.send()
            return
        self._answers.append((lone, number, put))
        if not self._has_answers:
            self._has_answers = True
            with suppress(OSError):  # it has ended
                os.eventfd_write(self._told, 1)

    def _answer(self) -> None:
        """Send what the writer has left here."""
        self._has_answers = False
        answered: dict[Lone, None] = {}
        while self._answers:
            lone, number, put = self._answers.popleft()
            lone.done(number, put)
            answered[lone] = None
        for lone in answered:
            lone.send()

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
