"""`qflow.open`."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Unpack

from qflow.allocator import share_heap
from qflow.broker import Broker, make_broker
from qflow.config import BrokerSettings
from qflow.door import Door, open_door
from qflow.errors import QflowError
from qflow.importing import importing
from qflow.memory.waiting import shelter_made

if TYPE_CHECKING:
    from qflow.options import BrokerOptions


def open(path: str | os.PathLike[str], **options: Unpack[BrokerOptions]) -> Broker:
    """Open a spool, creating it if there is none, and own it until the broker is closed.

    Args:
        path: a directory; made with mode 0700 if missing. It may be an existing spool or empty.
        options: `capacity_bytes="64MiB"`, `spill="files"`, `segment_bytes="8MiB"`, `max_mapped_segments=0`,
            `max_transaction_bytes="64MiB"`, `unsafe_filesystem=False`, `journal="auto"`, `journal_bytes="4MiB"`,
            `door=True`: see `qflow.BrokerOptions`.

    Raises:
        SpoolInUse: another process owns it; nothing was touched.
        StorageError: the directory or its file system cannot be used.
        FormatTooNew, FormatTooOld: a newer qflow wrote it, or one from before the first release.
        CorruptionError: its log or its first records are damaged, or it has no log any more; it was left as it is.
        InvalidArgument: an option is unknown or makes no sense, or the path is a URL, or holds something that is no
            spool.
        QflowError: a free-threaded build of CPython runs without its lock (GIL); nothing was touched.
    Cost: two commits for a new spool, one for an existing one, whatever waits in it.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise QflowError(
            "this process runs without the lock of the interpreter (GIL), on which qflow and its binding of LMDB rely: "
            "start it without PYTHON_GIL=0 and -X gil=0, or with a build of CPython that is not free-threaded"
        )
    settings = BrokerSettings.from_call(options, "broker")
    share_heap()
    return shelter_made(lambda: with_door(make_broker(path, settings)))


def with_door(broker: Broker) -> Broker:
    """Let other processes in, if they are to be."""
    if broker.settings.door:
        broker.engine.door = open_door(broker.path, partial(_serve, broker))
    return broker


def _serve(broker: Broker, door: Door) -> None:
    """Serve callers from other processes: what that takes is imported when the first one comes."""
    with importing:
        serving = import_module("qflow.remote.server.serving")
    serving.serve(broker, door)
