"""Writes lines to a descriptor and acks a line once its reader has it.

What is written to a pipe lies in the pipe until its reader takes it, and is gone with the reader. So a line written to
a pipe is acked only when the pipe holds it no more; FIONREAD tells how much the pipe holds (Linux). Anywhere else a
line is acked once it is written.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import stat
import sys
import termios
from collections import deque
from collections.abc import Iterable, Iterator

from qflow.cli.stop import Stop
from qflow.delivery import Deliveries
from qflow.errors import StorageError

_PATIENCE_MS = int(Stop.PATIENCE_S * 1000)
_READ_CHECK_MS = 5


class Outlet:
    """Where lines leave.

    Args:
        descriptor: pipe, file or terminal to write to.
        delimiter: written after each line.
        stop: makes `send` and `wait` raise `Stopped`, between two lines.
    """

    def __init__(self, descriptor: int, delimiter: bytes, stop: Stop) -> None:
        self.acked = 0
        """Lines acked so far."""
        self._descriptor = descriptor
        self._delimiter = delimiter
        self._stop = stop
        self._is_pipe = sys.platform == "linux" and stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        # A pipe that polls as writable takes so many bytes at once without blocking.
        self._block_bytes = select.PIPE_BUF if self._is_pipe else 1024 * 1024
        self._writable = select.poll()
        self._writable.register(descriptor, select.POLLOUT)
        self._broken = select.poll()
        self._broken.register(descriptor, 0)
        self._written = self._read = 0  # bytes
        self._pending: deque[tuple[int, int, Deliveries]] = deque()
        """Batches not acked yet, each with where it starts and ends in the bytes written."""

    @property
    def pending(self) -> bool:
        """Whether lines are not acked yet."""
        return bool(self._pending)

    def send(self, batch: Deliveries) -> None:
        """Write a batch, then ack what was read so far.

        Raises:
            BrokenPipeError: the reader is gone.
            StorageError: the lines cannot be written.
            Stopped: asked to stop.
        """
        bodies = batch.bodies
        size = sum(map(len, bodies)) + len(bodies) * len(self._delimiter)
        self._pending.append((self._written, self._written + size, batch))
        for block in self._blocks(bodies):
            self._write(block)
        self.settle()

    def settle(self) -> None:
        """Ack the batches that their reader has."""
        self._read = self._written - self._unread()
        while self._pending and self._pending[0][1] <= self._read:
            batch = self._pending.popleft()[2]
            batch.ack()
            self.acked += len(batch)

    def settle_lines(self, *, everything_was_read: bool = False) -> None:
        """Ack each line its reader had at the last `settle`; the last thing done, also after the descriptor is closed.

        Args:
            everything_was_read: the reader said so, so each line written is acked.
        """
        read = self._written if everything_was_read else self._read
        for start, _, batch in self._pending:
            end = start
            for delivery in batch:
                end += len(delivery.body) + len(self._delimiter)
                if end > read:
                    return
                delivery.ack()
                self.acked += 1

    def wait(self) -> None:
        """Wait until the reader has everything, and ack it.

        Raises:
            BrokenPipeError: the reader is gone.
            Stopped: asked to stop.
        """
        self.settle()
        while self._pending:
            self._stop.check()
            self.check(_READ_CHECK_MS)
            self.settle()

    def check(self, patience_ms: int = 0) -> None:
        """Raise `BrokenPipeError` if the reader is gone, or goes within `patience_ms`."""
        if self._broken.poll(patience_ms):
            raise BrokenPipeError

    def _blocks(self, bodies: Iterable[bytes]) -> Iterator[bytearray]:
        """Group whole lines, so that only a line longer than a block can be cut."""
        block = bytearray()
        for body in bodies:
            if block and len(block) + len(body) + len(self._delimiter) > self._block_bytes:
                yield block
                block = bytearray()
            block += body
            block += self._delimiter
        yield block

    def _write(self, block: bytearray) -> None:
        self._stop.check()
        while not self._writable.poll(_PATIENCE_MS):
            self._stop.check()
        with memoryview(block) as view:
            done = 0
            while done < len(view):
                try:
                    count = os.write(self._descriptor, view[done : done + self._block_bytes])
                except BrokenPipeError:
                    raise
                except OSError as error:
                    raise StorageError(f"cannot write the lines out: {error.strerror}") from error
                done += count
                self._written += count

    def _unread(self) -> int:
        if not self._is_pipe:
            return 0
        held = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, held)
        return held[0]
