"""Records of the log in the order of their keys: the loops over some of them, each written once.

A *lane* is all records whose keys differ in nothing but their last eight bytes: a number, big-endian, so that they sort
by it. Keys are returned as bytes, values as the transaction gives them: bytes, or views that end with it.

Every function works inside a transaction it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any

from qflow.errors import CorruptionError
from qflow.named_tuples import NamedTuple

LAST = 2**64 - 1
"""The highest number in a lane."""
NUMBER_BYTES = 8


class Forgotten(NamedTuple):
    """How far `forget` came."""

    removed: int
    position: bytes
    """Where the next call begins; empty if it was through."""


def number_of(key: bytes) -> int:
    """Return the number in a key."""
    return int.from_bytes(key[-NUMBER_BYTES:], "big")


def behind(prefix: bytes) -> bytes:
    """Return the lowest key that is above all that begin with a prefix."""
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def at_or_before(cursor: Any, key: bytes) -> bool:
    """Put a cursor on the last record of a lane that is not behind a key; False if there is none."""
    found = cursor.set_range(key)
    if found and bytes(cursor.key()) == key:
        return True
    found = cursor.prev() if found else cursor.last()
    return bool(found) and bytes(cursor.key()).startswith(key[:-NUMBER_BYTES])


def items(txn: Any, start: bytes, stop: bytes, *, reaching: bool = False) -> Iterator[tuple[bytes, Any]]:
    """Yield (key, value) of the records with keys in [start, stop), in order.

    Args:
        reaching: begin with the record before `start` in its lane, where none is at it: it may reach over it.
    """
    low = start[:-NUMBER_BYTES] if reaching else start
    with txn.cursor() as cursor:
        if _find(cursor, start, reaching):
            for found, value in cursor.iternext():
                key = bytes(found)
                if not low <= key < stop:
                    return
                yield key, value


def keys(txn: Any, start: bytes, stop: bytes, *, reaching: bool = False) -> Iterator[bytes]:
    """Yield what `items` does without the values, which are not read. Cost: 0.2 µs a key."""
    with txn.cursor() as cursor:
        if _find(cursor, start, reaching):
            yield from takewhile(stop.__gt__, map(bytes, cursor.iternext(values=False)))


def _find(cursor: Any, start: bytes, reaching: bool) -> bool:
    return (reaching and at_or_before(cursor, start)) or bool(cursor.set_range(start))


def any_below(txn: Any, prefix: bytes) -> bool:
    """Tell whether there is a record whose key begins so."""
    return next(keys(txn, prefix, behind(prefix)), None) is not None


def next_number(txn: Any, key: bytes) -> int:
    """Return the number of the first record at or behind a key in its lane; `LAST` if there is none."""
    found = next(keys(txn, key, behind(key[:-NUMBER_BYTES])), None)
    return LAST if found is None else number_of(found)


def delete_between(txn: Any, start: bytes, stop: bytes, limit: int = LAST) -> int:
    """Delete the records with keys in [start, stop), at most `limit` of them; return how many those were."""
    removed = 0
    with txn.cursor() as cursor:
        found = cursor.set_range(start)
        while found and removed < limit and start <= bytes(cursor.key()) < stop:
            found = cursor.delete()
            removed += 1
    return removed


def delete_below(txn: Any, prefixes: Iterable[bytes], limit: int) -> tuple[int, bool]:
    """Delete the records whose keys begin so, at most `limit`.

    Returns:
        what is left of the limit, and whether more of them are.
    """
    for prefix in prefixes:
        limit -= delete_between(txn, prefix, behind(prefix), limit)
        if limit <= 0 and any_below(txn, prefix):
            return 0, True
    return limit, False


def forget(
    txn: Any, prefix: bytes, start: bytes, limit: int, left: Callable[[bytes, bytes], bytes | None]
) -> Forgotten:
    """Look at some of the records whose keys begin so, and delete those that are over.

    Args:
        start: the `position` where the last call stopped; empty: begin with the first.
        limit: how many to look at.
        left: given key and value; returns the value from now on, None if it is over.
    """
    stop = behind(prefix)
    removed = looked = 0
    with txn.cursor() as cursor:
        found = cursor.set_range(start or prefix)
        while found and prefix <= bytes(cursor.key()) < stop:
            if looked >= limit:
                return Forgotten(removed, cursor.key())
            looked += 1
            key, value = cursor.item()
            after = left(key, value)
            if after is None:
                removed += 1
                found = cursor.delete()
                continue
            if after != value:
                cursor.put(key, after)
            found = cursor.next()
    return Forgotten(removed, b"")


def damaged(txn: Any, prefix: bytes, check: Callable[[bytes, bytes], object]) -> Iterator[str]:
    """Yield, in words, what is wrong with the records whose keys begin so; `check` raises that as CorruptionError."""
    for key, value in items(txn, prefix, behind(prefix)):
        try:
            check(key, value)
        except CorruptionError as error:
            yield str(error)
