"""What a message is in memory: a *record*.

A record is either plain `bytes` (a body and nothing else: the common case, no wrapper to pay for) or a `Message`
(a body with headers, a topic, times, or one that is not logged). `len(record)` is the message's size in bytes either
way: the body and what is encoded before it. That is what limits count; memory is charged `OVERHEAD_BYTES` more.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, repeat
from operator import itemgetter
from sys import getsizeof
from typing import Any, TypeAlias

from qflow.errors import InvalidArgument

OVERHEAD_BYTES = 80
"""Charged for each resident message on top of its bytes.

A `bytes` object costs 33 bytes over its content, rounded up by the allocator to 16, and its place in a run 8: 56 at
most, and up to 24 more where blocks of the allocator are shared with shorter-lived objects.
"""

SINGLE_BYTES = 144
"""Charged beside that for each message that was delivered on its own.

Its `Delivery` takes 80 bytes, its sequence 32, its place among those that are held 30 to 60. (Of a batch, those are
made by who asks for them.)
"""

BATCH_BYTES = 1_000
"""Charged for each batch of deliveries beside its messages.

The batch, its lists, and its place among those that are held take some 500 bytes, or 900 once messages of it were
settled by themselves; at the door of a spool, what a connection knows of it 200 more.
"""

MAX_KEY_BYTES = 65_535

HeaderValue: TypeAlias = str | int | float | bool | None
Headers: TypeAlias = Mapping[str, HeaderValue]


_UNLOGGED, _EXPIRES, _DUE, _TOPIC, _KEY = 1, 2, 4, 8, 16
_META = struct.Struct("<BI")
_MOMENT = struct.Struct("<Q")
_TEXT_LENGTH = struct.Struct("<H")
_new = bytes.__new__
_first_byte = itemgetter(0)
_everything = itemgetter(slice(None))
_until_due = itemgetter(slice(_META.size + _MOMENT.size))
_until_due_after_expiry = itemgetter(slice(_META.size + 2 * _MOMENT.size))


def kept_ms(time_s: float) -> int:
    """Return a moment as it is kept, in milliseconds since the epoch: 0 if it is before that, for it has no sign."""
    return max(0, int(time_s * 1000))


class Message(bytes):
    """A record with more than a body, as the bytes it is everywhere: in memory, in a spill file and in the log.

        flags (1 byte) · length of all before the body (4) · [expiry (8)] · [due time (8)] · [topic, its length before
        it (2)] · [key, likewise] · headers · body

    One object of bytes, so that memory is charged what it takes. Its `body` is a copy, made at each access.
    """

    __slots__ = ()

    def __new__(
        cls,
        body: bytes,
        header_bytes: bytes = b"",
        logged: bool = True,
        *,
        expires_ms: int = 0,
        due_ms: int = 0,
        topic: str = "",
        key: bytes = b"",
    ) -> Message:
        """Pack a message; times are milliseconds since the epoch, 0 = none."""
        flags = 0 if logged else _UNLOGGED
        parts = [b"", header_bytes, body]
        if key:
            flags |= _KEY
            parts[1:1] = (_TEXT_LENGTH.pack(len(key)), key)
        if topic:
            flags |= _TOPIC
            name = topic.encode()
            parts[1:1] = (_TEXT_LENGTH.pack(len(name)), name)
        if due_ms:
            flags |= _DUE
            parts.insert(1, _MOMENT.pack(due_ms))
        if expires_ms:
            flags |= _EXPIRES
            parts.insert(1, _MOMENT.pack(expires_ms))
        parts[0] = _META.pack(flags, _META.size + sum(map(len, parts)) - len(body))
        return _new(cls, b"".join(parts))

    @classmethod
    def unpack(cls, data: bytes) -> Message:
        """Return the message that these bytes are."""
        return _new(cls, data)

    @property
    def body_offset(self) -> int:
        """Where the body begins."""
        start: int = _META.unpack_from(self)[1]
        return start

    @property
    def body(self) -> bytes:
        return bytes(memoryview(self)[self.body_offset :])

    @property
    def logged(self) -> bool:
        return not self[0] & _UNLOGGED

    @property
    def expires_ms(self) -> int:
        """When it expires, milliseconds since the epoch; 0 = never."""
        return int(_MOMENT.unpack_from(self, _META.size)[0]) if self[0] & _EXPIRES else 0

    @property
    def due_ms(self) -> int:
        """Not to be delivered before, milliseconds since the epoch; 0 = at once."""
        flags = self[0]
        return int(_MOMENT.unpack_from(self, _META.size + (4 * flags & 8))[0]) if flags & _DUE else 0

    @property
    def topic(self) -> str:
        """What it was published under; empty for a put."""
        if not self[0] & _TOPIC:
            return ""
        start = self._topic_offset()
        return str(memoryview(self)[start + 2 : self._text_end(start)], "utf-8")

    @property
    def key(self) -> bytes:
        """What it was published with, to choose its partition; empty for none."""
        if not self[0] & _KEY:
            return b""
        start = self._key_offset()
        return bytes(memoryview(self)[start + 2 : self._text_end(start)])

    @property
    def header_bytes(self) -> bytes:
        """The headers, as `encode_headers` made them."""
        start = self._key_offset()
        if self[0] & _KEY:
            start = self._text_end(start)
        return bytes(memoryview(self)[start : self.body_offset])

    def head_and_body(self) -> tuple[bytes, bytes]:
        """Return `header_bytes` and `body`. Cost: a copy of both, which is less than to ask for one after the other."""
        if self[0] & ~_UNLOGGED:
            return self.header_bytes, self.body
        start = self.body_offset
        return self[_META.size : start], self[start:]

    def _text_end(self, start: int) -> int:
        """Return where a text ends whose length stands at `start`."""
        return start + 2 + int(_TEXT_LENGTH.unpack_from(self, start)[0])

    def _key_offset(self) -> int:
        start = self._topic_offset()
        return self._text_end(start) if self[0] & _TOPIC else start

    def _topic_offset(self) -> int:
        flags = self[0]
        return _META.size + (4 * flags & 8) + (2 * flags & 8)

    def __repr__(self) -> str:
        start = self.body_offset
        return f"Message({len(self) - start} B body, {start} B before it, logged={self.logged})"


Record: TypeAlias = bytes | Message


def body_bytes(body: object) -> bytes:
    """Return the body as immutable bytes; bytearray and memoryview are copied. Cost: one type check for bytes."""
    if type(body) is bytes:
        return body
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    raise InvalidArgument(
        f"a message body must be bytes, bytearray or memoryview, not {type(body).__name__}: encode it first, "
        "for example with text.encode() or json.dumps(value).encode()"
    )


def bodies_bytes(bodies: Iterable[Any]) -> list[Any]:
    """Return bodies as `body_bytes` does. Cost: 0.01 µs each where all are bytes, else 0.2."""
    if isinstance(bodies, bytes | bytearray | memoryview | str):  # which has items, too, and may have none
        raise InvalidArgument(f"bodies must be several, not one {type(bodies).__name__}: put it alone, or in a list")
    try:
        found: list[Any] = list(bodies)
    except TypeError as error:
        raise InvalidArgument(f"bodies must be iterable, not {type(bodies).__name__}") from error
    return found if is_plain(found) else list(map(body_bytes, found))


def body_of(record: Record) -> bytes:
    """Return a record's body."""
    return record if type(record) is bytes else record.body  # type: ignore[union-attr]


class EncodedHeaders(dict[str, HeaderValue]):
    """Headers that many messages have: encoded once. They do not change."""

    __slots__ = ("encoded",)

    def __init__(self, headers: Headers) -> None:
        super().__init__(headers)
        self.encoded = encode_headers(headers)


_as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def encode_headers(headers: Headers | None) -> bytes:
    """Encode headers as JSON (UTF-8); none or an empty mapping is no bytes at all. Cost: 4 µs."""
    if type(headers) is EncodedHeaders:
        return headers.encoded
    if not headers:
        return b""
    if not isinstance(headers, Mapping):
        raise InvalidArgument(f"headers must be a mapping, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"a header name must be str, not {type(name).__name__} ({name!r})")
        if value is not None and not isinstance(value, str | int | float | bool):
            raise InvalidArgument(
                f"header {name!r} must be str, int, float, bool or None, not {type(value).__name__}: encode it as text"
            )
    try:
        return _as_json(headers if type(headers) is dict else dict(headers)).encode()
    except ValueError as error:  # NaN, infinity, or a lone surrogate
        raise InvalidArgument(f"headers cannot be encoded as JSON: {error}") from error


def decode_headers(header_bytes: bytes) -> dict[str, HeaderValue]:
    """Return the headers of `encode_headers`."""
    if not header_bytes:
        return {}
    headers: dict[str, Any] = json.loads(header_bytes)
    return headers


def is_logged(record: Record) -> bool:
    """Tell whether a record is one that the log holds."""
    return type(record) is bytes or not record[0] & _UNLOGGED


def pack_all(messages: Iterable[bytes]) -> list[bytes]:
    """Return the bytes that messages are, which the garbage collector does not follow. Cost: 0.05 µs each."""
    return list(map(_everything, messages))


def unpack_all(packed: Iterable[bytes]) -> list[Record]:
    """Return the messages that these bytes are. Cost: 0.2 µs each."""
    return list(map(_new, repeat(Message), packed))


def expiries(records: Sequence[Record]) -> list[int]:
    """Return when each of these expires, in milliseconds since the epoch; 0 = never.

    Cost: 0.2 µs each where all of them do, else twice that.
    """
    kinds = list(map(type, records))
    if kinds.count(Message) < len(kinds) or not all(flags & _EXPIRES for flags in set(map(_first_byte, records))):
        return list(map(expires_of, records))
    return [moment for (moment,) in map(_MOMENT.unpack_from, records, repeat(_META.size))]


def packed_expiries(packed: Sequence[bytes]) -> list[int]:
    """Return the same of messages as the bytes they are. Cost: 0.15 µs each."""
    return [_MOMENT.unpack_from(record, _META.size)[0] if record[0] & _EXPIRES else 0 for record in packed]


def latest_expiry(records: Sequence[Record]) -> int:
    """Return when the last of these expires, in milliseconds since the epoch; 0 if one of them never does."""
    moments = expiries(records)
    return max(moments) if all(moments) else 0


def due_of(record: Record) -> int:
    """Return before when a record is not delivered, in milliseconds since the epoch; 0 = at once."""
    return record.due_ms if isinstance(record, Message) else 0


def by_due(records: list[Record]) -> Iterator[tuple[int, int, int]]:
    """Yield (due time, start, stop) of each stretch of records that are due at one time. Cost: 0.1 µs a record."""
    flags = bytes(map(_first_byte, records))
    key: Callable[[bytes], Any] = due_of
    if flags.count(flags[:1]) == len(flags):  # the moment stands at the same place in all of them
        key = _until_due_after_expiry if flags[0] & _EXPIRES else _until_due
    start = 0
    for _, group in groupby(records, key):
        stop = start + sum(1 for _ in group)
        yield due_of(records[start]), start, stop
        start = stop


def expires_of(record: Record) -> int:
    """Return when a record expires, in milliseconds since the epoch; 0 = never."""
    return record.expires_ms if isinstance(record, Message) else 0


def is_plain(records: Sequence[Record]) -> bool:
    """Tell whether every record is plain bytes. Cost: 0.007 µs a record; a set of the types takes 0.02."""
    return list(map(type, records)).count(bytes) == len(records)


def charge(records: list[Record]) -> int:
    """Return what these records cost in memory, in bytes. Cost: 0.011 µs a plain record."""
    return sum(map(len, records)) + OVERHEAD_BYTES * len(records)


def text_bytes(topics: Sequence[str]) -> int:
    """Return what the characters of some topics take in memory; of parts together, what they take of the whole.

    Cost: 0.015 µs each where they are ASCII.
    """
    text = "".join(topics)
    return len(text) if text.isascii() else sum(map(getsizeof, topics)) - getsizeof("") * len(topics)


LANE_SHIFT = 56
"""A queue may have several lanes, each a line of its own; a sequence's top byte is the number of its lane."""
OFFSET_MASK = (1 << LANE_SHIFT) - 1
"""The other bytes: of a stream, the offset in a partition."""
DELAYED = 16
"""Lanes 0 to 9 are priorities; lane 16 + p holds messages of priority p until they are due."""
RETURNED = 32
"""By 32 + p, a schedule holds what was given back with a delay, of both lanes of priority p; no sequence is there."""


def sequence_of(partition: int, offset: int) -> int:
    """Return the sequence of an offset in a partition; too large an offset gives the largest sequence."""
    return (partition << LANE_SHIFT) + min(offset, OFFSET_MASK)


def offset_of(sequence: int) -> int:
    """Return the offset of a sequence in its partition."""
    return sequence & OFFSET_MASK


def lane_of(sequence: int) -> int:
    """Return the number of a sequence's lane."""
    return sequence >> LANE_SHIFT


def lowest_by_lane(sequences: Sequence[int]) -> dict[int, int]:
    """Return the lowest of these sequences in each lane. Cost: 0.05 µs each where all are of one lane."""
    lowest: dict[int, int] = {}
    while sequences:
        first = min(sequences)
        lowest[lane_of(first)] = first
        end = (lane_of(first) + 1) << LANE_SHIFT
        if max(sequences) < end:
            break
        sequences = [sequence for sequence in sequences if sequence >= end]
    return lowest


def topic_prefix(topic: str) -> bytes:
    """Return what stands before the body of a message that has a topic and nothing else."""
    return bytes(Message(b"", topic=topic))


def with_prefix(prefix: bytes, body: bytes) -> Message:
    """Return a message from what stands before its body, and the body. Cost: 0.15 µs."""
    return _new(Message, prefix + body)


def check_key(key: object) -> bytes | None:
    """Return a valid key: None, or up to 65,535 bytes; text is encoded. Raises InvalidArgument: it is none."""
    if key is None:
        return None
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"key {key!r:.60} cannot be encoded as UTF-8: {error.reason}") from error
    elif isinstance(key, bytearray | memoryview):
        key = bytes(key)
    if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
        raise InvalidArgument(
            f"a key must be 1 to {MAX_KEY_BYTES:,} bytes, or text that takes so many, got {key!r:.60}"
        )
    return key
