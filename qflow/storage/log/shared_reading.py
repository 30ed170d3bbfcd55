"""Opens a log to read it beside its owner, who may put a compacted one in its place at this moment: see `snapshots`."""

from __future__ import annotations

import os

from qflow.errors import PermissionDenied, QflowError
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log.directory import LOCK, LOG, check_log_directory
from qflow.storage.log.overlay import Overlay

OLD = "log.old"


def open_to_read(spool: str, files: Files, *, readahead: bool = False) -> Environment | None:
    """Open the log of a spool beside its owner, who may compact it at this moment; None if there is no log."""
    log, old = os.path.join(spool, LOG), os.path.join(spool, OLD)
    while True:
        path = log if files.exists(log) or not files.exists(old) else old  # between two renames there is no `log`
        lay = _place(path, files)
        try:
            if check_log_directory(path):
                env = Environment(path, files, read_only=True, readahead=readahead)
                if _place(path, files) == lay:
                    env.seen = Overlay(env, files).over
                    return env
                env.close()  # of two moments: the lock of one log, perhaps, and the data of another
            elif lay is None and not (files.exists(log) or files.exists(old)):
                return None
        except (QflowError, FileNotFoundError) as error:
            still_there = not files.exists(log) if path == old else _place(path, files) == lay
            of_lmdb = not isinstance(error.__cause__, OSError)  # which names no file; the data could be opened before
            if still_there and isinstance(error, PermissionDenied) and of_lmdb:
                raise PermissionDenied(
                    f"{error}; who reads notes which pages are to be kept in {os.path.join(path, LOCK)}: that must be "
                    "writable, or the spool be on a read-only mount"
                ) from error
            if still_there:
                raise


def _place(path: str, files: Files) -> tuple[int, int, int] | None:
    """Return which file is at a path, and since when: file systems reuse numbers. None if there is none."""
    try:
        found = files.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
