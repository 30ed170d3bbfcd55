"""A large file that is written step by step: whole, synced on the way, and with nothing left open when that fails."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from qflow.errors import NO_THREAD, QflowError
from qflow.storage.files import Files
from qflow.storage.pacing import PIPE_BYTES, STEP_BYTES, write_paced

WHOLE = os.urandom(2**16) * (3 * STEP_BYTES // 2**16)


class Disk(Files):
    """Notes how much of a file each sync found, and is full from some place on."""

    def __init__(self, room: int = 2**40) -> None:
        self.synced: list[int] = []
        self.room = room
        self.pwrite = self._write
        self.sync_data = self._sync_data

    def _write(self, fd: int, data: Any, position: int) -> int:
        if position + len(data) > self.room:
            raise OSError(errno.ENOSPC, "full")
        return os.pwrite(fd, data, position)

    def _sync_data(self, fd: int) -> None:
        self.synced.append(os.fstat(fd).st_size)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file; no other is open afterwards that was not before."""
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    gc.collect()  # what other tests left open is closed now, not meanwhile
    before = set(os.listdir("/proc/self/fd"))
    yield fd
    assert set(os.listdir("/proc/self/fd")) <= before
    os.close(fd)


def write(fd: int) -> None:
    """Write what takes many pieces to a pipe."""
    rest = memoryview(WHOLE)
    while rest:
        rest = rest[os.write(fd, rest) :]


def test_what_is_written_comes_whole_and_is_synced_on_the_way(file: int) -> None:
    disk = Disk()
    write_paced(disk, file, write)
    assert os.pread(file, 2 * len(WHOLE), 0) == WHOLE
    steps = [after - before for before, after in itertools.pairwise([0, *disk.synced])]
    assert len(steps) >= 2
    assert all(STEP_BYTES <= step < STEP_BYTES + PIPE_BYTES for step in steps)


def test_a_full_disk_is_told_when_all_is_written(file: int) -> None:
    """Who writes is not held up by it: a pipe that nobody reads would be."""
    with pytest.raises(OSError, match="full"):
        write_paced(Disk(room=STEP_BYTES), file, write)


def test_what_the_writer_raises_comes_first(file: int) -> None:
    def fail(fd: int) -> None:
        os.write(fd, b"x")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_paced(Disk(room=0), file, fail)


@pytest.mark.parametrize("missing", ["dup", "pipe", "thread"])
def test_nothing_is_left_open_where_the_system_is_short_of_something(
    file: int, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    error = RuntimeError(NO_THREAD) if missing == "thread" else OSError(errno.EMFILE, "too many")
    monkeypatch.setattr(*((threading.Thread, "start") if missing == "thread" else (os, missing)), fail)
    with pytest.raises(QflowError if missing == "thread" else OSError, match="no more threads|too many"):
        write_paced(Disk(), file, write)
    monkeypatch.undo()


def test_what_has_begun_takes_no_memory(file: int) -> None:
    """A thread that found none would leave who writes with a broken pipe, and no word of why."""

    def trace_and_write(fd: int) -> None:
        tracemalloc.start()
        write(fd)

    try:
        write_paced(Disk(), file, trace_and_write)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PIPE_BYTES // 8
