"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qflow
from unit.clocks import Clock, open_still


@pytest.fixture
def clock() -> Clock:
    """Time that the test moves."""
    return Clock()


@pytest.fixture
def open_at(spool: Path, clock: Clock) -> Iterator[Callable[..., qflow.Broker]]:
    """Open the spool under the test's clock, without a maintenance thread; checked and closed as by `open_spool`."""
    opened: list[qflow.Broker] = []

    def open_it(**settings: Any) -> qflow.Broker:
        broker = open_still(spool, clock, **settings)
        opened.append(broker)
        return broker

    yield open_it
    for broker in opened:
        if not broker.closed:
            assert broker.check() == []
            broker.close()
