"""What tests of spill stores share: a directory on the disk they are made for, but for those of very many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import scratch


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the test's own, in one that nobody else uses."""
    place = scratch.in_memory() if request.node.get_closest_marker("in_memory") else None
    with scratch.directory(place, "contract") as path:
        own = path / "test"
        own.mkdir()
        yield own
