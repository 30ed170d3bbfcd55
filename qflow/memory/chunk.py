"""A chunk: messages of a schedule that were, or are being, moved to the spill store together.

A chunk is *moving* from when it is claimed at the far end of its schedule until it is installed: its groups are still
in memory and can be taken back. Then it is *spilled*: it knows where its messages lie, in which order and what they
weigh, but not when each is due; only when the next one is due at the earliest.

In the spill store each record is wrapped: its due time (8 bytes) and tag (5) stand before it. This form never outlives
the process.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from operator import add, gt
from typing import Any

from qflow.memory.group import GROUP_BYTES, GROUP_MESSAGES, Group
from qflow.message import OVERHEAD_BYTES
from qflow.named_tuples import NamedTuple

CHUNK_BYTES = 1024
"""Charged for each spilled chunk on top of its sequences: 790 where its slots are one range, 110 for each one more."""
SEQUENCE_BYTES = 8
"""Charged for each spilled message."""
CHUNK_MESSAGES = 65_536
"""Chunks are not joined to more: what is left of a chunk's sequences is copied with each piece restored."""
WRAPPING_BYTES = 13
_TAG_BITS = 40
_TAG_MASK = (1 << _TAG_BITS) - 1


def index_charge(count: int) -> int:
    """Return what is charged for a spilled chunk of so many messages."""
    return CHUNK_BYTES + SEQUENCE_BYTES * count


class Unpacked(NamedTuple):
    """What the leading wrapped records of a chunk are: to be installed if the claim still stands."""

    messages: int
    """How many were read, the lost ones included."""
    groups: list[Group]
    lost: list[int]
    """Sequences of those that could not be read."""
    message_bytes: int
    due_ms: int
    """What is left of the chunk is not due before."""


class Weight:
    """What the messages of some chunks weigh together: of one, or of those that were cut from one."""

    __slots__ = ("chunks", "message_bytes")

    def __init__(self, message_bytes: int) -> None:
        self.message_bytes = message_bytes
        """Without wrapping. A lost message's bytes stay counted as long as one of the chunks lives."""
        self.chunks = 1


class Chunk:
    """See the module."""

    __slots__ = (
        "bound",
        "claim",
        "count",
        "cut",
        "first",
        "groups",
        "largest",
        "last_due_ms",
        "sequences",
        "slots",
        "smallest",
        "weight",
    )

    def __init__(self, first: int, groups: list[Group], count: int, message_bytes: int, cut: bool) -> None:
        self.first = first
        """Position of its first message: the number that it has in the spill store. The others follow without gaps."""
        self.groups = groups
        """In order; none once it is spilled."""
        self.cut = cut
        """The first group was cut off one that stayed in its place, and is not charged as one more."""
        self.claim: object | None = None
        self.count = count
        """Messages it holds; the lost ones are gone from it."""
        self.weight = Weight(message_bytes)
        self.bound = groups[0][:2]
        """(due time, sequence): none of its messages comes before."""
        self.last_due_ms = groups[-1][0]
        self.largest = self.smallest = 0
        """Bytes of the largest and the smallest wrapped record it ever held."""
        self.sequences: array[int] = array("Q")
        """One a message, in order of (due time, sequence)."""
        self.slots: Any = None
        """Where the wrapped records lie; None while it is moving."""

    @property
    def charged(self) -> int:
        """What the records of a moving chunk cost in memory, without their groups."""
        return self.weight.message_bytes + OVERHEAD_BYTES * self.count

    @property
    def groups_bytes(self) -> int:
        """What is charged for the groups of a moving chunk."""
        return GROUP_BYTES * (len(self.groups) - self.cut)

    def goes_on_with(self, chunk: Chunk) -> bool:
        """Tell whether another chunk goes on where this one ends, in the spill store and in time."""
        return (
            self.claim is None
            and self.first + self.count == chunk.first
            and self.count + chunk.count <= CHUNK_MESSAGES
            and (self.last_due_ms, self.sequences[-1]) < chunk.bound
        )

    def packed(self) -> list[bytes]:
        """Return the wrapped records of a moving chunk, in order. Needs no lock. Cost: 0.2 to 0.6 µs a message."""
        heads: list[bytes] = []
        records: list[bytes] = []
        sequences: list[int] = []
        for due_ms, first, tag, *members in self.groups:
            head = (due_ms << _TAG_BITS | tag).to_bytes(WRAPPING_BYTES, "big")
            if len(members) == 1:
                heads.append(head)
                sequences.append(first)
            else:
                heads += [head] * len(members)
                sequences += range(first, first + len(members))
            records += members
        wrapped = list(map(add, heads, records))
        sizes = list(map(len, wrapped))
        self.largest, self.smallest = max(sizes), min(sizes)
        self.sequences = array("Q", sequences)
        return wrapped

    def unpacked(self, pieces: Sequence[bytes | None]) -> Unpacked:
        """Return the messages that the leading wrapped records are, None being one that is lost.

        Needs no lock, as long as the claim stands. Cost: 0.2 to 0.6 µs a message.
        """
        groups: list[Group] = []
        lost: list[int] = []
        records: list[bytes] = []
        head = b""
        number = first = following = -1
        message_bytes = 0
        for sequence, piece in zip(self.sequences, pieces, strict=False):
            if piece is None:
                lost.append(sequence)
                continue
            record = piece[WRAPPING_BYTES:]
            if sequence == following and piece[:WRAPPING_BYTES] == head and len(records) < GROUP_MESSAGES:
                records.append(record)
            else:
                if records:
                    groups.append((number >> _TAG_BITS, first, number & _TAG_MASK, *records))
                head = piece[:WRAPPING_BYTES]
                number = int.from_bytes(head, "big")
                first = sequence
                records = [record]
            following = sequence + 1
            message_bytes += len(record)
        if records:
            groups.append((number >> _TAG_BITS, first, number & _TAG_MASK, *records))
        due_ms = self._due_after(pieces, number >> _TAG_BITS)
        return Unpacked(len(pieces), groups, lost, message_bytes, due_ms)

    def _due_after(self, pieces: Sequence[bytes | None], last_due_ms: int) -> int:
        """Return when the message after these is due at the earliest.

        So a message that was restored always comes before what is left of its chunk, and can be delivered.
        """
        place = len(pieces)
        while place and pieces[place - 1] is None:
            place -= 1
        due_ms = last_due_ms if place else self.bound[0]
        return due_ms + rises(self.sequences[max(place, 1) - 1 : len(pieces) + 1])

    def divided(self, index: int, due_ms: int) -> tuple[Chunk, array[int], Any]:
        """Return a chunk with what lies from `index` on in a spilled one; and sequences and slots of what lies before.

        This one is left as it is, but that both share their weight from now on.

        Args:
            due_ms: the message there is not due before.
        """
        before, slots = self.slots.take(index)
        right = copy(self)
        right.first += index
        right.count -= index
        right.sequences, right.slots = self.sequences[index:], slots
        right.bound = due_ms, right.sequences[0]
        return right, self.sequences[:index], before

    def readable(self, room_bytes: int) -> int:
        """Return how much may be read (`SpillArea.read` counts it) so that what is restored fits into so much room."""
        least = self.smallest + OVERHEAD_BYTES
        return room_bytes * least // (least - WRAPPING_BYTES + GROUP_BYTES)

    def __repr__(self) -> str:
        place = "moving" if self.slots is None else "spilled"
        claimed = ", claimed" if self.claim is not None else ""
        return f"<Chunk {place} at {self.first}, {self.count} messages from {self.bound}{claimed}>"


def rises(sequences: array[int]) -> int:
    """Return by how much the due time rises at least from the first of these to the last, in the order of a chunk.

    A sequence lower than the one before it tells that the due time is higher. Cost: 0.03 µs each.
    """
    return sum(map(gt, sequences, sequences[1:]))
