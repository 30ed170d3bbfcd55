"""Raw floors: the bare operations a queue is made of. They keep their positions in memory and are no queues."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

import lmdb

from bench.engines.base import FLOOR, KILL, SYNCED, Engine, Opened


class _Append:
    """One file that grows at its end and is read from its beginning."""

    def __init__(self, sync: bool, path: Path) -> None:
        self._fd = os.open(path / "data", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._sync = sync
        self._sizes: deque[int] = deque()
        self._position = 0

    def put(self, body: bytes) -> None:
        os.write(self._fd, body)
        if self._sync:
            os.fdatasync(self._fd)
        self._sizes.append(len(body))

    def put_many(self, bodies: Sequence[bytes]) -> None:
        os.write(self._fd, b"".join(bodies))
        if self._sync:
            os.fdatasync(self._fd)
        self._sizes.extend(map(len, bodies))

    def take(self) -> bytes:
        body = os.pread(self._fd, self._sizes.popleft(), self._position)
        self._position += len(body)
        return body

    def opened(self) -> Opened:
        return Opened(put=self.put, take=self.take, put_many=self.put_many, close=lambda: os.close(self._fd))


class _FilePerMessage:
    """A file for each message, unlinked when it was read, or kept and overwritten by a later message."""

    def __init__(self, keep: bool, path: Path) -> None:
        self._prefix = f"{path}{os.sep}"
        self._keep = keep
        self._numbers = count()
        self._waiting: deque[tuple[int, int]] = deque()
        self._free: list[int] = []

    def put(self, body: bytes) -> None:
        if self._free:
            number = self._free.pop()
            fd = os.open(f"{self._prefix}{number:x}", os.O_WRONLY)
        else:
            number = next(self._numbers)
            fd = os.open(f"{self._prefix}{number:x}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwrite(fd, body, 0)
        os.close(fd)
        self._waiting.append((number, len(body)))

    def take(self) -> bytes:
        number, size = self._waiting.popleft()
        fd = os.open(f"{self._prefix}{number:x}", os.O_RDONLY)
        body = os.read(fd, size)
        os.close(fd)
        if self._keep:
            self._free.append(number)
        else:
            os.unlink(f"{self._prefix}{number:x}")
        return body

    def opened(self) -> Opened:
        return Opened(put=self.put, take=self.take, close=lambda: None)


class _Lmdb:
    """LMDB in its default mode, synced: a key for each message, or one for each batch."""

    def __init__(self, blocks: bool, path: Path) -> None:
        self._env = lmdb.open(str(path), map_size=1 << 40, lib_version=0)
        self._numbers = count(1)
        self._blocks = blocks
        self._counts: deque[int] = deque()

    def put(self, body: bytes) -> None:
        with self._env.begin(write=True) as txn:
            txn.put(next(self._numbers).to_bytes(8, "big"), body)

    def put_many(self, bodies: Sequence[bytes]) -> None:
        if self._blocks:
            self.put(b"".join(bodies))
            self._counts.append(len(bodies))
            return
        with self._env.begin(write=True) as txn:
            for body in bodies:
                txn.put(next(self._numbers).to_bytes(8, "big"), body)

    def take(self) -> bytes:
        return self.take_many(1)[0]

    def take_many(self, most: int) -> list[bytes]:
        if self._blocks:
            most, pieces = 1, self._counts.popleft()
        with self._env.begin(write=True) as txn, txn.cursor() as cursor:
            found: list[bytes] = []
            while len(found) < most and cursor.first():
                found.append(cursor.value())
                cursor.delete()
        if not self._blocks:
            return found
        size = len(found[0]) // pieces
        return [found[0][start : start + size] for start in range(0, len(found[0]), size)]

    def opened(self) -> Opened:
        if self._blocks:
            return Opened(put_many=self.put_many, take_many=self.take_many, close=self._env.close)
        return Opened(
            put=self.put, take=self.take, put_many=self.put_many, take_many=self.take_many, close=self._env.close
        )


_floor = partial(Engine, kind=FLOOR)
ENGINES = [
    _floor(
        name="append",
        promise=KILL,
        why="write at the end, pread; no sync",
        open=lambda path: _Append(False, path).opened(),
    ),
    _floor(
        name="file-kept",
        promise=KILL,
        why="a file each, overwritten by later messages; no sync",
        open=lambda path: _FilePerMessage(True, path).opened(),
    ),
    _floor(
        name="file-fresh",
        promise=KILL,
        why="a new file each, unlinked when read; no sync",
        open=lambda path: _FilePerMessage(False, path).opened(),
    ),
    _floor(
        name="append-fdatasync",
        promise=SYNCED,
        why="fdatasync after each write; a take only reads",
        open=lambda path: _Append(True, path).opened(),
    ),
    _floor(
        name="lmdb-message",
        promise=SYNCED,
        why="a key each, one transaction a call, in LMDB's default mode",
        open=lambda path: _Lmdb(False, path).opened(),
    ),
    _floor(
        name="lmdb-block",
        promise=SYNCED,
        why="one value a batch, one transaction a call, in LMDB's default mode",
        open=lambda path: _Lmdb(True, path).opened(),
    ),
]
