"""Where a log lies in its spool, and how a new one comes there: made and synced in `log.new/`, then renamed."""

from __future__ import annotations

import os
import stat

from qflow.errors import CorruptionError, StorageError
from qflow.storage.files import FILE_MODE, FULL, Files, space_of, storage_error

LOG, STAGED = "log", "log.new"
DATA, LOCK, LAST = "data.mdb", "lock.mdb", "last"
_TABLE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HEAD_BYTES, _SLOT_BYTES, _PAGE_BYTES = 128, 64, 4096
"""Of the table of readers."""


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


def make_reader_table(log: str, files: Files, readers: int) -> None:
    """Have disk space for all of `lock.mdb`: LMDB maps it, and on a full disk who writes to a hole is killed (SIGBUS).

    A table that was made with holes keeps those in which no reader has been yet, where the disk has no room for them.
    Nothing in this process has the log open: closing the table would give up the locks that say who reads.
    """
    path, size = os.path.join(log, LOCK), _HEAD_BYTES + _SLOT_BYTES * readers
    found = _found(path)
    if found is not None and stat.S_ISREG(found.st_mode) and size <= found.st_size <= space_of(found):
        return
    try:
        fd = files.open(path, _TABLE, FILE_MODE)
        try:
            files.allocate(fd, size)
        except OSError as error:
            if error.errno not in FULL:
                raise
            files.allocate(fd, min(size, _PAGE_BYTES))
        finally:
            files.close(fd)
    except OSError as error:
        raise storage_error(error, "make room for the readers of the log", path) from error


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
    """Tell whether there is a log at `path`; refuse what looks like one but is not ours to follow, or to look at."""
    found = _found(path)
    if found is None:
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise StorageError(f"{path} is not a directory: move it away, or open another spool")
    places = [os.path.join(path, name) for name in (DATA, LOCK, LAST)]
    for place in places:
        found = _found(place)
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise StorageError(f"{place} is not a file of its own, but a link or the like: put the file in its place")
    found = _found(places[0])
    if found is None:
        raise CorruptionError(
            f"{path} holds no data.mdb: the log is gone; restore it from a snapshot, or move {path} away"
        )
    if not found.st_size:
        raise CorruptionError(
            f"{places[0]} is empty: the log is gone; restore it from a snapshot, or move {path} away. It was left as "
            "it is"
        )
    return True


def _found(path: str) -> os.stat_result | None:
    """Return what lies at a path, a link itself; None if nothing does."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, "look at the log", path) from error
