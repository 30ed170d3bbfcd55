"""What tests of spill stores share: a directory on the disk they are made for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import scratch


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory of the test's own, in one that nobody else uses."""
    with scratch.directory(None, "contract") as path:
        own = path / "test"
        own.mkdir()
        yield own
