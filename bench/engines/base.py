"""What every engine looks like to a workload: a few callables, and a true word about what survives.

An adapter is a function that opens an engine at a path and returns an `Opened`, whose callables are the engine's own
methods wherever these fit, so that the adapter costs nothing. Opening the same path again is the engine's reopening.

What counts as a promise is what holds when a call has *returned*:

- `MEMORY`: nothing survives the process, or what survives cannot be found again;
- `KILL`: it survives a kill of the process; a power cut may take it, for nothing was synced;
- `SYNCED`: it was forced to the disk before the call returned.

A promise holds for puts and for settling alike: an adapter settles in the way that promises the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from bench.errors import CannotRun

MEMORY = "memory"
KILL = "survives kill"
SYNCED = "synced before return"
CAPACITY_BYTES = 64 * 2**20
PROMISES = (MEMORY, KILL, SYNCED)

QFLOW, PEER, PLAIN, FLOOR = "qflow", "peer", "plain", "floor"
KINDS = (QFLOW, PEER, PLAIN, FLOOR)
"""Ours; a queue library; what one writes by hand with the standard library; bare operations, which are no queue."""


@attrs.frozen(kw_only=True)
class Opened:
    """An engine that is open."""

    put: Callable[[bytes], object] | None = None
    take: Callable[[], bytes] | None = None
    """Get the oldest message and settle it; the queue is not empty."""
    put_many: Callable[[Sequence[bytes]], object] | None = None
    take_many: Callable[[int], Sequence[bytes]] | None = None
    """Get up to so many and settle them at once; None where the engine has no batches."""
    close: Callable[[], object]

    def push(self, bodies: Sequence[bytes]) -> None:
        """Put some messages in the largest batches it takes."""
        if self.put_many is not None:
            self.put_many(bodies)
            return
        assert self.put is not None
        for body in bodies:
            self.put(body)

    def pull(self, count: int) -> Sequence[bytes]:
        """Take exactly so many in the largest batches it gives."""
        taken: list[bytes] = []
        while len(taken) < count:
            if self.take_many is not None:
                found = self.take_many(count - len(taken))
                if not found:
                    raise AssertionError(f"{len(taken)} of {count} messages came back")
                taken += found
            else:
                assert self.take is not None
                taken.append(self.take())
        return taken


@attrs.frozen(kw_only=True)
class Engine:
    """A named way to queue messages."""

    name: str
    kind: str
    promise: str
    why: str
    """One line: what makes the promise true."""
    open: Callable[..., Opened]
    """Opens it at a path; with a second argument, the capacity in bytes, if `bounded`."""
    package: str = ""
    """What to install for it."""
    bounded: bool = False
    """It can be told how much memory messages may take."""

    @contextmanager
    def opened(self, path: Path, capacity_bytes: int = CAPACITY_BYTES) -> Iterator[Opened]:
        """Open it in a directory that exists; raise `CannotRun` if it is not installed."""
        try:
            opened = self.open(path, capacity_bytes) if self.bounded else self.open(path)
        except ModuleNotFoundError as error:
            raise CannotRun(f"{self.package or error.name} is not installed") from error
        try:
            yield opened
        finally:
            opened.close()
