"""The figures of a spool that is looked at from outside: asked of its owner, else read."""

from __future__ import annotations

import os
from typing import Any

from qflow import inspect
from qflow.errors import QflowError, StorageError
from qflow.inspect.live import is_of_now
from qflow.metrics.naming import Told, told_by, told_in
from qflow.metrics.sources import Source
from qflow.remote.client.connecting import connect


def source_of_spool(path: str | os.PathLike[str]) -> Source:
    """Return what asks the owner of a spool, and reads what there is where nobody answers.

    Its `look` raises `NotFound`, `CorruptionError` or `StorageError` if there is no spool, or it cannot be read.
    """
    spool = os.fspath(path)
    return Source(lambda: spool, lambda: _look(spool))


def _look(spool: str) -> Told:
    """Return what the owner tells; or what there is to read, if there is none, or it lets nobody in, or hangs."""
    is_silent = False
    try:
        with connect(spool) as broker:
            return told_by(broker.stats())
    except StorageError:
        is_silent = True
    except QflowError:
        pass
    return _read(spool, is_silent)


def _read(spool: str, is_silent: bool) -> Told:
    """Return what the owner wrote last, or what the log has if there is no owner.

    Args:
        is_silent: it does not answer.
    """
    found = inspect.read_spool(spool)
    if found.owner_pid is not None and found.live is not None:
        return told_in(found.live, has_owner=is_of_now(found.live) and not is_silent)
    streams: dict[str, Any] = {
        stream.name: {
            "messages": stream.messages,
            "bytes": stream.bytes,
            "partitions": len(stream.partitions),
            "subscriptions": [{"name": one.name, "lag_messages": one.lag_messages} for one in stream.subscriptions],
        }
        for stream in found.streams
    }
    queues = {queue.name: {"messages": queue.messages, "bytes": queue.bytes} for queue in found.queues}
    facts = {
        "messages": sum(queue.messages for queue in found.queues),
        "journal_records": found.journal_records,
        "queues": queues,
        "streams": streams,
    }
    return told_in(facts, has_owner=found.owner_pid is not None and not is_silent)
