"""What all modes of `qflow pipe` share: a thread that stores stdin in the queue, and lines taken out of it."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from qflow.cli import facts
from qflow.cli.lines import Lines
from qflow.cli.outlet import Window
from qflow.cli.standard import complain
from qflow.cli.stop import Stop
from qflow.config import LONGEST_S
from qflow.deliveries import Deliveries
from qflow.errors import DiskFull, InvalidArgument, QueueFull

if TYPE_CHECKING:
    from qflow.queues.queue import Queue

STDIN = 0
_MANY = 2**63


class Flow:
    """Lines from stdin, stored in a queue and taken out of it.

    Args:
        queue: holds the lines.
        capacity: memory of its broker, in bytes.
        delimiter: ends a line, on both sides.
        skip: lines at the beginning of stdin that are left out, because they were stored before.
        stop: ends both sides.
    """

    def __init__(self, queue: Queue, capacity: int, delimiter: bytes, skip: int, stop: Stop) -> None:
        self.queue = queue
        self.delimiter = delimiter
        self.stop = stop
        self.found = len(queue)
        """Lines that an earlier run left in the queue."""
        self.skipped = 0
        """Lines of stdin that were left out."""
        self.stored = 0
        """Lines of stdin confirmed in the queue."""
        self.handed_out = 0
        """Lines taken out of the queue and not returned to it."""
        self.delivered = 0
        """Lines acked."""
        self.restarts = 0
        """How often the command was started again."""
        self._skip = skip
        self._must_fit = False
        self.is_held_back = False
        """A line from stdin waits for room in the queue or on the disk."""
        self._said = False
        self._filling: Future[None] | None = None
        settings = queue.settings
        self._capacity = min(capacity, settings.capacity_bytes or capacity)
        # So a batch fits beside a window of half of the limit.
        settings = settings.changed(
            limit_messages=_half(settings.limit_messages), limit_bytes=_half(settings.limit_bytes)
        )
        self._lines = Lines(STDIN, "stdin", delimiter, settings, stop, self._capacity)

    @property
    def input_ended(self) -> bool:
        """Nothing more comes from stdin: it has ended, cannot be read, or is not read any more."""
        return self._filling is None or self._filling.done()

    def window(self, size: int) -> Window | None:
        """Return the bounds of lines kept unacked after the reader took them: half of what memory and limits allow."""
        settings = self.queue.settings
        size = min(size, _half(settings.limit_bytes) or size)
        return Window(size, self._capacity // 2, _half(settings.limit_messages) or _MANY) if size else None

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Start to store stdin."""
        self._filling = threads.submit(self._fill)

    def take(self, most: int, timeout_s: float) -> Deliveries | None:
        """Return at most `most` lines; an empty batch if none came in time; None if then stdin has ended, too.

        None may also say that memory has no room beside what is held: see `is_empty` for whether there are more.

        Raises:
            Stopped: asked to stop.
        """
        self.stop.check()
        ended = self.input_ended  # before the get: it may end meanwhile
        batch = self.queue.get_many(most, timeout_s=timeout_s)
        if self.queue.settings.ack_timeout_s is not None:
            batch.extend(LONGEST_S)  # so that they do not come back while the command works
        self.handed_out += len(batch)
        return None if ended and not batch else batch

    def first(self) -> Deliveries | None:
        """Wait for a line and return it; None if stdin has ended and all are taken. Raises Stopped: asked to stop."""
        while not (batch := self.take(1, Stop.PATIENCE_S)):
            if batch is None and self.is_empty():
                return None
        return batch

    def give_back(self, batch: Deliveries) -> None:
        """Give lines that were taken back to the queue."""
        batch.nack()
        self.handed_out -= len(batch)

    def back_in_words(self, count: int) -> str:
        """Return in words where so many lines of a failed run are."""
        return f"{facts.counted(count, 'line')} it had been given {'is' if count == 1 else 'are'} back in the queue"

    def is_empty(self, taken: int = 0) -> bool:
        """Tell whether the queue holds nothing but `taken` lines that were taken."""
        return len(self.queue) == taken

    def is_drained(self, taken: int = 0) -> bool:
        """Tell whether also stdin has ended."""
        return self.input_ended and self.is_empty(taken)

    def is_last(self, taken: int) -> bool:
        """Tell whether `taken` lines are the last of all, as far as is known."""
        return self.is_empty(taken) and self._lines.is_near_end()

    def store_rest(self) -> None:
        """Store the rest of stdin, until it ends or the queue is full: nothing leaves that any more. Raises Stopped."""
        self._must_fit = True
        while not self.input_ended:
            self.stop.check()
            wait([self._filling] if self._filling else [], timeout=Stop.PATIENCE_S)

    def finish(self) -> None:
        """Raise the error of the thread that stored stdin, after it has ended."""
        if self._filling is not None:
            self._filling.result()

    def _fill(self) -> None:
        for batch in self._lines:
            if self.skipped < self._skip:
                left_out = min(len(batch), self._skip - self.skipped)
                self.skipped += left_out
                del batch[:left_out]
            if batch:
                self._store(batch)
                self.stored += len(batch)
        self._lines.warn_of_unfinished()
        if self.skipped < self._skip and not self.stop.requested:
            raise InvalidArgument(
                f"stdin has {facts.counted(self.skipped, 'line')}, fewer than the {self._skip:,} of --resume-from: is "
                "it the same input? To send what is left in the queue, leave --resume-from out and give no input"
            )

    def _store(self, batch: list[bytes]) -> None:
        """Put lines, waiting for room until asked to stop; say so on stderr if the disk is full."""
        while True:
            try:
                self.queue.put_many(batch, timeout_s=Stop.PATIENCE_S)
                self.is_held_back = False
                return
            except (QueueFull, DiskFull) as error:
                self.is_held_back = True
                if isinstance(error, DiskFull) and not self._said:
                    self._said = True
                    complain(f"qflow: {error}; stdin waits for that")
                if self.stop.requested or self._must_fit:
                    raise


def _half(limit: int | None) -> int | None:
    return None if limit is None else max(1, limit // 2)
