"""The properties of a content header as they came: where each stands, and the same list with other headers."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pamqp import decode

from qflow.amqp.model.tables import encode_table

CONTENT_TYPE, CONTENT_ENCODING, HEADERS, DELIVERY_MODE, PRIORITY, CORRELATION_ID, REPLY_TO = (
    1 << bit for bit in range(15, 8, -1)
)
EXPIRATION, MESSAGE_ID, TIMESTAMP, TYPE, USER_ID, APP_ID, CLUSTER_ID = (1 << bit for bit in range(8, 1, -1))
"""The bits of the flags, in the order of the list."""
_TEXT, _TABLE, _OCTET, _MOMENT = range(4)
_LAYOUT = (
    (CONTENT_TYPE, _TEXT),
    (CONTENT_ENCODING, _TEXT),
    (HEADERS, _TABLE),
    (DELIVERY_MODE, _OCTET),
    (PRIORITY, _OCTET),
    (CORRELATION_ID, _TEXT),
    (REPLY_TO, _TEXT),
    (EXPIRATION, _TEXT),
    (MESSAGE_ID, _TEXT),
    (TIMESTAMP, _MOMENT),
    (TYPE, _TEXT),
    (USER_ID, _TEXT),
    (APP_ID, _TEXT),
    (CLUSTER_ID, _TEXT),
)
_flags = struct.Struct(">H")
_length = struct.Struct(">I")


def flags_of(raw: bytes) -> int:
    """Return the flags of a property list."""
    flags: int = _flags.unpack_from(raw)[0]
    return flags


def spans(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (bit, start, end) of each property that is there, in order."""
    flags = _flags.unpack_from(raw)[0]
    at = 2
    for bit, kind in _LAYOUT:
        if flags & bit:
            if kind == _TEXT:
                end = at + 1 + raw[at]
            elif kind == _TABLE:
                end = at + 4 + _length.unpack_from(raw, at)[0]
            else:
                end = at + (1 if kind == _OCTET else 8)
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
    packed = kept + (encode_table(dict(entries))[4:] if entries else b"")
    table = _length.pack(len(packed)) + packed if packed else b""
    flags = flags | HEADERS if table else flags & ~HEADERS
    return _flags.pack(flags) + before + table + behind


def entries_of(table: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, encoded entry) of a table; the entry is the name and the value."""
    at = 4
    while at < len(table):
        value_at = at + 1 + table[at]
        end = value_at + decode.embedded_value(table[value_at:])[0]
        yield table[at + 1 : value_at].decode(), table[at:end]
        at = end
