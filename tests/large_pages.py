"""The memory of this process in large pages: a fork copies an entry for each page, and there are 512 times fewer.

Tests fork thousands of times. With pages of 4 KiB, a process that has collected all of them spends more on a fork
than the child does on its work. Linux 6.1 and later puts memory together when it is asked to; elsewhere nothing is
done.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

LARGE_BYTES = 2 * 2**20
MANY_FORKS = 50
"""After so many, memory is gathered again: it has grown, and what was written to beside a child is in small pages."""
_COLLAPSE = 25
"""`MADV_COLLAPSE`: what is there now moves into large pages; what comes later lies in small ones, as always."""
_forks: list[None] = []
"""One for each since memory was gathered."""
os.register_at_fork(before=lambda: _forks.append(None))


def gather_after_forks() -> None:
    """Gather the memory of this process where it has forked many times since."""
    if len(_forks) >= MANY_FORKS:
        gather()


def gather() -> None:
    """Move what this process has in memory of its own into large pages, where these are whole."""
    _forks.clear()
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, _, *name = line.split(maxsplit=5)
        if access == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            begin = -(-begin // LARGE_BYTES) * LARGE_BYTES
            if begin + LARGE_BYTES <= end:
                # One that fails is as before: an older kernel, a stack with its guard, or no large page is free.
                madvise(begin, end // LARGE_BYTES * LARGE_BYTES - begin, _COLLAPSE)
