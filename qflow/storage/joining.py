"""The value of a large block in one piece, as LMDB wants it, without a second copy of the body in memory.

It is laid out in a file without a name, which is mapped: the system may take its pages whenever it needs them, nothing
of it is synced, and it is gone when nobody has it mapped any more. Where there can be no such file, the value is made
in memory: a commit must not fail for that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress

from qflow.storage.encoding import Sections
from qflow.storage.files import FILE_MODE, UNNAMED, Files, write_all

LAID_OUT_BYTES = 4 * 2**20
"""From this size on a value is laid out in a file. Smaller ones are copied in memory, one at a time: that is faster."""

Value = bytes | mmap.mmap
Join = Callable[[Sections], Value]
"""`join`, as those know it who know no files."""


def join(files: Files, directory: str, sections: Sections) -> Value:
    """Return the sections of a block in one piece; a large one is a file of this directory, mapped."""
    size = sum(map(len, sections))
    if size >= LAID_OUT_BYTES:
        with suppress(OSError):
            return _laid_out(files, directory, sections, size)
    return b"".join(sections)


def _laid_out(files: Files, directory: str, sections: Sections, size: int) -> mmap.mmap:
    fd = files.open(directory, UNNAMED, FILE_MODE)
    try:
        position = 0
        for section in sections:
            position = write_all(files, fd, section, position)
        mapped = files.map(fd, size)
    finally:
        os.close(fd)
    try:
        files.bring_in(mapped, 0, size)  # what cannot be read is an error here, and would kill the process later
    except BaseException:
        mapped.close()
        raise
    return mapped
