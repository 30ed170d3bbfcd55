"""Brings the rows of a log into line with its blocks, some of which are gone, before anybody opens it.

In a queue what is gone counts as settled: the chain of its blocks goes on over a mark. In a stream its offsets stay,
and readers are told of the gap. Positions of subscriptions that are gone begin where the stream does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from qflow.config import QueueSettings
from qflow.errors import CorruptionError
from qflow.inspect.log_check import check_log
from qflow.message import offset_of
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import NO_PREVIOUS, TOPICS, Header
from qflow.storage.environment import Environment, LmdbError, full_or_failed
from qflow.storage.files import Files
from qflow.storage.log import recovery, table
from qflow.storage.log.keys import BLOCKS, QUEUES, key_of, parts_of, queue_key
from qflow.storage.log.marks import after_mark, count_marks, settle_ranges
from qflow.storage.log.reading import read_unsettled
from qflow.storage.log.recovery import CURSOR, QUEUE
from qflow.storage.log.rows import Row, Settled, new_row, read_row, write_row
from qflow.storage.streams import partitions

_READ_AT_ONCE = 16 * 2**20
_MOST_LANES = 32


class Hole(NamedTuple):
    """Sequences of a queue, or offsets of a stream, [first, end), that are gone."""

    name: str
    first: int
    end: int
    messages: int
    """At most."""
    reason: str


class Mended(NamedTuple):
    """A log that can be opened."""

    queues: int
    streams: int
    messages: int
    holes: list[Hole]
    problems: list[str]
    """What a check finds, still."""


def mend(log: str, files: Files) -> Mended:
    """Bring the rows of a log into line. Raises DiskFull, StorageError: it could not be written."""
    holes: list[Hole] = []
    env = Environment(log, files)
    try:
        try:
            with env.begin(write=True) as txn:
                records = dict(_adopted(txn, holes))
                messages = sum(_mend_record(txn, owner, fields, holes) for owner, fields in records.items())
                _mend_cursors(txn, records)
        except LmdbError as error:
            raise full_or_failed(error, log) from error
        found = recovery.read_log(env)
        problems = list(check_log(env, found, Counter()))
        return Mended(len(found.queues), len(found.streams), messages, holes, problems)
    finally:
        env.close()


def _adopted(txn: Any, holes: list[Hole]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield owner and fields of all that are not deleted; those whose record is gone become queues of another name.

    Blocks of a stream without a record, or of what was deleted, are removed.
    """
    known = dict(recovery.records_of(txn, []))
    prefix = bytes((QUEUES,))
    for key in list(table.keys(txn, prefix, table.behind(prefix))):
        owner = int.from_bytes(key[1:], "big")
        if owner not in known:  # it was deleted: what is left of it would have been removed soon
            txn.delete(key)
            _remove(txn, owner, [])
    for owner in list(_owners(txn)):
        if owner not in known:
            fields = _fields_of(txn, owner)
            if fields is None:
                _remove(txn, owner, holes)
            else:
                known[owner] = fields
    for owner, fields in known.items():
        value = recovery.queue_value(fields["name"], fields["incarnation"], fields["settings"], kind=fields["kind"])
        if txn.get(queue_key(owner)) is None:
            txn.put(queue_key(owner), value)
        yield owner, fields
    if known:
        recovery.write_new(txn, max(known), txn.get(queue_key(max(known))))


def _owners(txn: Any) -> Iterator[int]:
    """Yield the owners of blocks and rows."""
    owner = 0
    stop = bytes((BLOCKS + 1,))
    while (key := next(table.keys(txn, key_of(BLOCKS, owner, 0, 0), stop), None)) is not None:
        owner = parts_of(key)[1]
        yield owner
        owner += 1


def _fields_of(txn: Any, owner: int) -> dict[str, Any] | None:
    """Return the record of a queue that has lost its own; None of what is no queue."""
    lanes = [lane for lane in _lanes(txn, owner) if _headers(txn, owner, lane, 0)]
    if not lanes or max(lanes) >= _MOST_LANES or _headers(txn, owner, lanes[0], 0)[0].columns & TOPICS:
        return None
    settings = QueueSettings(priorities=10 if max(lanes) else 1).to_dict()
    return {"name": f"recovered-{owner}", "incarnation": 1, "settings": settings, "deleted": False, "kind": QUEUE}


def _remove(txn: Any, owner: int, holes: list[Hole]) -> None:
    for lane in _lanes(txn, owner):
        headers = _headers(txn, owner, lane, 0)
        if headers:
            count = sum(header.count for header in headers)
            name = f"number {owner}, whose record is gone"
            holes.append(Hole(name, headers[0].key.first, headers[-1].end, count, "nobody knows what it was"))
        table.delete_between(txn, key_of(BLOCKS, owner, lane, 0), key_of(BLOCKS, owner, lane + 1, 0))


def _lanes(txn: Any, owner: int) -> list[int]:
    """Return the lanes of an owner that have a row or blocks."""
    lanes: list[int] = []
    lane, stop = 0, key_of(BLOCKS, owner + 1, 0, 0)
    while lane < 256 and (key := next(table.keys(txn, key_of(BLOCKS, owner, lane, 0), stop), None)) is not None:
        lanes.append(parts_of(key)[2])
        lane = lanes[-1] + 1
    return lanes


def _headers(txn: Any, owner: int, lane: int, floor: int) -> list[Header]:
    """Return the headers of the blocks that reach above a floor."""
    found = table.items(txn, key_of(BLOCKS, owner, lane, 0), key_of(BLOCKS, owner, lane, table.LAST))
    headers = [blocks.read_header(value, where="a block") for _, value in found]
    return [header for header in headers if header.end > floor]


def _row(txn: Any, owner: int, lane: int) -> Row | None:
    try:
        return read_row(txn, owner, lane)
    except CorruptionError:
        return None


def _mend_record(txn: Any, owner: int, fields: dict[str, Any], holes: list[Hole]) -> int:
    """Mend all lanes of a queue or stream; return how many messages it has."""
    if fields["kind"] == CURSOR:
        return 0
    name = f"{fields['kind']} {fields['name']!r}"
    messages = 0
    for lane in sorted({0, *_lanes(txn, owner)}):
        known = _row(txn, owner, lane)
        headers = _headers(txn, owner, lane, 0 if known is None else known.floor)
        row = _believed(lane, known, headers)
        gaps = _gaps(txn, owner, lane, row, headers)
        for first, end in gaps:
            holes.append(Hole(name, offset_of(first), offset_of(end), end - first, "its block is gone"))
        row = row._replace(tail=headers[-1].key.first if headers else NO_PREVIOUS)
        mended = (_queue_lane if fields["kind"] == QUEUE else _partition)(txn, owner, lane, row, gaps)
        write_row(txn, owner, lane, mended)
        messages += mended.messages
    return messages


def _believed(lane: int, known: Row | None, headers: list[Header]) -> Row:
    """Return the row of a lane, made up from its blocks if it is gone."""
    if known is not None:
        return known
    if not headers:
        return new_row(lane)
    end = headers[-1].end
    return new_row(lane)._replace(next=end, floor=headers[0].key.first, doubtful=end, referring=end)


def _gaps(txn: Any, owner: int, lane: int, row: Row, headers: list[Header]) -> list[tuple[int, int]]:
    """Return the ranges above the floor in which blocks are gone, as their neighbours tell."""
    row = row._replace(marks=count_marks(txn, owner, lane, row.floor))
    gaps: list[tuple[int, int]] = []
    position, before = row.floor, None
    for header in headers:
        first = header.key.first
        chained = header.previous == (NO_PREVIOUS if before is None else before.key.first)
        if first > position and not chained and not _is_reached(header, row, position):
            start = after_mark(txn, owner, lane, row, position)
            if start < first:
                gaps.append((start, first))
        position, before = max(position, header.end), header
    last = before.key.first if before is not None else NO_PREVIOUS
    if row.tail not in (NO_PREVIOUS, last) and row.floor <= row.tail and row.tail >= position and position < row.next:
        gaps.append((position, row.next))
    return gaps


def _is_reached(header: Header, row: Row, position: int) -> bool:
    """Tell whether nothing is missing before a block: the one before it is below the floor."""
    return header.previous == NO_PREVIOUS or (header.previous < row.floor and position == row.floor)


def _queue_lane(txn: Any, owner: int, lane: int, row: Row, gaps: list[tuple[int, int]]) -> Row:
    row = row._replace(marks=count_marks(txn, owner, lane, row.floor))
    row = settle_ranges(txn, owner, lane, row, [Settled(first, end, 0, 0) for first, end in gaps])
    position, expected, messages, size = row.floor, None, 0, 0
    while position < row.next:
        read = read_unsettled(txn, owner, lane, row, position, row.next, _READ_AT_ONCE, expected)
        messages += sum(len(records) for _, records in read.pieces)
        size += sum(sum(map(len, records)) for _, records in read.pieces)
        position, expected = read.position, read.last_block
    return row._replace(messages=messages, bytes=size)


def _partition(txn: Any, owner: int, lane: int, row: Row, gaps: list[tuple[int, int]]) -> Row:
    if gaps and gaps[0][0] == row.floor:
        row = row._replace(floor=gaps[0][1])
    position, messages, size = row.floor, 0, 0
    while position < row.next:
        read = partitions.read(txn, partitions.Query(owner, lane, position, row.next, _READ_AT_ONCE))
        messages += sum(piece.messages for piece in read.pieces)
        size += sum(piece.size for piece in read.pieces)
        position = read.position
    return row._replace(messages=messages, bytes=size)


def _mend_cursors(txn: Any, records: dict[int, dict[str, Any]]) -> None:
    """Give each subscription a row for the first partition; where the stream begins, if it has none."""
    for owner, fields in records.items():
        stream = fields["settings"].get("stream")
        if fields["kind"] == CURSOR and stream in records and _row(txn, owner, 0) is None:
            floor = read_row(txn, stream, 0).floor
            write_row(txn, owner, 0, new_row(0)._replace(floor=floor, next=floor))
