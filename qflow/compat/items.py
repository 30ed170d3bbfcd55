"""The items of a drop-in: objects as bodies of messages, in a spool of its own or one that is kept."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
import threading
import weakref
from typing import Any, Literal, Protocol

import qflow
from qflow.errors import InvalidArgument, Reentered


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
        kept = path is not None
        directory = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="qflow-queue-")
        try:
            broker = qflow.open(directory, capacity_bytes=capacity_bytes, door=kept)
        except BaseException:
            _remove(None, None if kept else directory)
            raise
        self.close = weakref.finalize(self, _remove, broker, None if kept else directory)
        """Lets go of the spool; called when nothing refers to the items any more, and at the end of the program."""
        try:
            self.queue: qflow.Queue[Any] = broker.declare_queue(name, durable=kept)
        except BaseException:
            self.close()
            raise

    def put(self, item: Any) -> None:
        """Append an object; where it is kept, return once it is synced."""
        self.queue.put(self._serializer.dumps(item))

    def get(self) -> Any:
        """Take the first object. One that cannot be loaded stays the first."""
        delivery = self.queue.get_nowait()
        with delivery:
            return self._serializer.loads(delivery.body)

    def __len__(self) -> int:
        return len(self.queue)


def _remove(broker: qflow.Broker | None, directory: str | None) -> None:
    if broker is not None:
        try:
            broker.close()
        except Reentered:  # garbage is collected in the middle of a call of some broker: that must go on first
            threading.Thread(target=_remove, args=(broker, directory), name="qflow-queue-removed").start()
            return
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
