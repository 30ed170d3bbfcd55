"""Writes lines to a descriptor and acks a line once its reader has it.

What is written to a pipe lies in the pipe until its reader takes it, and is gone with the reader. So a line written to
a pipe is acked only when the pipe holds it no more; FIONREAD tells how much the pipe holds (Linux). Anywhere else a
line is acked once it is written.
"""

from __future__ import annotations

import array
import fcntl
import termios
from collections import deque

from qflow.cli.stop import Stop
from qflow.cli.writer import Writer
from qflow.delivery import Deliveries

_READ_CHECK_MS = 5


class Outlet(Writer):
    """Where lines leave; `wait`, too, raises `Stopped` when it is asked to stop."""

    def __init__(self, descriptor: int, delimiter: bytes, stop: Stop) -> None:
        super().__init__(descriptor, delimiter, stop)
        self.acked = 0
        """Lines acked so far."""
        self._read = 0  # bytes
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
        self.write(bodies)
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

    def _unread(self) -> int:
        if not self._is_pipe:
            return 0
        held = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, held)
        return held[0]
