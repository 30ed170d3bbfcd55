"""The descriptors of a process: what stdin, stdout and stderr leave free, and what its children do not get."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""This process, or the system, cannot open files at the moment."""
REMEDIES = {
    errno.EMFILE: "this process has too many open files: close some, or raise `ulimit -n`",
    errno.ENFILE: "the system has too many open files: close some, or raise fs.file-max",
    errno.ENOMEM: "there is no memory for it: look at `ulimit -v`, and at the limits of the container or service",
}
_REFUSING = (0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)
"""What stands in for each refuses what it is used for, as one that is closed does."""


def occupy_standard() -> None:
    """Open a dummy for a closed stdin, stdout or stderr: a file of the spool would get its number, and what it prints.

    Cost: 1 µs where none is closed.
    """
    for descriptor, refusing in _REFUSING:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, refusing)


def is_standard(path: str) -> bool:
    """Tell whether a file has the number of stdin, stdout or stderr; not if it is not there."""
    for descriptor, _ in _REFUSING:
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return True
    return False


def close_on_exec(path: str) -> None:
    """Have no program that is started get a file that a library has opened, which does not tell the descriptor.

    Where no descriptor is left to look by, it stays as it is: the next file that is opened says so.
    Cost: 10 µs for each descriptor that is open.
    """
    status = os.stat(path)
    descriptors: list[int] = []
    with suppress(OSError):
        descriptors += map(int, os.listdir("/dev/fd"))
    for descriptor in descriptors:
        with suppress(OSError):  # it was that of the listing, or another thread's
            if os.path.samestat(os.fstat(descriptor), status):
                os.set_inheritable(descriptor, False)
