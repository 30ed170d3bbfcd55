"""What the blocks of several lanes have in common that are given the same messages: all but whose they are, and where.

Columns and messages are encoded once; a block of them takes 1 µs, most of it for checksums. The bytes are those that
`encoding.py` makes of the same messages.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from xxhash import xxh3_64_digest

from qflow.storage.blocks import (
    BEFORE_OWNER,
    BEHIND_OWNER,
    CHECKSUM_BYTES,
    HEADER,
    HEADER_BYTES,
    KINDS,
    MAGIC,
    NUMBER,
    SINGLE_BYTES,
    TIMES,
    BlockKey,
    column,
)
from qflow.storage.encoding import MAX_MESSAGES, Messages, cut, kinds_of

_pack_number = NUMBER.pack
_join = b"".join


class Content:
    """See the module. It does not change, but for `close`."""

    __slots__ = (
        "_columns",
        "_kinds",
        "_lengths",
        "_payload",
        "_shown",
        "_size",
        "_time_ms",
        "_times",
        "block_bytes",
        "count",
    )

    def __init__(self, count: int, time_ms: int, lengths: bytes, kinds: bytes, times: bytes, payload: bytes) -> None:
        """Columns as they stand in a block; kinds and times are empty where all are 0."""
        self.count = count
        self._time_ms = time_ms
        self._lengths = lengths
        self._kinds = kinds
        self._times = times
        self._payload: bytes | None = payload
        self._size = len(payload)
        self._columns = (KINDS if kinds else 0) | (TIMES if times else 0)
        self._shown = lengths + kinds + times
        self.block_bytes = HEADER_BYTES + len(self._shown) + self._size + CHECKSUM_BYTES
        """How long a block of it is."""

    @classmethod
    def of(cls, messages: Messages, time_ms: int) -> Content:
        """Return the content of a block of messages that have no topics, and fit into one."""
        kinds = b"" if messages.plain else kinds_of(messages.records)
        return cls(len(messages.records), time_ms, column(messages.sizes), kinds, b"", _join(messages.records))

    @classmethod
    def of_block(cls, block: bytes, key: BlockKey) -> tuple[Content, int] | None:
        """Return the content of a block without gaps and topics, and what it says of the one before; None of others."""
        if len(block) < SINGLE_BYTES:
            return None
        magic, columns, table, lane, owner, count, first, span, size, previous, time_ms = HEADER.unpack_from(block)
        if (magic, table, owner, lane, first) != (MAGIC, *key) or columns & ~(TIMES | KINDS) or span != count:
            return None
        parts = cut(block, columns, count, size)
        if parts is None:
            return None
        lengths, kinds, times, _, _, payload = parts
        return cls(count, time_ms, lengths, kinds, times, payload), previous

    @property
    def is_open(self) -> bool:
        """What it holds is known."""
        return self._payload is not None

    @property
    def key(self) -> tuple[object, ...]:
        """What is the same of contents that are."""
        return self.count, self._time_ms, self._columns, self._shown, self._payload

    def close(self) -> None:
        """Forget what it holds."""
        self._payload = None
        self._lengths = self._kinds = self._times = self._shown = b""

    def grown(self, messages: Messages, time_ms: int) -> Content | None:
        """Return this with messages more at its end; None if they do not fit into one block."""
        count, late_ms = len(messages.records), time_ms - self._time_ms
        total = self.count + count
        if self._payload is None or total > MAX_MESSAGES or not 0 <= late_ms < 2**32:
            return None
        kinds = self._kinds
        if kinds or not messages.plain:
            kinds = (kinds or bytes(4 * self.count)) + kinds_of(messages.records)
        times = (self._times or bytes(4 * self.count)) + _pack_number(late_ms) * count
        lengths = self._lengths + column(messages.sizes)
        return Content(total, self._time_ms, lengths, kinds, times, _join((self._payload, *messages.records)))

    def blocks(self, table: int, lane: int, first: int, previous: int) -> Callable[[int], bytes]:
        """Return what makes a block of it, given its owner."""
        before = BEFORE_OWNER.pack(MAGIC, self._columns, table, lane)
        behind = BEHIND_OWNER.pack(self.count, first, self.count, self._size, previous, self._time_ms)
        shown, payload = self._shown, self._payload
        assert payload is not None

        def block(owner: int) -> bytes:
            bare = before + _pack_number(owner) + behind
            head = bare + _pack_number(crc32(bare)) + shown
            return _join((head, payload, xxh3_64_digest(payload, crc32(head))))

        return block
