"""Streams, read from outside of their owner."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from functools import partial

from qflow.config import spool_path
from qflow.inspect.logs import opened_log
from qflow.inspect.stream_reader import Gap, StreamReader


def read_stream(
    path: str | os.PathLike[str],
    stream: str,
    topic_filter: str = "#",
    *,
    partition: int | None = None,
    start: str | int | datetime = "earliest",
    on_gap: Callable[[Gap], object],
) -> StreamReader:
    """Return a reader of a stream, which goes on from call to call; it leaves no trace in the spool.

    Args:
        topic_filter: as in MQTT.
        partition: number of the only one to read; None = all.
        start: `"earliest"`, `"latest"`, an offset, or the first message not earlier than a datetime with a time zone.
        on_gap: called with each `Gap`, before the messages behind it are returned.

    Raises:
        NotFound: there is no spool, or no such stream. InvalidArgument: the filter is not valid, or an offset is past
        the end. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    """
    spool = spool_path(path)
    return StreamReader(
        spool, partial(opened_log, spool), stream, topic_filter, partition=partition, start=start, on_gap=on_gap
    )
