"""What the standard library offers: queues in memory, and a table of SQLite used as one would write it by hand."""

from __future__ import annotations

import queue
import sqlite3
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from bench.engines.base import KILL, MEMORY, PLAIN, SYNCED, Engine, Opened


def _queue(_: Path) -> Opened:
    opened: queue.Queue[bytes] = queue.Queue()
    return Opened(put=opened.put, take=opened.get, close=lambda: None)


def _deque(_: Path) -> Opened:
    opened: deque[bytes] = deque()
    return Opened(put=opened.append, take=opened.popleft, put_many=opened.extend, close=opened.clear)


class _Table:
    """A table of messages in WAL mode; one connection, so threads take turns."""

    def __init__(self, synchronous: str, path: Path) -> None:
        self._lock = Lock()
        self._db = sqlite3.connect(path / "queue.db", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {synchronous}")
        self._db.execute("CREATE TABLE IF NOT EXISTS message (id INTEGER PRIMARY KEY, body BLOB NOT NULL)")

    def put(self, body: bytes) -> None:
        with self._lock:
            self._db.execute("INSERT INTO message (body) VALUES (?)", (body,))

    def put_many(self, bodies: Sequence[bytes]) -> None:
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT INTO message (body) VALUES (?)", ((body,) for body in bodies))

    def take(self) -> bytes:
        return self.take_many(1)[0]

    def take_many(self, most: int) -> list[bytes]:
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            rows = self._db.execute("SELECT id, body FROM message ORDER BY id LIMIT ?", (most,)).fetchall()
            if rows:
                self._db.execute("DELETE FROM message WHERE id <= ?", (rows[-1][0],))
        return [body for _, body in rows]

    def opened(self) -> Opened:
        return Opened(
            put=self.put, take=self.take, put_many=self.put_many, take_many=self.take_many, close=self._db.close
        )


ENGINES = [
    Engine(name="queue.Queue", kind=PLAIN, promise=MEMORY, why="objects in a deque under a lock", open=_queue),
    Engine(name="deque", kind=PLAIN, promise=MEMORY, why="objects in a deque, no lock", open=_deque),
    Engine(
        name="sqlite-normal",
        kind=PLAIN,
        promise=KILL,
        why="WAL with synchronous=NORMAL syncs at checkpoints only",
        open=lambda path: _Table("NORMAL", path).opened(),
    ),
    Engine(
        name="sqlite-full",
        kind=PLAIN,
        promise=SYNCED,
        why="WAL with synchronous=FULL syncs the WAL at each commit",
        open=lambda path: _Table("FULL", path).opened(),
    ),
]
