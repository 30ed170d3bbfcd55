"""Faulty seams: files and a log whose operations fail on request, before or after the real one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lmdb

import qflow
from qflow.broker import Broker, make_broker
from qflow.config import BrokerSettings
from qflow.storage.environment import Environment
from qflow.storage.files import Files

HOT = ("open", "close", "read", "pwrite", "lseek", "ftruncate", "unlink", "sync_data")
SAME = {"preadv": "read", "pread": "read", "bring_in": "read", "pwritev": "pwrite"}
"""Operations that fail, and count, as another one."""
ALWAYS = 2**40
PATIENCE_S = 30


class Failure:
    """One planned failure: calls `after` … `after + times` of an operation raise, before or after the real one."""

    def __init__(self, error: BaseException | Callable[[], BaseException], after: int, times: int, late: bool) -> None:
        self.error = error
        self.after = after
        self.left = times
        self.late = late

    def due(self) -> bool:
        if self.after > 0:
            self.after -= 1
            return False
        self.left -= 1
        return self.left >= 0

    def strike(self) -> None:
        raise self.error if isinstance(self.error, BaseException) else self.error()


class Faults:
    """Failures by the name of an operation, and how often each was called."""

    def __init__(self) -> None:
        self.planned: dict[str, Failure] = {}
        self.calls: dict[str, int] = {}
        self.before: dict[str, Callable[[], None]] = {}
        """Called before an operation: a test may wait there."""

    def fail(self, name: str, error: Any, *, after: int = 0, times: int = ALWAYS, late: bool = False) -> None:
        if isinstance(error, int):
            error = OSError(error, os.strerror(error))
        self.planned[name] = Failure(error, after, times, late)

    def heal(self) -> None:
        self.planned.clear()

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **named: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            if name in self.before:
                self.before[name]()
            failure = self.planned.get(name)
            due = failure is not None and failure.due()
            if due and failure is not None and not failure.late:
                failure.strike()
            result = real(*arguments, **named)
            if due and failure is not None:
                failure.strike()
            return result

        return operation


class FaultyFiles(Files):
    """Files with faults; `spill_only` spares everything that is not a spill file."""

    def __init__(self, faults: Faults) -> None:
        for name in HOT:
            setattr(self, name, faults.wrap(name, getattr(Files, name)))
        for name, other in SAME.items():
            setattr(self, name, faults.wrap(other, getattr(super(), name)))
        for name in ("allocate", "make_directory", "rename", "list", "scan", "remove_directory", "lstat"):
            setattr(self, name, faults.wrap(name, getattr(super(), name)))


class FaultyEnvironment(Environment):
    """A log with faults: `begin` (of writes), `commit`, `make_room`, `grow_map`, `copy_to`."""

    def __init__(self, path: str, files: Files, faults: Faults) -> None:
        super().__init__(path, files)
        self._plain_begin = super().begin
        self._faulty_begin = faults.wrap("begin", super().begin)
        self._faulty_commit = faults.wrap("commit", super().commit)
        for name in ("make_room", "grow_map", "copy_to"):
            setattr(self, name, faults.wrap(name, getattr(super(), name)))

    def begin(self, *, write: bool = False, buffers: bool = False) -> Any:
        return self._faulty_begin(write=True) if write else self._plain_begin(buffers=buffers)

    def commit(self, txn: Any) -> None:
        try:
            self._faulty_commit(txn)
        except lmdb.Error:
            txn.abort()  # a commit of LMDB that fails ends its transaction; an interrupt before it does not
            raise


def open_faulty(path: Any, faults: Faults, **settings: Any) -> Broker:
    """Open a spool with faulty files and a faulty log, to which each batch is committed, unless settings say else."""
    settings.setdefault("journal", "off")
    return make_broker(
        path,
        BrokerSettings(**settings),
        files=FaultyFiles(faults),
        open_environment=lambda log, files: FaultyEnvironment(log, files, faults),
    )


@contextmanager
def faulty_broker(path: Any, faults: Faults, **settings: Any) -> Iterator[Broker]:
    """Open a spool with faults and close it at the end; after a failure it is left alone, for closing might hang."""
    broker = open_faulty(path, faults, **settings)
    yield broker
    faults.heal()
    in_thread(broker.close)


def in_thread(work: Callable[[], Any]) -> Any:
    """Run something in another thread and return its result; hanging is a failure."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert outcome, "it hangs"
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def drained(queue: qflow.Queue) -> list[bytes]:
    """Get and ack everything; return the bodies."""
    bodies = []
    while len(queue):
        with queue.get(timeout_s=0) as delivery:
            bodies.append(delivery.body)
    return bodies


def bodies_of(queue: qflow.Queue) -> list[bytes]:
    """Get and ack, in batches, what can be got at once; return the bodies."""
    bodies: list[bytes] = []
    while batch := queue.get_many(1000, timeout_s=0):
        bodies += batch.bodies
        batch.ack()
    return bodies
