"""Two ways to a broker: to own it, and to be connected to who owns it. Tests of the surface run with both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import qflow
from qflow.opening import with_door

OWNER, DOOR = "owner", "door"


@contextmanager
def opening(access: str, open_owner: Callable[..., qflow.Broker]) -> Iterator[Callable[..., Any]]:
    """Provide a function that opens a spool with some settings, and returns its owner, or what is connected to that.

    Whatever is open at the end must pass its own check, and is closed. To close what is connected is, for the test, to
    close the spool: it can be opened again.
    """
    opened: list[tuple[qflow.Broker, Any]] = []

    def open_it(**settings: Any) -> Any:
        for owner, broker in opened:
            if broker.closed:
                owner.close()
        owner = open_owner(**settings)
        broker = owner
        opened.append((owner, owner))
        if access == DOOR:
            if owner.engine.door is None:
                with_door(owner)
            broker = qflow.connect(owner.path)
            opened[-1] = owner, broker
        return broker

    yield open_it
    for owner, broker in opened:
        if not owner.closed:
            broker.close() if broker is not owner else None
            assert owner.check() == []
            owner.close()
