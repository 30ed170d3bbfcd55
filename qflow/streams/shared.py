"""What all streams of a broker share: the log, memory, clocks, and callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from qflow.named_tuples import NamedTuple
from qflow.storage.log.transaction_log import TransactionLog
from qflow.streams.room import Room
from qflow.used import Used


class Shared(NamedTuple):
    """See the module."""

    log: TransactionLog
    room: Room
    max_transaction_bytes: int
    report: Callable[[str, int], None]
    """Called with a text about damage, and how many messages are lost."""
    used: Used
    uuid: str = ""
    """Of the spool."""
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    held: Callable[[int], Mapping[int, int]] | None = None
    """Returns, of a stream, the offset by partition from which retention keeps everything for readers outside."""
