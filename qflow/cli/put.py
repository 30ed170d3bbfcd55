"""`qflow put`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import facts, options
from qflow.cli.lines import Lines
from qflow.cli.spool import AnyQueue, is_owner, queue_to_fill, reached
from qflow.cli.stop import Stop, Stopped
from qflow.config import Overflow, QueueSettings
from qflow.errors import QueueFull
from qflow.message import charge

if TYPE_CHECKING:
    from rich.progress import Progress


STDIN = Path("-")
ROOM_S = 1.0
"""Seconds to wait for a spill to make room in memory; at a limit of the queue nothing can."""


@click.command()
@options.new_or_old_spool
@options.queue_name
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path))
@options.delimiter
@options.capacity
@options.as_json
def put(
    spool: Path, queue_name: str, files: tuple[Path, ...], delimiter: bytes, capacity: int, as_json: bool
) -> int | None:
    """Put the lines of FILES, or of stdin, into QUEUE: a message a line.

    The spool and the queue are made if they are missing. The last line need not end with the delimiter. Lines counted
    as confirmed are synced on disk. The count is printed whatever happens: an interrupted run can be continued after
    that many lines.

    \b
    Examples:
      seq 1000 | qflow put spool jobs
      qflow put spool jobs work.txt more.txt
      find . -print0 | qflow put spool files --delimiter '\\0'
    """
    with Stop() as stop:
        tally = Tally(queue_name)
        try:
            with _progress(files) as progress:
                _put(spool, capacity, Source(files or (STDIN,), delimiter, stop, progress), tally, stop)
        except Stopped:
            return stop.exit_code
        finally:
            tally.print(as_json)
        return stop.exit_code


class Source:
    """The lines of several files."""

    def __init__(self, files: tuple[Path, ...], delimiter: bytes, stop: Stop, progress: Progress | None) -> None:
        self._files = files
        self._delimiter = delimiter
        self._stop = stop
        self._progress = progress

    def batches(self, settings: QueueSettings, capacity: int) -> Iterator[list[bytes]]:
        """Yield batches; asking for the next one confirms the one before."""
        for path in self._files:
            name = "stdin" if path == STDIN else str(path)
            with _opened(path) as descriptor:
                lines = Lines(descriptor, name, self._delimiter, settings, self._stop, capacity)
                size = os.fstat(descriptor).st_size or None  # not known of a pipe
                task = None if self._progress is None else self._progress.add_task(facts.readable(name), total=size)
                for batch in lines:
                    yield batch
                    if self._progress is not None and task is not None:
                        self._progress.advance(task, sum(map(len, batch)) + len(batch) * len(self._delimiter))
                lines.warn_of_unfinished()


class Tally:
    """Counts of what was confirmed in a queue, given its name."""

    def __init__(self, queue: str) -> None:
        self.queue = queue
        self._lines = 0
        self._bytes = 0
        self._first: int | None = None
        self._last: int | None = None

    def count(self, sequences: range, batch: list[bytes]) -> None:
        """Count a batch that was put."""
        self._lines += len(batch)
        self._bytes += sum(map(len, batch))
        if self._first is None:
            self._first = sequences[0]
        self._last = sequences[-1]

    def print(self, as_json: bool) -> None:
        """Print the counts."""
        if as_json:
            facts.print_json(
                {
                    "queue": self.queue,
                    "confirmed": self._lines,
                    "bytes": self._bytes,
                    "first_sequence": self._first,
                    "last_sequence": self._last,
                }
            )
        else:
            size = facts.counted(self._bytes, "byte")
            click.echo(f"lines confirmed in {facts.readable(self.queue)}: {self._lines:,} ({size})")


def _put(spool: Path, capacity: int, source: Source, tally: Tally, stop: Stop) -> None:
    """Put everything; a spool of our own is closed and opened again whenever its memory is filled.

    This process never gets a message, so spilling one would be work for nothing: once the messages fill half of
    the memory, the spool is opened again, which takes milliseconds and leaves them in the log alone.
    """
    batches: Iterator[list[bytes]] | None = None
    while True:
        with reached(spool, capacity, None if batches is None else stop) as broker:
            queue = queue_to_fill(broker, tally.queue)
            memory = min(capacity, queue.settings.capacity_bytes or capacity)
            batches = batches or source.batches(queue.settings, memory)
            room = memory // 2
            for batch in batches:
                tally.count(_put_batch(queue, batch, None if is_owner(broker) else stop), batch)
                room -= charge(batch)
                if room < 0 and is_owner(broker):
                    break
            else:
                return


def _put_batch(queue: AnyQueue, batch: list[bytes], stop: Stop | None) -> range:
    """Put a batch; at a limit of a queue that others empty, wait until they have, or until asked to stop."""
    while True:
        try:
            return queue.put_many(batch, timeout_s=ROOM_S)
        except QueueFull:
            if stop is None or queue.settings.on_overflow is not Overflow.BLOCK:
                raise
            stop.check()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    if path == STDIN:
        yield 0
        return
    with path.open("rb", buffering=0) as file:
        yield file.fileno()


@contextmanager
def _progress(files: tuple[Path, ...]) -> Iterator[Progress | None]:
    """Show progress on stderr, if that is a terminal and the lines are not typed there."""
    if not os.isatty(2) or (not files and os.isatty(0)):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress
