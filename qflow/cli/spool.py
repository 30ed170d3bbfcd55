"""Spools and queues of this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qflow.cli.stop import Stop
from qflow.errors import NotFound, SpoolInUse

if TYPE_CHECKING:
    from qflow.broker import Broker
    from qflow.queues.queue import Queue


def owned(spool: Path, capacity: int, stop: Stop | None) -> Broker:
    """Open a spool; with `stop`, wait while another process owns it.

    Raises:
        Stopped: asked to stop while waiting.
    """
    import qflow

    while True:
        try:
            return qflow.open(spool, capacity_bytes=capacity)
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
