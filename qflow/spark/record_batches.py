"""Blocks of the log made into Arrow record batches, as columns into columns.

Lengths become offsets, payloads are laid one behind the other and are the values: what is done per message is done in C.
Messages with a key or headers have something before the body, which is cut away; their blocks cost more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from qflow.errors import CorruptionError
from qflow.message import Message, Record, decode_headers
from qflow.spark.schema import LOG_APPEND_TIME
from qflow.storage.column_pieces import ColumnPiece

_NUMBER = np.dtype("<u4")
Array = np.ndarray[Any, Any]
Chunk = bytes | memoryview


def _numbers(column: memoryview | None, piece: ColumnPiece) -> Array:
    """Return a column of a block, of the messages that were asked for; zeros where it has none."""
    if column is None:
        return np.zeros(piece.messages, _NUMBER)
    return np.frombuffer(column, _NUMBER, piece.messages, 4 * piece.low)


class _Bodies:
    """Keys, bodies and headers of a piece: the bodies as lengths and bytes, the others only where there are some."""

    def __init__(self, piece: ColumnPiece) -> None:
        columns = piece.columns
        lengths = np.frombuffer(columns.lengths, _NUMBER)
        ends = np.cumsum(lengths, dtype=np.int64)
        if ends[-1] != columns.header.payload_bytes:
            raise CorruptionError("the lengths of the messages in a block do not add up")
        start = int(ends[piece.low - 1]) if piece.low else 0
        self.lengths: Array = lengths[piece.low : piece.high]
        self.chunks: list[Chunk] = [columns.payload[start : int(ends[piece.high - 1])]]
        self.keys: list[bytes | None] | None = None
        self.headers: list[Any] | None = None
        if columns.kinds is not None and (kinds := _numbers(columns.kinds, piece)).any():
            records = [
                columns.payload[low:high]
                for low, high in zip([start, *ends[piece.low : piece.high - 1]], ends[piece.low : piece.high], strict=True)
            ]
            self._take_apart(piece, kinds.tolist(), records)

    def _take_apart(self, piece: ColumnPiece, kinds: list[int], records: list[memoryview]) -> None:
        """Look at messages one by one. Cost: 2 µs each."""
        keys: list[bytes | None] = []
        headers: list[Any] = []
        chunks: list[Chunk] = []
        for index, (kind, data) in enumerate(zip(kinds, records, strict=True), piece.low):
            record: Record | memoryview = piece.fetched[index] if kind == 2 else Message.unpack(data) if kind else data  # type: ignore[arg-type]
            if isinstance(record, Message):
                keys.append(record.key or None)
                headers.append(_header_list(record.header_bytes))
                chunks.append(memoryview(record)[record.body_offset :])
            else:
                keys.append(None)
                headers.append(None)
                chunks.append(record)
        self.keys, self.headers, self.chunks = keys, headers, chunks
        self.lengths = np.fromiter(map(len, chunks), _NUMBER, len(chunks))


def _header_list(header_bytes: bytes) -> list[tuple[str, bytes | None]] | None:
    """Return headers as Kafka has them: text as its bytes, numbers and flags as JSON writes them."""
    if not header_bytes:
        return None
    return [
        (name, None if value is None else (value if isinstance(value, str) else json.dumps(value)).encode())
        for name, value in decode_headers(header_bytes).items()
    ]


def _binary(lengths: Sequence[Array], chunks: Iterable[Chunk]) -> pa.Array:
    """Return an array of values, given as their lengths and all their bytes."""
    count = sum(map(len, lengths))
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(chunks))])


class BatchMaker:
    """Makes record batches of one partition. `schema` is that of `schema.arrow_schema`."""

    def __init__(self, schema: pa.Schema, partition: int, first_sequence: int) -> None:
        """`first_sequence` is that of offset 0."""
        self.schema = schema
        self._partition = partition
        self._base = first_sequence
        makers: dict[str, Callable[[list[ColumnPiece], list[_Bodies], int], pa.Array]] = {
            "key": lambda _, bodies, count: _sparse(bodies, "keys", pa.binary()),
            "value": lambda _, bodies, count: _binary(
                [one.lengths for one in bodies], chain.from_iterable(one.chunks for one in bodies)
            ),
            "topic": lambda pieces, _, count: _topics(pieces),
            "partition": lambda _, __, count: pa.array(np.full(count, partition, np.int32)),
            "offset": lambda pieces, _, count: _offsets(pieces, first_sequence),
            "timestamp": lambda pieces, _, count: _times(pieces),
            "timestampType": lambda _, __, count: pa.array(np.full(count, LOG_APPEND_TIME, np.int32)),
            "headers": lambda _, bodies, count: _sparse(bodies, "headers", schema.field("headers").type),
        }
        self._makers = [makers[name] for name in schema.names]
        self._needs_bodies = bool({"key", "value", "headers"} & set(schema.names))

    def make(self, pieces: list[ColumnPiece]) -> pa.RecordBatch:
        """Return the messages of some pieces that are wanted. Cost: 0.05 µs each, and what copying them takes."""
        count = sum(piece.messages for piece in pieces)
        bodies = [_Bodies(piece) for piece in pieces] if self._needs_bodies else []
        batch = pa.RecordBatch.from_arrays([make(pieces, bodies, count) for make in self._makers], schema=self.schema)
        if any(piece.chosen is not None for piece in pieces):
            return batch.filter(pa.array(np.concatenate([_wanted(piece) for piece in pieces])))
        return batch


def _sparse(bodies: list[_Bodies], what: str, type_: pa.DataType) -> pa.Array:
    """Return a column that most blocks have nothing in."""
    parts = [
        pa.nulls(len(one.lengths), type_) if (values := getattr(one, what)) is None else pa.array(values, type_)
        for one in bodies
    ]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _topics(pieces: list[ColumnPiece]) -> pa.Array:
    names: list[str] = []
    before: list[str] = []
    numbers = []
    for piece in pieces:
        columns = piece.columns
        if columns.names != before:
            before = columns.names
            names += before
        numbers.append(_numbers(columns.topics, piece) + (len(names) - len(before)))
    return pa.array(names, pa.string()).take(pa.array(np.concatenate(numbers)))


def _offsets(pieces: list[ColumnPiece], base: int) -> pa.Array:
    first = pieces[0].first - base
    if pieces[-1].end - pieces[0].first == sum(piece.messages for piece in pieces):
        return pa.array(np.arange(first, pieces[-1].end - base))
    return pa.array(np.concatenate([np.arange(piece.first - base, piece.end - base) for piece in pieces]))


def _times(pieces: list[ColumnPiece]) -> pa.Array:
    times = np.concatenate(
        [_numbers(piece.columns.times, piece) + np.int64(piece.columns.header.time_ms) for piece in pieces]
    )
    return pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), len(times), [None, pa.py_buffer(times * 1000)])


def _wanted(piece: ColumnPiece) -> Array:
    if piece.chosen is None:
        return np.ones(piece.messages, np.bool_)
    return np.array(piece.chosen, np.bool_)[_numbers(piece.columns.topics, piece)]


def joined(batches: Iterable[pa.RecordBatch], least_bytes: int, least_rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches that are not small, and none that is empty."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= least_rows or size >= least_bytes:
            yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
