"""What the owner of a spool tells of itself in `stats.json`."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import attrs

from qflow.stats import BrokerStats, QueueStats
from qflow.storage.files import Files, read_whole, storage_error

_OF_BROKER = {field.name for field in attrs.fields(BrokerStats) if field.default is attrs.NOTHING}
_OF_QUEUE = {field.name for field in attrs.fields(QueueStats) if field.default is attrs.NOTHING}
"""Fields that owners of earlier versions tell, too."""
LATEST_S = 15.0
"""Figures that are older are not of now: an owner writes them each ten seconds at least, but not on a full disk."""


def read_live(spool: str) -> dict[str, Any] | None:
    """Return what the owner of a spool wrote last to `stats.json`; None if there is nothing, or not of an owner's.

    Raises:
        StorageError: it cannot be read.
    """
    path = os.path.join(spool, "stats.json")
    try:
        facts = json.loads(read_whole(Files(), path))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ESPIPE):  # a link or a FIFO: the owner did not write it
            return None
        raise storage_error(error, "read what the owner tells", path) from error
    return facts if _is_live(facts) else None


def is_of_now(live: Mapping[str, Any]) -> bool:
    """Tell whether what an owner wrote last is no older than `LATEST_S`."""
    return abs(time.time() - float(live["time_s"])) <= LATEST_S


def _is_live(facts: Any) -> bool:
    """Tell whether a value has the shape of what an owner writes."""
    return (
        isinstance(facts, dict)
        and facts.keys() >= {"pid", "time_s", *_OF_BROKER}
        and all(isinstance(facts[name], int | float) for name in ("time_s", "capacity_bytes"))
        and isinstance(facts["queues"], dict)
        and all(isinstance(queue, dict) and queue.keys() >= _OF_QUEUE for queue in facts["queues"].values())
    )
