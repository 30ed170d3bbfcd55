"""Looks at a spool from outside: at its log, at its owner through the door, at the disk."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import attrs

from qflow.amqp import letters
from qflow.config import spool_path
from qflow.doctor.look import Letters, Look
from qflow.doctor.spools import STALLED_S, under_way_s
from qflow.door import is_blocked, is_there
from qflow.errors import CorruptionError, FormatTooNew, FormatTooOld, QflowError
from qflow.inspect import Health, check_there, owner_of, read_health, read_live
from qflow.inspect.logs import can_be_opened, check_openable

ANSWERS_S = 5.0
"""How long an owner may take to answer."""
READ_BYTES = 64 * 2**20
"""A log of which no more is in use is read as a whole: half a second's work; less than a second on a slow disk."""


def look_at(path: str | os.PathLike[str]) -> Look:
    """Return what is seen of a spool; a log of `READ_BYTES` is read whole. Raises NotFound. StorageError.

    A log whose sync stands still is not read: who reads notes that in a file of it, and would wait for the same disk.
    """
    spool = spool_path(path)
    owner = owner_of(spool)
    told = {} if owner is None else _told(spool, owner)
    if under_way_s(told.get("stats")) >= STALLED_S:
        return attrs.evolve(seen_in(spool), owner_pid=owner, is_standing=True, **told)
    look = look_inside(spool, READ_BYTES)
    if isinstance(look.failure, FormatTooNew | FormatTooOld):
        told = {}
    return attrs.evolve(look, owner_pid=owner, **told)


def look_inside(path: str | os.PathLike[str], read_bytes: int = 0) -> Look:
    """Return what the log of a spool, its disk and what stands beside the log tell; its owner is not asked.

    Args:
        read_bytes: a log of which no more is in use is read as a whole.

    Raises:
        NotFound: there is no spool. StorageError: it cannot be read.
    Cost: a process that is forked; it reads a row for each lane, and some hundred dead letters.
    """
    spool = spool_path(path)
    look = _log(spool, read_bytes)
    obstacle = _obstacle(spool) if owner_of(spool) is None else None
    return attrs.evolve(look, obstacle=obstacle, is_door_blocked=is_blocked(spool), has_door=is_there(spool))


def _log(spool: str, read_bytes: int) -> Look:
    """Return what the log tells, and the disk."""
    try:
        check_there(spool)
    except CorruptionError as error:
        return attrs.evolve(seen_in(spool), failure=error, has_log=False)
    try:
        return seen_in(spool, read_health(spool, read_bytes, letters.headers_of))
    except (FormatTooNew, FormatTooOld) as error:
        return attrs.evolve(seen_in(spool), failure=error)
    except CorruptionError as error:
        return attrs.evolve(seen_in(spool), failure=error, has_pages=can_be_opened(spool))


def seen_in(spool: str, health: Health | None = None) -> Look:
    """Return what the disk of a spool tells, and its log as it was read.

    Args:
        health: None: nothing is known of the log.
    """
    try:
        disk, status = shutil.disk_usage(spool), os.statvfs(spool)
    except FileNotFoundError:
        look = Look(path=spool)
    else:
        look = Look(
            path=spool,
            disk_bytes=disk.total,
            disk_free_bytes=disk.free,
            disk_inodes=status.f_files,
            disk_free_inodes=status.f_favail,
        )
    if health is None:
        return look
    return attrs.evolve(
        look,
        clean=health.clean,
        problems=tuple(health.problems),
        is_read=health.is_read,
        letters={
            one.queue: Letters(
                messages=one.messages, reasons=one.reasons, looked_at=one.looked_at, is_named=one.is_named
            )
            for one in health.letters
        },
        passing=frozenset(health.passing),
        log_bytes=health.log_bytes,
        log_used_bytes=health.log_used_bytes,
        readers=tuple(health.readers),
        refused_batches=health.refused_batches,
        last_commit=health.last_commit,
    )


def _obstacle(spool: str) -> QflowError | None:
    try:
        check_openable(spool)
    except QflowError as error:
        return error
    return None


def _told(spool: str, owner: int) -> dict[str, Any]:
    """Return what the owner says of itself, when it is asked, or else what it wrote last."""
    import qflow

    try:
        with qflow.connect(spool, timeout_s=ANSWERS_S) as broker:
            return {"stats": attrs.asdict(broker.stats())}
    except (QflowError, OSError):
        seen, live = {"is_told": False, "is_stopped": is_stopped(owner)}, read_live(spool)
        if live is None or owner not in (0, live["pid"]):
            return seen
        return {**seen, "stats": live, "told_s_ago": max(0.0, time.time() - live["time_s"])}


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped by a signal or a debugger; 0 is one that is not known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False
