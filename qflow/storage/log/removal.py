"""Removing from the log what is settled below the floor, and what deleted queues left."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from qflow.errors import CorruptionError
from qflow.storage import blocks
from qflow.storage.blocks import BlockKey, Reference
from qflow.storage.log import table
from qflow.storage.log.bodies import Releases
from qflow.storage.log.keys import (
    ATTEMPTS,
    BLOCKS,
    DAMAGED,
    ERAS,
    MARKS,
    WINDOWS,
    key_of,
    next_block,
    parts_of,
    prefix_of,
)
from qflow.storage.log.marks import forget_attempts
from qflow.storage.log.rows import Row, read_row
from qflow.storage.log.table import LAST, number_of
from qflow.storage.log.windows import window_of

REMOVED_AT_ONCE = 256
"""Settled blocks removed in one commit, at most."""
RECORDS_AN_OWNER = 4
"""A deleted owner takes about as long as so many records, to find that there are none in most tables."""


def remove_settled(
    txn: Any, owner: int, lane: int, row: Row, limit: int = REMOVED_AT_ONCE, releases: Releases | None = None
) -> tuple[int, bool]:
    """Remove blocks, marks and attempts wholly below the floor, at most `limit`, and the references `releases` admits.

    Returns:
        the floor at which there will be something to remove again, and whether the limit stopped it.
    """
    removed = table.delete_between(txn, key_of(MARKS, owner, lane, 0), key_of(MARKS, owner, lane, row.floor), limit)
    window = window_of(row.floor)
    removed += table.delete_between(txn, key_of(WINDOWS, owner, lane, 0), key_of(WINDOWS, owner, lane, window), limit)
    removed += forget_attempts(txn, owner, lane, row.floor, limit)
    start, border = key_of(BLOCKS, owner, lane, 0), key_of(BLOCKS, owner, lane, row.floor + 1)
    room = max(0, limit - removed)
    begun = list(islice(table.keys(txn, start, border), room + 1))
    if not begun:
        return row.floor + 1, False
    # A block ends before the next begins, so only the last one can reach over the floor. To read its header copies the
    # whole block: 3 µs where it holds several messages, and one large message is told without.
    if row.floor >= row.next:
        end = row.floor
    elif number_of(begun[-1]) == row.floor:
        end = row.floor + 1  # at the least
    else:
        end = _block_end(txn, begun[-1])
    whole = len(begun) - (end > row.floor)
    gone = min(whole, room)
    if row.referring and number_of(begun[0]) < row.referring:
        gone = let_go(txn, begun[:gone], row.referring, releases or Releases())
    table.delete_between(txn, start, border, gone)
    if whole > gone:
        return 0, True
    return max(end, row.floor + 1), False


def _block_end(txn: Any, key: bytes) -> int:
    """Return the end of a block: by its header, or where that is damaged, where the next begins."""
    with txn.cursor() as cursor:
        cursor.set_key(key)
        head = cursor.value()[: blocks.HEADER_BYTES]
    try:
        return blocks.read_header(head, where="a block").end
    except CorruptionError:
        return next_block(txn, *parts_of(key)[1:])


def let_go(txn: Any, keys: list[bytes], below: int, releases: Releases) -> int:
    """Count down the references in blocks that are about to be removed; return how many of those blocks may be."""
    for index, key in enumerate(keys):
        if number_of(key) >= below:
            break
        if not releases.take(txn, _references(key, txn.get(key))):
            return index
    return len(keys)


def _references(key: bytes, value: bytes) -> list[Reference]:
    """Return the references in a block; of a damaged one nobody knows them, and what they stand for is kept."""
    try:
        return blocks.references(value, BlockKey(*parts_of(key)), where="a block")
    except CorruptionError:
        return []


def owners_within(limit: int) -> int:
    """Return of how many deleted owners something is removed in a commit that removes so many records, at most."""
    return min(limit, max(1, limit // RECORDS_AN_OWNER))


def delete_lanes(
    txn: Any, owner: int, limit: int = REMOVED_AT_ONCE, releases: Releases | None = None
) -> tuple[int, bool]:
    """Remove records of all lanes of a deleted queue, at most `limit`.

    Returns:
        what is left of the limit, and whether more of the queue is.
    """
    small = [prefix_of(number, owner) for number in (MARKS, WINDOWS, ATTEMPTS, DAMAGED, ERAS)]
    limit, more = table.delete_below(txn, small, limit)
    if more:
        return 0, True
    releases = releases or Releases()
    referring: dict[int, int] = {}
    prefix = prefix_of(BLOCKS, owner)
    with txn.cursor() as cursor:
        found = cursor.set_range(prefix)
        while found and (key := cursor.key()).startswith(prefix):
            lane = key[len(prefix)]
            if lane not in referring:
                referring[lane] = _referring(txn, owner, lane)
            if limit <= 0 or not let_go(txn, [key], referring[lane], releases):
                return limit, True
            found = cursor.delete()
            limit -= 1
    return limit, False


def _referring(txn: Any, owner: int, lane: int) -> int:
    """Return where the blocks of a lane end that may hold references: by its row, else with the last of them."""
    try:
        return read_row(txn, owner, lane).referring
    except CorruptionError:
        return LAST


def count_references(txn: Any, start: bytes, limit: int) -> tuple[Counter[int], bytes | None]:
    """Count the references in blocks of all queues, by number, from a key on, in about `limit` blocks.

    Returns:
        the counts, and the key to go on from; None at the end.
    """
    counted: Counter[int] = Counter()
    place, below = b"", 0
    with txn.cursor() as cursor:
        found = cursor.set_range(max(start, bytes((BLOCKS,))))
        while found and cursor.key()[0] == BLOCKS:
            key = cursor.key()
            if limit <= 0:
                return counted, key
            limit -= 1
            if key[:-8] != place:
                place = key[:-8]
                below = _referring(txn, *parts_of(key)[1:3])
            if number_of(key) < below:
                counted.update(reference.number for reference in _references(key, cursor.value()))
                found = cursor.next()
            else:
                found = cursor.set_range(place + bytes((255,)) * 9)  # behind the row
    return counted, None
