"""Whether a log lies where it was opened: somebody may move a spool, or remove it, while it is open."""

from __future__ import annotations

import os

from qflow.errors import StorageError
from qflow.storage.environment import Environment
from qflow.storage.log.directory import DATA


class Removed(StorageError):
    """What is written to a log is gone with the process: its file has no name any more."""


def is_in_place(env: Environment) -> bool:
    """Tell whether what is open is what lies at the path, or nothing lies there."""
    try:
        there = os.stat(os.path.join(env.path, DATA))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return os.path.samestat(env.status(), there)


def check_in_place(env: Environment) -> None:
    """Check that what is found by the path of a spool is not another one. Cost: 3 us.

    Raises:
        StorageError: it is.
    """
    if not is_in_place(env):
        raise StorageError(
            f"the spool {os.path.dirname(env.path)} was moved while it was open, and another one lies there: move both "
            "back, or close this one and open it where it is"
        )


def check_not_removed(env: Environment) -> None:
    """Check that what is written will be found again. Cost: 1 us.

    Raises:
        Removed: it will not.
    """
    if not env.status().st_nlink:
        raise Removed(
            f"the spool {os.path.dirname(env.path)} was removed while it was open: what is stored now would be gone "
            "with this process; have what waits taken, then open a spool anew where no cleaner comes"
        )
