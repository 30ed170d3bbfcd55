"""Bodies that several queues share: stored once, with a count of who refers to them.

    key                       value
    BODIES  0  0  0           the last number that was given
    BODIES  0  0  number      a block of one record; numbers are even
    BODIES  0  0  number + 1  how many references to it are in blocks: beside the body, on the same page
    BODIES  0  n  number      piece n of a body, from 1 on, of one that was stored in pieces: a block of one record
    META    ahead             the numbers of bodies that are stored ahead of the commit that refers to them, if any are

A queue's block holds a `Reference` in place of such a record. It is counted when it is written and counted down when it
leaves the log for good, with its block or out of it, in the same transaction; at 0 the body goes. Numbers are never
given twice, so a reference finds its body or none. Counts carry a CRC-32, bodies are blocks and have checksums of their
own. A count that is damaged is left as it is, with its body: too much is kept, and nothing is lost.

Bodies may be stored ahead, with their counts, in commits of their own: see `ahead`. The first of those notes all their
numbers, and the commit with the references removes the note; where it still stands when a log is opened, the bodies
that it names are removed. Who does not know the note finds bodies that count too many references, and keeps them.
One that is large is stored in pieces then, each in a commit of its own; the block under its number holds a reference
that says how many they are, and whether they are a `Message`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from types import MappingProxyType
from typing import Any

from qflow.errors import CorruptionError
from qflow.message import Message, Record, is_logged, is_plain
from qflow.storage import blocks, encoding
from qflow.storage.blocks import BlockKey, Reference
from qflow.storage.encoding import Messages
from qflow.storage.joining import Join
from qflow.storage.log import table
from qflow.storage.log.keys import LAST_LANE, key_of, meta_key
from qflow.storage.log.sealing import seal, unseal

BODIES = 7
SHARED_BYTES = 4096
"""A record of this size is stored once if several queues get it."""
RELEASED_AT_ONCE = encoding.MAX_MESSAGES
"""References counted down in one transaction, at most: no block holds more."""
FEW_RELEASED = 16
"""And so many where the disk is full, out of the reserve."""
RELEASING_BYTES = 4096 * RELEASED_AT_ONCE
"""Room for that: each count may lie on a page of its own."""

NOBODY = 0
"""In keys, where others have the number of a queue."""
_PREFIX = bytes((BODIES, *NOBODY.to_bytes(5, "big")))
_SKIPPED = 2**32
"""Left out behind the highest number where nobody knows any more which was the last."""


def key_of_body(number: int, piece: int = 0) -> bytes:
    return key_of(BODIES, NOBODY, piece, number)


_LAST_GIVEN = key_of_body(0)
_AHEAD = meta_key("ahead")


def _sealed(key: bytes, number: int) -> bytes:
    return seal(number.to_bytes(8, "little"), key)


def _read_number(txn: Any, key: bytes) -> int | None:
    """Return the number kept under a key, None if there is none; raises CorruptionError if it is damaged."""
    value = txn.get(key)
    if value is None:
        return None
    return int.from_bytes(unseal(value, f"the record at key {key.hex()}", key), "little")


def shared_among(puts: Iterable[tuple[list[Record], list[int]]]) -> tuple[dict[int, Record], int]:
    """Return the large records that several puts hold, by identity, and how many bytes too many that is.

    Args:
        puts: records and the sizes of them, of each put.
    """
    seen: set[int] = set()
    shared: dict[int, Record] = {}
    saved = 0
    for records, sizes in puts:
        for record, size in zip(records, sizes, strict=True):
            if size >= SHARED_BYTES and is_logged(record):
                if id(record) in seen:
                    shared[id(record)] = record
                    saved += size
                seen.add(id(record))
    return shared, saved


class Sharing:
    """The bodies that one transaction stores, and how often it refers to each."""

    def __init__(
        self,
        txn: Any,
        records: Mapping[int, Record],
        now_ms: int,
        join: Join = b"".join,
        ahead: Mapping[int, Reference] = MappingProxyType({}),
    ) -> None:
        """Store records, given by their identity, beside those that were stored ahead."""
        self._txn = txn
        self._references = dict(ahead)
        self._counts: Counter[int] = Counter()
        self._counted = {reference.number for reference in ahead.values()}
        if records:
            for (identity, record), number in zip(records.items(), new_numbers(txn, len(records)), strict=True):
                self._references[identity] = store(txn, number, record, now_ms, join)

    def stand_ins(self, records: list[Record]) -> list[Record]:
        """Return records with references in place of those that are stored."""
        references = self._references
        stored = [references.get(id(record), record) for record in records]
        self._counts.update(record.number for record in stored if type(record) is Reference)
        return stored

    def finish(self) -> None:
        """Write the counts, when every reference is in its block."""
        for number, count in self._counts.items():
            if number not in self._counted:
                write_count(self._txn, number, count)


def new_numbers(txn: Any, count: int) -> range:
    """Return numbers for so many bodies; they are given from now on."""
    first = _last_number(txn) + 2
    numbers = range(first, first + 2 * count, 2)
    txn.put(_LAST_GIVEN, _sealed(_LAST_GIVEN, numbers[-1]))
    return numbers


def store(txn: Any, number: int, record: Record, now_ms: int, join: Join, pieces: int = 0) -> Reference:
    """Write a body, without its count; of one that is stored in so many pieces, that it is."""
    stored = Reference(2 * pieces + (not is_plain([record])), len(record)) if pieces else record
    _put(txn, number, 0, stored, now_ms, join)
    return Reference(number, len(record))


def store_piece(txn: Any, number: int, piece: int, data: memoryview, now_ms: int, join: Join) -> None:
    """Write a piece of a body, from 1 to `LAST_LANE`."""
    _put(txn, number, piece, data, now_ms, join)


def _put(txn: Any, number: int, piece: int, record: Any, now_ms: int, join: Join) -> None:
    plain = type(record) is memoryview or is_plain([record])
    key = BlockKey(BODIES, NOBODY, piece, number)
    sections = encoding.encode_sections(key, Messages([record], [len(record)], plain), time_ms=now_ms)
    txn.put(key_of_body(number, piece), join(sections))


def write_count(txn: Any, number: int, count: int) -> None:
    key = key_of_body(number + 1)
    txn.put(key, _sealed(key, count))


# Stored ahead --------------------------------------------------------------------------------------------------------


def note_ahead(txn: Any, numbers: range) -> None:
    """Note that these bodies are stored for a commit that is still to come."""
    txn.put(_AHEAD, seal(numbers.start.to_bytes(8, "little") + numbers.stop.to_bytes(8, "little"), _AHEAD))


def forget_ahead(txn: Any) -> None:
    txn.delete(_AHEAD)


def noted_ahead(txn: Any) -> range:
    """Return the numbers of bodies that are stored ahead; none if there is no note, or it is damaged."""
    value = txn.get(_AHEAD)
    with suppress(CorruptionError):
        if value is not None:
            note = unseal(value, "the note of bodies stored ahead", _AHEAD)
            return range(int.from_bytes(note[:8], "little"), int.from_bytes(note[8:], "little"), 2)
    return range(0)


def remove_ahead(txn: Any, numbers: range, limit: int) -> bool:
    """Remove bodies that nothing refers to, and their counts: so many records at most; return whether more are left.

    The note goes with the last of them.
    """
    for piece in range(LAST_LANE + 1):
        limit -= table.delete_between(txn, key_of_body(numbers.start, piece), key_of_body(numbers.stop, piece), limit)
        if not limit:
            return True
    forget_ahead(txn)
    return False


def _last_number(txn: Any) -> int:
    with suppress(CorruptionError):
        number = _read_number(txn, _LAST_GIVEN)
        if number is not None:
            return number
    highest = _highest(txn)
    return 0 if highest is None else highest + highest % 2 + _SKIPPED


def _highest(txn: Any) -> int | None:
    with txn.cursor() as cursor:
        found = table.at_or_before(cursor, key_of_body(table.LAST))
        return table.number_of(cursor.key()) if found else None


def any_stored(txn: Any) -> bool:
    """Tell whether there is a shared body."""
    highest = _highest(txn)
    return highest is not None and highest > 0


def fetch(txn: Any, reference: Reference) -> Record:
    """Return what a reference stands for. Raises CorruptionError: it is damaged, or gone."""
    number = reference.number
    where = f"shared body {number}"
    record = _get(txn, number, 0, where)
    if type(record) is Reference:
        record = _put_together(txn, number, *divmod(record.number, 2), where)
    if len(record) != reference.size:
        raise CorruptionError(f"{where}: {len(record)} bytes, expected {reference.size}")
    return record


def _get(txn: Any, number: int, piece: int, where: str) -> Record:
    value = txn.get(key_of_body(number, piece))
    if value is None:
        raise CorruptionError(f"{where} has vanished")
    block = blocks.decode(value, BlockKey(BODIES, NOBODY, piece, number), where=where)
    if len(block.records) != 1:
        raise CorruptionError(f"{where}: {len(block.records)} records, expected 1")
    return block.records[0]


def _put_together(txn: Any, number: int, pieces: int, is_message: int, where: str) -> Record:
    """Return a body of its pieces. Memory: the body and a piece; of a `Message`, twice the body."""
    whole = BytesIO()
    for piece in range(1, pieces + 1):
        whole.write(_get(txn, number, piece, f"piece {piece} of {where}"))
    data = whole.getvalue()
    return Message.unpack(data) if is_message else data


def share_of(txn: Any, reference: Reference) -> int:
    """Return how many bytes of a body are one reference's: all of it, or its part of what several refer to."""
    count = None
    with suppress(CorruptionError):
        count = _read_number(txn, key_of_body(reference.number + 1))
    return reference.size // (count or 1)


def key_of_damage(txn: Any, number: int) -> bytes:
    """Return the key of what cannot be read of a body that `fetch` does not return; empty if that is gone.

    Cost: as `fetch`.
    """
    for piece in range(LAST_LANE + 1):
        try:
            _get(txn, number, piece, "")
        except CorruptionError:
            key = key_of_body(number, piece)
            return b"" if txn.get(key) is None else key
    return b""


class Releases:
    """Counts references down in one transaction: so many at most."""

    __slots__ = ("left",)

    def __init__(self, most: int = RELEASED_AT_ONCE) -> None:
        self.left = most

    def take(self, txn: Any, references: list[Reference]) -> bool:
        """Count down what leaves the log; False if that would be too many, and nothing was done."""
        if len(references) > self.left:
            return False
        self.left -= len(references)
        for reference in references:
            _release(txn, reference.number)
        return True


def _release(txn: Any, number: int) -> None:
    key = key_of_body(number + 1)
    try:
        count = _read_number(txn, key)
    except CorruptionError:
        return
    if count is None:
        return
    if count > 1:
        txn.put(key, _sealed(key, count - 1))
    else:
        txn.delete(key)
        txn.delete(key_of_body(number))
        found = [piece for piece in (1, 2) if txn.delete(key_of_body(number, piece))]  # one of them may be lost
        for piece in range(3, LAST_LANE + 1) if found else ():
            txn.delete(key_of_body(number, piece))


def problems(txn: Any, found: Mapping[int, int]) -> Iterator[str]:
    """Compare bodies and counts with the references that were found: how many of each number; tell what differs."""
    bodies: set[int] = set()
    counts: dict[int, int] = {}
    ahead = noted_ahead(txn)
    for key in table.keys(txn, key_of_body(1), table.behind(_PREFIX)):
        number = table.number_of(key)
        if ahead.start <= number < ahead.stop:
            continue
        if number % 2 == 0:
            bodies.add(number)
            continue
        try:
            counts[number - 1] = _read_number(txn, key) or 0
        except CorruptionError as error:
            counts[number - 1] = found.get(number - 1, 0)
            yield f"the count of shared body {number - 1} is damaged: {error}"
    pieces = Counter(map(table.number_of, table.keys(txn, key_of_body(0, 1), key_of_body(table.LAST, LAST_LANE))))
    alone = {number for number in pieces if number not in bodies and not ahead.start <= number < ahead.stop}
    for number in sorted({*bodies, *counts, *found, *alone}):
        if number not in bodies:
            rest = f", and {pieces[number]} of its pieces are left" if number in alone else ""
            yield f"shared body {number} has vanished{rest}"
        elif number not in counts:
            yield f"the count of shared body {number} has vanished"
        if counts.get(number, 0) != found.get(number, 0):
            yield (
                f"shared body {number} counts {counts.get(number, 0)} references, "
                f"the blocks hold {found.get(number, 0)}"
            )
