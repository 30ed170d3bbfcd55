"""Facts: small records of who builds on the engine, in rooms of their own. The engine keeps them and asks nothing.

    key                          value
    FACTS  length  room  key     the value
    FACTS  length  room  start   length of the key (2 bytes, big-endian), the key, the value

`length` is that of the room's name, one byte. A key too long for the log stands there with its start, 0xFF, which no
UTF-8 has, and a digest of the whole. Each value ends with a CRC-32 of its key in the log and itself. An earlier version
that opens the log leaves these records as they are.

Every function works inside a transaction it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qflow.errors import CorruptionError, InvalidArgument
from qflow.storage.log import table
from qflow.storage.log.keys import FACTS
from qflow.storage.log.sealing import seal, unseal

MAX_ROOM_BYTES = 64
MAX_KEY_BYTES = 16 * 1024
MAX_VALUE_BYTES = 2**20
_PLAIN_BYTES = 400
"""LMDB admits keys of 511 bytes."""
_DIGEST_BYTES = 20
_LONG = 0xFF
_LENGTH_BYTES = 2
_SHOWN_BYTES = 80


def check(room: str, facts: Mapping[str, bytes | None]) -> None:
    """Refuse what is too large.

    Raises:
        InvalidArgument: a room's name, a key or a value.
    """
    if not 0 < len(room.encode()) <= MAX_ROOM_BYTES:
        raise InvalidArgument(f"the name of a room takes 1 to {MAX_ROOM_BYTES} bytes of UTF-8, not as {room!r}")
    for key, value in facts.items():
        if len(key.encode()) > MAX_KEY_BYTES or len(value or b"") > MAX_VALUE_BYTES:
            raise InvalidArgument(
                f"a fact has a key of at most {MAX_KEY_BYTES} bytes and a value of at most {MAX_VALUE_BYTES}; "
                f"{key[:80]!r} has {len(key.encode())} and {len(value or b'')}"
            )


def _prefix(room: str) -> bytes:
    name = room.encode()
    return bytes((FACTS, len(name))) + name


def fact_key(room: str, key: str) -> bytes:
    """Return the key in the log. Two long ones share theirs if their 160-bit digests are the same, so none do."""
    encoded = key.encode()
    if len(encoded) > _PLAIN_BYTES:
        from hashlib import blake2b  # here, for it loads OpenSSL, and most keys are short

        digest = blake2b(encoded, digest_size=_DIGEST_BYTES).digest()
        encoded = encoded[:_PLAIN_BYTES] + bytes((_LONG,)) + digest
    return _prefix(room) + encoded


def _is_long(bare: bytes) -> bool:
    return bare[_PLAIN_BYTES : _PLAIN_BYTES + 1] == bytes((_LONG,))


def write(txn: Any, room: str, facts: Mapping[str, bytes | None]) -> None:
    """Keep facts, and forget those that are None. Cost: 3 µs each."""
    prefix = len(_prefix(room))
    for key, value in facts.items():
        place = fact_key(room, key)
        if value is None:
            txn.delete(place)
            continue
        start = b""
        if _is_long(place[prefix:]):
            encoded = key.encode()
            start = len(encoded).to_bytes(_LENGTH_BYTES, "big") + encoded
        txn.put(place, seal(start + value, place))


def size_of(facts: Mapping[str, bytes | None]) -> int:
    """Return about how many bytes `write` adds at the most."""
    return sum(2 * len(key.encode()) + len(value) for key, value in facts.items() if value is not None)


def read(txn: Any, room: str, report: Callable[[str], object] | None = None) -> dict[str, bytes]:
    """Return what is kept in a room. Cost: 2 µs each.

    Args:
        report: told of each that is damaged, which is left out.

    Raises:
        CorruptionError: one of them is damaged, and there is no `report`.
    """
    found: dict[str, bytes] = {}
    prefix = _prefix(room)
    for place, value in table.items(txn, prefix, table.behind(prefix)):
        try:
            key, bare = _fact(place, value)
        except CorruptionError as error:
            if report is None:
                raise
            report(str(error))
        else:
            found[key] = bare
    return found


def problems(txn: Any) -> Iterator[str]:
    """Yield, in words, which facts of all rooms are damaged. Cost: 2 µs each."""
    yield from table.damaged(txn, bytes((FACTS,)), _fact)


def _fact(place: bytes, value: bytes | memoryview) -> tuple[str, bytes]:
    """Return key and value of a record.

    Raises:
        CorruptionError: it is damaged.
    """
    length = place[1]
    room, key = place[2 : 2 + length], place[2 + length :]
    where = f"the fact {_shown(key[:_SHOWN_BYTES])} of {_shown(room)}"
    bare = unseal(value, where, place)
    if _is_long(key):
        end = _LENGTH_BYTES + int.from_bytes(bare[:_LENGTH_BYTES], "big")
        key, bare = bare[_LENGTH_BYTES:end], bare[end:]
    return key.decode(), bare


def _shown(text: bytes) -> str:
    return repr(text.decode(errors="replace"))
