"""The descriptors of stdin, stdout and stderr, which a process may have closed."""

from __future__ import annotations

import os

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
