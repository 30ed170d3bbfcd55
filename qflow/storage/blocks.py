"""The one byte layout for messages at rest: the block.

    header    52 bytes, little-endian, the last four a CRC-32 of the ones before
    columns   lengths (4 bytes a message), then each optional column whose bit is set, 4 bytes a message
    names     where the TOPICS bit is set: length (4), CRC-32 (4), and the distinct topics, with NUL between them
    payload   the messages, each as `message.py` has it: a bare body, or a `Message`; or what refers to one elsewhere
    checksum  8 bytes, XXH3-64 of the payload, seeded with the CRC-32 of all that stands before it

The header echoes the block's key (table, lane, owner, first sequence), so a block found under another key or in another
file is noticed, and names the first sequence of its predecessor, so a block that vanished is noticed. Message `i` has
sequence `first + i`, unless the OFFSETS column says otherwise. The names have a checksum of their own, so that a reader
who looks for some topics can pass over a block that holds none of them, and need not read the rest of it.

Rules: `decode` returns either exactly what was encoded (see `encoding.py`) or raises `CorruptionError`; it never
guesses. Cost: 0.1 µs a message.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, compress
from zlib import crc32

from xxhash import xxh3_64_digest

from qflow.errors import CorruptionError
from qflow.message import Message, Record
from qflow.named_tuples import NamedTuple

MAGIC = b"qfb4"
NO_PREVIOUS = 2**64 - 1

LARGE = 4096
"""From this mean size on it pays not to copy bodies once more."""

KINDS, OFFSETS, TIMES, TOPICS = 1, 2, 4, 8
"""Optional columns: 0 = plain bytes, 1 = a `Message`, 2 = a `Reference` · sequence minus first · milliseconds after the
block's time · which of the names."""
_COLUMNS = (KINDS, OFFSETS, TIMES, TOPICS)
COLUMN_ROOM = 4 * (1 + len(_COLUMNS))

HEADER = struct.Struct("<4sHBBIIQIIQQ")
BEFORE_OWNER, NUMBER, BEHIND_OWNER = struct.Struct("<4sHBB"), struct.Struct("<I"), struct.Struct("<IQIIQQ")
"""The header in three parts: in blocks of the same messages often only the owner differs."""
_CRC = struct.Struct("<I")
NAMES = struct.Struct("<II")
CHECKSUM_BYTES = 8

HEADER_BYTES = HEADER.size + _CRC.size
SINGLE_HEAD_BYTES = HEADER_BYTES + 4
SINGLE_BYTES = SINGLE_HEAD_BYTES + CHECKSUM_BYTES
"""What a block of one plain message takes on top of the message, and how much of it stands before the message."""
SINGLE_ROOM = SINGLE_BYTES + COLUMN_ROOM
"""What a block of one message takes on top of it at most."""


class Reference(bytes):
    """Stands in a block for a record that is stored elsewhere, once for several queues.

    0, where a `Message` has its flags (1 byte) · length of the record (4) · number of where it is (8)
    """

    __slots__ = ()

    def __new__(cls, number: int, size: int) -> Reference:
        return bytes.__new__(cls, _REFERENCE.pack(0, size, number))

    @classmethod
    def unpack(cls, data: bytes) -> Reference:
        """Return the reference that these bytes are."""
        return bytes.__new__(cls, data)

    @property
    def number(self) -> int:
        return int(_REFERENCE.unpack(self)[2])

    @property
    def size(self) -> int:
        """`len` of the record."""
        return int(_REFERENCE.unpack(self)[1])


_REFERENCE = struct.Struct("<BIQ")
KIND_OF: dict[type, int] = {bytes: 0, Message: 1, Reference: 2}
_UNPACK: tuple[Callable[[bytes], Record], ...] = (bytes, Message.unpack, Reference.unpack)


def full_length(record: Record) -> int:
    """Return how many bytes a record is, also one that a reference stands for."""
    return record.size if type(record) is Reference else len(record)


class BlockKey(NamedTuple):
    """Where a block lives: table, queue or stream, lane, sequence of its first message."""

    table: int
    owner: int
    lane: int
    first: int

    def __str__(self) -> str:
        return f"block {self.first} of number {self.owner}, lane {self.lane}, table {self.table}"


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
    def columns_end(self) -> int:
        """Where the columns end in the block."""
        return HEADER_BYTES + 4 * self.count * (1 + self.columns.bit_count())

    def total_bytes(self, data: bytes | memoryview) -> int:
        """Return how long the block is that begins with `data`; -1 if that is too short to tell."""
        position = self.columns_end
        if self.columns & TOPICS:
            if len(data) < position + NAMES.size:
                return -1
            position += NAMES.size + NAMES.unpack_from(data, position)[0]
        return position + self.payload_bytes + CHECKSUM_BYTES


class Columns(NamedTuple):
    """A block that was checked, not cut into records: views of it. Numbers take 4 bytes each, little-endian."""

    header: Header
    lengths: memoryview
    kinds: memoryview | None
    offsets: memoryview | None
    times: memoryview | None
    topics: memoryview | None
    names: bytes
    """The distinct topics, with NUL between them."""
    payload: memoryview


class Block(NamedTuple):
    """A decoded block. `records[i]` has sequence `first + offsets[i]`."""

    header: Header
    records: list[Record]
    offsets: Sequence[int]
    times_ms: Sequence[int]
    names: list[str]
    """The distinct topics, where it has any."""
    topics: Sequence[int]
    """Which of the names each record has; empty where there are none."""

    @property
    def first(self) -> int:
        return self.header.key.first

    @property
    def end(self) -> int:
        return self.header.end


def column(numbers: Iterable[int], code: str = "I") -> bytes:
    """Return numbers as they stand in a column, little-endian."""
    made = array(code, numbers)
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


def values(data: bytes | memoryview) -> array[int]:
    """Return the numbers in a column."""
    made = array("I")
    made.frombytes(data)
    if sys.byteorder == "big":
        made.byteswap()
    return made


def read_names(data: bytes | memoryview, *, where: str) -> list[str]:
    """Return the distinct topics in a block after checking them and its header; none where it has no such column.

    Cost: 2 µs and 0.03 µs a topic; the messages are not looked at.

    Raises:
        CorruptionError: header or names do not match their checksums.
    """
    header = read_header(data, where=where)
    if not header.columns & TOPICS:
        return []
    return _names(data, header.columns_end, where)


def _names(data: bytes | memoryview, position: int, where: str) -> list[str]:
    start = position + NAMES.size
    if len(data) < start:
        raise CorruptionError(f"{where}: its topics are cut off")
    length, expected = NAMES.unpack_from(data, position)
    text = bytes(data[start : start + length])
    if crc32(text) != expected:
        raise CorruptionError(f"{where}: its topics do not match their checksum")
    return text.decode().split("\0")


def read_header(data: bytes | memoryview, *, where: str) -> Header:
    """Return the header of a block after checking its own CRC; the rest of the block is not looked at."""
    if len(data) < HEADER_BYTES:
        raise CorruptionError(f"{where}: {len(data)} bytes are too few for a block")
    bare = bytes(data[: HEADER.size])
    (expected,) = _CRC.unpack_from(data, HEADER.size)
    if crc32(bare) != expected:
        raise CorruptionError(f"{where}: the block's header does not match its checksum")
    magic, columns, table, lane, owner, count, first, span, size, previous, time_ms = HEADER.unpack(bare)
    if magic != MAGIC or columns & ~sum(_COLUMNS) or not 0 < count <= span:
        raise CorruptionError(f"{where}: not a block this version can read")
    return Header(BlockKey(table, owner, lane, first), columns, count, span, size, previous, time_ms)


def columns(data: bytes | memoryview, header: Header, *, where: str) -> Columns:
    """Check every byte of a whole block and return it as it is: in columns.

    Args:
        header: what `read_header` returned.

    Raises:
        CorruptionError: the checksum or the length does not match.
    Cost: 5 µs, and 0.1 µs a KiB.
    """
    if len(data) != header.total_bytes(data):
        raise CorruptionError(f"{where}: {len(data)} bytes, expected {header.total_bytes(data)}")
    view = memoryview(data)
    start = len(data) - header.payload_bytes - CHECKSUM_BYTES
    payload = view[start:-CHECKSUM_BYTES]
    if xxh3_64_digest(payload, crc32(view[:start])) != view[-CHECKSUM_BYTES:]:
        raise CorruptionError(f"{where}: the block does not match its checksum")
    width = 4 * header.count
    position = HEADER_BYTES
    lengths = view[position : position + width]
    if not header.columns:
        return Columns(header, lengths, None, None, None, None, b"", payload)
    optional: dict[int, memoryview] = {}
    for column in _COLUMNS:
        if header.columns & column:
            position += width
            optional[column] = view[position : position + width]
    return Columns(
        header,
        lengths,
        optional.get(KINDS),
        optional.get(OFFSETS),
        optional.get(TIMES),
        optional.get(TOPICS),
        bytes(view[position + width + NAMES.size : start]) if TOPICS in optional else b"",
        payload,
    )


def decode(data: bytes | memoryview, key: BlockKey | None, *, where: str, header: Header | None = None) -> Block:
    """Decode a whole block and check every byte of it.

    Args:
        data: exactly one block.
        key: where it was found; None skips that check.
        where: named in errors.
        header: what `read_header` returned, where that was asked before.

    Raises:
        CorruptionError: a checksum, the length or the key does not match.
    """
    if header is None:
        header = read_header(data, where=where)
    if key is not None and header.key != key:
        raise CorruptionError(f"{where}: what lies there is {header.key}, expected {key}")
    found = columns(data, header, where=where)
    number = header.count
    payload: bytes | memoryview = found.payload
    lengths = values(found.lengths)
    if sum(lengths) != header.payload_bytes:
        raise CorruptionError(f"{where}: the lengths of the messages do not add up")
    ends = list(accumulate(lengths))
    cuts = map(slice, chain((0,), ends), ends)
    records: list[Record]
    if header.payload_bytes < LARGE * number:
        payload = bytes(payload)  # cheaper than a view of each message
        records = list(map(payload.__getitem__, cuts))
    else:
        records = list(map(bytes, map(payload.__getitem__, cuts)))
    if found.kinds is not None:
        kinds = values(found.kinds)
        if max(kinds) >= len(_UNPACK):
            raise CorruptionError(f"{where}: not a block this version can read")
        for index in compress(range(number), kinds):
            records[index] = _UNPACK[kinds[index]](records[index])
    names: list[str] = []
    topics: Sequence[int] = ()
    if found.topics is not None:
        names, topics = found.names.decode().split("\0"), values(found.topics)
        if max(topics) >= len(names):
            raise CorruptionError(f"{where}: not a block this version can read")
    return Block(
        header,
        records,
        range(number) if found.offsets is None else values(found.offsets),
        [header.time_ms] * number if found.times is None else [header.time_ms + delta for delta in values(found.times)],
        names,
        topics,
    )


def outline(data: bytes, key: BlockKey) -> tuple[Header, Sequence[int], Sequence[int]]:
    """Return a block's header, and lengths and offsets of its messages; of all that, only the header is checked.

    Raises:
        CorruptionError: the header, its key or the length does not match.
    """
    header = read_header(data, where="a block")
    if header.key != key or len(data) != header.total_bytes(data):
        raise CorruptionError("a block: not the block that belongs here")
    width = 4 * header.count
    lengths = values(data[HEADER_BYTES : HEADER_BYTES + width])
    if not header.columns & OFFSETS:
        return header, lengths, range(header.count)
    position = HEADER_BYTES + width * (1 + (header.columns & (OFFSETS - 1)).bit_count())
    return header, lengths, values(data[position : position + width])


def times(data: bytes, header: Header) -> Sequence[int]:
    """Return when each message of a block was written, in ms since the epoch; of all that, nothing is checked."""
    if not header.columns & TIMES:
        return [header.time_ms] * header.count
    position = HEADER_BYTES + 4 * header.count * (1 + (header.columns & (TIMES - 1)).bit_count())
    return [header.time_ms + delta for delta in values(data[position : position + 4 * header.count])]


def last_time(data: bytes | memoryview, header: Header) -> int:
    """Return when the last message of a block was written, in ms since the epoch, unchecked."""
    if not header.columns & TIMES:
        return header.time_ms
    columns = 2 + (header.columns & (TIMES - 1)).bit_count()
    return header.time_ms + int(_CRC.unpack_from(data, HEADER_BYTES + 4 * header.count * columns - 4)[0])


def references(data: bytes, key: BlockKey, *, where: str) -> list[Reference]:
    """Return the references in a block. Cost: one that holds none is not decoded.

    Raises:
        CorruptionError: as `decode`; for one that holds none, where the header does not match.
    """
    header = read_header(data, where=where)
    if len(data) != header.total_bytes(data):
        raise CorruptionError(f"{where}: {len(data)} bytes, expected {header.total_bytes(data)}")
    width = 4 * header.count
    if not header.columns & KINDS or KIND_OF[Reference] not in values(data[HEADER_BYTES + width :][:width]):
        return []
    return [record for record in decode(data, key, where=where).records if type(record) is Reference]
