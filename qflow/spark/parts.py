"""Messages of a block that are more than a body, taken apart in columns: key, headers and body of all at once.

What lies in a block one behind the other is, for each message, `Message`'s bytes before the key, the key, the headers
and the body: four values, of which some are empty. So all of them are one Arrow array over the block's payload, and a
column is every fourth of its values. Nothing here is done message by message.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

Array = Any
_EXPIRES, _DUE, _TOPIC, _KEY = 2, 4, 8, 16
"""The flags of `Message`; what they announce stands behind flags and length in this order."""
_META_BYTES, _MOMENT_BYTES, _LENGTH_BYTES = 5, 8, 2


class Parts(NamedTuple):
    """The parts of some messages, as Arrow arrays of bytes."""

    keys: pa.Array
    """None for no key."""
    headers: pa.Array
    """As `encode_headers` made them; empty for none."""
    bodies: pa.Array


def take_apart(payload: bytes, ends: Array, packed: Array) -> Parts:
    """Return the parts of messages that lie one behind the other.

    Args:
        ends: where each of them ends.
        packed: which of them are a `Message`; the others are bodies.

    Cost: 0.3 µs a message, and copying it.
    """
    data = np.frombuffer(payload + bytes(4), np.uint8)
    count = len(ends)
    starts: Array = np.zeros(count, np.int64)
    starts[1:] = ends[:-1]

    def number(at: Array, size: int, there: Array) -> Array:
        """Return the numbers of so many bytes at some places, and 0 where there is none."""
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
        values.take(pa.array(numbers + 1, mask=~has_key)),
        values.take(pa.array(numbers + 2)),
        values.take(pa.array(numbers + 3)),
    )
