"""Notes: what a request that stood alone did to its lane, as a record of the journal; the log gets it later.

    4  owner (4) · lane (1) · first (8) · time (8) · is a `Message` (1) · record       a message that was put
    5  owner (4) · lane (1) · first (8) · end (8) · messages (8) · bytes (8)           a range that was settled
    7  owner (4) · lane (1) · first (8) · time (8) · messages (4) · sizes · records    messages that were put together
    8  for each note: its size (4) · note                                              what was done together

A size (4) of a record is 2**31 more where that is a `Message`. Together are notes of different lanes, or what was put
into one behind what was settled there.

A note is a record of its own, made without a look into the log: see `direct`. A batch that is written after some notes
carries them out first, in its own transaction, so its changes hold what they did, too. Played back, notes count where
no changes follow them. Of a message that was put and settled by then, only the row of its lane is written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from qflow.errors import CorruptionError
from qflow.message import Message, Record, is_logged
from qflow.named_tuples import NamedTuple
from qflow.storage.blocks import BlockKey
from qflow.storage.encoding import Messages
from qflow.storage.joining import Join
from qflow.storage.log.append import TAIL_BYTES, append_messages
from qflow.storage.log.keys import BLOCKS
from qflow.storage.log.lane import Lane
from qflow.storage.log.removal import remove_settled
from qflow.storage.log.rows import Row, read_row, with_last_block, write_row

MOST_BYTES = 128 * 1024
"""A larger put is not noted: it would be written twice for little."""
NOTED_LANES = 16
"""Of so many lanes notes may stand beside each other."""
_PUT, _SETTLED, _PUT_MANY, _TOGETHER = 4, 5, 7, 8
_NOTES = frozenset(bytes((kind,)) for kind in (_PUT, _SETTLED, _PUT_MANY, _TOGETHER))
_PUT_HEAD = struct.Struct("<BIBQQB")
_PUT_MANY_HEAD = struct.Struct("<BIBQQI")
_MESSAGE = 2**31
"""In a size: the record is a `Message`."""
_SETTLED_ALL = struct.Struct("<BIBQQQQ")
_SIZE = struct.Struct("<I")


class Note(NamedTuple):
    """What a request does to its lane. What is settled begins at the floor."""

    lane: Lane
    before: Row
    after: Row
    """As `before`, but for its tail: nothing is known of blocks here."""
    first: int
    records: Sequence[Record] | None
    """What is put; None where it settles."""
    time_ms: int


Noting: TypeAlias = tuple[tuple[Note, ...], bytes]
"""What a request does to its lanes, here and as the journal has it."""


def put_note(lane: Lane, records: Sequence[Record], plain: bool, size: int, now_ms: int) -> Noting | None:
    """Return a note of messages of `size` bytes together, at the end of a lane; None if there is to be none.

    Args:
        plain: all of them are bytes; else some may be among them that the log does not hold.
    """
    row, first, record = lane.row, lane.next, records[0]
    if size > MOST_BYTES or not (lane.takes_notes and row.next == first and (plain or all(map(is_logged, records)))):
        return None
    messages = len(records)
    _, floor, count, total, tail, marks, doubtful, referring = row
    # Not `Row(…)`, here and below, which takes longer by half a microsecond.
    after = tuple.__new__(
        Row, (first + messages, floor, count + messages, total + size, tail, marks, doubtful, referring)
    )
    try:
        if messages == 1:
            changes = _PUT_HEAD.pack(_PUT, lane.owner, lane.lane, first, now_ms, type(record) is Message) + record
        else:
            head = _PUT_MANY_HEAD.pack(_PUT_MANY, lane.owner, lane.lane, first, now_ms, messages)
            changes = head + _together(records)
    except struct.error:  # a clock before 1970: a batch takes that for 1970
        return None
    return (tuple.__new__(Note, (lane, row, after, first, records, now_ms)),), changes


def _together(records: Sequence[Record]) -> bytes:
    """Return the sizes of records, and those. Cost: 0.05 µs a record."""
    sizes = [len(record) if type(record) is bytes else len(record) | _MESSAGE for record in records]
    return b"".join((struct.pack(f"<{len(sizes)}I", *sizes), *records))


def _apart(together: bytes, position: int, count: int) -> list[Record]:
    """Return what `_together` made bytes of, which begin there."""
    sizes = struct.unpack_from(f"<{count}I", together, position)
    position += 4 * count
    records: list[Record] = []
    for size in sizes:
        end = position + (size & ~_MESSAGE)
        record = together[position:end]
        records.append(Message.unpack(record) if size & _MESSAGE else record)
        position = end
    return records


def settle_note(lane: Lane, ranges: Sequence[Any]) -> Noting | None:
    """Return a note of a range that is settled; None if that takes a look into the log."""
    row = lane.row
    if len(ranges) != 1 or not lane.takes_notes or row.marks or row.referring:
        return None
    first, end, messages, size = ranges[0]
    if not row.floor == first < end <= row.next:
        return None
    if messages > row.messages or size > row.bytes:
        return None
    next_, _, count, total, *rest = row
    after = Row(next_, end, count - messages, total - size, *rest)
    changes = _SETTLED_ALL.pack(_SETTLED, lane.owner, lane.lane, first, end, messages, size)
    return (Note(lane, row, after, first, None, 0),), changes


def joint_note(notings: Iterable[Noting | None]) -> Noting | None:
    """Return one note of what is done together; None if a part of it is not to be noted, or meets another one.

    What is put into a lane may come behind what is settled there.
    """
    last: dict[Lane, Note] = {}
    notes: list[Note] = []
    parts = [bytes((_TOGETHER,))]
    for noting in notings:
        if noting is None:
            return None
        for note in noting[0]:
            before = last.get(note.lane)
            if before is not None and (before.records is not None or note.records is None):
                return None
            notes.append(note if before is None else _behind(before, note))
            last[note.lane] = note
        parts += _SIZE.pack(len(noting[1])), noting[1]
    return (tuple(notes), b"".join(parts)) if notes else None


def _behind(settled: Note, put: Note) -> Note:
    """Return a note of what is put into a lane as that is where something of it was settled."""
    before, after, row = put.before, put.after, settled.after
    messages, size = row.messages + after.messages - before.messages, row.bytes + after.bytes - before.bytes
    return put._replace(before=row, after=row._replace(next=after.next, messages=messages, bytes=size))


def _each(records: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the notes that some records of a journal hold, one by one."""
    for changes in records:
        if changes[0] != _TOGETHER:
            yield changes
            continue
        position = 1
        while position < len(changes):
            (size,) = _SIZE.unpack_from(changes, position)
            position += _SIZE.size + size
            yield changes[position - size : position]


def is_note(changes: bytes) -> bool:
    """Tell whether a record of the journal is a note."""
    return changes[:1] in _NOTES


def open_notes(records: Sequence[bytes]) -> int:
    """Return how many notes are at the end of some records of a journal: those that no changes follow."""
    count = 0
    while count < len(records) and is_note(records[-1 - count]):
        count += 1
    return count


class Tally:
    """Notes of one lane, and how they leave it."""

    def __init__(self, before: Row) -> None:
        self._before = before
        self._next, self._floor, self._messages, self._bytes = before[:4]
        self._first = -1
        self._records: list[Record] = []
        self._time_ms = 0

    def put(self, first: int, records: Sequence[Record], time_ms: int) -> None:
        """Have some messages more."""
        if not self._records:
            self._first, self._time_ms = first, time_ms
        count = len(records)
        self._records += records
        self._next = max(self._next, first + count)
        self._messages += count
        self._bytes += sum(map(len, records))

    def settle(self, end: int, messages: int, size: int) -> None:
        """Have everything settled below `end`, where that takes so many messages away."""
        self._floor = end
        self._messages -= messages
        self._bytes -= size

    @property
    def after(self) -> Row:
        """The lane's row behind them, but for its tail."""
        return Row(self._next, self._floor, self._messages, self._bytes, *self._before[4:])

    @property
    def fits(self) -> bool:
        """It is about a lane as it was: nothing is put where something is, or taken away that is not there."""
        return (not self._records or self._first >= self._before.next) and min(self._messages, self._bytes) >= 0

    def write(self, txn: Any, owner: int, lane: int, full_tail: int, join: Join) -> Row:
        """Bring a lane of the log up to them; return its row. Cost: as one put of all messages that still wait.

        Args:
            full_tail: see `Lane`.
        """
        row = self.after
        waiting = self._records[max(0, row.floor - self._first) :] if self._records else []
        if waiting:
            first = row.next - len(waiting)
            sizes = list(map(len, waiting))
            before = self._before
            before = before._replace(
                floor=row.floor, messages=row.messages - len(waiting), bytes=row.bytes - sum(sizes)
            )
            plain = all(type(record) is bytes for record in waiting)
            full_bytes = 0 if before.tail == full_tail else TAIL_BYTES
            messages = Messages(waiting, sizes, plain)
            key = BlockKey(BLOCKS, owner, lane, first)
            row = row._replace(tail=append_messages(txn, key, before, messages, self._time_ms, full_bytes, join).tail)
        write_row(txn, owner, lane, row)
        return row


def carry_out(txn: Any, notes: Iterable[Note], join: Join) -> dict[Lane, tuple[Row, int, bool]]:
    """Bring the log up to notes that follow each other; return how that leaves each lane: see `Lane` and its fields.

    Those are the row, `remove_at` and `removing`. Cost: as one put and one settle a lane.
    """
    tallies: dict[Lane, Tally] = {}
    for note in notes:
        tally = tallies.get(note.lane)
        if tally is None:
            tally = tallies[note.lane] = Tally(note.before)
        if note.records is not None:
            tally.put(note.first, note.records, note.time_ms)
        else:
            before, after = note.before, note.after
            tally.settle(after.floor, before.messages - after.messages, before.bytes - after.bytes)
    left = {}
    for lane, tally in tallies.items():
        row = tally.write(txn, lane.owner, lane.lane, lane.full_tail, join)
        remove_at, removing = lane.remove_at, lane.removing
        if row.floor >= remove_at:
            remove_at, removing = remove_settled(txn, lane.owner, lane.lane, row)
        left[lane] = row, remove_at, removing
    return left


def replay(txn: Any, records: Iterable[bytes], join: Join = b"".join) -> int:
    """Bring a log up to notes of its journal; return how many do not fit the state it is in, and were left out.

    Those of a lane whose row is damaged, or gone, are among them: it costs that lane, and no other.
    """
    tallies: dict[tuple[int, int], Tally | None] = {}
    counts: dict[tuple[int, int], int] = {}
    for changes in _each(records):
        _, owner, lane, first = _PUT_HEAD.unpack_from(changes)[:4]
        place = owner, lane
        if place not in tallies:
            tallies[place] = _tally_of(txn, owner, lane)
        counts[place] = counts.get(place, 0) + 1
        tally = tallies[place]
        if tally is None:
            continue
        if changes[0] == _PUT:
            *_, time_ms, is_message = _PUT_HEAD.unpack_from(changes)
            record: Record = changes[_PUT_HEAD.size :]
            tally.put(first, [Message.unpack(record) if is_message else record], time_ms)
        elif changes[0] == _PUT_MANY:
            *_, time_ms, count = _PUT_MANY_HEAD.unpack_from(changes)
            tally.put(first, _apart(changes, _PUT_MANY_HEAD.size, count), time_ms)
        else:
            *_, end, messages, size = _SETTLED_ALL.unpack(changes)
            tally.settle(end, messages, size)
    unfit = 0
    for place, tally in tallies.items():
        if tally is not None and tally.fits:
            tally.write(txn, *place, -1, join)
        else:
            unfit += counts[place]
    return unfit


def _tally_of(txn: Any, owner: int, lane: int) -> Tally | None:
    """Return what notes of a lane are counted in; None where its row cannot be read, as whoever opens it tells."""
    try:
        return Tally(with_last_block(txn, owner, lane, read_row(txn, owner, lane)))
    except CorruptionError:
        return None
