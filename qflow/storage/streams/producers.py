"""What producers have published, by number: so that what is sent twice is stored once, also after a crash.

    key                     value
    PRODUCERS  name, UTF-8  highest number, bitmap of the 1,024 below it, when it was last written (ms)

Bit 0 of the bitmap is the number next to the highest. What lies further below is not known any more. A record is
written in the transaction of the message that bears the number, and goes when it was not written for a week. It carries
a CRC-32. One that is damaged stays: taken for an empty one, it would have messages stored twice.

Every function works inside a transaction it is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from qflow.errors import CorruptionError
from qflow.named_tuples import NamedTuple
from qflow.storage.log import table
from qflow.storage.log.sealing import seal, unseal_as
from qflow.storage.log.table import Forgotten

PRODUCERS = 13
WINDOW = 1024
"""How far below a producer's highest number it is known which were stored."""
PRODUCER_EXPIRY_S = 7 * 24 * 3600
"""A producer that published nothing new for so long is forgotten."""
LOOKED_AT_ONCE = 256
"""Records looked at by one `forget`, at most: they lie side by side, on about 12 pages."""

_PREFIX = bytes((PRODUCERS,))
_RECORD = struct.Struct(f"<Q{WINDOW // 8}sQ")
_ALL_SEEN = (1 << WINDOW) - 1


class Window(NamedTuple):
    """The numbers of one producer that are stored."""

    highest: int
    seen: int = 0
    """Bit i: `highest - 1 - i` is stored."""
    seen_ms: int = 0

    def has(self, number: int) -> bool:
        """Tell whether a number is known to be stored."""
        return number == self.highest or (number < self.highest and self.seen >> (self.highest - 1 - number) & 1 == 1)

    def is_below(self, number: int) -> bool:
        """Tell whether a number is so low that nobody knows whether it is stored."""
        return number < self.highest - WINDOW


def with_number(window: Window | None, number: int, now_ms: int) -> Window:
    """Return a window in which a number is stored, too; one below it leaves no trace. Cost: 0.5 µs."""
    if window is None:
        return Window(number, 0, now_ms)
    highest, seen, _ = window
    above = number - highest
    if above > WINDOW:  # not by shifting: the gap may be 2**63
        return Window(number, 0, now_ms)
    if above > 0:
        return Window(number, (seen << 1 | 1) << (above - 1) & _ALL_SEEN, now_ms)
    if above < 0 and not window.is_below(number):
        seen |= 1 << (-above - 1)
    return Window(highest, seen, now_ms)


def read(txn: Any, name: str) -> Window | None:
    """Return what is known of a producer, or None. Raises CorruptionError. Cost: 2 µs, and a page from the disk."""
    value = txn.get(_PREFIX + name.encode())
    return None if value is None else _decode(value, name)


def write(txn: Any, name: str, window: Window) -> None:
    """Replace what is known of a producer. Cost: 1 µs, and a page of the log's."""
    txn.put(_PREFIX + name.encode(), _encode(window))


def forget(
    txn: Any, now_ms: int, start: bytes = b"", limit: int = LOOKED_AT_ONCE, moment: Callable[[int], int] = int
) -> Forgotten:
    """Look at some records, and remove those that were not written for `PRODUCER_EXPIRY_S`.

    Args:
        start: the `position` where the last call stopped; empty: begin with the first.
        limit: how many to look at.
        moment: returns a time that was written down by the clock as it is set now; that is written instead.
    Cost: 2 µs a record.
    """
    return table.forget(txn, _PREFIX, start, limit, partial(_left, now_ms, moment))


def any_stored(txn: Any) -> bool:
    """Tell whether there is any producer."""
    return table.any_below(txn, _PREFIX)


def problems(txn: Any) -> Iterator[str]:
    """Yield, in words, what is wrong with the records of all producers. Cost: 2 µs a producer."""
    yield from table.damaged(txn, _PREFIX, lambda key, value: _decode(value, _name(key)))


def _left(now_ms: int, moment: Callable[[int], int], key: bytes, value: bytes) -> bytes | None:
    try:
        window = _decode(value, _name(key))
    except CorruptionError:
        return value  # whoever publishes under that name is told
    seen_ms = moment(window.seen_ms)
    if seen_ms + PRODUCER_EXPIRY_S * 1000 <= now_ms:
        return None
    return value if seen_ms == window.seen_ms else _encode(window._replace(seen_ms=seen_ms))


def _encode(window: Window) -> bytes:
    seen = window.seen.to_bytes(WINDOW // 8, "little")
    return seal(_RECORD.pack(window.highest, seen, window.seen_ms))


def _name(key: bytes) -> str:
    return key[1:].decode(errors="backslashreplace")


def _decode(value: bytes, name: str) -> Window:
    try:
        highest, seen, seen_ms = unseal_as(_RECORD, value, f"the record of producer {name!r}")
    except CorruptionError as error:
        raise CorruptionError(
            f"{error}: nobody knows which of its numbers are stored. Look what of it arrived, and go on under a new "
            "producer name"
        ) from error
    return Window(highest, int.from_bytes(seen, "little"), seen_ms)
