"""The one byte layout for messages at rest: the block.

    header    52 bytes, little-endian, the last four a CRC-32 of the ones before
    columns   lengths (4 bytes a message), then each optional column whose bit is set, 4 bytes a message
    payload   for each message its header bytes, then its body
    checksum  4 bytes, a CRC-32 of everything before

The header echoes the block's key (table, lane, owner, first sequence), so a block found under another key or in another
file is noticed, and names the first sequence of its predecessor, so a block that vanished is noticed. Message `i` has
sequence `first + i`, unless the OFFSETS column says otherwise. A length of a message covers its header bytes and body.

Rules: `decode` returns either exactly what `encode` was given or raises `CorruptionError`; it never guesses.
Cost: 0.05 µs a message to encode, 0.1 µs to decode, plus a CRC at about 5 GB/s.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple
from zlib import crc32

from qflow.errors import CorruptionError
from qflow.message import Message, Record, is_plain

MAGIC = b"qfb1"
NO_PREVIOUS = 2**64 - 1
MAX_BYTES = 64 * 1024
"""No block is larger, unless it holds a single message."""
MAX_MESSAGES = 1024

HEADERS, OFFSETS, TIMES, UNLOGGED = 1, 2, 4, 8
"""Optional columns: header lengths · sequence minus first · milliseconds after the block's time · 1 = not logged."""
_COLUMNS = (HEADERS, OFFSETS, TIMES, UNLOGGED)
_COLUMN_ROOM = 4 * (1 + len(_COLUMNS))

_HEADER = struct.Struct("<4sHBBIIQIIQQ")
_CRC = struct.Struct("<I")
_RESIDUE = 0x2144DF1C
"""The CRC-32 of any bytes followed by their own CRC-32."""

# A block of one message, as `Singles` sees it. Functions bound to names here save a lookup a message each.
_CONSTANT_BYTES = 16  # magic, columns, table, lane, owner, count: the same in all such blocks of a lane
_pack_header = struct.Struct("<16sQIIQQ").pack
_unpack_key = struct.Struct("<16sQ4xI").unpack_from  # of that header: the constant, the sequence, the size
_pack_length = struct.Struct("<II").pack  # the header's CRC, and the one length
_pack_crc = _CRC.pack
_join = b"".join

HEADER_BYTES = _HEADER.size + _CRC.size
SINGLE_HEAD_BYTES = HEADER_BYTES + 4
SINGLE_BYTES = SINGLE_HEAD_BYTES + _CRC.size
"""What a block of one plain message takes on top of the message, and how much of it stands before the message."""


class BlockKey(NamedTuple):
    """Where a block lives: table, queue or stream, lane, sequence of its first message."""

    table: int
    owner: int
    lane: int
    first: int


class Header(NamedTuple):
    key: BlockKey
    columns: int
    count: int  # type: ignore[assignment]
    span: int
    payload_bytes: int
    previous: int
    time_ms: int

    @property
    def end(self) -> int:
        """The sequence after the last one this block covers."""
        return self.key.first + self.span

    @property
    def total_bytes(self) -> int:
        width = 4 * (1 + self.columns.bit_count())
        return HEADER_BYTES + self.count * width + self.payload_bytes + _CRC.size


class Block(NamedTuple):
    """A decoded block. `records[i]` has sequence `first + offsets[i]`."""

    header: Header
    records: list[Record]
    offsets: Sequence[int]
    times_ms: Sequence[int]

    @property
    def first(self) -> int:
        return self.header.key.first

    @property
    def end(self) -> int:
        return self.header.end


def _column(values: Iterable[int]) -> bytes:
    column = array("I", values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _values(data: bytes | memoryview) -> array[int]:
    column = array("I")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def encode(
    key: BlockKey,
    records: Sequence[Record],
    *,
    previous: int = NO_PREVIOUS,
    time_ms: int = 0,
    offsets: Sequence[int] | None = None,
    times: Sequence[int] | None = None,
) -> bytes:
    """Encode records into one block.

    Args:
        key: where it will live; `key.first` is the sequence offsets count from.
        records: at least one.
        previous: first sequence of the block before this one in its lane.
        time_ms: wall clock, milliseconds since the epoch.
        offsets: sequence minus `key.first` of each record; None for 0, 1, 2, …
        times: milliseconds after `time_ms` of each record; None for 0.
    """
    table, owner, lane, first = key
    if len(records) == 1 and type(records[0]) is bytes and offsets is None and times is None:
        body = records[0]
        size = len(body)
        bare = _HEADER.pack(MAGIC, 0, table, lane, owner, 1, first, 1, size, previous, time_ms)
        head = bare + _CRC.pack(crc32(bare)) + _CRC.pack(size)
        return b"".join((head, body, _CRC.pack(crc32(body, crc32(head)))))
    columns = 0
    parts: list[bytes] = [_column(map(len, records))]
    payload: list[bytes] = records  # type: ignore[assignment]
    unlogged: list[bool] = []
    if not is_plain(records):
        messages = [record if isinstance(record, Message) else Message(record) for record in records]
        if any(message.header_bytes for message in messages):
            columns |= HEADERS
            parts.append(_column(len(message.header_bytes) for message in messages))
        payload = [piece for message in messages for piece in (message.header_bytes, message.body)]
        unlogged = [not message.logged for message in messages]
    span = len(records)
    if offsets is not None:
        columns |= OFFSETS
        span = offsets[-1] + 1
        parts.append(_column(offsets))
    if times is not None:
        columns |= TIMES
        parts.append(_column(times))
    if any(unlogged):
        columns |= UNLOGGED
        parts.append(_column(unlogged))
    size = sum(map(len, records))
    bare = _HEADER.pack(MAGIC, columns, table, lane, owner, len(records), first, span, size, previous, time_ms)
    body = b"".join((bare, _CRC.pack(crc32(bare)), *parts, *payload))
    return body + _CRC.pack(crc32(body))


def read_header(data: bytes | memoryview, *, where: str) -> Header:
    """Return the header of a block after checking its own CRC; the rest of the block is not looked at."""
    if len(data) < HEADER_BYTES:
        raise CorruptionError(f"{where}: {len(data)} bytes are too few for a block")
    bare = bytes(data[: _HEADER.size])
    (expected,) = _CRC.unpack_from(data, _HEADER.size)
    if crc32(bare) != expected:
        raise CorruptionError(f"{where}: the block's header does not match its checksum")
    magic, columns, table, lane, owner, count, first, span, size, previous, time_ms = _HEADER.unpack(bare)
    if magic != MAGIC or columns & ~sum(_COLUMNS) or not 0 < count <= span:
        raise CorruptionError(f"{where}: not a block this version can read")
    return Header(BlockKey(table, owner, lane, first), columns, count, span, size, previous, time_ms)


class Singles:
    """Encodes and decodes blocks of one message for one table, owner and lane: what a per-message spill file holds.

    The same bytes as `encode`, without its choices; and since the CRC-32 of any bytes followed by their own CRC-32 is a
    constant, one pass over a whole block checks header, length and payload at once.

    Cost: encode 0.7 µs, decode 0.7 µs for 1 KiB.
    """

    __slots__ = ("_constant", "_key")

    def __init__(self, table: int, owner: int, lane: int) -> None:
        self._key = BlockKey(table, owner, lane, 0)
        self._constant = _HEADER.pack(MAGIC, 0, table, lane, owner, 1, 0, 0, 0, 0, 0)[:_CONSTANT_BYTES]

    def encode(self, first: int, record: Record) -> bytes:
        """Return the block of one record, whose sequence is `first`."""
        if type(record) is bytes:
            size = len(record)
            bare = _pack_header(self._constant, first, 1, size, NO_PREVIOUS, 0)
            crc = crc32(bare)
            length = _pack_length(crc, size)
            return _join((bare, length, record, _pack_crc(crc32(record, crc32(length, crc)))))
        return encode(self._key._replace(first=first), [record])

    def frame(self, first: int, body: bytes) -> tuple[bytes, bytes]:
        """Return what `encode` puts before and after a body, so that a large one can be written without a copy."""
        bare = _pack_header(self._constant, first, 1, len(body), NO_PREVIOUS, 0)
        head = bare + _pack_length(crc32(bare), len(body))
        return head, _pack_crc(crc32(body, crc32(head)))

    def unframe(self, head: bytes, body: bytes, tail: bytes, first: int, where: str) -> Record:
        """Decode a block read in the pieces of `frame`; a large body is not copied unless something is wrong."""
        size = len(body)
        if (
            len(head) == SINGLE_HEAD_BYTES
            and crc32(tail, crc32(body, crc32(head))) == _RESIDUE
            and _unpack_key(head) == (self._constant, first, size)
        ):
            return body
        return self.decode(head + body + tail, first, where)

    def decode(self, data: bytes, first: int, where: str) -> Record:
        """Return the record of a block; raises CorruptionError as `decode` does."""
        size = len(data) - SINGLE_BYTES
        if size >= 0 and crc32(data) == _RESIDUE and _unpack_key(data) == (self._constant, first, size):
            return data[SINGLE_HEAD_BYTES:-4]
        block = decode(data, self._key._replace(first=first), where=where)  # headers, a flag, or damage to name
        if block.header.count != 1:
            raise CorruptionError(f"{where}: holds {block.header.count} messages, expected 1")
        return block.records[0]


def decode(data: bytes | memoryview, key: BlockKey | None, *, where: str) -> Block:
    """Decode a whole block and check every byte of it.

    Args:
        data: exactly one block.
        key: where it was found; None skips that check.
        where: named in errors.

    Raises:
        CorruptionError: a checksum, the length or the key does not match.
    """
    header = read_header(data, where=where)
    if key is not None and header.key != key:
        raise CorruptionError(f"{where}: holds the block of {header.key}, expected {key}")
    if len(data) != header.total_bytes:
        raise CorruptionError(f"{where}: {len(data)} bytes, expected {header.total_bytes}")
    view = memoryview(data)
    (expected,) = _CRC.unpack_from(data, len(data) - _CRC.size)
    if crc32(view[: -_CRC.size]) != expected:
        raise CorruptionError(f"{where}: the block does not match its checksum")
    count = header.count
    width = 4 * count
    position = HEADER_BYTES
    lengths = _values(view[position : position + width])
    optional: dict[int, array[int]] = {}
    for column in _COLUMNS:
        if header.columns & column:
            position += width
            optional[column] = _values(view[position : position + width])
    position += width
    if sum(lengths) != header.payload_bytes:
        raise CorruptionError(f"{where}: the lengths of the messages do not add up")
    payload = bytes(view[position : -_CRC.size])
    ends = list(accumulate(lengths))
    records: list[Record] = list(map(payload.__getitem__, map(slice, chain((0,), ends), ends)))
    if HEADERS in optional or UNLOGGED in optional:
        zeros = array("I", bytes(width))
        header_lengths = optional.get(HEADERS, zeros)
        unlogged = optional.get(UNLOGGED, zeros)
        for index, (record, split, flag) in enumerate(zip(records, header_lengths, unlogged, strict=True)):
            if split or flag:
                whole = record if type(record) is bytes else b""
                records[index] = Message(whole[split:], whole[:split], not flag)
    times = optional.get(TIMES)
    return Block(
        header,
        records,
        optional.get(OFFSETS, range(count)),
        [header.time_ms + delta for delta in times] if times is not None else [header.time_ms] * count,
    )


def outline(data: bytes, key: BlockKey, *, where: str) -> tuple[Header, Sequence[int], Sequence[int]]:
    """Return a block's header, and lengths and offsets of its messages; of all that, only the header is checked.

    Raises:
        CorruptionError: the header, its key or the length does not match.
    """
    header = read_header(data, where=where)
    if header.key != key or len(data) != header.total_bytes:
        raise CorruptionError(f"{where}: not the block that belongs here")
    width = 4 * header.count
    lengths = _values(data[HEADER_BYTES : HEADER_BYTES + width])
    if not header.columns & OFFSETS:
        return header, lengths, range(header.count)
    position = HEADER_BYTES + width * (1 + (header.columns & (OFFSETS - 1)).bit_count())
    return header, lengths, _values(data[position : position + width])


def split(sizes: Iterable[int]) -> list[slice]:
    """Cut messages of these sizes into blocks of at most `MAX_BYTES` and `MAX_MESSAGES`; a larger message is alone."""
    ends = list(accumulate(map(_COLUMN_ROOM.__add__, sizes)))
    count = len(ends)
    room = MAX_BYTES - SINGLE_BYTES
    pieces: list[slice] = []
    start = used = 0
    while start < count:
        stop = bisect_right(ends, used + room, start, min(count, start + MAX_MESSAGES))
        stop = max(stop, start + 1)
        pieces.append(slice(start, stop))
        start, used = stop, ends[stop - 1]
    return pieces
