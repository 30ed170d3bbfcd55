"""Opens the log of a spool to read it, with or without a live owner."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qflow.config import spool_path
from qflow.errors import NotFound, PermissionDenied, QflowError
from qflow.inspect.child import in_child
from qflow.names import choices
from qflow.storage.environment import Environment
from qflow.storage.files import Files, storage_error
from qflow.storage.lock import LOCK_NAME, check_lock_file
from qflow.storage.log import recovery
from qflow.storage.log.directory import DATA, LOG
from qflow.storage.log.recovery import QueueRecord, Recovery
from qflow.storage.log.rows import read_rows
from qflow.storage.log.shared_reading import OLD, open_to_read
from qflow.storage.spill.store import SPILL, WIPING
from qflow.storage.spill.wiper import check_directories

_NO_LOG = " is not a spool: it holds no log. Give the directory that `qflow.open` was given"


def check_there(path: str | os.PathLike[str]) -> None:
    """Raise `NotFound` if there is no spool, where opening it would make one. Cost: some system calls.

    Raises:
        CorruptionError: there was one, and its log is gone. PermissionDenied: this user may not look whether there is.
    """
    spool = spool_path(path)
    try:
        if not stat.S_ISDIR(os.stat(spool).st_mode):
            raise NotFound(f"there is no spool at {spool}: it is no directory")
        if not any(_lies(os.path.join(spool, name)) for name in (LOG, OLD, LOG)):  # one is renamed over the other
            from qflow.storage.places import check_log  # most spools are there, and are listed fast

            check_log(spool, set(os.listdir(spool)))
            raise NotFound(spool + _NO_LOG)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no spool at {spool}: no such directory") from error
    except OSError as error:
        raise storage_error(error, "look into the spool", spool) from error


def check_openable(path: str) -> None:
    """Raise what would keep anybody from opening a spool that nobody owns, of what lies beside its log."""
    try:
        check_lock_file(path)
        check_directories(Files(), path)
        _check_users(Files(), path)
    except OSError as error:
        raise storage_error(error, "look into the spool", path) from error


def _check_users(files: Files, path: str) -> None:
    """Raise what keeps out the one user whom the spill directories let in: those of others are refused."""
    spill, wiping = (os.path.join(path, name) for name in (SPILL, WIPING))
    users = {place: files.lstat(place).st_uid for place in (spill, wiping) if os.path.lexists(place)}
    if len(set(users.values())) > 1:
        raise PermissionDenied(
            f"{spill} belongs to user {users[spill]}, and {wiping} to user {users[wiping]}: give both to the user to "
            "whom the log belongs"
        )
    for place, user in users.items():
        for name in (LOCK_NAME, os.path.join(LOG, DATA)):
            beside = os.path.join(path, name)
            if user and os.path.lexists(beside) and not _may_write(files.lstat(beside), user):
                raise PermissionDenied(
                    f"{place} belongs to user {user}, who may not write {beside}: give it to the user to whom the log "
                    "belongs"
                )


def _may_write(status: os.stat_result, user: int) -> bool:
    """Tell whether a user may write something, as far as its mode says: nobody knows here of which groups they are."""
    return status.st_uid == user or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def can_be_opened(path: str) -> bool:
    """Tell whether the file of a log is one, of which some may be read. Cost: a child process."""

    def opened() -> None:
        with opened_environment(path):
            pass

    try:
        in_child(path, opened)
    except QflowError:
        return False
    return True


def _lies(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def opened_environment(path: str, *, readahead: bool = False) -> Iterator[Environment]:
    """Open a log to read, as long as the context lasts.

    Args:
        readahead: for whoever reads much of it.

    Raises:
        NotFound: there is no spool.
    """
    check_there(path)
    env = open_to_read(path, Files(), readahead=readahead)
    if env is None:
        raise NotFound(path + _NO_LOG)
    try:
        yield env
    finally:
        env.close()


@contextmanager
def opened_log(path: str, *, readahead: bool = False) -> Iterator[tuple[Environment, Recovery]]:
    """`opened_environment`, with what the log says."""
    with opened_environment(path, readahead=readahead) as env:
        yield env, recovery.read_log(env)


def queue_of(found: Recovery, name: str) -> QueueRecord:
    """Return the record of a durable queue. Raises NotFound: there is none of that name."""
    for record in found.queues:
        if record.name == name and not record.deleted:
            return record
    names = (record.name for record in found.queues if not record.deleted)
    streams = (record.name for record in found.streams if not record.deleted)
    raise NotFound(f"there is no durable queue {name!r} in the log; {choices(name, names, streams=streams)}")


def as_now(txn: Any, record: QueueRecord) -> QueueRecord:
    """Return the record of a queue with its rows of the moment in which its blocks are read.

    A live owner goes on after the moment in which the record was read: blocks that those rows name may be gone.

    Raises:
        NotFound: it was deleted meanwhile.
    """
    if record.rows is None:
        return record
    if not recovery.is_there(txn, record.owner):
        raise NotFound(f"queue {record.name!r} was deleted meanwhile")
    return record._replace(rows=read_rows(txn, record.owner))
