"""Connections to a spool that the test itself owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import qflow


@pytest.fixture
def connect(spool: Path) -> Iterator[Callable[[], qflow.RemoteBroker]]:
    """Connect to the spool; connections are closed at the end."""
    opened: list[qflow.RemoteBroker] = []

    def connect_it() -> qflow.RemoteBroker:
        opened.append(qflow.connect(spool))
        return opened[-1]

    yield connect_it
    for remote in opened:
        remote.close()


@pytest.fixture
def owner(open_spool: Callable[..., qflow.Broker]) -> qflow.Broker:
    """The broker that owns the spool."""
    return open_spool()


@pytest.fixture
def remote(owner: qflow.Broker, connect: Callable[[], qflow.RemoteBroker]) -> qflow.RemoteBroker:
    """A connection to it."""
    return connect()
