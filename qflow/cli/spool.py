"""Opens spools, and finds queues, for commands that own them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from qflow.cli import damage
from qflow.cli.stop import Stop
from qflow.errors import NotFound, SpoolInUse

if TYPE_CHECKING:
    from qflow.broker import Broker
    from qflow.options import Spill
    from qflow.queues.queue import Queue


WIPING_S = 0.1
"""Seconds a command spends on removing spill files of an earlier owner: it may end before maintenance does that."""


@contextmanager
def owned_if_there(spool: Path, capacity: int, stop: Stop | None) -> Iterator[Broker]:
    """Own a spool that must exist; none is made.

    Raises:
        NotFound: there is no spool. Stopped: asked to stop while waiting.
    """
    from qflow import inspect

    inspect.check_there(spool)
    with owned(spool, capacity, stop) as broker:
        yield broker


@contextmanager
def owned(spool: Path, capacity: int, stop: Stop | None, *, spill: Spill = "files") -> Iterator[Broker]:
    """Own a spool as long as the context lasts; with `stop`, wait while another process owns it.

    Raises:
        Stopped: asked to stop while waiting.
    """
    from qflow.broker import finish_wiping

    with _opened(spool, capacity, stop, spill) as broker:
        try:
            yield broker
        finally:
            damage.of_command().note(spool, broker)
        finish_wiping(broker, WIPING_S)


def _opened(spool: Path, capacity: int, stop: Stop | None, spill: Spill) -> Broker:
    import qflow

    told_elsewhere = logging.getLogger("qflow.damage")  # `damage` prints one line at the end of the command
    if told_elsewhere.propagate:
        told_elsewhere.propagate = False
        told_elsewhere.addHandler(logging.NullHandler())
    while True:
        try:
            return qflow.open(spool, capacity_bytes=capacity, spill=spill)
        except SpoolInUse:
            if stop is None:
                raise
            stop.sleep(Stop.PATIENCE_S)


def queue_to_fill(broker: Broker, name: str) -> Queue:
    """Return the queue as it was declared; a missing one is made, durable and without limits."""
    try:
        return broker.queue(name)
    except NotFound:
        return broker.declare_queue(name)


def queue_to_empty(broker: Broker, name: str) -> Queue:
    """Return the queue; raise `NotFound` with the names of those that exist."""
    try:
        return broker.queue(name)
    except NotFound as error:
        names = ", ".join(broker.queues()) or "none"
        raise NotFound(f"there is no queue {name!r} in {broker.path}; there are: {names}") from error
