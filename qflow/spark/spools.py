"""Logs that this process has open for reading: one for each spool, reopened when a compaction replaced it.

Spark's workers live on from task to task, so logs stay open. LMDB opens a file once in a process, and a child must not
use a log that its parent has open: logs are identified by process, device and inode. A compacted log is another file,
which is opened at the next use.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qflow.arrow.states import SpoolState, state_of
from qflow.errors import NotFound, StorageError
from qflow.named_tuples import NamedTuple
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.log import recovery
from qflow.storage.log.shared_reading import open_to_read


class _Open(NamedTuple):
    spool: str
    """The path without symbolic links."""
    env: Environment
    uuid: str


_open: dict[tuple[int, int, int], _Open] = {}


def _place(spool: str) -> tuple[int, int, int] | None:
    """Return (process, device, inode) of the current log file; None if there is none, perhaps for a moment."""
    try:
        found = os.stat(os.path.join(spool, "log", "data.mdb"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise StorageError(
            f"the spool at {spool} may not be read by this user: run Spark as its owner, {error.filename} is closed to "
            "others"
        ) from error
    return os.getpid(), found.st_dev, found.st_ino


def _missing(spool: str, *, planned: bool) -> NotFound:
    if planned:
        return NotFound(
            f"this executor, on host {socket.gethostname()!r}, cannot see the spool at {spool}, which the driver has "
            "seen: a log is mapped into memory and can be read on its own host only. Serve it with `qflow serve "
            f"{spool} --flight HOST:PORT`, and give grpc+tls://HOST:PORT as the path; or run Spark on that host"
        )
    if os.path.isdir(spool):
        return NotFound(f"{spool} is not a spool: it holds no log. Give the directory that qflow.open was given")
    return NotFound(
        f"there is no spool at {spool} on host {socket.gethostname()!r}: give the directory that qflow.open was given, "
        "as an absolute path on this host"
    )


def _environment(spool: str, *, planned: bool) -> _Open:
    """Return the current log, open."""
    while True:
        place = _place(spool)
        if place is not None and place in _open:
            return _open[place]
        let_go(spool)
        env = open_to_read(spool, Files(), readahead=True) if os.path.isdir(spool) else None
        if env is None:
            raise _missing(spool, planned=planned)
        try:
            with env.reading() as txn:
                found = recovery.read(txn, spool)
        except BaseException:
            env.close()
            raise
        opened = _Open(os.path.realpath(spool), env, found.uuid)
        if place is not None and place == _place(spool):  # else it is not known which one was opened
            _open[place] = opened
            return opened
        env.close()


@contextmanager
def reading(spool: str, uuid: str | None = None, *, buffers: bool = False) -> Iterator[Any]:
    """Give a new read transaction of the log of a spool; to be short, because it keeps pages from reuse.

    Args:
        uuid: that the log must have; None = any.
        buffers: values are views of the map, valid until the end of the transaction.

    Raises:
        NotFound: there is no spool, or an executor cannot reach it. StorageError: it is another spool now, or this user
        may not read it. FormatTooNew, CorruptionError: as `qflow.open`.
    Cost: a system call; 2 ms the first time in a process.
    """
    opened = _environment(spool, planned=uuid is not None)
    if uuid is not None and opened.uuid != uuid:
        raise other_log(spool, uuid, opened.uuid)
    with opened.env.reading(buffers=buffers) as txn:
        yield txn


def other_log(spool: str, expected: str, found: str) -> StorageError:
    """Return the error for a log other than the one the offsets belong to."""
    return StorageError(
        f"the spool at {spool} was made anew: its log is {found}, the offsets of this query belong to {expected}. "
        "Bring that spool back, or begin anew with another checkpoint directory (of `qflow pipeline run`: another --to)"
    )


def look(spool: str, uuid: str | None = None) -> SpoolState:
    """Return the streams of a spool. Cost: reads a record and the rows of each stream, queue and cursor.

    Raises:
        NotFound, StorageError, FormatTooNew, CorruptionError: see `reading`.
    """
    with reading(spool) as txn:
        found = state_of(txn, spool)
    if uuid is not None and found.uuid != uuid:
        raise other_log(spool, uuid, found.uuid)
    return found


def let_go(spool: str) -> None:
    """Close the log of a spool, if this process has it open; the next use opens it again."""
    real = os.path.realpath(spool)
    for place, opened in list(_open.items()):
        if opened.spool == real and place[0] == os.getpid():
            del _open[place]
            opened.env.close()
