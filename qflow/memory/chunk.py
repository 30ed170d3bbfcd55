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
from itertools import filterfalse
from operator import add
from typing import Any, NamedTuple

from qflow.memory.group import GROUP_BYTES, GROUP_MESSAGES, MESSAGES, Group
from qflow.message import OVERHEAD_BYTES, is_logged_message

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
    logged: int
    logged_bytes: int
    due_ms: int
    """What is left of the chunk is not due before."""


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
        "logged",
        "logged_bytes",
        "message_bytes",
        "sequences",
        "slots",
        "smallest",
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
        self.message_bytes = message_bytes
        """What its messages weigh without wrapping. A lost message's bytes stay counted as long as the chunk lives, and
        what remains of an empty chunk is theirs; so it is with `logged_bytes`, and with `logged`."""
        self.logged = self.logged_bytes = 0
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
        """What its records would cost in memory, without their groups."""
        return self.message_bytes + OVERHEAD_BYTES * self.count

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
        unlogged: list[bytes] = []
        for due_ms, first, tag, *members in self.groups:
            head = (due_ms << _TAG_BITS | tag).to_bytes(WRAPPING_BYTES, "big")
            if len(members) == 1:
                heads.append(head)
                sequences.append(first)
            else:
                heads += [head] * len(members)
                sequences += range(first, first + len(members))
            records += members
            if tag & MESSAGES:
                unlogged += filterfalse(is_logged_message, members)
        wrapped = list(map(add, heads, records))
        sizes = list(map(len, wrapped))
        self.largest, self.smallest = max(sizes), min(sizes)
        self.logged = len(records) - len(unlogged)
        self.logged_bytes = self.message_bytes - sum(map(len, unlogged))
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
        message_bytes = unlogged = unlogged_bytes = 0
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
            if number & MESSAGES and not is_logged_message(record):
                unlogged += 1
                unlogged_bytes += len(record)
            following = sequence + 1
            message_bytes += len(record)
        if records:
            groups.append((number >> _TAG_BITS, first, number & _TAG_MASK, *records))
        count = len(pieces)
        read = count - len(lost)
        due_ms = self._due_after(pieces, number >> _TAG_BITS)
        return Unpacked(count, groups, lost, message_bytes, read - unlogged, message_bytes - unlogged_bytes, due_ms)

    def _due_after(self, pieces: Sequence[bytes | None], last_due_ms: int) -> int:
        """Return when the message after these is due at the earliest.

        A sequence lower than the one before it tells that the due time is higher: so a message that was restored always
        comes before what is left of its chunk, and can be delivered.
        """
        sequences = self.sequences
        place = len(pieces)
        while place and pieces[place - 1] is None:
            place -= 1
        due_ms = last_due_ms if place else self.bound[0]
        for after in range(max(place, 1), min(len(pieces) + 1, len(sequences))):
            due_ms += sequences[after] < sequences[after - 1]
        return due_ms

    def readable(self, room_bytes: int) -> int:
        """Return how much may be read (`SpillArea.read` counts it) so that what is restored fits into so much room."""
        least = self.smallest + OVERHEAD_BYTES
        return room_bytes * least // (least - WRAPPING_BYTES + GROUP_BYTES)

    def __repr__(self) -> str:
        place = "moving" if self.slots is None else "spilled"
        claimed = ", claimed" if self.claim is not None else ""
        return f"<Chunk {place} at {self.first}, {self.count} messages from {self.bound}{claimed}>"
