"""stdin and stdout of a command: each may be closed from the start, and what takes stdout may be full."""

from __future__ import annotations

import errno
import sys
from typing import BinaryIO

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


def in_words(error: Exception) -> str:
    """Return what an error says. One of writing that names no file is of stdout: who writes a file names it."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OF_WRITING:
        return f"cannot write to stdout: {error.strerror}"
    return str(error)
