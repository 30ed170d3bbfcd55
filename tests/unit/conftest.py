"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import drivers
import qflow
from unit.clocks import Clock, open_still


@pytest.fixture
def clock() -> Clock:
    """Time that the test moves."""
    return Clock()


@pytest.fixture(params=[True, False], ids=["durable", "transient"])
def durable(request: pytest.FixtureRequest) -> bool:
    """Whether queues are logged: each test is run with both."""
    return bool(request.param)


@pytest.fixture
def open_at(spool: Path, clock: Clock, access: str) -> Iterator[Callable[..., qflow.Broker]]:
    """Open the spool under the test's clock, without a maintenance thread; checked and closed as by `open_spool`."""
    with drivers.opening(access, lambda **settings: open_still(spool, clock, **settings)) as open_it:
        yield open_it
