"""How thorough a run of the tests is. With `QFLOW_TORTURE=1` it takes hours; `tox -e torture` sets that."""

from __future__ import annotations

import os

TORTURE = bool(os.environ.get("QFLOW_TORTURE"))
"""Strike everywhere, kill often, try many histories, and tell how often."""


def examples(count: int) -> int:
    """Return how many examples of a property are tried where so many make a thorough run."""
    return count if TORTURE else count // 3
