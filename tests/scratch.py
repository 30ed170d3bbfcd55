"""Where tests keep their spools: in memory, but for those of what a disk does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")
NEEDED_BYTES = 512 * 2**20
"""By one test."""


def in_memory(needed_bytes: int = NEEDED_BYTES) -> Path | None:
    """Return a directory in memory, where files take no time to make and to sync; None without one, or without room.

    A kill leaves all that the kernel has, wherever that lies: only a cut of power needs a disk.
    """
    try:
        found = os.statvfs(MEMORY)
    except FileNotFoundError:
        return None
    return MEMORY if found.f_bavail * found.f_frsize >= needed_bytes else None


@contextmanager
def directory(place: Path | None, name: str) -> Iterator[Path]:
    """Give a directory with `name` in its own, in `place` or where the system has such; it is removed at the end."""
    with tempfile.TemporaryDirectory(prefix=f"qflow-{name}-", dir=place) as found:
        yield Path(found)
