"""Converts blocks of the log to Arrow record batches, column by column.

Lengths become Arrow's offsets, and the payloads, joined, its values: no Python code runs for a single message. Messages
with a key or headers are split by `take_apart`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from time import monotonic
from typing import Any

import numpy as np
import pyarrow as pa

from qflow.arrow.schema import LOG_APPEND_TIME, NULL_HEADER, headers_type
from qflow.errors import CorruptionError, InvalidArgument, QflowError
from qflow.message import Message, Record, decode_headers
from qflow.named_tuples import NamedTuple
from qflow.storage.streams.columns import ColumnPiece

HEADERS = headers_type()
_NUMBER = np.dtype("<u4")
_ROW_BYTES = 40
"""What a row takes in columns of numbers, and as offsets of those of texts and bytes."""
_EXPIRES, _DUE, _TOPIC, _KEY = 2, 4, 8, 16
"""The flags of `Message`; the fields they announce follow flags and length in this order."""
_META_BYTES, _MOMENT_BYTES, _LENGTH_BYTES = 5, 8, 2
Array = Any
Chunk = bytes | memoryview


def _part(column: memoryview, piece: ColumnPiece) -> memoryview:
    if piece.high - piece.low == piece.columns.header.count:
        return column
    return column[4 * piece.low : 4 * piece.high]


def _numbers(pieces: Sequence[ColumnPiece], name: str) -> Array:
    """Return a column of some pieces; zeros for a block without it."""
    columns = ((piece, getattr(piece.columns, name)) for piece in pieces)
    return np.frombuffer(
        b"".join(bytes(4 * piece.messages) if column is None else _part(column, piece) for piece, column in columns),
        _NUMBER,
    )


class _Bodies:
    """Keys, bodies and headers of some pieces: bodies as lengths and bytes, the others as Arrow arrays."""

    def __init__(self, pieces: Sequence[ColumnPiece]) -> None:
        self.keys: list[pa.Array] = []
        self.headers: list[pa.Array] = []
        self.lengths: list[Array] = []
        self.nulls: list[Array] = []
        """Which values are null; their bodies are empty."""
        self.chunks: list[Chunk] = []
        for plain, group in groupby(pieces, _is_plain):
            if plain:
                self._add_plain(list(group))
            else:
                for piece in group:
                    self._take_apart(piece)

    def _add_plain(self, pieces: list[ColumnPiece]) -> None:
        """Add blocks whose messages are bodies alone."""
        lengths = _numbers(pieces, "lengths")
        starts = [0, *accumulate(piece.messages for piece in pieces)]
        sizes = np.add.reduceat(lengths, starts[:-1], dtype=np.int64).tolist()
        for piece, size in zip(pieces, sizes, strict=True):
            payload = piece.columns.payload
            if piece.messages < piece.columns.header.count:
                start = int(np.frombuffer(piece.columns.lengths, _NUMBER, piece.low).sum(dtype=np.int64))
                payload = payload[start : start + size]
            if len(payload) != size:
                raise _torn(piece)
            self.chunks.append(payload)
        self.lengths.append(lengths)
        self.nulls.append(np.zeros(len(lengths), np.bool_))
        self.keys.append(pa.nulls(len(lengths), pa.binary()))
        self.headers.append(pa.nulls(len(lengths), HEADERS))

    def _take_apart(self, piece: ColumnPiece) -> None:
        """Add a block in which some messages are more than a body. Cost: 0.5 µs each; 5 µs for what is elsewhere, and
        for each set of headers that is not like the one of another message in the block."""
        ends = np.cumsum(np.frombuffer(piece.columns.lengths, _NUMBER), dtype=np.int64)
        if ends[-1] != len(piece.columns.payload):
            raise _torn(piece)
        start = int(ends[piece.low - 1]) if piece.low else 0
        payload = bytes(piece.columns.payload[start : int(ends[piece.high - 1])])
        ends = ends[piece.low : piece.high] - start
        packed = np.frombuffer(piece.columns.kinds, _NUMBER)[piece.low : piece.high] != 0
        if piece.fetched:
            payload, ends, packed = _with_fetched(piece, payload, ends, packed)
        parts = take_apart(payload, ends, packed)
        self.keys.append(parts.keys)
        distinct = parts.headers.dictionary_encode()
        found = [headers_of(one.as_py()) for one in distinct.dictionary]
        headers = [one.headers for one in found]
        column = pa.array(headers, HEADERS) if any(headers) else pa.nulls(len(headers), HEADERS)
        self.headers.append(column.take(distinct.indices))
        numbers = np.frombuffer(distinct.indices.buffers()[1], np.int32, len(ends))
        self.nulls.append(np.array([one.is_null for one in found], np.bool_)[numbers])
        _, offsets, bodies = parts.bodies.buffers()
        places = np.frombuffer(offsets, np.int32, len(ends) + 1)
        self.lengths.append(np.diff(places))
        if places[-1]:
            self.chunks.append(memoryview(bodies).cast("B")[: places[-1]])


def _with_fetched(piece: ColumnPiece, payload: bytes, ends: Array, packed: Array) -> tuple[bytes, Array, Array]:
    """Return (payload, ends, packed), with references replaced by the shared bodies."""
    records: list[Record] = [
        piece.fetched.get(piece.low + index, payload[start:end])
        for index, (start, end) in enumerate(pairwise([0, *ends.tolist()]))
    ]
    packed = packed.copy()
    for index, record in piece.fetched.items():
        packed[index - piece.low] = isinstance(record, Message)
    return b"".join(records), np.cumsum(np.fromiter(map(len, records), np.int64, len(records))), packed


def _is_plain(piece: ColumnPiece) -> bool:
    kinds = piece.columns.kinds
    return kinds is None or not any(_part(kinds, piece))


def _torn(piece: ColumnPiece) -> CorruptionError:
    return CorruptionError(f"block {piece.columns.header.key}: the lengths of the messages do not add up")


class Parts(NamedTuple):
    """The parts of messages, as Arrow arrays of bytes."""

    keys: pa.Array
    """Null where there is no key."""
    headers: pa.Array
    """As `encode_headers` returns them; empty where there are none."""
    bodies: pa.Array


def take_apart(payload: bytes, ends: Array, packed: Array) -> Parts:
    """Return the parts of the messages in a payload, all messages at once.

    In a block, each message is four values in a row, some of them empty: `Message`'s bytes before the key, the key, the
    headers, the body. So the payload is viewed as one Arrow array of such values, and a column is every fourth of them.

    Args:
        ends: offset where each message ends.
        packed: whether each message is a `Message`; else it is a body.

    Cost: 0.3 µs a message, and a copy of it.
    """
    data = np.frombuffer(payload + bytes(4), np.uint8)
    count = len(ends)
    starts: Array = np.zeros(count, np.int64)
    starts[1:] = ends[:-1]

    def number(at: Array, size: int, there: Array) -> Array:
        """Return the integers of `size` bytes at these offsets; 0 where `there` is false."""
        place = np.where(there, at, 0)
        return np.where(there, sum(data[place + index].astype(np.int64) << (8 * index) for index in range(size)), 0)

    flags = number(starts, 1, packed)
    has_topic, has_key = flags & _TOPIC != 0, flags & _KEY != 0

    at = starts + np.where(packed, _META_BYTES, 0)
    at += _MOMENT_BYTES * ((flags & _EXPIRES != 0).astype(np.int64) + (flags & _DUE != 0))
    at += number(at, _LENGTH_BYTES, has_topic) + _LENGTH_BYTES * has_topic
    key_bytes = number(at, _LENGTH_BYTES, has_key)
    at += _LENGTH_BYTES * has_key
    edges: Array = np.zeros(4 * count + 1, np.int32)
    edges[0:-1:4], edges[1::4], edges[2::4] = starts, at, at + key_bytes
    edges[3::4] = starts + number(starts + 1, 4, packed)
    edges[-1] = len(payload)
    values = pa.Array.from_buffers(pa.binary(), 4 * count, [None, pa.py_buffer(edges), pa.py_buffer(payload)])
    numbers = np.arange(0, 4 * count, 4)
    return Parts(
        values.take(numbers_of(numbers + 1, valid=has_key)),
        values.take(numbers_of(numbers + 2)),
        values.take(numbers_of(numbers + 3)),
    )


class HeadersOf(NamedTuple):
    """The headers of a message for Spark."""

    headers: list[tuple[str, bytes | None]] | None
    """As in Kafka: text as UTF-8, numbers and bools as JSON; None = no headers."""
    is_null: bool
    """The message's value is null."""


def headers_of(header_bytes: bytes) -> HeadersOf:
    """Return encoded headers for Spark. Cost: 5 µs, nothing if there are none."""
    if not header_bytes:
        return HeadersOf(None, False)
    headers = decode_headers(header_bytes)
    is_null = headers.get(NULL_HEADER) is True
    found = [
        (name, None if value is None else (value if isinstance(value, str) else json.dumps(value)).encode())
        for name, value in headers.items()
        if not (is_null and name == NULL_HEADER)
    ]
    return HeadersOf(found or None, is_null)


def _binary(bodies: _Bodies) -> pa.Array:
    count = sum(map(len, bodies.lengths))
    offsets: Array = np.zeros(count + 1, np.int32)
    np.cumsum(np.concatenate(bodies.lengths), out=offsets[1:])
    nulls = np.concatenate(bodies.nulls)
    valid = _bits(~nulls) if nulls.any() else None
    payload = _laid_out(bodies.chunks, int(offsets[-1]))
    return pa.Array.from_buffers(pa.binary(), count, [valid, pa.py_buffer(offsets), payload])


def _laid_out(chunks: Iterable[Chunk], size: int) -> pa.Buffer:
    """Return chunks, joined, in memory of Arrow's pool, which is reused; `size` is their sum."""
    buffer = pa.allocate_buffer(size)
    room = memoryview(buffer).cast("B")
    position = 0
    for chunk in chunks:
        room[position : (position := position + len(chunk))] = chunk
    return buffer


class BatchMaker:
    """Makes record batches of one partition. `schema` is that of `schema.arrow_schema`."""

    def __init__(self, schema: pa.Schema, partition: int, first_sequence: int) -> None:
        """`first_sequence` is that of offset 0."""
        self.schema = schema
        self._partition = partition
        self._base = first_sequence
        self._needs_bodies = bool({"key", "value", "headers"} & set(schema.names))

    def size(self, pieces: list[ColumnPiece]) -> int:
        """Return about how many bytes `make` takes for them."""
        size = sum(piece.weight for piece in pieces) if self._needs_bodies else 0
        for piece in pieces:
            names = piece.columns.names
            size += piece.messages * (_ROW_BYTES + len(names) // (names.count(0) + 1))
        return size

    def make(self, pieces: list[ColumnPiece]) -> pa.RecordBatch:
        """Return the messages of some pieces as a record batch. Cost: 10 µs a block, and a copy of it."""
        count = sum(piece.messages for piece in pieces)
        bodies = _Bodies(pieces if self._needs_bodies else ())
        columns = [self._column(name, pieces, bodies, count) for name in self.schema.names]
        batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        if any(piece.chosen is not None for piece in pieces):
            wanted = np.concatenate([_wanted(piece) for piece in pieces])
            batch = batch.filter(pa.Array.from_buffers(pa.bool_(), len(wanted), [None, _bits(wanted)]))
        return check_nulls(batch)

    def _column(self, name: str, pieces: list[ColumnPiece], bodies: _Bodies, count: int) -> pa.Array:
        match name:
            case "key":
                return _concatenated(bodies.keys)
            case "value":
                return _binary(bodies)
            case "topic":
                return _topics(pieces)
            case "partition":
                return numbers_of(np.full(count, self._partition, np.int32))
            case "offset":
                return _offsets(pieces, self._base, count)
            case "timestamp":
                return _times(pieces)
            case "timestampType":
                return numbers_of(np.full(count, LOG_APPEND_TIME, np.int32))
            case "headers":
                return _concatenated(bodies.headers)
        raise AssertionError(name)


def check_nulls(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch. Raises InvalidArgument: a column has a null that may have none; Spark would read garbage."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise InvalidArgument(
                f"column {field.name!r} is 'not null' in the schema that was given, and a message has none: leave that "
                f"out of the schema, and such messages with .where('{field.name} is not null')"
            )
    return batch


def numbers_of(values: Array, valid: Array | None = None) -> pa.Array:
    """Return numbers as a column, as they lie; null where they are not `valid`.

    (`pa.array` and `to_numpy` import pandas, where that is installed: 0.2 s and 30 MiB in each process that reads for
    Spark. Columns with headers take that.)
    """
    bits = None if valid is None else _bits(valid)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [bits, pa.py_buffer(values)])


def _bits(values: Array) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def _concatenated(parts: list[pa.Array]) -> pa.Array:
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _topics(pieces: list[ColumnPiece]) -> pa.Array:
    names: list[bytes] = []
    bases: list[int] = []
    base = following = 0
    for piece in pieces:
        if not names or piece.columns.names != names[-1]:
            names.append(piece.columns.names)
            base, following = following, following + 1 + names[-1].count(0)
        bases.append(base)
    numbers = _numbers(pieces, "topics") + np.repeat(bases, [piece.messages for piece in pieces])
    return _texts(b"\0".join(names)).take(numbers_of(numbers))


def _texts(joined_by_nul: bytes) -> pa.Array:
    text = np.frombuffer(joined_by_nul, np.uint8)
    ends: Array = np.append(np.flatnonzero(text == 0), len(text))
    offsets: Array = np.zeros(len(ends) + 1, np.int32)
    offsets[1:] = ends - np.arange(len(ends))  # without the NULs before each
    return pa.Array.from_buffers(
        pa.string(), len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(text[text != 0].tobytes())]
    )


def _offsets(pieces: list[ColumnPiece], base: int, count: int) -> pa.Array:
    if pieces[-1].end - pieces[0].first == count:
        return numbers_of(np.arange(pieces[0].first - base, pieces[-1].end - base))
    return numbers_of(np.concatenate([np.arange(piece.first - base, piece.end - base) for piece in pieces]))


def _times(pieces: list[ColumnPiece]) -> pa.Array:
    starts = np.array([piece.columns.header.time_ms for piece in pieces], np.int64)
    times = _numbers(pieces, "times") + np.repeat(starts, [piece.messages for piece in pieces])
    return pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), len(times), [None, pa.py_buffer(times * 1000)])


def _wanted(piece: ColumnPiece) -> Array:
    if piece.chosen is None:
        return np.ones(piece.messages, np.bool_)
    return np.array(piece.chosen, np.bool_)[_numbers([piece], "topics")]


def joined(
    batches: Iterable[pa.RecordBatch], least_bytes: int, least_rows: int, quiet_s: float
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of at least so many bytes or rows, but for the last one, and what is late.

    What is gathered for the next one has less than that. Nothing else is kept while `batches` makes one.

    Args:
        quiet_s: where none was yielded for so long, what was gathered is, if only an empty batch. Else none is empty.
    """
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    yielded_s = monotonic()
    try:
        for batch in batches:
            is_late = monotonic() - yielded_s > quiet_s
            if batch.num_rows or (is_late and not waiting):
                waiting.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
            del batch
            if rows >= least_rows or size >= least_bytes or is_late:
                yield _in_one(waiting)
                rows, size, yielded_s = 0, 0, monotonic()
    except QflowError:
        if waiting:
            yield _in_one(waiting)  # whoever goes on behind what is lost has what is before it
        raise
    if waiting:
        yield _in_one(waiting)


def _in_one(waiting: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of these batches, and let go of them."""
    batch = waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
    waiting.clear()
    return batch
