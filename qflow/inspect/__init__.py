"""Read-only views and copies of a spool on disk, with or without a live owner: what the command line shows.

Nothing here takes the owner's lock or changes the log; each call reads a state of the log in short transactions. In the
process that owns the spool, use `Broker.stats` and `Broker.check` instead: LMDB opens a file once in a process.

A damaged log may kill the process that reads it. So all calls but `read_stream` read in a child process, and report its
death as an error.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import unquote

import attrs

from qflow.config import spool_path
from qflow.errors import CorruptionError, NotFound
from qflow.inspect.child import in_child
from qflow.inspect.facts import Examination, MessageFacts, QueueFacts, SpilledFacts, SpoolFacts
from qflow.inspect.log_check import check_every_page, check_log
from qflow.inspect.stream_facts import PartitionFacts, StreamFacts, SubscriptionFacts, streams_of
from qflow.inspect.stream_reader import Gap, StreamReader
from qflow.message import Message, Record, decode_headers, lane_of
from qflow.stats import BrokerStats, QueueStats, SnapshotReport
from qflow.storage import blocks
from qflow.storage.environment import Environment
from qflow.storage.files import Files, owner_pid, read_whole
from qflow.storage.inbox import stages
from qflow.storage.log import recovery
from qflow.storage.log.directory import LOG
from qflow.storage.log.keys import LAST_LANE
from qflow.storage.log.marks import is_settled
from qflow.storage.log.overlay import count_unapplied
from qflow.storage.log.reading import find_message
from qflow.storage.log.recovery import QueueRecord, Recovery
from qflow.storage.log.rows import Row
from qflow.storage.log.snapshots import OLD, make_snapshot, open_to_read
from qflow.storage.spill.store import SPILL, SPILL_TABLE

_OF_QUEUE = {field.name for field in attrs.fields(QueueStats)}

__all__ = [
    "Examination",
    "Gap",
    "MessageFacts",
    "PartitionFacts",
    "QueueFacts",
    "SpilledFacts",
    "SpoolFacts",
    "StreamFacts",
    "StreamReader",
    "SubscriptionFacts",
    "check_spool",
    "check_there",
    "copy_spool",
    "examine",
    "read_message",
    "read_spool",
    "read_stream",
    "spilled",
]
_NO_LOG = " is not a spool: it holds no log. Give the directory that `qflow.open` was given"


def check_there(path: str | os.PathLike[str]) -> None:
    """Raise `NotFound` if there is no spool, where opening it would make one. Cost: some system calls."""
    spool = spool_path(path)
    if not os.path.isdir(spool):
        raise NotFound(f"there is no spool at {spool}: no such directory")
    if not any(os.path.lexists(os.path.join(spool, name)) for name in (LOG, OLD, LOG)):  # one is renamed over the other
        raise NotFound(spool + _NO_LOG)


@contextmanager
def _log(path: str) -> Iterator[tuple[Environment, Recovery]]:
    check_there(path)
    env = open_to_read(path, Files())
    if env is None:
        raise NotFound(path + _NO_LOG)
    try:
        found = recovery.read_log(env)
        yield env, found
    finally:
        env.close()


def _queue(found: Recovery, name: str) -> QueueRecord:
    for record in found.queues:
        if record.name == name and not record.deleted:
            return record
    names = ", ".join(sorted(record.name for record in found.queues if not record.deleted)) or "none"
    raise NotFound(f"there is no durable queue {name!r} in the log; there are: {names}")


def read_spool(path: str | os.PathLike[str], *, now_s: float | None = None) -> SpoolFacts:
    """Return what a spool's log and its owner's `stats.json` say. Cost: reads one row a lane, partition and cursor.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _read_spool(spool, now_s))


def _read_spool(spool: str, now_s: float | None) -> SpoolFacts:
    with _log(spool) as (env, found):
        queues = [_facts(record) for record in found.queues if not record.deleted]
        streams = streams_of(found)
        with env.reading() as txn:
            origin = recovery.read_origin(txn, spool)
        journal_records = count_unapplied(env, Files())
    live = _live(os.path.join(spool, "stats.json"))
    age = None if live is None else (time.time() if now_s is None else now_s) - float(live["time_s"])
    return SpoolFacts(
        path=spool,
        uuid=str(found.uuid),
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


def copy_spool(
    path: str | os.PathLike[str], to: str | os.PathLike[str], *, unsafe_filesystem: bool = False
) -> SnapshotReport:
    """Copy the log of a spool to a new one; see `Broker.snapshot`. A commit under way is in the copy or not.

    The copy of a spool that was closed cleanly is clean, too, with exact counts of deliveries.

    Raises:
        NotFound: there is no spool at `path`. Else as `Broker.snapshot` and `qflow.open`, before anything is made.
    """
    spool = spool_path(path)

    def copy() -> SnapshotReport:
        with _log(spool) as (env, _):
            return make_snapshot(env, spool, to, Files(), unsafe_filesystem=unsafe_filesystem)

    return in_child(spool, copy)


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


def _live(path: str) -> dict[str, Any] | None:
    try:
        facts = json.loads(read_whole(Files(), path))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ESPIPE):  # a link or a FIFO: the owner did not write it
            return None
        raise
    return facts if _is_live(facts) else None


def _is_live(facts: Any) -> bool:
    """Tell whether a value has the shape of what an owner writes."""
    return (
        isinstance(facts, dict)
        and facts.keys() >= {"pid", "time_s", *(field.name for field in attrs.fields(BrokerStats))}
        and all(isinstance(facts[name], int | float) for name in ("time_s", "capacity_bytes"))
        and isinstance(facts["queues"], dict)
        and all(isinstance(queue, dict) and queue.keys() >= _OF_QUEUE for queue in facts["queues"].values())
    )


def spilled(path: str | os.PathLike[str], queue: str | None = None) -> Iterator[SpilledFacts]:
    """Yield the messages in the spill directory now, file by file; a live owner may change them meanwhile.

    Files kept for reuse still hold their last messages, which are listed, too.

    Args:
        queue: name of the only one to list; `NotFound` if neither log nor owner know it.
    """
    spool = spool_path(path)
    names = in_child(spool, lambda: _names(spool))
    live = _live(os.path.join(spool, "stats.json"))
    transient = set((live or {}).get("queues", {})) - set(names.values())
    if queue is not None and queue not in names.values() and queue not in transient:
        known = ", ".join(sorted({*names.values(), *transient})) or "none"
        raise NotFound(f"neither the log nor its owner knows a queue {queue!r}; there are: {known}")
    directory = os.path.join(spool, SPILL)
    try:
        areas = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for area in areas:
        name = _area_name(area, names)
        if queue is None or name == queue:
            yield from _spilled_files(os.path.join(directory, area), name)


def _names(spool: str) -> dict[int, str]:
    with _log(spool) as (_, found):
        return {record.owner: record.name for record in found.queues}


def _area_name(area: str, names: dict[int, str]) -> str | None:
    """Return the queue of a spill directory: by its number, or if that is not in the log, by its escaped name."""
    escaped, _, numbers = area.rpartition(".")
    try:
        owner = int(numbers.partition("-")[0], 16)
    except ValueError:
        return None
    if owner in names:
        return names[owner]
    return unquote(escaped)


def _spilled_files(directory: str, name: str | None) -> Iterator[SpilledFacts]:
    try:
        entries = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in sorted(entries, key=lambda entry: (len(entry.name), entry.name)):
            yield from _spilled_file(entry.path, name)


def _spilled_file(path: str, name: str | None) -> Iterator[SpilledFacts]:
    """Yield the messages of a file: one block, or a segment of blocks that ends at zeros or the end of the file."""
    position = 0
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while True:
                head = file.read(blocks.HEADER_BYTES)
                if position and head[:4] in (b"", bytes(4)):
                    return
                where = f"{path}, byte {position}" if position else path
                header = blocks.read_header(head, where=where)
                data = head + file.read(min(max(header.total_bytes(head), len(head)), size) - len(head))
                try:
                    block = blocks.decode(data, None, where=where)
                except CorruptionError as error:
                    yield SpilledFacts(
                        queue=name, sequence=None, size_bytes=0, file=path, position=position, problem=str(error)
                    )
                    position += len(data)
                    continue
                if header.key.table != SPILL_TABLE:
                    raise CorruptionError(f"{path}: not a spilled message")
                for offset, record in zip(block.offsets, block.records, strict=True):
                    yield SpilledFacts(
                        queue=name,
                        sequence=block.first + offset,
                        size_bytes=len(record),
                        file=path,
                        position=position,
                        problem=None,
                    )
                position += len(data)
    except (OSError, CorruptionError) as error:
        problem = f"{error}; what follows in the file was not read" if position else str(error)
        yield SpilledFacts(queue=name, sequence=None, size_bytes=0, file=path, position=position, problem=problem)


def read_message(path: str | os.PathLike[str], queue: str, sequence: int) -> MessageFacts:
    """Return one message of a durable queue from the log, settled or not, as long as its block is there.

    Raises:
        NotFound: no such queue, or the log does not hold the message (any more).
        CorruptionError: its block is damaged.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _read_message(spool, queue, sequence))


def _read_message(spool: str, queue: str, sequence: int) -> MessageFacts:
    lane = lane_of(sequence)
    message: Record | None = None
    with _log(spool) as (env, found):
        record = _queue(found, queue)
        rows = record.rows or {min(lane, LAST_LANE): Row()}  # a damaged row does not prevent a look
        settled = False
        if lane in rows:
            with env.reading() as txn:
                settled = is_settled(txn, record.owner, lane, rows[lane], sequence)
                with suppress(NotFound):
                    message, time_ms = find_message(txn, record.owner, lane, sequence)
    if message is None or (settled and not message):
        where = "it was settled and its bytes are gone" if settled else "it was never logged"
        raise NotFound(f"message {sequence} of queue {queue!r} is not in the log: {where}")
    headers = decode_headers(message.header_bytes) if type(message) is Message else {}
    return MessageFacts(
        queue=queue,
        sequence=sequence,
        body=message.body if type(message) is Message else bytes(message),
        headers=headers,
        time_ms=time_ms,
        settled=settled,
    )


def read_stream(
    path: str | os.PathLike[str],
    stream: str,
    topic_filter: str = "#",
    *,
    partition: int | None = None,
    start: str | int | datetime = "earliest",
    on_gap: Callable[[Gap], object],
) -> StreamReader:
    """Return a reader of a stream, which goes on from call to call; it leaves no trace in the spool.

    Args:
        topic_filter: as in MQTT.
        partition: number of the only one to read; None = all.
        start: `"earliest"`, `"latest"`, an offset, or the first message not earlier than a datetime with a time zone.
        on_gap: called with each `Gap`, before the messages behind it are returned.

    Raises:
        NotFound: there is no spool, or no such stream. InvalidArgument: the filter is not valid, or an offset is past
        the end. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    """
    spool = spool_path(path)
    return StreamReader(
        spool, partial(_log, spool), stream, topic_filter, partition=partition, start=start, on_gap=on_gap
    )


def check_spool(path: str | os.PathLike[str]) -> list[str]:
    """Return the problems that `examine` finds, one text each."""
    return examine(path).problems


def examine(path: str | os.PathLike[str]) -> Examination:
    """Read every block of the log and compare it with rows, index and cursors.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: reads the whole log once, in short transactions.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _examine(spool))


def _examine(spool: str) -> Examination:
    lost: Counter[str] = Counter()
    with _log(spool) as (env, found):
        found_problems = list(check_log(env, found, lost))
        if not found_problems and owner_pid(spool) is None:  # an owner meets those pages itself, and goes on meanwhile
            found_problems += check_every_page(env)
    files = Files()
    found_problems += [
        f"batch {batch.batch} of query {batch.query} was set aside in {stages.set_aside(spool, batch)}: "
        f"{stages.why_refused(files, spool, batch)}"
        for batch in stages.list_refused(files, spool)
    ]
    return Examination(problems=found_problems, lost=dict(+lost))
