"""Whether a log lies where it was opened: a spool may be moved while it is open, and another one made in its place."""

from __future__ import annotations

import os

from qflow.errors import StorageError
from qflow.storage.environment import Environment


def check_in_place(env: Environment) -> None:
    """Check that what is found by the path of a spool is not another one. Cost: 3 us.

    Raises:
        StorageError: it is.
    """
    if not env.in_place:
        raise StorageError(
            f"the spool {os.path.dirname(env.path)} was moved while it was open, and another one lies there: move both "
            "back, or close this one and open it where it is"
        )
