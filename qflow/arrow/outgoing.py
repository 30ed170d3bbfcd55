"""Converts Arrow record batches, rows to be published, to blocks, column by column.

The buffer of the values is the payload of the block; lengths and topics are its columns. Rows with a key or headers are
converted one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from qflow.arrow.schema import NULL_HEADER
from qflow.arrow.takers import Takers, too_large
from qflow.errors import InvalidArgument, MessageTooLarge, NotFound, QflowError
from qflow.message import HeaderValue, Message, Record, check_key, encode_headers
from qflow.named_tuples import NamedTuple
from qflow.storage import encoding
from qflow.storage.inbox.stage_files import StageWriter

_NUMBER = np.dtype("<u4")
Array = np.ndarray[Any, Any]


_OF_ROWS = (InvalidArgument, NotFound, MessageTooLarge)
_MOST_KEPT = 10_000
"""Topics that are not looked up anew."""
_SHOWN_BYTES = 60
"""Of the topic and the key of a row that is refused."""


class _Checked(NamedTuple):
    """Rows that can be written."""

    names: list[str]
    """Their topics, each once."""
    numbers: Array | None
    """By row, which of these it has; None if there is only one."""
    values: pa.Array
    records: list[Record] | None
    """None for rows without a key and headers."""
    sizes: Array


class Outgoing:
    """Checks rows and adds them to a stage."""

    def __init__(self, columns: dict[str, int], topic: str | None, takers: Takers) -> None:
        """`columns`: indexes of those of key, value, topic and headers that there are, by name."""
        self._columns = columns
        self._topic = topic
        self._takers = takers
        self._rooms: dict[str, int] = {}
        """By topic."""
        self._added = 0
        """Rows."""

    def add(self, batch: pa.RecordBatch, writer: StageWriter) -> None:
        """Add rows. Cost: 0.1 µs a row; 4 with keys or headers.

        Raises:
            InvalidArgument: a topic is null, or a topic, key or header is not valid.
            NotFound: no stream or queue takes a topic. MessageTooLarge: a row is.
        """
        try:
            found = self._check(batch)
        except _OF_ROWS as error:
            raise self._of_row(batch, error) from error
        if found.records is None:
            _add_plain(found, writer)
        else:
            _add_messages(found, found.records, writer)
        self._added += batch.num_rows

    def _check(self, batch: pa.RecordBatch) -> _Checked:
        values = self._column(batch, "value")
        assert values is not None
        names, numbers = self._topics(batch)
        rooms = np.fromiter(map(self._room, names), np.int64, len(names))
        keys, headers = self._column(batch, "key"), self._column(batch, "headers")
        columns = [column for column in (keys, headers) if column is not None]
        records: list[Record] | None = None
        if not values.null_count and all(column.null_count == len(column) for column in columns):
            sizes: Array = np.diff(_offsets(values)).astype(_NUMBER)
        else:
            records = _records(values, keys, headers)
            sizes = np.fromiter(map(len, records), np.int64, len(records))
        _check_sizes(sizes, names, numbers, rooms)
        return _Checked(names, numbers, values, records, sizes)

    def _of_row(self, batch: pa.RecordBatch, error: QflowError) -> QflowError:
        """Return the error of the first row that is refused, with what tells which one it is.

        Cost: that of checking all rows once more, in halves.
        """
        start, count = 0, batch.num_rows
        while count > 1:
            half = count // 2
            if self._refused(batch.slice(start, half)) is None:
                start, count = start + half, count - half
            else:
                count = half
        row = batch.slice(start, 1)
        error = self._refused(row) or error
        shown = [f"{name} {told}" for name in ("topic", "key") if (told := self._shown(row, name))]
        return type(error)(f"row {self._added + start} ({', '.join(['the first is 0', *shown])}): {error}")

    def _refused(self, batch: pa.RecordBatch) -> QflowError | None:
        try:
            self._check(batch)
        except _OF_ROWS as error:
            return error
        return None

    def _shown(self, row: pa.RecordBatch, name: str) -> str:
        """Return the topic or the key of a row, cut short; empty if it has none."""
        number = self._columns.get(name)
        value = None if number is None else row.column(number).cast(pa.binary())[0].as_py()
        if value is None:
            return ""
        short = value[:_SHOWN_BYTES]
        told = repr(short.decode(errors="backslashreplace")) if name == "topic" else repr(short)
        return told + "…" * (len(short) < len(value))

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array | None:
        number = self._columns.get(name)
        if number is None:
            return None
        column = batch.column(number)
        return column if name in ("topic", "headers") else column.cast(pa.binary())

    def _topics(self, batch: pa.RecordBatch) -> tuple[list[str], Array | None]:
        """Return (distinct topics, index of each row's topic); None for the indexes if there is only one."""
        column = self._column(batch, "topic")
        if column is None:
            assert self._topic is not None
            return [self._topic], None
        if column.null_count:
            raise InvalidArgument(
                "there is null in column 'topic': fill it, or give one topic for all, as option 'topic'"
            )
        encoded = column.dictionary_encode()
        try:
            names = encoded.dictionary.to_pylist()
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"in column 'topic' is a topic that is not UTF-8 ({error}), and topics are text: decode it from what "
                "it is, for example with decode(topic, 'ISO-8859-1')"
            ) from error
        return names, encoded.indices.to_numpy(zero_copy_only=False) if len(names) > 1 else None

    def _room(self, topic: str) -> int:
        room = self._rooms.get(topic)
        if room is None:
            if len(self._rooms) >= _MOST_KEPT:
                self._rooms.clear()
            room = self._rooms[topic] = self._takers.room(topic)
        return room


def _offsets(values: pa.Array) -> Array:
    offsets: Array = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, 4 * values.offset)
    return offsets


def _add_plain(found: _Checked, writer: StageWriter) -> None:
    offsets, data_buffer = _offsets(found.values), found.values.buffers()[2]
    data = memoryview(data_buffer if data_buffer is not None else b"").cast("B")
    for part in encoding.split(found.sizes.tolist()):
        start, stop = part.start, part.stop
        of_block, which = _names_of(found.names, found.numbers, part)
        payload = data[offsets[start] : offsets[stop]]
        column = found.sizes[part].tobytes()
        block = encoding.encode_columns(writer.key, column, payload, names=of_block, topics=which)
        writer.add(block, stop - start, len(payload))


def _records(values: pa.Array, keys: pa.Array | None, headers: pa.Array | None) -> list[Record]:
    nothing = [None] * len(values)
    return list(
        map(
            _record,
            values.to_pylist(),
            nothing if keys is None else keys.to_pylist(),
            nothing if headers is None else _lists(headers),
        )
    )


def _lists(headers: pa.Array) -> list[list[dict[str, Any]] | None]:
    try:
        found: list[list[dict[str, Any]] | None] = headers.to_pylist()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"in column 'headers' is a name that is not UTF-8 ({error}), and names are text: decode it from what it is"
        ) from error
    return found


def _add_messages(found: _Checked, records: list[Record], writer: StageWriter) -> None:
    names, numbers, sizes = found.names, found.numbers, found.sizes.tolist()
    topics = names * len(records) if numbers is None else list(map(names.__getitem__, numbers.tolist()))
    for part in encoding.split(sizes):
        block = encoding.encode(writer.key, records[part], topics=topics[part])
        writer.add(block, part.stop - part.start, sum(sizes[part]))


def _names_of(names: list[str], numbers: Array | None, part: slice) -> tuple[list[str], bytes]:
    """Return (distinct topics, index of each row's topic) of some rows."""
    if numbers is None:
        return names, bytes(4 * (part.stop - part.start))
    used, which = np.unique(numbers[part], return_inverse=True)
    return list(map(names.__getitem__, used.tolist())), which.astype(_NUMBER).tobytes()


def _check_sizes(sizes: Array, names: list[str], numbers: Array | None, rooms: Array) -> None:
    if int(sizes.max()) <= int(rooms.min()):
        return
    of_rows = np.broadcast_to(rooms, sizes.shape) if numbers is None else rooms[numbers]
    for row in np.flatnonzero(sizes > of_rows)[:1].tolist():
        name = names[0 if numbers is None else int(numbers[row])]
        raise too_large(name, int(sizes[row]), int(of_rows[row]))


def _record(body: bytes | None, key: bytes | None, headers: Sequence[dict[str, Any]] | None) -> Record:
    if key is None and not headers and body is not None:
        return body
    try:
        check_key(key)
    except InvalidArgument as error:
        raise InvalidArgument(f"column 'key': {error}") from error
    found = header_values(headers or ())
    if body is None:
        found |= {NULL_HEADER: True}
    return Message(body or b"", encode_headers(found), key=key or b"")


def header_values(headers: Sequence[dict[str, Any]]) -> dict[str, HeaderValue]:
    """Return Kafka's headers as headers of a message: text by name."""
    found: dict[str, HeaderValue] = {}
    for header in headers:
        name, value = (header["key"], header["value"]) if header is not None else (None, None)
        if name is None:
            raise InvalidArgument("in column 'headers' is a header without a name: give it one, or leave it out")
        if name in found:
            raise InvalidArgument(
                f"in column 'headers' are two headers {name!r}, and a message has one of each name: join their values"
            )
        try:
            found[name] = None if value is None else value.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"in column 'headers', header {name!r} is not UTF-8, and headers are text: encode it, for example "
                "with base64"
            ) from error
    return found
