"""Whether a log lies where it was opened: somebody may move a spool, or remove it, while it is open."""

from __future__ import annotations

import os

from qflow.errors import StorageError
from qflow.storage.environment import Environment
from qflow.storage.files import storage_error
from qflow.storage.log.directory import DATA


class Removed(StorageError):
    """What is written to a log is gone with the process: its file has no name any more."""


def is_in_place(env: Environment) -> bool:
    """Tell whether what is open is what lies at the path, or no log lies there."""
    try:
        return _is_there(env, or_nothing=True)
    except OSError:
        return False


def _is_there(env: Environment, or_nothing: bool) -> bool:
    """Tell so; `or_nothing`: or no log lies there. Raises OSError: that cannot be seen."""
    try:
        there = os.stat(os.path.join(env.path, DATA))
    except FileNotFoundError:
        return or_nothing
    return os.path.samestat(env.status(), there)


def check_in_place(env: Environment, *, or_nothing: bool = True) -> None:
    """Check that what is found by the path of a spool is not another one. Cost: 3 us.

    Args:
        or_nothing: there may be no log; not for who makes a file beside it, in whatever directory there is.

    Raises:
        StorageError: it is not what is open, or cannot be looked at.
    """
    try:
        is_there = _is_there(env, or_nothing)
    except OSError as error:
        raise storage_error(error, "look at the log", env.path) from error
    if not is_there:
        raise StorageError(
            f"the spool {os.path.dirname(env.path)} was moved while it was open, and is not what lies there: move it "
            "back, or close it and open it where it is"
        )


def is_removed(env: Environment) -> bool:
    """Tell whether what is written is gone with the process, or the log was closed. Cost: 1 us."""
    try:
        return not env.status().st_nlink
    except OSError:  # a signal handler has closed it
        return True


def check_not_removed(env: Environment) -> None:
    """Check that what is written will be found again. Cost: 1 us. Raises Removed: it will not."""
    if is_removed(env):
        raise _removed(env)


def check_there(env: Environment) -> None:
    """`check_not_removed` by any thread, also beside a compaction, which removes the file of before.

    Raises:
        Removed: what is written will not be found again.
    """
    file = env.file
    try:
        has_name = env.status().st_nlink > 0
    except OSError:  # it was closed meanwhile
        return
    if not has_name and env.file is file:
        raise _removed(env)


def _removed(env: Environment) -> Removed:
    spool = os.path.dirname(env.path)
    return Removed(removed(f"the spool {spool}" if env.place.is_removed else f"the log of the spool {spool}"))


def removed(what: str) -> str:
    """Return what there is to say of a spool that was removed, or of its log."""
    return (
        f"{what} was removed while it was open: what is stored now would be gone with this process; have what waits "
        "taken, or copied by `broker.snapshot`, then open a spool anew where no cleaner comes"
    )
