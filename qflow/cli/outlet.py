"""Writes lines to a descriptor and acks a line once its reader has taken it, or so many bytes more.

Bytes written to a pipe stay in the pipe until the reader takes them, and are lost if the reader dies first. So a line
is acked only when the pipe does not hold it any more; FIONREAD tells how much the pipe holds (Linux). For any other
descriptor a line counts as taken once it is written.

Lines that a reader has taken and not processed yet are lost with it, too, and their number cannot be seen. With a
*window*, a line is acked only when so many bytes behind it were taken, as readers process lines in order.
"""

from __future__ import annotations

import array
import fcntl
import termios
from collections import deque
from collections.abc import Callable

import attrs

from qflow.cli.stop import Stop
from qflow.cli.writer import Writer
from qflow.deliveries import Deliveries
from qflow.errors import StorageError
from qflow.message import OVERHEAD_BYTES

_READ_CHECK_MS = 5
_BATCH_LINES = 1000
_BATCH_BYTES = 256 * 1024


class _Part:
    """A batch with lines that are not acked.

    Args:
        batch: the lines.
        start, end: offsets, in all bytes written, where the first line not acked begins and the last line ends.
        charge: bytes of memory charged for it.
    """

    __slots__ = ("acked", "batch", "charge", "end", "start")

    def __init__(self, batch: Deliveries, start: int, end: int, charge: int) -> None:
        self.batch = batch
        self.start = start
        self.end = end
        self.charge = charge
        self.acked = 0
        """Lines that were acked one by one."""


@attrs.frozen
class Window:
    """Bounds of the lines kept unacked after the reader took them; one batch more is possible."""

    size: int
    """Bytes that the reader must have taken behind a line before the line is acked."""
    most_charged: int
    """The most bytes of memory charged for them."""
    most_lines: int
    """The most lines."""


class Outlet(Writer):
    """Writes batches of lines and acks them; `wait`, too, raises `Stopped` when asked to stop.

    Args:
        window: when lines are acked; None = once they were taken.
        watch: see `Writer`.
        is_sure: a batch counts as acked when its ack is in the log.
    """

    def __init__(
        self,
        descriptor: int,
        delimiter: bytes,
        stop: Stop,
        window: Window | None = None,
        watch: Callable[[], None] | None = None,
        *,
        is_sure: bool = False,
    ) -> None:
        super().__init__(descriptor, delimiter, stop, watch)
        self._is_sure = is_sure
        self.acked = 0
        """Lines acked so far."""
        self.lines = 0
        """Lines written, at least in part, and not acked."""
        self.most = _BATCH_LINES if window is None else 1
        """The most lines of the next batch, so that it is small beside the window."""
        self._window = window
        self._behind = 0 if window is None else window.size
        self.taken = 0
        """Bytes that the reader had taken at the last `settle`."""
        self._held = 0  # bytes charged for `_pending`
        self._pending: deque[_Part] = deque()

    @property
    def has_window(self) -> bool:
        """Lines are kept unacked after they were taken."""
        return self._window is not None

    @property
    def unread(self) -> int:
        """Bytes that the reader had not taken at the last `settle`."""
        return self._written - self.taken

    @property
    def is_taken(self) -> bool:
        """The reader had taken every line at the last `settle`."""
        return not self._pending or self._pending[-1].end <= self.taken

    def send(self, batch: Deliveries, *, last_apart: bool = False) -> None:
        """Write a batch, then ack what may be acked.

        Args:
            last_apart: write the last line once all others were taken. A reader that exits early after what it took
                leaves that line, which tells it from one that exits at the end of its input.

        Raises:
            BrokenPipeError: the reader is gone.
            StorageError: the lines cannot be written.
            Stopped: asked to stop.
        """
        bodies = batch.bodies
        count = len(bodies)
        size = sum(map(len, bodies))
        charge = size + count * OVERHEAD_BYTES
        end = self._written + size + count * len(self._delimiter)
        self._pending.append(_Part(batch, self._written, end, charge))
        self._held += charge
        self.lines += count
        if self._window is not None:
            room = min(_BATCH_BYTES, self._window.most_charged // 4)
            self.most = max(1, min(_BATCH_LINES, 2 * self.most, room * count // charge, self._window.most_lines // 4))
        if last_apart:
            self.write(bodies[:-1])
            self.wait()
            del bodies[:-1]
        self.write(bodies)
        self.settle()

    def settle(self) -> None:
        """Ack the batches that may be acked."""
        self.taken = self._written - self._in_pipe()
        done = self.taken - self._behind
        while self._pending and (self._pending[0].end <= done or self._must_go(self._pending[0])):
            try:
                self._pending[0].batch.ack(wait=self._is_sure)
            except StorageError:  # nobody knows whether they are acked: nothing is given back, or done again
                self._pending.clear()
                self._held = self.lines = 0
                raise
            self._drop_first()

    def shed(self) -> None:
        """Ack each line that the reader had taken at the last `settle`, whatever the window."""
        self._ack_lines(self.taken)

    def settle_lines(self, *, everything_was_read: bool = False) -> None:
        """Ack each line that could be acked at the last `settle`, which acks whole batches. Called last.

        Args:
            everything_was_read: the reader confirmed that, so every line written is acked.
        """
        self._ack_lines(self._written if everything_was_read else self.taken - self._behind)

    def ack_first(self) -> None:
        """Ack the first line, if the reader had taken it at the last `settle` and no line was acked yet."""
        if not self.acked and self._pending:
            self._ack_lines(self.taken, most=1)

    def take_back(self) -> int:
        """Give the lines not acked back to the queue; return their number."""
        count = self.lines
        while self._pending:
            self._pending.popleft().batch.nack()
        self._held = self.lines = 0
        return count

    def wait(self, *, may_stop: bool = True) -> None:
        """Wait until the reader has taken all. Raises BrokenPipeError: it is gone. Stopped: asked to, if it may."""
        self.settle()
        while self.unread:
            if may_stop:
                self._stop.check()
            self.check(_READ_CHECK_MS)
            self.settle()

    def _ack_lines(self, end: int, most: int | None = None) -> None:
        """Ack the lines that end at or before an offset in all bytes written, at most `most`."""
        while self._pending and most != 0:
            part = self._pending[0]
            if part.end <= end and most is None:
                part.batch.ack()
                self._drop_first()
                continue
            delivery = part.batch[part.acked]
            after = part.start + len(delivery.body) + len(self._delimiter)
            if after > end:
                return
            delivery.ack()
            part.start = after
            part.acked += 1
            self.acked += 1
            self.lines -= 1
            most = None if most is None else most - 1
            if part.acked == len(part.batch):
                self._drop_first()

    def _must_go(self, part: _Part) -> bool:
        """Tell whether the parts behind it fill the window, so that it is to be acked once the reader has taken it."""
        window = self._window
        if window is None or part.end > self.taken:
            return False
        lines = self.lines - len(part.batch) + part.acked
        return self._held - part.charge >= window.most_charged or lines >= window.most_lines

    def _drop_first(self) -> None:
        part = self._pending.popleft()
        left = len(part.batch) - part.acked
        self.acked += left
        self.lines -= left
        self._held -= part.charge

    def _in_pipe(self) -> int:
        if not self._is_pipe:
            return 0
        held = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, held)
        return held[0]
