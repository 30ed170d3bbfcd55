"""stdin, stdout and stderr of a command: each may be closed from the start, and what takes the last two may be full."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import click

from qflow.errors import StorageError

_OF_WRITING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF})


def stdin_bytes() -> BinaryIO:
    """Return stdin. Raises StorageError: it is closed."""
    if sys.stdin is None:
        raise StorageError("cannot read stdin: it is closed")
    return sys.stdin.buffer


def stdout_bytes() -> BinaryIO:
    """Return stdout. Raises StorageError: it is closed."""
    if sys.stdout is None:
        raise StorageError("cannot write to stdout: it is closed")
    return sys.stdout.buffer


class _Patient(io.FileIO):
    """A descriptor that does not block, written as if it did."""

    def write(self, data: Any, /) -> int:
        while (count := super().write(data)) is None:
            ready = select.poll()
            ready.register(self, select.POLLOUT)
            ready.poll()
        return count


def wait_for_readers() -> None:
    """Have stdout and stderr wait for who reads, whatever other processes have set: who shares a pipe shares its flags.

    An interpreter fails where a descriptor that does not block takes no more.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue  # it is closed, or a program's own
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:  # somebody keeps in memory what is printed
            continue
        stream.flush()
        file = io.BufferedWriter(_Patient(descriptor, "wb", closefd=False))
        by_line = stream.line_buffering or stream.write_through  # which has no buffers, as by PYTHONUNBUFFERED
        setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=by_line))


def discard(descriptor: int) -> None:
    """Redirect stdout or stderr to /dev/null: the interpreter flushes both once more at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def discard_stdout() -> None:
    """See `discard`."""
    discard(1)


@contextmanager
def complaining() -> Iterator[None]:
    """Print on stderr. Where that cannot be written, the exit code says all that can be said."""
    try:
        yield
    except OSError:
        discard(2)


def complain(sentence: str) -> None:
    """Print a line on stderr; see `complaining`: what is under way goes on."""
    with complaining():
        click.echo(sentence, err=True)


def in_words(error: Exception) -> str:
    """Return what an error says. One of writing that names no file is of stdout: who writes a file names it.

    Nothing more is written there then.
    """
    if isinstance(error, OSError) and error.filename is None and error.errno in _OF_WRITING:
        discard_stdout()
        return f"cannot write to stdout: {error.strerror}"
    return str(error)
