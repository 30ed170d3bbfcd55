"""What the two ways of `qflow pipe` share: stdin on its way into the queue, and lines on their way out."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from qflow.cli.exits import Exit
from qflow.cli.lines import Lines
from qflow.cli.stop import Stop
from qflow.delivery import Deliveries
from qflow.errors import DiskFull, QueueFull

if TYPE_CHECKING:
    from qflow.queues.queue import Queue

STDIN = 0


class Flow:
    """Lines from stdin through a queue.

    Args:
        queue: keeps the lines.
        delimiter: what ends a line, on both sides.
        stop: ends both sides.
    """

    def __init__(self, queue: Queue, delimiter: bytes, stop: Stop) -> None:
        self.queue = queue
        self.delimiter = delimiter
        self.stop = stop
        self.found = len(queue)
        """Lines an earlier run left."""
        self.stored = 0
        """Lines of stdin confirmed in the queue."""
        self.delivered = 0
        """Lines acked."""
        self._filling: Future[None] | None = None

    def start(self, threads: ThreadPoolExecutor) -> None:
        """Start to read stdin."""
        self._filling = threads.submit(self._fill)

    def take(self, most: int, timeout_s: float) -> Deliveries | None:
        """Return at most so many lines; an empty batch if none came in time; None if stdin has ended and all are taken.

        Raises:
            Stopped: asked to stop.
        """
        self.stop.check()
        ended = (
            self._filling is None or self._filling.done()
        )  # before the look into the queue, for it may end meanwhile
        batch = self.queue.get_many(most, timeout_s=timeout_s)
        return None if ended and not batch else batch

    def finish(self) -> None:
        """Raise what went wrong with stdin, after all threads ended."""
        if self._filling is not None:
            self._filling.result()

    def _fill(self) -> None:
        lines = Lines(STDIN, "stdin", self.delimiter, self.queue.settings, self.stop)
        for batch in lines:
            self._store(batch)
            self.stored += len(batch)
        lines.warn_of_unfinished()

    def _store(self, batch: list[bytes]) -> None:
        """Put lines, waiting for room as long as nobody asks to stop: stdin waits then, too."""
        while True:
            try:
                self.queue.put_many(batch, timeout_s=Stop.PATIENCE_S)
                return
            except (QueueFull, DiskFull):
                if self.stop.requested:
                    raise


class CommandFailed(click.ClickException):
    """The command of a pipe did not do its part."""

    exit_code = Exit.COMMAND

    def show(self, file: object = None) -> None:
        click.echo(f"qflow: {self.message}", err=True)


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command that reads what is written to its stdin; an interrupt, the second signal, ends it.

    It runs in a process group of its own, so that Ctrl-C reaches it through this process only.
    """
    process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, process_group=0)
    try:
        yield process
    except KeyboardInterrupt:
        process.terminate()
        raise


def how_it_ended(status: int) -> str:
    """Return the end of a process in words."""
    return f"exited with {status}" if status >= 0 else f"was ended by signal {-status}"
