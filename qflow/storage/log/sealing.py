"""Small records with a checksum of their own, for LMDB has none: the one place that adds and checks it.

A record is followed by its CRC-32, or by that of its key and itself: then it says nothing where it is found under
another key.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from qflow.errors import CorruptionError


def seal(value: bytes, key: bytes = b"") -> bytes:
    """Append a checksum to a small record. Cost: 0.3 µs."""
    return value + crc32(value, crc32(key)).to_bytes(4, "little")


def unseal(value: bytes | memoryview | None, where: str, key: bytes = b"") -> bytes:
    """Check and strip the checksum of `seal`. Raises CorruptionError: it does not match, or there is no such record."""
    if value is None:
        raise CorruptionError(f"{where} has vanished")
    bare = bytes(value[:-4])
    if len(value) < 4 or crc32(bare, crc32(key)) != int.from_bytes(value[-4:], "little"):
        raise CorruptionError(f"{where} does not match its checksum")
    return bare


def unseal_as(layout: Any, value: bytes | memoryview | None, where: str, key: bytes = b"") -> tuple[Any, ...]:
    """Return what a record of a `struct` has. Raises CorruptionError: as `unseal`, or it has another length."""
    bare = unseal(value, where, key)
    if len(bare) != layout.size:
        raise CorruptionError(f"{where} is {len(bare)} bytes long, not {layout.size}: another version wrote it")
    unpacked: tuple[Any, ...] = layout.unpack(bare)
    return unpacked
