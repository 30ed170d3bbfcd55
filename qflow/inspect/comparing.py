"""What two spools have in common, and what not: queues, settings, and messages by their sequence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import attrs

from qflow.config import spool_path
from qflow.inspect.child import in_child
from qflow.inspect.logs import check_there, opened_log
from qflow.inspect.pages import unsettled
from qflow.inspect.stream_facts import rows_of
from qflow.message import Message, body_of, offset_of
from qflow.named_tuples import NamedTuple
from qflow.storage.environment import Environment
from qflow.storage.log.recovery import QUEUE, QueueRecord, Recovery
from qflow.storage.streams import partitions

MOST = 100_000
"""As many differences are told."""
_READ_AT_ONCE = 4 * 2**20

ONLY_A, ONLY_B, DIFFER = "only in a", "only in b", "differ"


@attrs.frozen(kw_only=True)
class Difference:
    """One difference of two spools, `a` and `b`: of a whole queue, of a setting, or of messages in a row."""

    kind: str
    """"queue" or "stream"."""
    name: str
    what: str
    """"only in a", "only in b", "differ": the whole of it, or these messages; else the name of what differs."""
    first: int | None = None
    """The first sequence, in a stream the first offset, of messages in a row."""
    last: int | None = None
    partition: int | None = None
    a: Any = None
    b: Any = None


class _Side(NamedTuple):
    env: Environment
    found: Recovery


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str], *, messages: bool = True) -> list[Difference]:
    """Return how two spools differ; nothing if they hold the same.

    Args:
        messages: compare those that wait, or are retained, one by one; False: only how many there are.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: reads both logs once; 5 µs a message.
    """
    first, second = spool_path(a), spool_path(b)
    for spool in (first, second):
        check_there(spool)
    if os.path.samefile(first, second):
        return []
    return in_child(f"{first} and {second}", lambda: _compare(first, second, messages))


def _compare(first: str, second: str, messages: bool) -> list[Difference]:
    with opened_log(first, readahead=True) as a, opened_log(second, readahead=True) as b:
        differences = []
        for difference in _differences(_Side(*a), _Side(*b), messages):
            differences.append(difference)
            if len(differences) == MOST:
                break
        return differences


def _differences(a: _Side, b: _Side, messages: bool) -> Iterator[Difference]:
    ours, theirs = _records(a.found), _records(b.found)
    for key in sorted({*ours, *theirs}):
        kind, name = key
        if key not in theirs or key not in ours:
            yield Difference(kind=kind, name=name, what=ONLY_A if key in ours else ONLY_B)
            continue
        one, other = ours[key], theirs[key]
        yield from _settings(kind, name, one, other)
        yield from _counts(kind, name, one, other)
        if messages and one.rows is not None and other.rows is not None:
            yield from _messages(kind, name, (a, one), (b, other))


def _records(found: Recovery) -> dict[tuple[str, str], QueueRecord]:
    return {(record.kind, record.name): record for record in (*found.queues, *found.streams) if not record.deleted}


def _settings(kind: str, name: str, a: QueueRecord, b: QueueRecord) -> Iterator[Difference]:
    for setting in sorted({*a.settings, *b.settings}):
        ours, theirs = a.settings.get(setting), b.settings.get(setting)
        if ours != theirs:
            yield Difference(kind=kind, name=name, what=setting, a=ours, b=theirs)


def _counts(kind: str, name: str, a: QueueRecord, b: QueueRecord) -> Iterator[Difference]:
    for what in ("messages", "bytes"):
        ours, theirs = _sum(a, what), _sum(b, what)
        if ours != theirs:
            yield Difference(kind=kind, name=name, what=what, a=ours, b=theirs)


def _sum(record: QueueRecord, what: str) -> int | None:
    return None if record.rows is None else sum(getattr(row, what) for row in record.rows.values())


_Place = tuple[int | None, int]
"""Partition, or None, and sequence or offset."""


def _messages(kind: str, name: str, a: tuple[_Side, QueueRecord], b: tuple[_Side, QueueRecord]) -> Iterator[Difference]:
    read = _of_queue if kind == QUEUE else _of_stream
    run: list[Any] = []
    for what, (partition, number) in _joined(read(*a), read(*b)):
        if run and run[:2] == [what, partition] and run[3] + 1 == number:
            run[3] = number
            continue
        yield from _told(kind, name, run)
        run = [what, partition, number, number]
    yield from _told(kind, name, run)


def _told(kind: str, name: str, run: list[Any]) -> Iterator[Difference]:
    if run:
        what, partition, first, last = run
        yield Difference(kind=kind, name=name, what=what, first=first, last=last, partition=partition)


def _joined(a: Iterator[tuple[Any, object]], b: Iterator[tuple[Any, object]]) -> Iterator[tuple[str, _Place]]:
    """Yield where two sides, each in order, have not the same."""
    ours, theirs = next(a, None), next(b, None)
    while ours is not None or theirs is not None:
        if theirs is None or (ours is not None and ours[0] < theirs[0]):
            assert ours is not None
            yield ONLY_A, ours[0]
            ours = next(a, None)
        elif ours is None or theirs[0] < ours[0]:
            yield ONLY_B, theirs[0]
            theirs = next(b, None)
        else:
            if ours[1] != theirs[1]:
                yield DIFFER, ours[0]
            ours, theirs = next(a, None), next(b, None)


def _content(record: Any) -> tuple[bytes, bytes, str]:
    headers, topic = (record.header_bytes, record.topic) if isinstance(record, Message) else (b"", "")
    return body_of(record), headers, topic


def _of_queue(side: _Side, record: QueueRecord) -> Iterator[tuple[_Place, object]]:
    """Yield the place and content of each message that waits, in the order of sequences."""
    rows = sorted((record.rows or {}).items())
    for lane, row in rows:
        with side.env.reading() as txn:
            for sequence, message in unsettled(txn, record._replace(rows={lane: row})):
                yield (0, sequence), _content(message)


def _of_stream(side: _Side, record: QueueRecord) -> Iterator[tuple[_Place, object]]:
    for number, row in enumerate(rows_of(record, record.settings["partitions"])):
        position = row.floor
        while position < row.next:
            with side.env.reading() as txn:
                query = partitions.Query(record.owner, number, position, row.next, _READ_AT_ONCE)
                found = partitions.read(txn, query)
            for piece in found.pieces:
                for sequence, message, topic in zip(piece.sequences, piece.records, piece.topics, strict=True):
                    yield (number, offset_of(sequence)), (topic, *_content(message))
            position = found.position
