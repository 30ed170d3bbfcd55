"""A cursor's place in one partition: where it reads, what it has read ahead, and where it was told to look."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from itertools import compress, takewhile
from typing import Any

from qflow.delivery import MAY_BE_REPEATED
from qflow.storage.log.transaction_log import Lane
from qflow.storage.streams.partitions import Found, Hole, Piece
from qflow.streams.deliveries import Share
from qflow.streams.partition import Partition

HINTS = 1024
"""A live part that is behind by more commits is live no more: it reads on as one that replays."""


class Part:
    """A cursor's place in one partition. Under the cursor's lock, but what is said to be under the partition's."""

    __slots__ = (
        "behind", "buffer", "charged", "clear_to", "covered", "doubtful", "fetching", "head", "hints", "lane", "live",
        "partition", "position", "ready", "seen", "skips", "wake",
    )  # fmt: skip

    def __init__(self, wake: Callable[[], None], partition: Partition, position: int, lane: Lane | None) -> None:
        self.wake = wake
        """Has the cursor look again."""
        self.partition = partition
        self.lane = lane
        """Where what is settled is logged; None for a cursor that is not durable."""
        self.position = self.covered = position
        """Everything below has been read; everything below `covered` is in a piece that was."""
        self.buffer: deque[Share] = deque()
        """What was read ahead; of the first share, `head` messages are taken already."""
        self.head = self.ready = self.charged = 0
        """How many messages are left of it, and what they are charged."""
        self.behind: Hole | None = None
        """Messages that are gone, and somebody has to be told."""
        self.fetching: object | None = None
        self.skips: list[tuple[int, int]] = []
        """What was settled above the floor when the cursor was opened."""
        self.doubtful = 0
        """What is below it may have been delivered before."""
        self.seen = 0
        """What is below it was delivered, or passed over."""
        self.live = False
        self.hints: deque[int] = deque()
        self.clear_to = position
        """Under the partition's lock: where something comes that is wanted; nothing is below `clear_to`."""

    def come(self, first: int) -> None:
        """Something wanted was committed. Under the partition's lock."""
        if self.live:
            if len(self.hints) >= HINTS:
                self.live = False
                self.clear_to = self.hints[0]
                self.hints.clear()
            else:
                self.hints.append(first)

    def has_more(self) -> bool:
        """Tell whether there is something to read; if not, the part is live."""
        partition = self.partition
        with partition.lock:
            if self.live:
                return bool(self.hints)
            if max(self.position, self.clear_to) < partition.next:
                return True
            self.live = True
            return False

    def next_to_read(self) -> tuple[int, int]:
        """Return from where to read, and where what is confirmed ends. `read_to` tells how far that went."""
        partition = self.partition
        with partition.lock:
            end = partition.next
            position = max(self.position, self.clear_to)
            if self.live:
                hints = self.hints
                while hints and hints[0] < position:
                    hints.popleft()
                position = max(position, hints[0] if hints else end)
            return position, end

    def read_to(self, position: int, end: int, *, told: bool) -> None:
        """Note that everything below `position` was read, of what was to be read up to `end`.

        Unless hints tell where the next message is that is wanted (`told`), the rest comes next.
        """
        with self.partition.lock:
            if self.live:
                hints = self.hints
                while hints and hints[0] < position:
                    hints.popleft()
                if position < end and not told and not (hints and hints[0] == position):
                    hints.appendleft(position)
            elif position < end and not told:
                self.clear_to = min(self.clear_to, position)

    def clear(self) -> int | None:
        """Return below which sequence nothing is wanted that was not taken; None while something is read ahead."""
        if self.buffer or self.fetching is not None or self.behind is not None:
            return None
        return self.unread() if self.live else self.position

    def unread(self) -> int:
        """Return the first sequence that was neither read nor passed over; with nothing left, that of the next one."""
        with self.partition.lock:
            if self.live:
                return self.hints[0] if self.hints else self.partition.next
            return max(self.position, self.clear_to)

    def lag(self) -> int:
        """Return how many messages, of all topics, are there that were neither taken nor passed over."""
        place = self.unread()
        if self.buffer:
            sequences = self.buffer[0].piece.sequences
            place = sequences[self.head - 1] + 1 if self.head else sequences[0]
        end = self.partition.next
        place = max(place, self.partition.floor)  # what retention took does not come any more
        return max(0, end - place) - self.settled_in(place, end)

    def restart(self, position: int) -> None:
        """Read on from somewhere else; what was read ahead is forgotten, and what it was charged is returned."""
        self.fetching = None
        self.buffer.clear()
        self.head = self.ready = self.charged = 0
        self.behind = None
        self.position = self.covered = position
        with self.partition.lock:
            self.live = False
            self.hints.clear()
            self.clear_to = 0

    def install(self, found: Found) -> int:
        """Keep what was read; return what it is charged."""
        covered, charged = self.covered, 0
        shares: list[Share] = []
        for read in found.pieces:
            piece = read._replace(start=covered) if covered < read.start else read
            left = without_settled(piece, self.skips) if self.skips else piece
            if left is not None:  # else what follows covers it
                covered = piece.end
                share = Share(self, left, MAY_BE_REPEATED if left.sequences[0] < self.doubtful else 0)
                shares.append(share)
                charged += share.charged
        ready = self.ready + sum(len(share.piece.records) for share in shares)
        position = max(self.position, found.position)
        hole = self.behind if found.hole is None else found.hole
        # Nothing is called from here on but the last, so that an interrupt finds all of it done, or nothing.
        self.covered, self.position, self.behind = covered, position, hole
        self.ready, self.charged = ready, self.charged + charged
        self.buffer += shares
        if self.skips:
            del self.skips[: bisect_right(self.skips, self.covered, key=_end_of)]
        return charged

    def take(self, most: int) -> Share:
        """Return messages that were read ahead, at most so many of them. Cost: what it takes, not what is there."""
        whole = self.buffer[0]
        head, count = self.head, len(whole.piece.records)
        end = min(count, head + most)
        share = whole if not head and end == count else whole._replace(piece=whole.piece.part(head, end))
        charged = self.charged - share.charged
        seen = max(self.seen, share.piece.end)
        self.ready, self.charged, self.seen = self.ready - end + head, charged, seen
        if end < count:
            self.head = end
        else:
            self.head = 0
            self.buffer.popleft()
        return share

    def settled_in(self, start: int, end: int) -> int:
        """Return how many messages of a range were settled when the cursor was opened."""
        return sum(max(0, min(end, high) - max(start, low)) for low, high in self.skips)

    def first_ready(self) -> int | None:
        """Return the sequence of the next message that was read ahead."""
        return self.buffer[0].piece.sequences[self.head] if self.buffer else None


def _end_of(skip: tuple[int, int]) -> int:
    return skip[1]


def without_settled(piece: Piece, skips: list[tuple[int, int]]) -> Piece | None:
    """Return what is left of a piece, covering the same; None if all of it was settled."""
    low = bisect_right(skips, piece.start, key=_end_of)
    touching = list(takewhile(lambda skip: skip[0] < piece.end, skips[low:]))
    if not touching:
        return piece
    sequences = piece.sequences
    keep = [True] * len(sequences)
    for first, end in touching:
        start, stop = bisect_left(sequences, first), bisect_left(sequences, end)
        keep[start:stop] = [False] * (stop - start)
    if not any(keep):
        return None
    columns: list[list[Any]] = [list(compress(column, keep)) for column in piece[2:]]
    return Piece(piece.start, piece.end, *columns)
