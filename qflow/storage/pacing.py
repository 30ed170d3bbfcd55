"""Writing a large file so that nobody else's sync has to wait for all of it: it is synced step by step.

A file system that is asked to sync one file mostly writes what waits of others, too. So who writes does so into a pipe;
a thread brings it to the file, and takes no more before that much is on the disk.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from qflow.errors import QflowError
from qflow.starting import start
from qflow.storage.files import Files, write_all

STEP_BYTES = 2**22
"""Synced at once: 4 to 10 ms of a disk's time."""
PIPE_BYTES = 2**20


def write_paced(files: Files, fd: int, write: Callable[[int], object]) -> None:
    """Have something write to a file, of which `STEP_BYTES` wait to be synced at most.

    Args:
        fd: the file, which is empty.
        write: given a descriptor to write to, which cannot seek; returns when all is written.

    Raises:
        OSError: the disk does not take it. QflowError: there can be no more threads. What `write` raises.
    Cost: about the time of one sync at the end.
    """
    bringing, writing = _Bringing.into(files, fd)
    try:
        bringing.begin()
        write(writing)
    finally:
        os.close(writing)
        bringing.join()
    if bringing.error is not None:
        raise bringing.error


class _Bringing:
    """Brings what comes out of a pipe to a file, until nothing more comes, in a thread. The descriptors are its own."""

    def __init__(self, files: Files, buffer: memoryview, pipe: int, fd: int) -> None:
        self._files = files
        self._buffer = buffer
        self._pipe = pipe
        self._fd = fd
        self.error: BaseException | None = None
        with suppress(OSError):  # this user has too much in pipes: it goes in smaller pieces
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._thread = threading.Thread(target=self._run, name="qflow-paced", daemon=True)

    @classmethod
    def into(cls, files: Files, fd: int) -> tuple[_Bringing, int]:
        """Return one for a file, and the descriptor of the pipe's other end."""
        buffer = memoryview(bytearray(PIPE_BYTES))  # before anything is open; the thread needs no memory later
        own = os.dup(fd)
        try:
            reading, writing = os.pipe()
        except OSError:
            os.close(own)
            raise
        return cls(files, buffer, reading, own), writing

    def begin(self) -> None:
        try:
            start(self._thread)
        except QflowError:  # there are as many as there may be
            self._close()
            raise

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _close(self) -> None:
        os.close(self._pipe)
        os.close(self._fd)

    def _run(self) -> None:
        files, fd = self._files, self._fd
        position = synced = 0
        try:
            while size := os.readv(self._pipe, [self._buffer]):
                if self.error is not None:
                    continue  # it is read to its end, for whoever writes waits for that
                try:
                    position = write_all(files, fd, self._buffer[:size], position)
                    if position - synced >= STEP_BYTES:
                        files.sync_data(fd)
                        synced = position
                except BaseException as error:
                    self.error = error
        finally:
            self._close()
