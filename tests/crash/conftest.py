"""What tests that kill share: a directory where syncs take no time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import scratch


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory of the test's own, in memory where there is room."""
    with scratch.directory(scratch.in_memory(), "crash") as path:
        yield path
