"""The small records of a stream's topic index, and the keys of all of them.

    key                              value
    TOPICS       owner  name         the epoch in which the name was listed last
    TOPIC_NAMES  owner  number       a piece of the list of names: see `names.py`
    POSTINGS     owner  lane  first  which blocks hold which topics: see `postings.py`
    INDEX        owner               how far the list of names goes
    INDEX        owner  lane         how far the lane is indexed

Numbers in keys are big-endian. A name too long for a key stands there with its beginning, 0xFF, which no UTF-8 has,
and a digest of the whole. Every small value ends with a CRC-32 of its key and itself: a record that was damaged, or is
found under another key, says nothing.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import islice
from typing import Any

from qflow.errors import CorruptionError
from qflow.message import LANE_SHIFT
from qflow.named_tuples import NamedTuple
from qflow.storage.log import table
from qflow.storage.log.keys import BLOCKS, key_of, prefix_of
from qflow.storage.log.sealing import seal, unseal, unseal_as

TOPICS, TOPIC_NAMES, POSTINGS, INDEX = 9, 10, 11, 12
TABLES = (INDEX, TOPICS, TOPIC_NAMES, POSTINGS)
"""The rows first: without them nothing counts as indexed, while the rest is removed."""
REMOVED_AT_ONCE = 256
"""Records removed in one commit, at most."""

_NAMES_ROW = struct.Struct("<QIIIII")
_PROGRESS = struct.Struct("<QQQ")
_DIGEST_BYTES = 20
_PLAIN_BYTES = 480
"""LMDB admits keys of 511 bytes."""


class NamesRow(NamedTuple):
    """What is true of the list of topics of one stream; see `names.py`."""

    birth: int
    """Given by chance when the index was begun: one that was begun anew has another."""
    epoch: int = 1
    first: int = 0
    """The oldest piece that is kept."""
    border: int = 0
    """Pieces from this one on were written in this epoch, those below it in the one before."""
    next: int = 0
    """The number the next piece will have."""
    tail: int = 0
    """Length of the last piece."""


class Progress(NamedTuple):
    """What is true of the index of one lane: segments cover [begin, indexed_to) without a gap."""

    begin: int
    indexed_to: int
    border: int
    """Where the lane was indexed to when the epoch began."""


def name_key(owner: int, name: bytes) -> bytes:
    """Return the key of a topic. Two long ones share theirs if their 160-bit digests are the same, so none do."""
    if len(name) > _PLAIN_BYTES:
        from hashlib import blake2b  # here, for it loads OpenSSL, and most topics are short

        name = name[:_PLAIN_BYTES] + b"\xff" + blake2b(name, digest_size=_DIGEST_BYTES).digest()
    return prefix_of(TOPICS, owner) + name


def piece_key(owner: int, number: int) -> bytes:
    return prefix_of(TOPIC_NAMES, owner) + number.to_bytes(4, "big")


def lane_key(owner: int, lane: int) -> bytes:
    return prefix_of(INDEX, owner) + bytes((lane,))


def read_names_row(txn: Any, owner: int) -> NamesRow | None:
    """Return the row of a stream's topics; None if nothing was indexed. Raises CorruptionError: it is damaged."""
    key = prefix_of(INDEX, owner)
    value = txn.get(key)
    where = f"the row of the topics of stream {owner}"
    return None if value is None else NamesRow(*unseal_as(_NAMES_ROW, value, where, key))


def write_names_row(txn: Any, owner: int, row: NamesRow) -> None:
    key = prefix_of(INDEX, owner)
    txn.put(key, seal(_NAMES_ROW.pack(*row), key))


def _progress(owner: int, lane: int, value: bytes | memoryview) -> Progress:
    where = f"the index row of stream {owner}, lane {lane}"
    return Progress(*unseal_as(_PROGRESS, value, where, lane_key(owner, lane)))


def read_progress(txn: Any, owner: int, lane: int) -> Progress:
    """Return how far a lane is indexed; at first, up to its beginning. Raises CorruptionError: its row is damaged."""
    value = txn.get(lane_key(owner, lane))
    if value is None:
        first = lane << LANE_SHIFT
        return Progress(first, first, first)
    return _progress(owner, lane, value)


def write_progress(txn: Any, owner: int, lane: int, progress: Progress) -> None:
    key = lane_key(owner, lane)
    txn.put(key, seal(_PROGRESS.pack(*progress), key))


def progress_of_lanes(txn: Any, owner: int) -> dict[int, Progress]:
    """Return how far each lane is indexed that has a row. Raises CorruptionError: one of them is damaged."""
    prefix = prefix_of(INDEX, owner)
    rows = table.items(txn, lane_key(owner, 0), table.behind(prefix))
    return {key[-1]: _progress(owner, key[-1], value) for key, value in rows}


def any_left(txn: Any, owner: int) -> bool:
    """Tell whether there is any record of a stream's index."""
    return any(table.any_below(txn, prefix_of(number, owner)) for number in TABLES)


def delete_index(txn: Any, owner: int, limit: int = REMOVED_AT_ONCE) -> bool:
    """Remove records of a stream's index, at most `limit`; return whether more is left.

    Once it has returned False, whatever is still in the stream can be indexed anew. Readers are right all the while:
    nothing counts as indexed from the first call on.
    """
    return delete_within(txn, owner, limit)[1]


def delete_within(txn: Any, owner: int, limit: int) -> tuple[int, bool]:
    """Do what `delete_index` does; return what is left of the limit, and whether more of the index is."""
    return table.delete_below(txn, [prefix_of(number, owner) for number in TABLES], limit)


def blocks_between(txn: Any, owner: int, lane: int, position: int, end: int, limit: int) -> list[int]:
    """Return the first sequences of at most `limit` blocks that may hold a sequence in [position, end).

    Cost: 0.2 µs a block; only keys are read.
    """
    start, stop = key_of(BLOCKS, owner, lane, position), key_of(BLOCKS, owner, lane, end)
    found = table.keys(txn, start, stop, reaching=True)  # the block before may reach here
    return list(map(table.number_of, islice(found, limit)))


def listed_value(key: bytes, epoch: int) -> bytes:
    """Return the record of a name that is listed in an epoch."""
    return seal(epoch.to_bytes(4, "little"), key)


def listed_before(key: bytes, value: bytes | memoryview | None, epoch: int) -> bool:
    """Tell whether a name was listed last before an epoch; a damaged record counts as such, the name is listed anew."""
    if value is None:
        return False
    with suppress(CorruptionError):
        return int.from_bytes(unseal(value, "a topic", key), "little") < epoch
    return True
