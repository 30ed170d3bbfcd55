"""The properties of a content header as they came: where each stands, and the same list with other headers."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from qflow.amqp.model.tables import encode_table
from qflow.amqp.wire.tables import PROPERTIES, fields_of

HEADERS, DELIVERY_MODE, PRIORITY, EXPIRATION, USER_ID = (1 << bit for bit in (13, 12, 11, 8, 4))
"""Bits of the flags."""
_LAYOUT = tuple(zip((1 << bit for bit in range(15, 1, -1)), PROPERTIES, strict=True))
_flags = struct.Struct(">H")
_length = struct.Struct(">I")


def spans(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (bit, start, end) of each property that is there, in order."""
    flags = _flags.unpack_from(raw)[0]
    at = 2
    for bit, kind in _LAYOUT:
        if flags & bit:
            if kind == "s":
                end = at + 1 + raw[at]
            elif kind == "F":
                end = at + 4 + _length.unpack_from(raw, at)[0]
            else:
                end = at + (1 if kind == "b" else 8)
            yield bit, at, end
            at = end


def changed(raw: bytes, entries: Mapping[str, Any], *, dropped: Collection[str] = (), expires: bool = True) -> bytes:
    """Return a property list with other headers; what is not named stays, byte by byte.

    Args:
        entries: headers to set.
        dropped: names of headers to leave out.
        expires: keep the expiration.
    """
    flags = _flags.unpack_from(raw)[0]
    before, kept, behind = b"", b"", b""
    for bit, start, end in spans(raw):
        if bit == HEADERS:
            kept = b"".join(entry for name, entry in entries_of(raw[start:end]) if name not in {*entries, *dropped})
        elif bit == EXPIRATION and not expires:
            flags &= ~EXPIRATION
        elif bit > HEADERS:
            before += raw[start:end]
        else:
            behind += raw[start:end]
    packed = kept + (encode_table(entries, wide=True)[4:] if entries else b"")
    table = _length.pack(len(packed)) + packed if packed else b""
    flags = flags | HEADERS if table else flags & ~HEADERS
    return _flags.pack(flags) + before + table + behind


def entries_of(table: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, encoded entry) of a table; the entry is the name and the value."""
    for at, value_at, end in fields_of(table):
        yield table[at + 1 : value_at].decode(), table[at:end]
