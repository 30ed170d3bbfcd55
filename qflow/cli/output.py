"""Lines for stdout or stderr, which a thread of its own writes.

Who reads a pipe may stop doing so, as a log shipper that hangs: then the pipe is full, and whoever writes to it waits,
for good. A server does not: what it says goes through a queue of bounded size.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from qflow.cli.standard import discard
from qflow.starting import start

MOST_BYTES = 256 * 1024
"""Of lines that wait to be written."""
LONGEST_END_S = 1.0
"""How long the end waits for them."""


def missing(count: int) -> str:
    """Return what stands where lines are missing."""
    lines = "1 line is" if count == 1 else f"{count:,} lines are"
    return f"{lines} missing before this one: nobody took them"


class Output:
    """Lines in the order in which they were put, whatever thread did that.

    Those that find no room, or cannot be written, are left out; the next that is written has a line before it that says
    how many.

    Args:
        stream: stdout or stderr. Nothing is left in its buffer, so that the interpreter's end does not wait for it.
        of_missing: makes that line.
        most_bytes: of lines that wait.

    Raises:
        QflowError: there can be no more threads.
    """

    def __init__(
        self, stream: TextIO, of_missing: Callable[[int], str] = missing, *, most_bytes: int = MOST_BYTES
    ) -> None:
        stream.flush()
        self._stream = stream
        try:
            self._descriptor: int | None = stream.fileno()
        except io.UnsupportedOperation:  # somebody keeps in memory what is said
            self._descriptor = None
        self._of_missing = of_missing
        self._room = most_bytes
        self._lines: deque[tuple[int, bytes]] = deque()
        """Each with the number of those that are missing before it."""
        self._missing = 0
        """Since the last of them."""
        self._is_closed = False
        self._changed = threading.Condition()  # reentrant: a finalizer may put a line
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="qflow-output", daemon=True)
        start(self._thread)

    def put(self, line: str) -> None:
        """Have a line written, unless there is no room for it."""
        data = self._encoded(line)
        with self._changed:
            if len(data) > self._room:
                self._missing += 1
                return
            self._append(data)

    def check(self) -> None:
        """Raises OSError: a line could not be written."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Return when all is written, or soon after; then nobody waits any more for who reads this."""
        with self._changed:
            self._is_closed = True
            if self._missing:
                self._append(b"")
            self._changed.notify()
        self._thread.join(LONGEST_END_S)
        if self._thread.is_alive() and self._descriptor is not None:
            discard(self._descriptor)

    def _encoded(self, line: str) -> bytes:
        return f"{line}\n".encode(self._stream.encoding or "utf-8", "backslashreplace")

    def _append(self, data: bytes) -> None:
        self._lines.append((self._missing, data))
        self._room -= len(data)
        self._missing = 0
        self._changed.notify()

    # The thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        lost = 0  # since the last line that could be written
        while (taken := self._next()) is not None:
            count, data = taken
            lost += count
            try:
                self._write((self._encoded(self._of_missing(lost)) if lost else b"") + data)
                lost = 0
            except OSError as error:
                self._error = error
                lost += 1

    def _next(self) -> tuple[int, bytes] | None:
        """Return the next line, when there is one; None at the end."""
        with self._changed:
            while not self._lines and not self._is_closed:
                self._changed.wait()
            if not self._lines:
                return None
            taken = self._lines.popleft()
            self._room += len(taken[1])
            return taken

    def _write(self, data: bytes) -> None:
        if self._descriptor is None:
            self._stream.write(data.decode(self._stream.encoding or "utf-8"))
            return
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # who shares the pipe has made it so
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()


@contextmanager
def output(stream: TextIO | None, of_missing: Callable[[int], str] = missing) -> Iterator[Output]:
    """Write lines until the block ends; nowhere if the stream was closed from the start. Raises as `Output`."""
    with ExitStack() as stack:
        made = Output(stack.enter_context(open(os.devnull, "w")) if stream is None else stream, of_missing)
        stack.callback(made.close)
        yield made
