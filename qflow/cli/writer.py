"""Writes lines to a descriptor: whole ones, as long as nobody asks to stop and the reader is there."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Iterable, Iterator

from qflow.cli.stop import Stop
from qflow.errors import StorageError

_PATIENCE_MS = int(Stop.PATIENCE_S * 1000)


class Writer:
    """Where lines leave.

    Args:
        descriptor: pipe, file or terminal to write to.
        delimiter: written after each line.
        stop: makes `write` raise `Stopped`, between two lines.
    """

    def __init__(self, descriptor: int, delimiter: bytes, stop: Stop) -> None:
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
        self._written = 0  # bytes

    def write(self, lines: Iterable[bytes]) -> None:
        """Write some lines, each followed by the delimiter.

        Raises:
            BrokenPipeError: the reader is gone.
            StorageError: the lines cannot be written.
            Stopped: asked to stop.
        """
        for block in self._blocks(lines):
            self._write(block)

    def check(self, patience_ms: int = 0) -> None:
        """Raise `BrokenPipeError` if the reader is gone, or goes within `patience_ms`."""
        if self._broken.poll(patience_ms):
            raise BrokenPipeError

    def _blocks(self, lines: Iterable[bytes]) -> Iterator[bytearray]:
        """Group whole lines, so that only a line longer than a block can be cut."""
        block = bytearray()
        for line in lines:
            if block and len(block) + len(line) + len(self._delimiter) > self._block_bytes:
                yield block
                block = bytearray()
            block += line
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
