"""The LMDB environment under the log: the only room that knows LMDB.

Creation: everything is made and synced in `log.new/`, then renamed to `log/`, then the parent is synced; a crash leaves
either no log or a whole one. A `log/` that cannot be opened is never deleted. What copies a log, and how a copy takes
its place, is in `snapshots`.

Facts this rests on (py-lmdb 3): two engines in one wheel with formats that exclude each other, so the engine is named
and asserted; only the default mode (no `writemap`, `map_async`, `sync=False`, `metasync=False`) keeps what it promised
through a power cut; a full disk shows up as an I/O error at commit, after which nobody knows, so room is made in the
file before a transaction begins.
"""

from __future__ import annotations

import os
import stat
from typing import Any

import lmdb

from qflow.errors import CorruptionError, DiskFull, StorageError
from qflow.storage.files import CREATE, FILE_MODE, Files, storage_error

ENGINE = 0
"""LMDB 0.9.x, data format 1."""
MAP_BYTES = 2**40
LEAST_MAP_BYTES = 2**24
RESERVE_BYTES = 256 * 1024
"""Kept free in the file for transactions that only settle."""
STEP_BYTES = 4 * 2**20
"""The file grows by so much at a time, where the disk has it."""
LOG, STAGED = "log", "log.new"
DATA = "data.mdb"
_PAGES_TOUCHED = 64
"""Copied for any transaction: a path of the tree for each place written, and the list of free pages."""

MapFull = lmdb.MapFullError
LmdbError = lmdb.Error


def _open(path: str, *, read_only: bool = False, readahead: bool = False) -> lmdb.Environment:
    size = MAP_BYTES
    while True:
        try:
            env = lmdb.open(
                path,
                map_size=size,
                max_dbs=0,
                mode=0o700,
                create=False,
                readonly=read_only,
                readahead=readahead,
                max_spare_txns=1,
                lib_version=ENGINE,
            )
            break
        except (lmdb.MemoryError, lmdb.InvalidParameterError) as error:  # an address-space limit
            if size <= LEAST_MAP_BYTES:
                raise StorageError(
                    f"the log at {path} could not be mapped: {error}; raise the address-space limit"
                ) from error
            size //= 2
        except lmdb.Error as error:
            if "Cannot allocate memory" in str(error) and size > LEAST_MAP_BYTES:
                size //= 2
                continue
            if "already open in this process" in str(error):
                raise StorageError(
                    f"the log at {path} is open in this process: ask the broker that has it, with stats(), check() or "
                    "snapshot(), or look from another process"
                ) from error
            raise StorageError(
                f"the log at {path} could not be opened: {str(error).rstrip('.')}. It was left as it is; copy it "
                "before you try repairs"
            ) from error
    if env.lib_version()[0] != ENGINE:
        env.close()
        raise StorageError(f"the log at {path} was opened by LMDB {env.lib_version()}, expected {ENGINE}.x")
    return env


class Environment:
    """The log's store of keys and values. One write transaction at a time, by whoever leads."""

    def __init__(self, path: str, files: Files, *, read_only: bool = False, readahead: bool = False) -> None:
        """Open a log; `readahead` is for whoever reads much of it: 10 times the speed where it is not in memory."""
        self.path = path
        self._files = files
        self._env = _open(path, read_only=read_only, readahead=readahead)
        self._page_bytes: int = self._env.stat()["psize"]
        self._check_length()
        self._data_fd = -1
        self._allocated = 0
        if not read_only:
            self._env.reader_check()
            self._data_fd = os.open(os.path.join(path, DATA), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _check_length(self) -> None:
        """Refuse a file that was cut short: reading a map beyond its end would kill the process."""
        data = os.path.join(self.path, DATA)
        size, needed = os.stat(data).st_size, (self._env.info()["last_pgno"] + 1) * self._page_bytes
        if size < needed:
            self._env.close()
            raise CorruptionError(
                f"{data} has {size} bytes, its log needs {needed}: it was cut short. Bring back a whole copy of it"
            )

    @classmethod
    def create(cls, spool: str, files: Files, first: dict[bytes, bytes]) -> None:
        """Make an empty log with the pairs of `first` in it; either it is there, whole and synced, or it is not."""
        put_pairs(staging(spool, files), first)
        put_in_place(spool, files)

    def begin(self, *, write: bool = False, buffers: bool = False) -> Any:
        """Begin a transaction; reads are of one moment and must be short, for they pin pages."""
        try:
            return self._env.begin(write=write, buffers=True) if buffers else self._env.begin(write=write)
        except lmdb.MapResizedError:  # another process, the owner, needed more than is mapped here
            try:
                self._env.set_mapsize(0)  # as large as it says
            except (lmdb.Error, OSError) as error:
                raise StorageError(
                    f"the log at {self.path} has grown, and could not be mapped as a whole: {error}; raise the "
                    "address-space limit"
                ) from error
            return self.begin(write=write, buffers=buffers)

    def commit(self, txn: Any) -> None:
        """Commit and sync."""
        txn.commit()

    def last_transaction(self) -> int:
        """Return the number of the last committed transaction."""
        number: int = self._env.info()["last_txnid"]
        return number

    def make_room(self, value_bytes: int, values: int, *, settles_only: bool, step_bytes: int = STEP_BYTES) -> None:
        """Make sure that a transaction writing so much finds the disk it needs.

        Raises:
            DiskFull: it would not; nothing was begun. Transactions that only settle may use a reserve.
        Cost: one system call for each `step_bytes` the file grows.
        """
        last_page: int = self._env.info()["last_pgno"]
        page = self._page_bytes
        needed = (last_page + 1 + _PAGES_TOUCHED + 2 * values) * page + value_bytes
        if needed + (0 if settles_only else RESERVE_BYTES) <= self._allocated:
            return
        wanted = needed if settles_only else needed + RESERVE_BYTES
        for size in (wanted + step_bytes, wanted):
            try:
                self._files.allocate(self._data_fd, size)
            except OSError as error:
                if size == wanted:
                    raise storage_error(error, "make room in the log for a transaction", self.path) from error
            else:
                self._allocated = size
                return

    def grow_map(self) -> None:
        """Double the map, with no transaction open; the slow path of an address-space limit."""
        self._env.set_mapsize(self._env.info()["map_size"] * 2)

    def size_bytes(self) -> int:
        """Return the length of the file."""
        return os.stat(os.path.join(self.path, DATA)).st_size

    def forget_dead_readers(self) -> int:
        """Give back the pages that readers pin whose processes were killed; return how many there were.

        Cost: some system calls for each process that reads.
        """
        dead: int = self._env.reader_check()
        return dead

    def copy_to(self, directory: str) -> None:
        """Write what is committed at this moment into an empty directory, without free pages; nothing is synced.

        Commits and reads go on; their pages are pinned until the end. Other threads run meanwhile, but an interrupt of
        this one comes after it.

        Raises:
            DiskFull, StorageError: the copy could not be written; a part of it may be there.
        Cost: writes what the log holds.
        """
        data = os.path.join(directory, DATA)
        try:
            fd = self._files.open(data, CREATE, FILE_MODE)
            try:
                self._env.copyfd(fd, compact=True)
            finally:
                self._files.close(fd)
        except OSError as error:
            raise storage_error(error, "write a copy of the log", data) from error
        except lmdb.Error as error:
            raise _full_or_failed(error, directory) from error

    def exchange(self, other: Environment) -> None:
        """Go on with what another environment has open, and it with what this one had; no transaction is open."""
        mine = self._env, self._data_fd, self._allocated
        self._env, self._data_fd, self._allocated = other._env, other._data_fd, other._allocated
        other._env, other._data_fd, other._allocated = mine  # no call in here: an interrupt finds all or nothing

    @property
    def in_place(self) -> bool:
        """What is open is what lies at the path, or nothing lies there."""
        try:
            there = os.stat(os.path.join(self.path, DATA))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return os.path.samestat(os.fstat(self._data_fd), there)

    def close(self) -> None:
        self._env.close()
        if self._data_fd >= 0:
            os.close(self._data_fd)
            self._data_fd = -1


def staging(spool: str, files: Files) -> str:
    """Return `log.new/` in a spool, empty: where a log is made."""
    staged = os.path.join(spool, STAGED)
    if os.path.islink(staged) or (os.path.exists(staged) and not os.path.isdir(staged)):
        raise StorageError(f"{staged} is in the way: remove it and try again")
    if os.path.isdir(staged):
        for name in files.list(staged):
            files.unlink(os.path.join(staged, name))
    else:
        files.make_directory(staged)
    return staged


def put_pairs(directory: str, pairs: dict[bytes, bytes]) -> None:
    """Write some pairs into a log that nobody uses yet, or begin it with them."""
    env = _open(directory)
    try:
        with env.begin(write=True) as txn:
            for key, value in pairs.items():
                txn.put(key, value)
        env.sync(True)
    except lmdb.Error as error:
        raise _full_or_failed(error, directory) from error
    finally:
        env.close()


def sync_staged(spool: str, files: Files) -> None:
    """Force all of `log.new/` to the disk."""
    staged = os.path.join(spool, STAGED)
    files.sync_file(os.path.join(staged, DATA))
    files.sync_directory(staged)


def put_in_place(spool: str, files: Files) -> None:
    """Make `log.new/` the log of a spool that has none."""
    sync_staged(spool, files)
    files.rename(os.path.join(spool, STAGED), os.path.join(spool, LOG))
    files.sync_directory(spool)


def check_log_directory(path: str) -> bool:
    """Tell whether there is a log at `path`; refuse what looks like one but is not ours to follow."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise StorageError(f"{path} is not a directory: move it away, or open another spool")
    if not os.path.isfile(os.path.join(path, DATA)):
        raise CorruptionError(
            f"{path} holds no data.mdb: the log is gone; restore it from a snapshot, or move {path} away"
        )
    return True


def _full_or_failed(error: Exception, path: str) -> StorageError:
    if "No space left" in str(error) or "Input/output" in str(error):
        return DiskFull(f"there is no room for a new log at {path}: {error}; free some space and try again")
    return StorageError(f"a new log at {path} could not be written: {error}")
