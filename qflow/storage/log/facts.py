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
from qflow.named_tuples import NamedTuple
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
PAGE_FACTS = 1_000
PAGE_BYTES = 2**20
PAGE_KEYS = 20_000
"""A page ends when it has so many facts or bytes, or has looked at so many keys: a reader of the log is short."""


class Facts:
    """Records that are kept, or forgotten, together in one commit, with a publish or by themselves.

    Args:
        rooms: by room, the value of each key; None forgets it.

    Raises:
        InvalidArgument: one is too large.
    """

    __slots__ = ("rooms", "size", "values")

    def __init__(self, rooms: Mapping[str, Mapping[str, bytes | None]]) -> None:
        for room, facts in rooms.items():
            check(room, facts)
        self.rooms = rooms
        self.size = sum(map(size_of, rooms.values()))
        """About how many bytes `write` adds at the most."""
        self.values = sum(map(len, rooms.values()))

    def write(self, txn: Any) -> None:
        """Keep and forget them, in a transaction."""
        for room, facts in self.rooms.items():
            write(txn, room, facts)


class Page(NamedTuple):
    """A part of a room, in the order of its keys."""

    facts: list[tuple[str, bytes]]
    position: bytes
    """Where the next page begins; empty where this was the last."""


def check(room: str, facts: Mapping[str, bytes | None]) -> None:
    """Refuse what is too large. Raises InvalidArgument: a room's name, a key or a value."""
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


def forget_unchanged(txn: Any, room: str, facts: Mapping[str, bytes]) -> None:
    """Forget facts that are as somebody has read them; others, and those damaged, stay. Cost: 5 µs each."""
    for key, value in facts.items():
        try:
            is_same = get(txn, room, key) == value
        except CorruptionError:
            continue  # who reads it is told
        if is_same:
            txn.delete(fact_key(room, key))


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


def get(txn: Any, room: str, key: str) -> bytes | None:
    """Return what is kept under a key; None if nothing is. Cost: 3 µs. Raises CorruptionError: it is damaged."""
    place = fact_key(room, key)
    value = txn.get(place)
    return None if value is None else _fact(place, value)[1]


def page(
    txn: Any,
    room: str,
    prefix: str = "",
    position: bytes = b"",
    *,
    most: int = PAGE_FACTS,
    wanted: Callable[[str], bool | str] | None = None,
    report: Callable[[str], object] | None = None,
) -> Page:
    """Return facts of a room whose keys begin with `prefix`, from a position on; it may have none and not be the last.

    Keys are in the order of their UTF-8; those above 400 bytes in that of their starts.

    Args:
        position: of the page before.
        wanted: takes a key and tells whether it belongs to what is asked for; text says: no, nor does any before this.
        report: as in `read`.

    Raises:
        CorruptionError: one is damaged, and there is no `report`.
    Cost: 1 µs a key, 2 µs a fact.
    """
    start = _prefix(room)
    low = start + prefix.encode()[:_PLAIN_BYTES]
    stop = table.behind(low)
    found: list[tuple[str, bytes]] = []
    size = looked = 0
    with txn.cursor() as cursor:
        there = cursor.set_range(max(low, position))
        while there and (place := bytes(cursor.key())) < stop:
            if len(found) >= most or size >= PAGE_BYTES or looked >= PAGE_KEYS:
                return Page(found, place)
            looked += 1
            verdict: bool | str = False
            try:
                key, value = _fact(place, cursor.value())
                verdict = key.startswith(prefix) and (wanted is None or wanted(key))
            except CorruptionError as error:
                if report is None:
                    raise
                report(str(error))
            if verdict is True:
                found.append((key, value))
                size += len(key) + len(value)
            target = start + verdict.encode()[:_PLAIN_BYTES] if isinstance(verdict, str) else b""
            there = cursor.set_range(target) if target > place else cursor.next()
    return Page(found, b"")


def problems(txn: Any) -> Iterator[str]:
    """Yield, in words, which facts of all rooms are damaged. Cost: 2 µs each."""
    yield from table.damaged(txn, bytes((FACTS,)), _fact)


def _fact(place: bytes, value: bytes | memoryview) -> tuple[str, bytes]:
    """Return key and value of a record. Raises CorruptionError: it is damaged."""
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
