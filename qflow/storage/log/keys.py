"""The layout of the log: blocks, a row and marks for each lane of a queue, in one keyspace.

    key                                      value
    BLOCKS  owner  lane  first sequence      a block
    BLOCKS  owner  lane  ffffffffffffffff    the lane's row: it sorts beside the tail block, on the same page
    MARKS   owner  lane  first sequence      a settled range above the floor, wider than a window: its end
    WINDOWS owner  lane  first sequence      what is settled above the floor in 4,096 sequences: see `windows.py`
    ATTEMPTS owner lane  first sequence      earlier deliveries of a range: its end and their number; none overlap
    DAMAGED owner  lane  first sequence      a block that did not match its checksum, kept as it was found
    QUEUES  owner                            name, incarnation, settings (JSON)
    META    name                             format, uuid, clean mark, the last record of the journal that is in here
    BODIES  0  0  number                     what several queues share: see `bodies.py`
    ERAS    owner  lane  first sequence      by which opening a stream's messages were written: see `eras.py`
    FACTS   room  key                        what is built on the engine keeps here: see `facts.py`

All numbers in keys are big-endian, so keys sort as numbers. Small records of ours (rows, marks, attempts) carry a
CRC-32, for LMDB has none: see `sealing.py`. What rows say is in `rows.py`.

Where the records of a block are references to shared bodies, readers see the bodies, and rows count those. What removes
a block, or a message from one, counts its references down; the row tells how far up there may be any.

Every function of the modules that write the log works inside a transaction it is given; what changes a row returns the
one that holds if that transaction commits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from qflow.storage.log import table

BLOCKS, MARKS, ATTEMPTS, DAMAGED, QUEUES, META, ERAS, WINDOWS, FACTS = 1, 2, 3, 4, 5, 6, 15, 16, 17
FORMAT = 7
OLDEST_FORMAT = 4
"""In which all that was settled above the floor lies in ranges. It is read, and carried over where it is opened.

Format 5 has no journal, format 6 no bodies in pieces.
"""
LAST_LANE = 255

_KEY = struct.Struct(">BIBQ")
_OWNER = struct.Struct(">BI")
_LANE = struct.Struct(">BIB")
pack_lane = _LANE.pack
"""Returns what the keys of a lane in a table begin with; given the table, the owner, the lane."""


def key_of(table_number: int, owner: int, lane: int, first: int) -> bytes:
    return _KEY.pack(table_number, owner, lane, first)


def parts_of(key: bytes) -> tuple[int, int, int, int]:
    """Return what `key_of` was given."""
    return _KEY.unpack(key)


def prefix_of(table_number: int, owner: int) -> bytes:
    """Return what the keys of all lanes of an owner begin with."""
    return _OWNER.pack(table_number, owner)


def queue_key(owner: int) -> bytes:
    return _OWNER.pack(QUEUES, owner)


def meta_key(name: str) -> bytes:
    return bytes((META,)) + name.encode()


def scan(txn: Any, owner: int, lane: int, position: int, end: int) -> Iterator[tuple[bytes, Any]]:
    """Yield (key, value) of each block that may hold a sequence in [position, end), in order.

    Values are what the transaction gives: bytes, or views that end with it.
    """
    stop = key_of(BLOCKS, owner, lane, min(end, table.LAST))
    return table.items(txn, key_of(BLOCKS, owner, lane, position), stop, reaching=True)


def next_block(txn: Any, owner: int, lane: int, first: int) -> int:
    """Return where the block behind one begins; a number above all sequences if there is none."""
    return table.next_number(txn, key_of(BLOCKS, owner, lane, first + 1))


def kept_damaged(txn: Any, owner: int) -> Iterator[tuple[int, int]]:
    """Yield (first sequence, size) of the damaged blocks that were set aside, of all lanes."""
    prefix = prefix_of(DAMAGED, owner)
    for key, value in table.items(txn, prefix, table.behind(prefix)):
        yield table.number_of(key), len(value)
