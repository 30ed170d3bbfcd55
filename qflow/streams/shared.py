"""What all streams of a broker share: the log, memory, clocks, and what to tell others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import attrs

from qflow.storage.log.transaction_log import TransactionLog
from qflow.streams.room import Room


@attrs.frozen(kw_only=True)
class Shared:
    """See the module."""

    log: TransactionLog
    room: Room
    max_transaction_bytes: int
    report: Callable[[str, int], None]
    """Is told of damage, and how many messages that is."""
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    held: Callable[[int], Mapping[int, int]] | None = None
    """Returns from which offset on readers outside have retention keep everything, by partition."""
