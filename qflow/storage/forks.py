"""Logs that are open in this process, or were when it was forked: LMDB opens none of them in it again."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import ReferenceType, ref

from qflow.errors import ForkedProcess, QflowError, StorageError


class Opened(Protocol):
    """An environment that is open."""

    file: os.stat_result
    """Of its file."""


_opened: set[ReferenceType[Opened]] = set()
"""In this process. A copy of it is made in one step, whatever other threads open meanwhile."""
_inherited: set[tuple[int, int]] = set()
"""Devices and inodes of those that were open at a fork."""
_of_parent: set[tuple[int, int]] = set()
"""Those that were so in the parent."""


def note(one: Opened) -> None:
    """Note that an environment is open."""
    _opened.add(ref(one, _opened.discard))


def forget(one: Opened) -> None:
    """Note that it is closed."""
    _opened.discard(ref(one))


def _files() -> set[tuple[int, int]]:
    """Return device and inode of each log that is open in this process."""
    there = (reference() for reference in _opened.copy())
    return {(one.file.st_dev, one.file.st_ino) for one in there if one is not None}


def check_not_open(path: str, file: os.stat_result) -> None:
    """Refuse a log that is open in this process before LMDB does. Raises StorageError."""
    if (file.st_dev, file.st_ino) in _files():
        raise open_already(path, file)


def open_already(path: str, file: os.stat_result) -> QflowError:
    """Return the error for a log that LMDB takes for open in this process."""
    if (file.st_dev, file.st_ino) in _inherited:
        return ForkedProcess(
            f"this process was forked while the log at {path} was open, and can never open it: use the spool from here "
            "with qflow.connect, close it before forking, or start a fresh process (spawn, exec)"
        )
    return StorageError(
        f"the log at {path} is open in this process: ask the broker that has it, with stats(), check() or snapshot(), "
        "or look from another process"
    )


def speak_for_parent() -> None:
    """In a child that does the parent's work: what that has open is its own."""
    _inherited.intersection_update(_of_parent)


def _after_fork() -> None:
    _of_parent.update(_inherited)
    _inherited.update(_files())
    _opened.clear()


os.register_at_fork(after_in_child=_after_fork)
