"""qflow itself: both spill stores, transient and durable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import qflow
from bench.engines.base import MEMORY, QFLOW, SYNCED, Engine, Opened
from bench.errors import CannotRun
from qflow.config import BrokerSettings
from qflow.storage.files import Files

STORES = ("files", "segments")
make_broker: Callable[..., qflow.Broker] = getattr(qflow.broker, "make_broker", qflow.Broker)
"""Opens a spool with clocks and files of a workload, also of a qflow where that was the class."""
PATIENCE_S = 60
"""How long a get waits: a message that does not come by then is lost, and the row says so."""


def open_broker(path: Path, *, spill: str = "files", files: Files | None = None, **settings: Any) -> qflow.Broker:
    """Open a spool; raise `CannotRun` where this qflow does not have the spill store, or a setting of it."""
    try:
        if files is None:
            return qflow.open(path, spill=spill, **settings)
        return make_broker(path, BrokerSettings(spill=spill, **settings), files=files)
    except (TypeError, qflow.InvalidArgument) as error:
        raise CannotRun(f"spill={spill!r}: {error}") from error


def _open(path: Path, capacity_bytes: int, *, spill: str, durable: bool) -> Opened:
    broker = open_broker(path / "spool", spill=spill, capacity_bytes=capacity_bytes)
    queue = broker.declare_queue("bench", durable=durable)

    def take() -> bytes:
        delivery = queue.get(PATIENCE_S)
        delivery.ack(durable)
        return delivery.body

    def take_many(most: int) -> Sequence[bytes]:
        batch = queue.get_many(most, PATIENCE_S)
        bodies = batch.bodies
        batch.ack(durable)
        return bodies

    return Opened(put=queue.put, take=take, put_many=queue.put_many, take_many=take_many, close=broker.close)


ENGINES = [
    Engine(
        name=f"qflow-{spill}" + "-durable" * durable,
        kind=QFLOW,
        promise=SYNCED if durable else MEMORY,
        why="one synced LMDB commit before put and ack(wait=True) return" if durable else "wiped when the spool opens",
        open=partial(_open, spill=spill, durable=durable),
        bounded=True,
    )
    for durable in (False, True)
    for spill in STORES
]
