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

Rules: `decode` returns either exactly what `encode` was given or raises `CorruptionError`; it never guesses.
Cost: 0.05 µs a message to encode, 0.1 µs to decode. The checksum adds 0.2 µs for 16 KiB, where a CRC-32 took 2.5.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, compress, count, islice
from operator import lt
from typing import NamedTuple
from zlib import crc32

from xxhash import xxh3_64, xxh3_64_digest

from qflow.errors import CorruptionError
from qflow.message import Message, Record, is_plain

MAGIC = b"qfb4"
NO_PREVIOUS = 2**64 - 1
MAX_BYTES = 64 * 1024
"""No block is larger, unless it holds a single message."""
MAX_MESSAGES = 1024

_LARGE = 4096
"""From this mean size on it pays not to copy bodies once more."""

KINDS, OFFSETS, TIMES, TOPICS = 1, 2, 4, 8
"""Optional columns: 0 = plain bytes, 1 = a `Message`, 2 = a `Reference` · sequence minus first · milliseconds after the
block's time · which of the names."""
_COLUMNS = (KINDS, OFFSETS, TIMES, TOPICS)
_COLUMN_ROOM = 4 * (1 + len(_COLUMNS))

_HEADER = struct.Struct("<4sHBBIIQIIQQ")
_CRC = struct.Struct("<I")
_NAMES = struct.Struct("<II")
CHECKSUM_BYTES = 8

# A block of one message, as `Singles` sees it. Functions bound to names here save a lookup a message each.
_CONSTANT_BYTES = 16  # magic, columns, table, lane, owner, count: the same in all such blocks of a lane
_pack_header = struct.Struct("<16sQIIQQ").pack
_unpack_key = struct.Struct("<16sQ4xI20xI").unpack_from  # constant, sequence, payload size, and the one length
_pack_length = struct.Struct("<II").pack  # the header's CRC, and the one length
_pack_crc = _CRC.pack
_join = b"".join

HEADER_BYTES = _HEADER.size + _CRC.size
SINGLE_HEAD_BYTES = HEADER_BYTES + 4
SINGLE_BYTES = SINGLE_HEAD_BYTES + CHECKSUM_BYTES
"""What a block of one plain message takes on top of the message, and how much of it stands before the message."""
SINGLE_ROOM = SINGLE_BYTES + _COLUMN_ROOM
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
_KIND_OF: dict[type, int] = {bytes: 0, Message: 1, Reference: 2}
_UNPACK: tuple[Callable[[bytes], Record], ...] = (bytes, Message.unpack, Reference.unpack)


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
            if len(data) < position + _NAMES.size:
                return -1
            position += _NAMES.size + _NAMES.unpack_from(data, position)[0]
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


def _sizes_column(sizes: Sequence[int]) -> bytes:
    """Return the column of so many lengths; in half the time where it is one."""
    return _pack_crc(sizes[0]) if len(sizes) == 1 else _column(sizes)


def _column(values: Iterable[int]) -> bytes:
    column = array("I", values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _kinds(records: Iterable[Record]) -> bytes:
    """Return the KINDS column of some records. Cost: 0.05 µs a record."""
    return _column(map(_KIND_OF.__getitem__, map(type, records)))


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
    sizes: Sequence[int] | None = None,
    plain: bool | None = None,
    topics: Sequence[str] | None = None,
) -> bytes:
    """Encode records into one block.

    Args:
        key: where it will live; `key.first` is the sequence offsets count from.
        records: at least one.
        previous: first sequence of the block before this one in its lane.
        time_ms: wall clock, milliseconds since the epoch.
        offsets: sequence minus `key.first` of each record; None for 0, 1, 2, …
        times: milliseconds after `time_ms` of each record; None for 0.
        sizes, plain: `len` of each record, and `is_plain` of them, where the caller knows.
        topics: of each record, none of them empty; None for records that have none.

    Raises:
        CorruptionError: the offsets do not rise.
    """
    table, owner, lane, first = key
    if len(records) == 1 and type(records[0]) is bytes and offsets is None and times is None and topics is None:
        body = records[0]
        size = len(body)
        bare = _HEADER.pack(MAGIC, 0, table, lane, owner, 1, first, 1, size, previous, time_ms)
        head = bare + _pack_length(crc32(bare), size)
        return _join((head, body, xxh3_64_digest(body, crc32(head))))
    if sizes is None:
        sizes = list(map(len, records))
    columns = 0
    parts: list[bytes] = [_column(sizes)]
    if not (is_plain(records) if plain is None else plain):
        columns |= KINDS
        parts.append(_kinds(records))
    span = len(records)
    if offsets is not None:
        if not all(map(lt, offsets, islice(offsets, 1, None))):
            raise CorruptionError(
                f"block {first} of owner {owner}, lane {lane}, was not written, for two of its messages have the same "
                "place, or are out of order: close the broker and open the spool again"
            )
        columns |= OFFSETS
        span = offsets[-1] + 1
        parts.append(_column(offsets))
    if times is not None:
        columns |= TIMES
        parts.append(_column(times))
    if topics is not None:
        columns |= TOPICS
        numbers = dict(zip(dict.fromkeys(topics), count(), strict=False))
        parts += (_column(map(numbers.__getitem__, topics)), _names_section(numbers))
    size = sum(sizes)
    bare = _HEADER.pack(MAGIC, columns, table, lane, owner, len(records), first, span, size, previous, time_ms)
    head = _join((bare, _pack_crc(crc32(bare)), *parts))
    body = _join(records)
    return _join((head, body, xxh3_64_digest(body, crc32(head))))


def encode_columns(
    key: BlockKey, lengths: bytes, payload: bytes | memoryview, *, names: Sequence[str], topics: bytes
) -> bytes:
    """Encode messages that are bodies and nothing else into one block, given as its columns. Cost: 5 µs.

    Args:
        lengths, topics: 4 bytes a message, little-endian: its length, and which of `names` its topic is.
        payload: the bodies, one behind the other.
        names: distinct topics, each of them used.
    """
    table, owner, lane, first = key
    count = len(lengths) // 4
    bare = _HEADER.pack(MAGIC, TOPICS, table, lane, owner, count, first, count, len(payload), NO_PREVIOUS, 0)
    head = _join((bare, _pack_crc(crc32(bare)), lengths, topics, _names_section(names)))
    return _join((head, payload, xxh3_64_digest(payload, crc32(head))))


def _names_section(names: Iterable[str]) -> bytes:
    text = "\0".join(names).encode()
    return _NAMES.pack(len(text), crc32(text)) + text


def pieces(key: BlockKey, records: list[Record], offsets: Sequence[int] | None = None) -> list[bytes]:
    """Return what `encode` gives, in pieces to be written one after the other; large bodies are not copied."""
    count = len(records)
    size = sum(map(len, records))
    if offsets is not None or size < _LARGE * count or not is_plain(records):
        return [encode(key, records, offsets=offsets)]
    table, owner, lane, first = key
    bare = _HEADER.pack(MAGIC, 0, table, lane, owner, count, first, count, size, NO_PREVIOUS, 0)
    head = _join((bare, _pack_crc(crc32(bare)), _column(map(len, records))))
    checksum = xxh3_64(seed=crc32(head))
    for record in records:
        checksum.update(record)
    return [head, *records, checksum.digest()]


def grow(
    block: bytes,
    key: BlockKey,
    sequence: int,
    records: Sequence[Record],
    sizes: Sequence[int],
    *,
    plain: bool,
    settled: int,
    time_ms: int,
    topics: Sequence[str] | None = None,
) -> bytes | None:
    """Return a block with records from `sequence` on at its end, without the bytes of the first `settled` ones.

    The same as to decode, change and encode it, for the shape nearly all blocks have: no gaps. It is
    done in bytes, so its cost does not grow with the messages: 7 µs for a block of 8 KiB, most of it for checksums.

    Returns:
        None where the block has another shape, is damaged, or would hold too many messages: take the long way.
    """
    if len(block) < SINGLE_BYTES:
        return None
    magic, columns, table, lane, owner, before, first, span, size, previous, start_ms = _HEADER.unpack_from(block)
    total = before + len(records)
    late_ms = time_ms - start_ms
    if (
        (magic, table, owner, lane, first) != (MAGIC, *key)
        or columns & ~(TIMES | KINDS | TOPICS)
        or bool(columns & TOPICS) != (topics is not None)
        or span != before
        or sequence != first + before
        or not settled <= before < total <= MAX_MESSAGES
        or not 0 <= late_ms < 2**32
    ):
        return None
    view = memoryview(block)
    width = 4 * before
    position = HEADER_BYTES + width
    lengths: bytes | memoryview = view[HEADER_BYTES:position]
    kinds: bytes | memoryview = b""
    if columns & KINDS:
        kinds = view[position : position + width]
        position += width
    elif not plain:
        kinds = bytes(width)
    times: bytes | memoryview = bytes(width)
    if columns & TIMES:
        times = view[position : position + width]
        position += width
    numbers = section = b""
    if topics is not None:
        names_bytes = _NAMES.unpack_from(block, position + width)[0]
        text = bytes(view[position + width + _NAMES.size :][:names_bytes])
        numbers, section = _extend_names(view[position : position + width], text, topics)
        position += width + _NAMES.size + names_bytes
    payload = view[position:-CHECKSUM_BYTES]
    if len(payload) != size or xxh3_64_digest(payload, crc32(view[:position])) != view[-CHECKSUM_BYTES:]:
        return None
    if settled:
        dropped = sum(_values(lengths[: 4 * settled]))
        lengths = bytes(4 * settled) + lengths[4 * settled :]
        if kinds:
            kinds = bytes(4 * settled) + kinds[4 * settled :]
        size -= dropped
        payload = payload[dropped:]
    size += sum(sizes)
    columns = TIMES | (TOPICS if topics is not None else 0)
    new_kinds = b""
    if kinds:
        columns |= KINDS
        new_kinds = bytes(4 * len(records)) if plain else _kinds(records)
    bare = _HEADER.pack(MAGIC, columns, table, lane, owner, total, first, total, size, previous, start_ms)
    late = _pack_crc(late_ms) * len(records)
    parts = (lengths, _sizes_column(sizes), kinds, new_kinds, times, late, numbers, section)
    head = _join((bare, _pack_crc(crc32(bare)), *parts))
    body = _join((payload, *records))
    return _join((head, body, xxh3_64_digest(body, crc32(head))))


def _extend_names(column: bytes | memoryview, text: bytes, topics: Sequence[str]) -> tuple[bytes, bytes]:
    """Return a TOPICS column and the names behind it, as they are with some topics more."""
    places = dict(zip(text.split(b"\0"), count(), strict=False))
    added = [places.setdefault(topic.encode(), len(places)) for topic in topics]
    text = b"\0".join(places)
    return bytes(column) + _column(added), _NAMES.pack(len(text), crc32(text)) + text


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
    """Return the names at some place of a block."""
    start = position + _NAMES.size
    if len(data) < start:
        raise CorruptionError(f"{where}: its topics are cut off")
    length, expected = _NAMES.unpack_from(data, position)
    text = bytes(data[start : start + length])
    if crc32(text) != expected:
        raise CorruptionError(f"{where}: its topics do not match their checksum")
    return text.decode().split("\0")


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

    The same bytes as `encode`, without its choices.

    Cost: encode 0.6 µs, decode 0.5 µs for 1 KiB.
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
            head = bare + _pack_length(crc32(bare), size)
            return _join((head, record, xxh3_64_digest(record, crc32(head))))
        return encode(self._key._replace(first=first), [record])

    def frame(self, first: int, body: bytes) -> tuple[bytes, bytes]:
        """Return what `encode` puts before and after a body, so that a large one can be written without a copy."""
        bare = _pack_header(self._constant, first, 1, len(body), NO_PREVIOUS, 0)
        head = bare + _pack_length(crc32(bare), len(body))
        return head, xxh3_64_digest(body, crc32(head))

    def unframe(self, head: bytes, body: bytes, tail: bytes, first: int, where: str) -> Record:
        """Decode a block read in the pieces of `frame`; a large body is not copied unless something is wrong."""
        size = len(body)
        if (
            len(head) == SINGLE_HEAD_BYTES
            and _unpack_key(head) == (self._constant, first, size, size)
            and xxh3_64_digest(body, crc32(head)) == tail
        ):
            return body
        return self.decode(head + body + tail, first, where)

    def decode(self, data: bytes, first: int, where: str) -> Record:
        """Return the record of a block; raises CorruptionError as `decode` does."""
        size = len(data) - SINGLE_BYTES
        if size >= 0 and _unpack_key(data) == (self._constant, first, size, size):
            record = data[SINGLE_HEAD_BYTES:-CHECKSUM_BYTES]
            if xxh3_64_digest(record, crc32(data[:SINGLE_HEAD_BYTES])) == data[-CHECKSUM_BYTES:]:
                return record
        block = decode(data, self._key._replace(first=first), where=where)  # headers, a flag, or damage to name
        if block.header.count != 1:
            raise CorruptionError(f"{where}: holds {block.header.count} messages, expected 1")
        return block.records[0]


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
        bytes(view[position + width + _NAMES.size : start]) if TOPICS in optional else b"",
        payload,
    )


def topic_numbers(found: Columns) -> Sequence[int]:
    """Return the topic of each message of a block, as a number of its names; nothing if they have none."""
    return () if found.topics is None else _values(found.topics)


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
    lengths = _values(found.lengths)
    if sum(lengths) != header.payload_bytes:
        raise CorruptionError(f"{where}: the lengths of the messages do not add up")
    ends = list(accumulate(lengths))
    cuts = map(slice, chain((0,), ends), ends)
    records: list[Record]
    if header.payload_bytes < _LARGE * number:
        payload = bytes(payload)  # cheaper than a view of each message
        records = list(map(payload.__getitem__, cuts))
    else:
        records = list(map(bytes, map(payload.__getitem__, cuts)))
    if found.kinds is not None:
        kinds = _values(found.kinds)
        if max(kinds) >= len(_UNPACK):
            raise CorruptionError(f"{where}: not a block this version can read")
        for index in compress(range(number), kinds):
            records[index] = _UNPACK[kinds[index]](records[index])
    names: list[str] = []
    topics: Sequence[int] = ()
    if found.topics is not None:
        names, topics = found.names.decode().split("\0"), _values(found.topics)
        if max(topics) >= len(names):
            raise CorruptionError(f"{where}: not a block this version can read")
    return Block(
        header,
        records,
        range(number) if found.offsets is None else _values(found.offsets),
        [header.time_ms] * number
        if found.times is None
        else [header.time_ms + delta for delta in _values(found.times)],
        names,
        topics,
    )


def outline(data: bytes, key: BlockKey, *, where: str) -> tuple[Header, Sequence[int], Sequence[int]]:
    """Return a block's header, and lengths and offsets of its messages; of all that, only the header is checked.

    Raises:
        CorruptionError: the header, its key or the length does not match.
    """
    header = read_header(data, where=where)
    if header.key != key or len(data) != header.total_bytes(data):
        raise CorruptionError(f"{where}: not the block that belongs here")
    width = 4 * header.count
    lengths = _values(data[HEADER_BYTES : HEADER_BYTES + width])
    if not header.columns & OFFSETS:
        return header, lengths, range(header.count)
    position = HEADER_BYTES + width * (1 + (header.columns & (OFFSETS - 1)).bit_count())
    return header, lengths, _values(data[position : position + width])


def times(data: bytes, header: Header) -> Sequence[int]:
    """Return when each message of a block was written, in ms since the epoch; of all that, nothing is checked."""
    if not header.columns & TIMES:
        return [header.time_ms] * header.count
    position = HEADER_BYTES + 4 * header.count * (1 + (header.columns & (TIMES - 1)).bit_count())
    return [header.time_ms + delta for delta in _values(data[position : position + 4 * header.count])]


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
    if not header.columns & KINDS or _KIND_OF[Reference] not in _values(data[HEADER_BYTES + width :][:width]):
        return []
    return [record for record in decode(data, key, where=where).records if type(record) is Reference]


def reach(ends: Sequence[int], start: int, room: int) -> int:
    """Return where a block ends that begins with message `start` and takes at most `room` bytes; `start` if none fits.

    Args:
        ends: the sums of the sizes of the first 1, 2, 3, … messages.
    """
    used = ends[start - 1] if start else 0
    most = range(start, min(len(ends), start + MAX_MESSAGES))
    room -= SINGLE_BYTES
    return start + bisect_right(most, room, key=lambda last: ends[last] - used + _COLUMN_ROOM * (last - start + 1))


def split(sizes: Sequence[int], room: int = MAX_BYTES) -> list[slice]:
    """Cut messages of these sizes into blocks of at most `room` and `MAX_MESSAGES`; a larger message is alone.

    Cost: 0.02 µs a message.
    """
    count = len(sizes)
    if count <= 1:
        return [slice(0, 1)][:count]
    ends = list(accumulate(sizes))
    cuts: list[slice] = []
    start = 0
    while start < count:
        stop = max(start + 1, reach(ends, start, room))
        cuts.append(slice(start, stop))
        start = stop
    return cuts
