"""A queue that swings around its capacity, where a simple rule would write and read every message.

Operations are counted where the spill stores meet the file system, at `Files`, and in the same way for both: creating a
file, overwriting, reading, renaming and unlinking count one each. A write into a file that was just created is part of
the creation; opening a file that exists, closing it and asking for its status count nothing; a read counts whether it
is of a map or of a file. The statistics that are renamed into place each second are not about messages and left out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from bench.engines.qflow_queues import PATIENCE_S, STORES, open_broker
from bench.measure import Row, Series, Setup, Workload, at_most
from qflow.storage.files import Files

COUNTED = {
    "pwrite": "overwrite",
    "pwritev": "overwrite",
    "read": "read",
    "pread": "read",
    "preadv": "read",
    "bring_in": "read",
    "rename": "rename",
    "unlink": "unlink",
}
"""What a method of `Files` counts as, where it has that method."""
CAPACITY = 4 * 2**20
BODY = bytes(1024)
BOUNDS = {"files": at_most(0.4), "segments": at_most(0.2)}


class CountingFiles(Files):
    """The file system, counting what is done to it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._created: set[int] = set()
        for method, kind in COUNTED.items():
            if hasattr(Files, method):
                setattr(self, method, self._counting(getattr(Files, method), kind))
        self.open = self._open

    def _open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = os.open(path, flags, mode)
        self._created.discard(fd)
        if path.endswith("stats.json.new"):
            self._created.add(fd)  # not about messages
        elif flags & os.O_CREAT:
            self.counts["create"] += 1
            self._created.add(fd)
        return fd

    def _counting(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        bound = method if isinstance(vars(Files)[method.__name__], staticmethod) else method.__get__(self)

        def counted(*arguments: Any) -> Any:
            first = arguments[0]
            if kind == "overwrite" and first in self._created:
                self._created.discard(first)
            elif not (kind == "rename" and first.endswith("stats.json.new")):
                self.counts[kind] += 1
            return bound(*arguments)

        return counted


def swinging(setup: Setup) -> Iterator[Row]:
    for spill in STORES:
        yield _swing(setup, spill)


def _swing(setup: Setup, spill: str) -> Row:
    swings = setup.size(100, 10)
    name = f"{spill}: file operations a message, swinging 10 % around the capacity"
    files = CountingFiles()
    with setup.scratch() as path:
        try:
            broker = open_broker(path / "spool", spill=spill, files=files, capacity_bytes=CAPACITY)
        except Exception as error:
            return Row(name=name, problem=f"not measured: {error}")
        with broker:
            queue = broker.declare_queue("bench", durable=False)
            created = files.counts["create"]
            while files.counts["create"] == created:  # up to the capacity: the first file says that it is reached
                queue.put(BODY)
            swing = len(queue) // 10
            _take(queue, swing)
            values = []
            for number in range(swings + 1):
                before = files.counts.copy()
                for _ in range(2 * swing):
                    queue.put(BODY)
                _take(queue, 2 * swing)
                if number == 0:
                    start = before = files.counts.copy()
                    continue
                values.append((files.counts - before).total() / (2 * swing))
    messages = swings * 2 * swing
    each = {kind: count / messages for kind, count in sorted((files.counts - start).items())}
    return Row(
        name=name,
        figure=Series("operations a message", "", [(files.counts - start).total() / messages]),
        bound=BOUNDS[spill],
        details=[
            Series("in each swing", "", values),
            *(Series(kind, "", [value]) for kind, value in each.items()),
        ],
        notes=[f"{messages:,} messages of 1 KiB in {swings} swings of {2 * swing:,}, capacity {CAPACITY // 2**20} MiB"],
    )


def _take(queue: Any, count: int) -> None:
    for _ in range(count):
        queue.get(PATIENCE_S).ack()


WORKLOADS = [
    Workload("oscillation", "a queue swings from 90 to 110 % of its capacity; file operations a message", swinging)
]
