"""Messages that a cursor has read ahead of its members, from the live tail or the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

from qflow.errors import GapError, QflowError
from qflow.memory.line import Line
from qflow.message import offset_of
from qflow.storage.streams.partitions import Found, Hole, Piece
from qflow.streams.deliveries import Share
from qflow.streams.history import History
from qflow.streams.interest import Interest
from qflow.streams.part import Part
from qflow.streams.room import Room, Slab, charge_for

READ_BYTES = 256 * 1024
LEAST_READ_BYTES = 64 * 1024
BATCH_BYTES = 2**20
"""About the most bytes of messages in a batch."""
ALONE_BYTES = charge_for(1, 0)
"""Taken for a read where there is no room: it keeps one message, however many lie in its block."""


class ReadAhead:
    """See the module. Called under the cursor's lock; only `fetch` releases it meanwhile."""

    def __init__(
        self, history: History, interest: Interest, parts: list[Part], room: Room, lock: Any, line: Line
    ) -> None:
        self.parts = parts
        self.missed = 0
        """Messages that were gone before they were read."""
        self.freed = 0
        """Bytes that were reserved for a read, and not given back yet."""
        self._history = history
        self._interest = interest
        self._room = room
        self._lock = lock
        self._line = line
        self._turn = 0

    @property
    def ready(self) -> int:
        """How many messages were read and not taken."""
        return sum([part.ready for part in self.parts])

    @property
    def is_full(self) -> bool:
        """No more may be read ahead."""
        return sum([part.charged for part in self.parts]) >= BATCH_BYTES

    @property
    def is_reading(self) -> bool:
        """A thread is reading; it notifies the line when it is done."""
        return any(part.fetching is not None for part in self.parts)

    @property
    def has_more(self) -> bool:
        """There is something to read."""
        return any(map(Part.has_more, self.parts))

    @property
    def is_worth_a_look(self) -> bool:
        """There are messages to take or to read, or a gap to report."""
        return any(part.buffer or part.behind is not None or part.untold or part.has_more() for part in self.parts)

    def restart(self, positions: Iterable[int]) -> int:
        """Forget what was read ahead, and read on from these sequences; return the bytes that were charged."""
        charged = sum(part.charged for part in self.parts)
        for part, position in zip(self.parts, positions, strict=True):
            part.restart(position)
        return charged

    def part_to_read(self) -> Part | None:
        """Return a part with messages to read that no thread is reading; each in turn."""
        count = len(self.parts)
        for index in range(count):
            part = self.parts[(self._turn + index) % count]
            if part.fetching is None and part.behind is None and part.has_more():
                self._turn = (self._turn + index + 1) % count
                return part
        return None

    def room_for(self, getting: Any, wanted: int, *, least: bool) -> int:
        """Reserve memory for a read; return the bytes, 0 if there are none. With `least`, one message's even then.

        The get has them as `reserved`, until it reads or gives them back.
        """
        for amount in (READ_BYTES if wanted <= 256 else BATCH_BYTES, LEAST_READ_BYTES):
            if self._room.hold(amount, least=False, getting=getting):
                return amount
        if not least:
            return 0
        self._room.hold(ALONE_BYTES, least=True, getting=getting)
        return ALONE_BYTES

    def give_back(self, getting: Any) -> None:
        """Give back what a get has reserved."""
        self.freed += getting.reserved
        getting.reserved = 0
        if self.freed:
            self._room.settle(self)

    def is_in_memory(self, part: Part) -> bool:
        """Tell whether the next thing to read is in the live tail."""
        first, _ = part.next_to_read()
        return first in part.partition.tail.slabs

    def fetch(self, part: Part, getting: Any, most: int, check_open: Callable[[], None]) -> None:
        """Read on in a part, without the lock, and keep the messages unless a seek came meanwhile.

        What the get has `reserved` is for them; the rest is given back.
        """
        amount = getting.reserved
        claim = object()
        most = min(most, amount // charge_for(1, 0))  # small messages are charged more than their bytes
        found: Found | None = None
        charged = 0
        try:
            getting.reserved, part.fetching = 0, claim
            position, end = part.next_to_read()
            floor = part.partition.floor
            stop = min(end, part.doubtful) if floor <= position < part.doubtful else end
            slab = part.partition.tail.slabs.get(position)
            self._lock.release()
            try:
                if slab is None or slab.end > stop or position < floor:  # retention dropped it
                    found = self._history.read(part.partition.number, position, stop, amount, self._interest, most)
                    told = False
                else:  # a hint tells where the next matching commit is
                    found, told = self._found_in(slab), True
                if amount == ALONE_BYTES and sum(piece.messages for piece in found.pieces) > 1:
                    found, told = first_of(found), False
            except QflowError:
                check_open()  # if it was closed meanwhile, that is the reason
                raise
            finally:
                self._lock.acquire()
            if part.fetching is claim:
                charged = part.install(found)
                part.read_to(found.position, end, told=told)
        finally:
            if part.fetching is claim:
                part.fetching = None
            self.freed += amount - charged  # below 0 where a block, or a message, is larger than what was reserved
            self._room.settle(self)
            self._line.notify()

    def _found_in(self, slab: Slab) -> Found:
        records, topics = slab.records, list(slab.topics)
        times = [slab.time_ms] * len(records)
        sequences: Any = range(slab.first, slab.end)
        names = list(dict.fromkeys(topics))
        chosen = self._interest.choose(names)
        if chosen is not None:
            known = dict(zip(names, chosen, strict=True))
            picked = [known[topic] for topic in topics]
            records, topics, times, sequences = (
                list(compress(column, picked)) for column in (records, topics, times, sequences)
            )
        pieces = [Piece(slab.first, slab.end, sequences, records, topics, times)] if records else []
        return Found(pieces, None, slab.end, 0)

    def untold(self, skip: bool) -> list[GapError]:
        """Return what the next gets of a part are to raise: messages are gone, once those before are delivered.

        With `skip`, they are counted, and there is nothing.
        """
        for part in self.parts:
            if part.behind is not None and not part.buffer:
                self._count_gone(part, part.behind)
            if part.untold:
                if not skip:
                    return part.untold
                part.untold.clear()
        return []

    def _count_gone(self, part: Part, hole: Hole) -> None:
        """Turn the hole that is next into what is to be told of it."""
        first, end = offset_of(hole.start), offset_of(hole.end)
        gone = end - first - part.settled_in(hole.start, hole.end)
        gaps: tuple[GapError, ...] = ()
        if gone:
            text = (
                f"stream {self._history.name!r}, partition {part.partition.number}: messages {first} to {end - 1} "
                f"are gone ({hole.problem}); the next call goes on at {end}"
            )
            gaps = (GapError(text, partition=part.partition.number, first=first, end=end, messages=gone),)
        untold = part.untold
        # Nothing is called from here on, so that an interrupt finds all of it done, or nothing.
        part.behind = None
        self.missed += gone
        untold += gaps

    def take(self, most: int) -> list[Share]:
        """Return at most `most` messages that were read, from each part in turn."""
        shares: list[Share] = []
        parts, count = self.parts, len(self.parts)
        for index in range(count):
            part = parts[(self._turn + index) % count]
            while part.buffer and most > 0:
                taken = part.take(most)
                shares.append(taken)
                most -= len(taken.piece.records)
        return shares


def first_of(found: Found) -> Found:
    """Return the first message of what was read, and nothing of what is behind it."""
    piece = found.pieces[0].part(0, 1)
    return Found([piece], None, piece.end, found.decoded)
