"""Windows: which of 4,096 sequences were settled above the floor, in one record, whatever the order they came in.

A window begins at a multiple of `WINDOW`. In memory it is a *map*, an int whose bit n stands for its sequence n; in the
log it is sealed, in the shorter of two forms, with 2-byte little-endian numbers:

    0  first, last, …     its runs of settled sequences, counted from the beginning of the window
    1  skipped, bits      the map from its byte `skipped` on

A record that is damaged says nothing: its messages are delivered again, never lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from qflow.errors import CorruptionError
from qflow.storage.log import table
from qflow.storage.log.keys import WINDOWS, key_of
from qflow.storage.log.sealing import seal, unseal
from qflow.storage.log.table import number_of

WINDOW = 4096
"""Sequences in a window: their map takes 512 bytes, so that a page holds a few of them."""
_RUNS, _BITS = b"\0", b"\1"
_RUN = struct.Struct("<HH")


def ones(count: int) -> int:
    """Return a map of so many settled sequences."""
    return (1 << count) - 1


def window_of(sequence: int) -> int:
    """Return where the window of a sequence begins."""
    return sequence - sequence % WINDOW


def _from(settled: int, low: int) -> int:
    """Return a map without what is below its sequence `low`."""
    return settled >> low << low if low > 0 else settled


def runs(settled: int) -> Iterator[tuple[int, int]]:
    """Yield [first, end) of each run of ones in a map. Cost: 0.5 µs each."""
    at = 0
    while settled:
        skipped = (settled & -settled).bit_length() - 1
        settled >>= skipped
        width = ((settled + 1) & ~settled).bit_length() - 1
        settled >>= width
        yield at + skipped, at + skipped + width
        at += skipped + width


def encode(settled: int, key: bytes) -> bytes:
    """Return the record of a map that is not empty."""
    skipped = ((settled & -settled).bit_length() - 1) // 8
    bits = settled.to_bytes((settled.bit_length() + 7) // 8, "little")[skipped:]
    if 4 * (settled & ~(settled << 1)).bit_count() < len(bits):
        return seal(_RUNS + b"".join(_RUN.pack(low, high - 1) for low, high in runs(settled)), key)
    return seal(_BITS + skipped.to_bytes(2, "little") + bits, key)


def decode(key: bytes, value: bytes | memoryview) -> int:
    """Return the map of a record. Raises CorruptionError: it does not match its checksum."""
    plain = unseal(value, "a window", key)
    if plain[:1] == _BITS:
        return int.from_bytes(plain[3:], "little") << 8 * int.from_bytes(plain[1:3], "little")
    settled: int = 0
    for first, last in _RUN.iter_unpack(plain[1:]):
        settled |= ones(last + 1 - first) << first
    return settled


def settled_runs(txn: Any, owner: int, lane: int, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield runs of settled sequences in [first, end), in order, each within its window."""
    start = window_of(first)
    for key, value in table.items(txn, key_of(WINDOWS, owner, lane, start), key_of(WINDOWS, owner, lane, end)):
        at = number_of(key)
        try:
            settled = decode(key, value)
        except CorruptionError:
            continue
        for low, high in runs(_from(settled, first - at)):
            if at + low >= end:
                return
            yield at + low, min(at + high, end)


def count(txn: Any, owner: int, lane: int, floor: int) -> int:
    """Return how many windows hold anything at or above a floor, and can be read."""
    found = 0
    last = -1
    for low, _ in settled_runs(txn, owner, lane, floor, table.LAST):
        found += window_of(low) != last
        last = window_of(low)
    return found


class Windows:
    """The windows of one lane while a transaction settles: read where they are needed, written at the end."""

    def __init__(self, txn: Any, owner: int, lane: int, floor: int) -> None:
        self._txn = txn
        self._place = WINDOWS, owner, lane
        self._floor = floor
        """Nothing below counts."""
        self._before: dict[int, int] = {}
        """What the log holds, of each that was read, by where it begins."""
        self._maps: dict[int, int] = {}
        """What it is to hold."""
        self._damaged: set[int] = set()

    @property
    def read(self) -> bool:
        """Something was looked at, or is to be written."""
        return bool(self._maps)

    def _map(self, window: int) -> int:
        found = self._maps.get(window)
        return self._load(window) if found is None else found

    def _load(self, window: int) -> int:
        key = key_of(*self._place, window)
        value = self._txn.get(key)
        settled = 0
        if value is not None:
            try:
                settled = decode(key, value)
            except CorruptionError:
                self._damaged.add(window)
        settled = _from(settled, self._floor - window)
        self._before[window] = self._maps[window] = settled
        return settled

    def add(self, first: int, end: int) -> None:
        """Settle [first, end). Cost: 0.5 µs."""
        while first < end:
            window = window_of(first)
            stop = min(end, window + WINDOW)
            self._maps[window] = self._map(window) | ones(stop - first) << (first - window)
            first = stop

    def add_new(self, first: int, end: int) -> bool:
        """`add` what is a part of one window, if nothing of it is settled; else False. Cost: 0.5 µs."""
        window = first - first % WINDOW
        if end - first >= WINDOW or end - window > WINDOW:
            return False
        before = self._maps.get(window)
        if before is None:
            before = self._load(window)
        wanted = (1 << end - first) - 1 << first - window
        if before & wanted:
            return False
        self._maps[window] = before | wanted
        return True

    def settled(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the runs of what is settled in [first, end), in order. Cost: 0.5 µs where there are none."""
        found: list[tuple[int, int]] = []
        for window in self._between(first, end):
            low = max(first, window)
            part = self._map(window) >> (low - window) & ones(min(end, window + WINDOW) - low)
            if part:
                found += [(low + start, low + stop) for start, stop in runs(part)]
        return found

    def _between(self, first: int, end: int) -> Iterable[int]:
        """Return where the windows of [first, end) begin: all, or if they are many those that hold something."""
        low = window_of(first)
        if end - low <= 2 * WINDOW:
            return range(low, end, WINDOW)
        keys = table.keys(self._txn, key_of(*self._place, low), key_of(*self._place, end))
        return sorted({*map(number_of, keys), *(window for window in self._maps if low <= window < end)})

    def reach(self, floor: int) -> int:
        """Return how far everything is settled from a floor on."""
        while True:
            window = window_of(floor)
            ahead = self._map(window) >> (floor - window)
            width = ((ahead + 1) & ~ahead).bit_length() - 1
            floor += width
            if not width or floor % WINDOW:
                return floor

    def write(self, floor: int) -> int:
        """Write what has changed, and drop what is below the new floor; return by how many more windows count."""
        grown = 0
        first = window_of(self._floor)
        if floor >= first + WINDOW:
            self._map(first)  # whether it counted is known then
        written: list[tuple[bytes, bytes]] = []
        for window, reached in sorted(self._maps.items()):
            before, key = self._before[window], key_of(*self._place, window)
            settled = _from(reached, floor - window)
            counted = before != 0 or window in self._damaged
            grown += (settled != 0) - counted
            if not settled:
                self._txn.delete(key)
            elif settled != before:
                written.append((key, encode(settled, key)))
        if written:
            with self._txn.cursor() as cursor:
                cursor.putmulti(written)
        if floor >= first + WINDOW:
            grown -= table.delete_between(
                self._txn, key_of(*self._place, first), key_of(*self._place, window_of(floor))
            )
        return grown
