"""The broker that messages of a worker come by, for the function that it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from qflow.errors import NotFound

if TYPE_CHECKING:
    import qflow

_brokers: list[Any] = []
"""Of the worker that runs in this process, while it has one."""


def broker() -> qflow.RemoteBroker:
    """Return the broker that the message at hand came by, for a function that puts what follows from it.

    The worker connects, again where the owner was restarted, and closes it. A transaction of it may ack the message.

    Raises:
        NotFound: this process is no worker.
    """
    if not _brokers:
        raise NotFound("broker() is for a function that `qflow work` calls: no worker of this process has a broker")
    connected: qflow.RemoteBroker = _brokers[-1]
    return connected


@contextmanager
def coming_by(connected: Any) -> Iterator[None]:
    """Have functions that are called in this context find a broker."""
    _brokers.append(connected)
    try:
        yield
    finally:
        _brokers.pop()
