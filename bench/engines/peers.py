"""Queue libraries, each in the mode its documentation recommends; what they promise was read in their source."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from bench.engines.base import KILL, MEMORY, PEER, SYNCED, Engine, Opened
from bench.errors import CannotRun


def _check_default_syncs() -> None:
    """Hold that this SQLite syncs each commit unless told otherwise: it can be built not to, in WAL mode."""
    with closing(sqlite3.connect(":memory:")) as db:
        options = {name for (name,) in db.execute("PRAGMA compile_options")}
    if options & {"DEFAULT_WAL_SYNCHRONOUS=0", "DEFAULT_WAL_SYNCHRONOUS=1"}:
        raise CannotRun("this SQLite was built not to sync each commit in WAL mode, so the engine would promise less")


def _persist_file(path: Path) -> Opened:
    import persistqueue

    # Its index is renamed into place, so the temporary files must be on the file system of the queue.
    opened = persistqueue.Queue(str(path / "queue"), tempdir=str(path))

    def take() -> bytes:
        body: bytes = opened.get()
        opened.task_done()
        return body

    def take_many(most: int) -> list[bytes]:
        bodies = [opened.get() for _ in range(min(most, opened.qsize()))]
        for _ in bodies:
            opened.task_done()
        return bodies

    def close() -> None:
        for file in (opened.headf, opened.tailf):
            file.close()

    return Opened(put=opened.put, take=take, take_many=take_many, close=close)


def _persist_sqlite(path: Path) -> Opened:
    import persistqueue

    _check_default_syncs()
    # Without auto_commit, several gets are settled by one task_done; a put commits by itself either way.
    opened = persistqueue.SQLiteQueue(str(path), multithreading=True, auto_commit=False)

    def take_many(most: int) -> list[bytes]:
        bodies = [opened.get() for _ in range(min(most, opened.qsize()))]
        opened.task_done()
        return bodies

    return Opened(put=opened.put, take=lambda: take_many(1)[0], take_many=take_many, close=opened.close)


def _persist_ack(path: Path) -> Opened:
    import persistqueue

    _check_default_syncs()
    opened = persistqueue.SQLiteAckQueue(str(path), multithreading=True)
    taken = 0

    def take() -> bytes:
        nonlocal taken
        found = opened.get(raw=True)
        opened.ack(id=found["pqid"])
        taken += 1
        if taken % 1000 == 0:  # acked messages stay in the table until they are cleared
            opened.clear_acked_data(keep_latest=0)
        body: bytes = found["data"]
        return body

    return Opened(put=opened.put, take=take, close=opened.close)


def _queuelib(path: Path) -> Opened:
    from queuelib import FifoDiskQueue

    opened: Any = FifoDiskQueue(str(path / "queue"))
    return Opened(put=opened.push, take=opened.pop, close=opened.close)


def _diskcache(path: Path) -> Opened:
    from diskcache import Deque

    opened = Deque(directory=str(path))

    def put_many(bodies: Sequence[bytes]) -> None:
        with opened.transact():
            opened.extend(bodies)

    def take_many(most: int) -> list[bytes]:
        with opened.transact():
            return [opened.popleft() for _ in range(min(most, len(opened)))]

    return Opened(
        put=opened.append, take=opened.popleft, put_many=put_many, take_many=take_many, close=opened.cache.close
    )


def _litequeue(path: Path) -> Opened:
    from litequeue import LiteQueue

    opened = LiteQueue(path / "queue.db")
    taken = 0

    def settle(messages: list[str]) -> None:
        nonlocal taken
        before = taken // 1000
        taken += len(messages)
        for message in messages:
            opened.done(message)
        if taken // 1000 > before:  # settled messages stay in the table until they are pruned
            opened.prune()

    def take() -> bytes:
        message = opened.pop()
        settle([message.message_id])
        body: bytes = message.data
        return body

    def put_many(bodies: Sequence[bytes]) -> None:
        with opened.transaction():
            for body in bodies:
                opened.put(body)

    def take_many(most: int) -> list[bytes]:
        found = [message for message in (opened.pop() for _ in range(most)) if message is not None]
        with opened.transaction():
            settle([message.message_id for message in found])
        return [message.data for message in found]

    return Opened(put=opened.put, take=take, put_many=put_many, take_many=take_many, close=opened.close)


def _huey(path: Path) -> Opened:
    from huey.storage import SqliteStorage

    _check_default_syncs()
    opened = SqliteStorage(filename=str(path / "huey.db"), strict_fifo=True)
    return Opened(put=opened.enqueue, take=opened.dequeue, close=opened.close)


_peer = partial(Engine, kind=PEER)
ENGINES = [
    _peer(
        name="persist-queue-file",
        promise=KILL,
        package="persist-queue",
        why="each put flushes and renames its index; a data file is synced only when it is full",
        open=_persist_file,
    ),
    _peer(
        name="persist-queue-sqlite",
        promise=SYNCED,
        package="persist-queue",
        why="WAL, and SQLite's default synchronous=FULL",
        open=_persist_sqlite,
    ),
    _peer(
        name="persist-queue-sqlite-ack",
        promise=SYNCED,
        package="persist-queue",
        why="WAL, and SQLite's default synchronous=FULL; get and ack commit one each",
        open=_persist_ack,
    ),
    _peer(
        name="queuelib",
        promise=MEMORY,
        package="queuelib",
        why="FifoDiskQueue writes its index at close only: after a kill its messages are not found",
        open=_queuelib,
    ),
    _peer(
        name="diskcache",
        promise=KILL,
        package="diskcache",
        why="Deque: WAL with synchronous=NORMAL",
        open=_diskcache,
    ),
    _peer(
        name="litequeue",
        promise=KILL,
        package="litequeue",
        why="WAL with synchronous=NORMAL",
        open=_litequeue,
    ),
    _peer(
        name="huey",
        promise=SYNCED,
        package="huey",
        why="SqliteStorage: WAL, and SQLite's default synchronous=FULL unless told otherwise; a take deletes, no ack",
        open=_huey,
    ),
]
