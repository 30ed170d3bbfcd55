"""What tells one thing from another of the same name: random numbers, and the uuids of logs, as text.

The module `uuid` makes the same, but imports what opening a spool does not need, and takes a millisecond for that.
"""

from __future__ import annotations

import os


def new_number() -> int:
    """Return a random number of 64 bits."""
    return int.from_bytes(os.urandom(8), "big")


def new_uuid() -> str:
    """Return a random uuid (version 4)."""
    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    return uuid_of(raw)


def uuid_of(raw: bytes | bytearray) -> str:
    """Return the uuid of these 16 bytes."""
    digits = raw.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def bytes_of(uuid: str) -> bytes:
    """Return the 16 bytes of a uuid."""
    return bytes.fromhex(uuid.replace("-", ""))
