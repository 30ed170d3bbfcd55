"""The items of a drop-in: objects as bodies of messages, in a spool of its own or one that is kept."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import shutil
import tempfile
import threading
import weakref
from queue import SimpleQueue
from typing import Any, Literal, Protocol

import qflow
from qflow.errors import InvalidArgument
from qflow.loggers import get_logger
from qflow.starting import start

LOOK_S = 0.1
"""Who waits for an item that somebody else holds looks again after that: nothing tells when it comes back."""
LAST_S = 10.0
"""The end of a program waits no longer for queues that are being removed."""


class Serializer(Protocol):
    """Makes bytes of an object, and the object of them: a module such as `marshal` will do."""

    def dumps(self, item: Any, /) -> bytes: ...
    def loads(self, body: bytes, /) -> Any: ...


class _Json:
    def dumps(self, item: Any) -> bytes:
        return json.dumps(item).encode()

    def loads(self, body: bytes) -> Any:
        return json.loads(body)


class _Bytes:
    def dumps(self, item: Any) -> bytes:
        if not isinstance(item, bytes):
            raise InvalidArgument(f"serializer='bytes' takes items that are bytes, not {type(item).__name__}")
        return item

    def loads(self, body: bytes) -> Any:
        return body


_NAMED: dict[str, Serializer] = {"pickle": pickle, "json": _Json(), "bytes": _Bytes()}


class Items:
    """Objects in a queue of qflow, first in, first out.

    Args:
        path: a spool, which is made if it is missing, where the items are kept; None = a directory that goes with this.
        name: of the queue in it.
        serializer: `"pickle"`, `"json"`, `"bytes"`, or what has `dumps` and `loads`.
        capacity_bytes: memory for items; what is more lies on the disk.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        name: str,
        serializer: Literal["pickle", "json", "bytes"] | Serializer,
        capacity_bytes: int | str,
    ) -> None:
        found = _NAMED.get(serializer) if isinstance(serializer, str) else serializer
        if found is None or not callable(getattr(found, "dumps", None)) or not callable(getattr(found, "loads", None)):
            raise InvalidArgument(
                f"serializer must be 'pickle', 'json', 'bytes', or have dumps and loads, got {serializer!r:.80}"
            )
        self._serializer: Serializer = found
        _remover.start()  # before there is anything to remove, should it fail
        kept = path is not None
        directory = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="qflow-queue-")
        try:
            broker = qflow.open(directory, capacity_bytes=capacity_bytes, door=kept)
        except BaseException:
            _remove(None, None if kept else directory)
            raise
        self._end = weakref.finalize(self, _let_go, broker, None if kept else directory, os.getpid())
        try:
            self.queue: qflow.Queue[Any] = broker.declare_queue(name, durable=kept)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the spool; done by itself soon after nothing refers to the items, and at the end of the program."""
        if (end := self._end.peek()) is not None:
            broker, directory, _ = end[2]
            _remove(broker, directory)
            self._end.detach()  # what could not be closed is tried again at the end of all references

    def put(self, item: Any) -> None:
        """Append an object; where it is kept, return once it is synced."""
        self.queue.put(self._serializer.dumps(item))

    def get(self) -> Any:
        """Take the first object; one that cannot be loaded stays. Raises QueueEmpty: there is none, or all are held."""
        delivery = self.queue.get_nowait()
        with delivery:
            return self._serializer.loads(delivery.body)

    def drop(self) -> int:
        """Settle all objects, also those that cannot be loaded or that somebody holds; return how many."""
        return self.queue.purge() if self.queue else 0

    def __len__(self) -> int:
        return len(self.queue)


def _let_go(broker: qflow.Broker, directory: str | None, pid: int) -> None:
    """Have what nothing refers to any more removed.

    By a thread: a finalizer runs in any, also in one that the broker waits for as it closes. None takes anything from a
    parent process.
    """
    if os.getpid() != pid:
        return
    if _remover.has_ended:  # the program ends, and this thread is the last one
        _remove(broker, directory)
    else:
        _remover.garbage.put((broker, directory))


def _remove(broker: qflow.Broker | None, directory: str | None) -> None:
    if broker is not None:
        broker.close()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


class _Remover:
    """A thread that removes what finalizers hand to it, from the first queue of a process on."""

    def __init__(self) -> None:
        self.garbage: SimpleQueue[tuple[qflow.Broker, str | None] | None] = SimpleQueue()
        self.has_ended = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="qflow-compat", daemon=True)
                start(self._thread)

    def end(self) -> None:
        self.has_ended = True
        if self._thread is not None and self._thread.is_alive():
            self.garbage.put(None)
            self._thread.join(LAST_S)

    def _run(self) -> None:
        while (found := self.garbage.get()) is not None:
            try:
                _remove(*found)
            except Exception:
                _logger.exception("a queue that nothing refers to could not be closed")
            del found


_logger = get_logger("qflow.compat")
_remover = _Remover()
atexit.register(_remover.end)
os.register_at_fork(after_in_child=_remover.__init__)  # type: ignore[misc]
