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
from qflow.errors import InvalidArgument
from qflow.message import HeaderValue, Message, Record, check_key, encode_headers
from qflow.storage import encoding
from qflow.storage.inbox.stage_files import StageWriter

_NUMBER = np.dtype("<u4")
Array = np.ndarray[Any, Any]


class Outgoing:
    """Checks rows and adds them to a stage."""

    def __init__(self, columns: dict[str, int], topic: str | None, takers: Takers) -> None:
        """`columns`: indexes of those of key, value, topic and headers that there are, by name."""
        self._columns = columns
        self._topic = topic
        self._takers = takers
        self._rooms: dict[str, int] = {}

    def add(self, batch: pa.RecordBatch, writer: StageWriter) -> None:
        """Add rows. Cost: 0.1 µs a row; 4 with keys or headers.

        Raises:
            InvalidArgument: a topic is null, or a topic, key or header is not valid.
            NotFound: no stream or queue takes a topic. MessageTooLarge: a row is.
        """
        values = self._column(batch, "value")
        assert values is not None
        names, numbers = self._topics(batch)
        rooms = np.fromiter(map(self._room, names), np.int64, len(names))
        keys, headers = self._column(batch, "key"), self._column(batch, "headers")
        columns = [column for column in (keys, headers) if column is not None]
        if not values.null_count and all(column.null_count == len(column) for column in columns):
            self._add_plain(values, names, numbers, rooms, writer)
        else:
            self._add_messages(values, keys, headers, names, numbers, rooms, writer)

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
                "a row has null in column 'topic': fill it, or give one topic for all, as option 'topic'"
            )
        encoded = column.dictionary_encode()
        try:
            names = encoded.dictionary.to_pylist()
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"a row has a topic that is not UTF-8 ({error}), and topics are text: decode it from what it is, for "
                "example with decode(topic, 'ISO-8859-1')"
            ) from error
        return names, encoded.indices.to_numpy(zero_copy_only=False) if len(names) > 1 else None

    def _room(self, topic: str) -> int:
        room = self._rooms.get(topic)
        if room is None:
            room = self._rooms[topic] = self._takers.room(topic)
        return room

    def _add_plain(
        self, values: pa.Array, names: list[str], numbers: Array | None, rooms: Array, writer: StageWriter
    ) -> None:
        _, offsets_buffer, data_buffer = values.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int32, len(values) + 1, 4 * values.offset)
        data = memoryview(data_buffer if data_buffer is not None else b"").cast("B")
        lengths = np.diff(offsets).astype(_NUMBER)
        _check_sizes(lengths, names, numbers, rooms)
        for part in encoding.split(lengths.tolist()):
            start, stop = part.start, part.stop
            of_block, which = _names_of(names, numbers, part)
            payload = data[offsets[start] : offsets[stop]]
            column = lengths[part].tobytes()
            block = encoding.encode_columns(writer.key, column, payload, names=of_block, topics=which)
            writer.add(block, stop - start, len(payload))

    def _add_messages(
        self,
        values: pa.Array,
        keys: pa.Array | None,
        headers: pa.Array | None,
        names: list[str],
        numbers: Array | None,
        rooms: Array,
        writer: StageWriter,
    ) -> None:
        nothing = [None] * len(values)
        records = list(
            map(
                _record,
                values.to_pylist(),
                nothing if keys is None else keys.to_pylist(),
                nothing if headers is None else headers.to_pylist(),
            )
        )
        sizes = list(map(len, records))
        _check_sizes(np.array(sizes), names, numbers, rooms)
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
    check_key(key)
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
            raise InvalidArgument("a row has a header without a name: give it one, or leave it out")
        if name in found:
            raise InvalidArgument(
                f"a row has two headers {name!r}, and a message has one of each name: join their values"
            )
        try:
            found[name] = None if value is None else value.decode()
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"header {name!r} of a row is not UTF-8, and headers are text: encode it, for example with base64"
            ) from error
    return found
