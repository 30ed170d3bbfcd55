"""Rows and tail blocks that are the same for many owners but for whose they are, as one change of the journal.

6 · owners (4) · row length (2) · block length (4) · each owner (4) · row · block of the first of them
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from qflow.errors import CorruptionError
from qflow.named_tuples import NamedTuple
from qflow.storage.blocks import HEADER, BlockKey
from qflow.storage.contents import Content
from qflow.storage.log.keys import key_of
from qflow.storage.log.table import LAST

ALIKE = 6
_HEAD = struct.Struct("<BIHI")


class Alike(NamedTuple):
    """See the module."""

    number: bytes
    """What the keys of the blocks end with."""
    owners: list[int]
    row: bytes
    block: bytes
    """That of the first owner."""

    def encode(self) -> bytes:
        """Return the change."""
        _, owners, row, block = self
        head = _HEAD.pack(ALIKE, len(owners), len(row), len(block))
        return b"".join((head, struct.pack(f"<{len(owners)}I", *owners), row, block))


def volume(changes: bytes, at: int) -> tuple[int, int]:
    """Return how many bytes and values the change at `at` puts."""
    _, count, row_bytes, block_bytes = _HEAD.unpack_from(changes, at)
    return count * (row_bytes + block_bytes), 2 * count


def end_of(changes: bytes, at: int) -> int:
    """Return where the change ends that begins at `at`."""
    _, count, row_bytes, block_bytes = _HEAD.unpack_from(changes, at)
    return int(at + _HEAD.size + 4 * count + row_bytes + block_bytes)


def pairs(changes: bytes, at: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values that the change at `at` stands for. Cost: 2 µs an owner.

    Raises:
        CorruptionError: its block is none of the first owner.
    """
    _, count, row_bytes, block_bytes = _HEAD.unpack_from(changes, at)
    at += _HEAD.size
    owners = struct.unpack_from(f"<{count}I", changes, at)
    at += 4 * count
    row, block = changes[at : at + row_bytes], changes[at + row_bytes : at + row_bytes + block_bytes]
    found = None
    if len(block) >= HEADER.size:
        _, _, table, lane, _, _, first, *_ = HEADER.unpack_from(block)
        found = Content.of_block(block, BlockKey(table, owners[0], lane, first))
    if found is None:
        raise CorruptionError(f"a change of {count} queues at once is damaged: it holds no block of the first of them")
    content, previous = found
    block_of = content.blocks(table, lane, first, previous)
    for owner in owners:
        yield key_of(table, owner, lane, first), block_of(owner)
        yield key_of(table, owner, lane, LAST), row
