"""A cursor's place in one partition: where it reads, what it has read ahead, and hints of publishers."""

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
"""Hints a live part keeps, one for each commit; with more, it is not live any more and reads all there is."""


class Part:
    """A cursor's place in one partition. Used under the cursor's lock, or the partition's where it says so."""

    __slots__ = (
        "behind", "buffer", "charged", "clear_to", "covered", "doubtful", "fetching", "head", "hints", "lane", "live",
        "partition", "position", "ready", "seen", "skips", "wake",
    )  # fmt: skip

    def __init__(self, wake: Callable[[], None], partition: Partition, position: int, lane: Lane | None) -> None:
        self.wake = wake
        """Wakes a waiting get of the cursor."""
        self.partition = partition
        self.lane = lane
        """The lane of the log that records what is settled; None for a cursor that is not durable."""
        self.position = self.covered = position
        """All sequences below `position` were read; those below `covered` belong to a piece that was read."""
        self.buffer: deque[Share] = deque()
        """Messages read ahead; `head` of the first share are taken already."""
        self.head = self.ready = self.charged = 0
        """`ready`: messages left in the buffer; `charged`: bytes that the ledger counts for them."""
        self.behind: Hole | None = None
        """Messages that are gone, which no get has reported yet."""
        self.fetching: object | None = None
        self.skips: list[tuple[int, int]] = []
        """Ranges above the floor that were settled when the cursor was opened."""
        self.doubtful = 0
        """Sequences below may have been delivered before."""
        self.seen = 0
        """Sequences below were delivered, or passed over."""
        self.live = False
        self.hints: deque[int] = deque()
        self.clear_to = position
        """With `live` and `hints` under the partition's lock: nothing below is left to be read. A hint is the first
        sequence of a commit that holds a matching message."""

    def come(self, first: int) -> None:
        """Note that a commit from this sequence on holds a matching message. Under the partition's lock."""
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
        """Return (first sequence to read, end of what is confirmed); call `read_to` after reading."""
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

        The rest is read next, unless hints say where the next matching message is (`told`).
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
        """Return the sequence below which all matching messages were taken; None while some are read ahead."""
        if self.buffer or self.fetching is not None or self.behind is not None:
            return None
        return self.unread() if self.live else self.position

    def unread(self) -> int:
        """Return the first sequence that was neither read nor passed over, at most that of the next publish."""
        with self.partition.lock:
            if self.live:
                return self.hints[0] if self.hints else self.partition.next
            return max(self.position, self.clear_to)

    def lag(self) -> int:
        """Return how many retained messages, of all topics, were neither taken nor passed over."""
        place = self.unread()
        if self.buffer:
            sequences = self.buffer[0].piece.sequences
            place = sequences[self.head - 1] + 1 if self.head else sequences[0]
        end = self.partition.next
        place = max(place, self.partition.floor)  # what retention dropped is not delivered
        return max(0, end - place) - self.settled_in(place, end)

    def restart(self, position: int) -> None:
        """Read on from another sequence and forget what was read ahead; the caller gives `charged` of it back."""
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
        """Add to the buffer what was read; return the bytes charged for it."""
        covered, charged = self.covered, 0
        shares: list[Share] = []
        for read in found.pieces:
            piece = read._replace(start=covered) if covered < read.start else read
            left = without_settled(piece, self.skips) if self.skips else piece
            if left is not None:  # else the next piece covers its range
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
        """Return at most `most` messages from the buffer. Cost: O(messages returned)."""
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
        """Return how many messages in [start, end) were settled when the cursor was opened."""
        return sum(max(0, min(end, high) - max(start, low)) for low, high in self.skips)

    def first_ready(self) -> int | None:
        """Return the sequence of the first message in the buffer; None if it is empty."""
        return self.buffer[0].piece.sequences[self.head] if self.buffer else None


def _end_of(skip: tuple[int, int]) -> int:
    return skip[1]


def without_settled(piece: Piece, skips: list[tuple[int, int]]) -> Piece | None:
    """Return a piece without settled messages, covering the same range; None if all of it was settled."""
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
