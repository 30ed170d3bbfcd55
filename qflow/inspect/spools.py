"""What a spool's log and its owner say of its queues and streams."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from qflow.config import spool_path
from qflow.inspect.child import in_child
from qflow.inspect.facts import QueueFacts, SpoolFacts
from qflow.inspect.live import read_live
from qflow.inspect.logs import opened_log
from qflow.inspect.stream_facts import StreamFacts, find_stream, streams_of
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.lock import owner_pid
from qflow.storage.log import facts, recovery
from qflow.storage.log.overlay import count_unapplied
from qflow.storage.log.recovery import QueueRecord, Recovery
from qflow.storage.log.rows import Row
from qflow.streams.counting import Waiting, count_waiting


def read_spool(path: str | os.PathLike[str]) -> SpoolFacts:
    """Return what a spool's log and its owner's `stats.json` say. Cost: reads one row a lane, partition and cursor.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _read_spool(spool))


def _read_spool(spool: str) -> SpoolFacts:
    with opened_log(spool) as (env, found):
        queues = [_facts(record) for record in found.queues if not record.deleted]
        streams = streams_of(found)
        with env.reading() as txn:
            origin = recovery.read_origin(txn, spool)
        journal_records = count_unapplied(env, Files())
    live = read_live(spool)
    age = None if live is None else time.time() - float(live["time_s"])
    return SpoolFacts(
        path=spool,
        uuid=found.uuid,
        origin=None if origin is None else str(origin),
        clean=found.clean,
        journal_records=journal_records,
        owner_pid=owner_pid(spool),
        queues=queues,
        streams=streams,
        live=live,
        live_age_s=age,
        problems=found.problems,
    )


def _facts(record: QueueRecord) -> QueueFacts:
    rows = record.rows or {0: Row()}
    return QueueFacts(
        name=record.name,
        number=record.owner,
        messages=sum(row.messages for row in rows.values()),
        bytes=sum(row.bytes for row in rows.values()),
        next_sequence=rows[0].next,
        floor=rows[0].floor,
        settled_ranges=sum(row.marks for row in rows.values()),
        settings=record.settings,
        problem=None if record.rows is not None else "its row is damaged",
    )


Result = TypeVar("Result")


class Rooms:
    """A log that is open to read, in the child process of `inspect.read_rooms`."""

    def __init__(self, env: Environment, found: Recovery, is_owned: bool) -> None:
        self.streams: list[StreamFacts] = streams_of(found)
        self.is_owned = is_owned
        """A process has the spool open."""
        self.problems: list[str] = found.problems
        """Of the log, and of facts that were left out."""
        self._env = env
        self._found = found

    def count_waiting(self, stream: str, starts: list[tuple[str, int]], end: int, reads: int) -> Waiting:
        """Return how many messages of a stream with one partition any of some filters matches; see `count_waiting`."""
        record = find_stream(self._found, stream)
        if record is None:
            return Waiting(0, True)
        return count_waiting(self._env.reading, record.owner, starts, end, reads)

    def facts(self, room: str) -> Iterator[tuple[str, bytes]]:
        """Yield key and value of the facts of a room, in the order of the keys; those damaged are told in `problems`.

        Each thousand is of a moment of its own. Cost: 3 µs each.
        """
        position = b""
        while True:
            with self._env.reading() as txn:
                page = facts.page(txn, room, position=position, report=self.problems.append)
            yield from page.facts
            if not (position := page.position):
                return


def read_rooms(path: str | os.PathLike[str], work: Callable[[Rooms], Result]) -> Result:
    """Return what a function makes of the facts that a log keeps for others; it runs in a child process.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`. What `work` raises.
    """
    spool = spool_path(path)

    def read() -> Result:
        with opened_log(spool) as (env, found):
            return work(Rooms(env, found, owner_pid(spool) is not None))

    return in_child(spool, read)
