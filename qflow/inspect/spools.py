"""What a spool's log and its owner say of its queues and streams."""

from __future__ import annotations

import os
import time

from qflow.config import spool_path
from qflow.inspect.child import in_child
from qflow.inspect.facts import QueueFacts, SpoolFacts
from qflow.inspect.live import read_live
from qflow.inspect.logs import opened_log
from qflow.inspect.stream_facts import streams_of
from qflow.storage.files import Files
from qflow.storage.lock import owner_pid
from qflow.storage.log import recovery
from qflow.storage.log.overlay import count_unapplied
from qflow.storage.log.recovery import QueueRecord
from qflow.storage.log.rows import Row


def read_spool(path: str | os.PathLike[str], *, now_s: float | None = None) -> SpoolFacts:
    """Return what a spool's log and its owner's `stats.json` say. Cost: reads one row a lane, partition and cursor.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _read_spool(spool, now_s))


def _read_spool(spool: str, now_s: float | None) -> SpoolFacts:
    with opened_log(spool) as (env, found):
        queues = [_facts(record) for record in found.queues if not record.deleted]
        streams = streams_of(found)
        with env.reading() as txn:
            origin = recovery.read_origin(txn, spool)
        journal_records = count_unapplied(env, Files())
    live = read_live(spool)
    age = None if live is None else (time.time() if now_s is None else now_s) - float(live["time_s"])
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
        messages=sum(row.messages for row in rows.values()),
        bytes=sum(row.bytes for row in rows.values()),
        next_sequence=rows[0].next,
        floor=rows[0].floor,
        settled_ranges=sum(row.marks for row in rows.values()),
        settings=record.settings,
        problem=None if record.rows is not None else "its row is damaged",
    )
