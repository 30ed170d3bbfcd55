"""Plain loops over files: what the same bytes cost with nothing around them. Each returns its seconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter


def create_files(directory: Path, count: int, block: bytes) -> float:
    prefix = f"{directory}{os.sep}"
    start = perf_counter()
    for number in range(count):
        fd = os.open(f"{prefix}{number:x}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwrite(fd, block, 0)
        os.close(fd)
    return perf_counter() - start


def overwrite_files(directory: Path, count: int, block: bytes) -> float:
    prefix = f"{directory}{os.sep}"
    start = perf_counter()
    for number in range(count):
        fd = os.open(f"{prefix}{number:x}", os.O_WRONLY)
        os.pwrite(fd, block, 0)
        os.close(fd)
    return perf_counter() - start


def read_files(directory: Path, count: int, block: bytes, *, unlink: bool = False) -> float:
    prefix = f"{directory}{os.sep}"
    size = len(block) + 1
    start = perf_counter()
    for number in range(count):
        path = f"{prefix}{number:x}"
        fd = os.open(path, os.O_RDONLY)
        os.read(fd, size)
        os.close(fd)
        if unlink:
            os.unlink(path)
    return perf_counter() - start


class AppendFile:
    """One file written from its beginning, message after message, and read in the same order.

    Written *anew* it grows from nothing each time; else the bytes of before are overwritten, their pages being there.
    """

    def __init__(self, path: Path, *, anew: bool) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._anew = anew

    def append(self, count: int, block: bytes) -> float:
        fd = self._fd
        if self._anew:
            os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        start = perf_counter()
        for _ in range(count):
            os.write(fd, block)
        return perf_counter() - start

    def read(self, count: int, block: bytes) -> float:
        fd, size = self._fd, len(block)
        start = perf_counter()
        for position in range(0, count * size, size):
            os.pread(fd, size, position)
        return perf_counter() - start

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def append_files(directory: Path) -> Iterator[dict[str, AppendFile]]:
    """Open both kinds: what a store of segments does lies between the two, for it reuses the segments it has."""
    files = {
        "append": AppendFile(directory / "appended", anew=True),
        "overwrite": AppendFile(directory / "overwritten", anew=False),
    }
    yield files
    for file in files.values():
        file.close()
