"""Where tests that kill keep their spools."""

from __future__ import annotations

import os
from pathlib import Path

MEMORY = Path("/dev/shm")
NEEDED_BYTES = 512 * 2**20


def in_memory() -> Path | None:
    """Return a directory in memory, which takes no time to sync; None without one, or without room there.

    A kill leaves all that the kernel has, wherever that lies: only a cut of power needs a disk.
    """
    try:
        found = os.statvfs(MEMORY)
    except FileNotFoundError:
        return None
    return MEMORY if found.f_bavail * found.f_frsize >= NEEDED_BYTES else None
