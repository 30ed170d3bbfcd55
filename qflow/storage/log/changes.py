"""What a transaction changes, noted while it is written: pairs put and keys deleted, as bytes for the journal.

    1  key length (2) · value length (4) · key · value                                        a pair
    2  key length (2) · key                                                                   a key that is no more
    3  key length (2) · start (4) · kept (4) · head length (4) · tail length (4) · key · head · tail
                                          a value that has grown: head, `kept` bytes of the old one from `start`, tail
    6  ...                                rows and blocks of many owners: see `alike`

Played back in order on the same state they lead to the same state.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from qflow.errors import CorruptionError
from qflow.storage.environment import DAMAGE
from qflow.storage.log import alike
from qflow.storage.log.alike import Alike

_PUT, _DELETE, _GROW = 1, 2, 3
_ALIKE = bytes((alike.ALIKE,))
_PAIR = struct.Struct("<BHI")
_KEY = struct.Struct("<BH")
_GROWN = struct.Struct("<BHIIII")
PAGE_BYTES = 4096
ON_A_PAGE_BYTES = 1600
"""About the largest value that LMDB keeps beside others on a page."""
UNFIT = b"what it has grown from is not there"
"""Stands for a value that has grown from another state. By identity: no part of a journal is this object."""


class Changes:
    """A write transaction that notes what is changed through it. As one of LMDB, as far as the log uses that.

    What many owners have alike is put late: see `put_alike`.
    """

    def __init__(self, txn: Any) -> None:
        self.txn = txn
        """To be used by itself after `catch_up` only."""
        self.id = txn.id
        self._parts: list[bytes] = []
        self.size = 0
        """Bytes that were noted since the last `take`."""
        self._pages = 0  # of large values, at the most, since the transaction began
        self._small_bytes = self._values = 0  # the same of small ones; keys that were changed
        self._sizes: dict[bytes, int] = {}
        self._alike: defaultdict[bytes, dict[int, int]] = defaultdict(dict)
        """The size of each tail block that `put_alike` put: by what its key ends with, then by owner."""
        self._late: Callable[[Any], object] | None = None
        """Puts what is noted, and not in the transaction yet."""
        self._places: list[tuple[bytes, list[int]]] = []
        """Numbers and owners of that."""

    @property
    def written(self) -> tuple[int, int]:
        """How many bytes and values, as `Environment.make_room` takes them."""
        return self._pages * PAGE_BYTES + 2 * self._small_bytes, self._values

    def get(self, key: bytes) -> Any:
        if self._late is not None:
            self.catch_up()
        return self.txn.get(key)

    def put(self, key: bytes, value: bytes) -> bool:
        self.note(key, value)
        done: bool = self.txn.put(key, value)
        return done

    def note(self, key: bytes, value: bytes) -> None:
        """Note that a pair is put, next."""
        self.size += _PAIR.size + len(key) + len(value)
        self._parts += _PAIR.pack(_PUT, len(key), len(value)), key, value
        self._weigh(key, value)

    def put_grown(self, key: bytes, value: bytes, start: int, kept: int, tail_bytes: int) -> None:
        """Put a value that ends with `kept` bytes of the one before, from `start` on, and `tail_bytes` behind them."""
        tail = len(value) - tail_bytes
        head = tail - kept
        self.size += _GROWN.size + len(key) + head + tail_bytes
        self._parts += _GROWN.pack(_GROW, len(key), start, kept, head, tail_bytes), key, value[:head], value[tail:]
        self._weigh(key, value)
        self.txn.put(key, value)

    def _weigh(self, key: bytes, value: bytes) -> None:
        """Count a value that is put next."""
        if self._late is not None:
            self.catch_up()
        size = len(value)
        self._count(size, self._sizes.get(key), 1)
        self._sizes[key] = size

    def _count(self, size: int, before: int | None, values: int) -> None:
        """Count values of so many bytes, each in place of one of `before` bytes; None: their keys are new."""
        if size > ON_A_PAGE_BYTES:
            pages = size // PAGE_BYTES + 1
            stays = before is not None and before > ON_A_PAGE_BYTES and before // PAGE_BYTES + 1 == pages
            if not stays:
                self._pages += pages * values
        elif size > (before or 0):
            self._small_bytes += (size - (before or 0)) * values
        if before is None:
            self._values += values

    def put_alike(self, groups: Sequence[Alike], put: Callable[[Any], object]) -> None:
        """Put rows and tail blocks that are the same for many owners but for whose they are.

        Where all of them were put in this transaction before, `put` is called late: when something else is read or
        written, or before the commit, and not at all if they were put anew by then. To change a thousand pages takes
        ten times as long as to note what is changed. Their pages were read and copied into memory by the first put, so
        a damaged one was found then.

        Args:
            put: does it, given the transaction of LMDB.
        """
        places = [(number, owners) for number, owners, _, _ in groups]
        if places != self._places:
            self.catch_up()
        sizes = [Counter(map(self._alike[number].get, owners)) for number, owners in places]
        if any(None in counts for counts in sizes):
            put(self.txn)
        else:
            self._late, self._places = put, places
        for one, counts in zip(groups, sizes, strict=True):
            self._note(one, counts)

    def _note(self, one: Alike, sizes: Counter[int | None]) -> None:
        """Note what was put in place of blocks of these sizes; None: of those that had none."""
        change = one.encode()
        self.size += len(change)
        self._parts.append(change)
        for before, count in sizes.items():
            self._count(len(one.block), before, count)
            if before is None:
                self._count(len(one.row), None, count)
        self._alike[one.number].update(dict.fromkeys(one.owners, len(one.block)))

    def catch_up(self) -> None:
        """Have all that is noted in the transaction; what raised is tried again by the next call, and not left out.

        Raises:
            MapFull. CorruptionError: pages are damaged, of nobody that is to be blamed for it.
        """
        if self._late is None:
            return
        try:
            self._late(self.txn)
        except DAMAGE as error:
            raise CorruptionError(f"pages of the log are damaged: {error}") from error
        self._late, self._places = None, []

    def delete(self, key: bytes) -> bool:
        self.catch_up()
        self.note_deleted(key)
        done: bool = self.txn.delete(key)
        return done

    def note_deleted(self, key: bytes) -> None:
        """Note that a key is no more."""
        self.size += _KEY.size + len(key)
        self._parts += _KEY.pack(_DELETE, len(key)), key
        self._sizes.pop(key, None)
        self._values += 1

    def cursor(self) -> _Cursor:
        self.catch_up()
        return _Cursor(self, self.txn.cursor())

    def take(self) -> bytes:
        """Return what was noted since the last call."""
        changes = b"".join(self._parts)
        self._parts.clear()
        self.size = 0
        return changes

    def abort(self) -> None:
        self.txn.abort()


class _Cursor:
    """A cursor whose deletions and puts are noted."""

    __slots__ = (
        "_changes", "_cursor", "getmulti", "item", "iternext", "key", "last", "next", "prev", "set_key", "set_range",
        "value",
    )  # fmt: skip

    def __init__(self, changes: Changes, cursor: Any) -> None:
        self._changes = changes
        self._cursor = cursor
        self.key, self.value, self.item = cursor.key, cursor.value, cursor.item
        self.next, self.prev, self.last, self.iternext = cursor.next, cursor.prev, cursor.last, cursor.iternext
        self.set_key, self.set_range, self.getmulti = cursor.set_key, cursor.set_range, cursor.getmulti

    def delete(self) -> bool:
        self._changes.note_deleted(bytes(self._cursor.key()))
        done: bool = self._cursor.delete()
        return done

    def putmulti(self, items: Iterable[tuple[bytes, bytes]]) -> tuple[int, int]:
        """Put some pairs; return how many, and how many of them were new or changed.

        At once: between two calls that put one, another thread has the interpreter for as long as it likes.
        """
        pairs = list(items)
        for key, value in pairs:
            self._changes.note(key, value)
        count, added = self._cursor.putmulti(pairs)
        return count, added

    def __enter__(self) -> _Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        self._cursor.close()


def put_grown(txn: Any, key: bytes, value: bytes, start: int, kept: int, tail_bytes: int) -> None:
    """`Changes.put_grown`, in any transaction."""
    if isinstance(txn, Changes):
        txn.put_grown(key, value, start, kept, tail_bytes)
    else:
        txn.put(key, value)


def volume(changes: bytes) -> tuple[int, int]:
    """Return about how many bytes and values the changes of one batch put, as `Environment.make_room` takes them."""
    size, values, at = 4 * len(changes), 4, 0
    while changes[at : at + 1] == _ALIKE:  # which stand alone, or first
        more_size, more_values = alike.volume(changes, at)
        size, values, at = size + more_size, values + more_values, alike.end_of(changes, at)
    return size, values


def play(txn: Any, changes: bytes) -> int:
    """Make the changes of one batch in a transaction; return how many do not fit the state it is in, and were not made.

    Those are values that have grown, where there is no such value, or a shorter one.
    """
    unfit = 0
    for key, value in played(txn.get, changes):
        if value is UNFIT:
            unfit += 1
        elif value is None:
            txn.delete(key)
        else:
            txn.put(key, value)
    return unfit


def played(get: Any, changes: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield each key with its new value, None where it is deleted, `UNFIT` where it has grown from another state.

    `get` returns what was there before.
    """
    at = 0
    while at < len(changes):
        kind = changes[at]
        if kind == _PUT:
            _, length, size = _PAIR.unpack_from(changes, at)
            at += _PAIR.size
            yield changes[at : at + length], changes[at + length : at + length + size]
            at += length + size
        elif kind == _DELETE:
            _, length = _KEY.unpack_from(changes, at)
            at += _KEY.size + length
            yield changes[at - length : at], None
        elif kind == alike.ALIKE:
            yield from alike.pairs(changes, at)
            at = alike.end_of(changes, at)
        else:
            _, length, start, kept, head, tail = _GROWN.unpack_from(changes, at)
            at += _GROWN.size
            key = changes[at : at + length]
            before = get(key)
            at += length
            middle = at + head
            if before is None or len(before) < start + kept:
                yield key, UNFIT
            else:
                yield key, changes[at:middle] + bytes(before[start : start + kept]) + changes[middle : middle + tail]
            at = middle + tail
