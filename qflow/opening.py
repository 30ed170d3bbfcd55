"""`qflow.open`."""

from __future__ import annotations

import os
import sys
from typing import Any

from qflow.broker import Broker
from qflow.config import BrokerSettings
from qflow.errors import InvalidArgument, QflowError
from qflow.memory.waiting import shelter_made


def open_broker(
    path: str | os.PathLike[str],
    *,
    capacity_bytes: int | str = "64MiB",
    spill: str = "files",
    segment_bytes: int | str = "8MiB",
    max_mapped_segments: int = 0,
    max_transaction_bytes: int | str = "64MiB",
    unsafe_filesystem: bool = False,
) -> Broker:
    """Open a spool, creating it if there is none, and own it until the broker is closed.

    Args:
        path: a directory; made with mode 0700 if missing. It may be an existing spool or empty.
        capacity_bytes: memory for the messages of all queues together, an int or a text such as "64MiB".
        spill: how messages that do not fit lie on disk: `"files"`, one each, or `"segments"`, many in a file of
            fixed size, which costs a hundredth of the file operations.
        segment_bytes: size of a segment, "4KiB" to "256MiB"; a larger message has one of its own.
        max_mapped_segments: how many segments, of all queues, are mapped into memory for reading at once, each with a
            file descriptor; 0 maps none and reads with `pread`, which was found as fast.
        max_transaction_bytes: the most one `put_many` or transaction may hold. A commit has all of it in memory.
        unsafe_filesystem: accept a network file system.

    Raises:
        SpoolInUse: another process owns it; nothing was touched.
        StorageError: the directory or its file system cannot be used.
        FormatTooNew: a newer qflow wrote it.
        CorruptionError: its log or its first records are damaged, or it has no log any more; it was left as it is.
        InvalidArgument: a setting makes no sense, or the path is a URL, or holds something that is no spool.
        QflowError: a free-threaded build of CPython runs without its lock (GIL); nothing was touched.
    Cost: two commits for a new spool, one for an existing one, whatever waits in it.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise QflowError(
            "this process runs without the lock of the interpreter (GIL), on which qflow and its binding of LMDB rely: "
            "start it without PYTHON_GIL=0 and -X gil=0, or with a build of CPython that is not free-threaded"
        )
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path) or not os.fspath(path):
        raise InvalidArgument(f"the path of a spool must be a path without NUL, not {path!r}")
    values: dict[str, Any] = {
        "capacity_bytes": capacity_bytes,
        "spill": spill,
        "segment_bytes": segment_bytes,
        "max_mapped_segments": max_mapped_segments,
        "max_transaction_bytes": max_transaction_bytes,
        "unsafe_filesystem": unsafe_filesystem,
    }
    settings = BrokerSettings(**values)
    return shelter_made(lambda: Broker(path, settings))
