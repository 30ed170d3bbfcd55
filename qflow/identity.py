"""What tells one thing from another of the same name: random numbers, and the uuids of logs, as text.

The module `uuid` makes the same, but imports what opening a spool does not need, and takes a millisecond for that.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from qflow.errors import InvalidArgument


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


class OfSpool:
    """A queue or a stream, for threads or tasks, beside the owner or at the door: of one spool, with a name there."""

    __slots__ = ()
    _kind: ClassVar[str]
    """Which of both, in words."""

    def _spool_uuid(self) -> str:
        raise NotImplementedError


def name_at(uuid: str, kind: str, one: Any) -> Any:
    """Return the name of a queue, or of a stream, of the spool with this uuid; or what was given, if it is none.

    Raises:
        InvalidArgument: it is of another spool.
    """
    if not isinstance(one, OfSpool) or one._kind != kind:
        return one
    if one._spool_uuid() != uuid:
        raise of_another_broker(kind, one)
    return one.name  # type: ignore[attr-defined]


def of_another_broker(kind: str, one: object) -> InvalidArgument:
    """Return the error for a queue, or a stream, of another broker."""
    return InvalidArgument(f"{one!r} is a {kind} of another broker: use the one it came from")


def uuid_at(one: Any) -> str:
    """Return the uuid of the spool that a queue or a stream is of."""
    uuid: str = one._spool_uuid()
    return uuid
