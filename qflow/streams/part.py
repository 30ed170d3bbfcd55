"""A cursor's place in one partition: where it reads, what it has read ahead, and hints of publishers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import compress
from operator import itemgetter
from typing import Any

from qflow.delivery import MAY_BE_REPEATED
from qflow.errors import GapError
from qflow.storage.log.transaction_log import Lane
from qflow.storage.streams.partitions import Found, Hole, Piece
from qflow.streams.deliveries import Share
from qflow.streams.partition import Partition

HINTS = 128
"""A live part that is behind by twice as many commits is not live any more, and reads all there is."""
_first_of, _end_of = itemgetter(0), itemgetter(1)  # of a range


class Stretch:
    """Some commits in which a filter found something, one behind the other."""

    __slots__ = ("firsts", "following", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.firsts: list[int] = []
        """The first sequence of each."""
        self.following: int | None = None
        """The first one of the next stretch."""


class Hints:
    """The newest commits of a partition in which a filter found something; all under the partition's lock.

    Several cursors read them. Each keeps the stretch it is in, so it knows what comes next, however far it is behind.
    """

    __slots__ = ("_before", "_open")

    def __init__(self) -> None:
        self._open = Stretch(0)
        self._before: Stretch | None = None

    def here(self) -> Stretch:
        """Return the stretch that the next commit belongs to."""
        if len(self._open.firsts) >= HINTS:
            self._before, self._open = self._open, Stretch(self._open.number + 1)
        return self._open

    def add(self, first: int) -> None:
        """Have one more, the newest. Cost: 0.2 µs."""
        stretch = self.here()
        if not stretch.firsts and self._before is not None:
            self._before.following = first
        stretch.firsts.append(first)

    def behind(self, stretch: Stretch) -> Stretch | None:
        """Return the stretch behind one that has one; None if it is not kept any more."""
        for kept in (self._before, self._open):
            if kept is not None and kept.number == stretch.number + 1:
                return kept
        return None


class Part:
    """A cursor's place in one partition. Used under the cursor's lock, or the partition's where it says so."""

    __slots__ = (
        "again", "behind", "buffer", "charged", "clear_to", "covered", "doubtful", "fetching", "head", "hints", "lane",
        "live", "partition", "position", "ready", "seen", "skips", "stretch", "untold",
    )  # fmt: skip

    def __init__(self, partition: Partition, position: int, lane: Lane | None, hints: Hints) -> None:
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
        """Messages that are gone, once those before are taken."""
        self.untold: list[GapError] = []
        """Of messages that are gone and were counted: what the next gets raise. A get that is given up puts it back."""
        self.fetching: object | None = None
        self.skips: list[tuple[int, int]] = []
        """Ranges that were settled out of order when the cursor was opened, and around which others may come back."""
        self.doubtful = 0
        """Sequences below may have been delivered before."""
        self.seen = 0
        """Sequences below were delivered, or passed over."""
        self.live = False
        """Under the partition's lock, as what follows: it has read all there was, and hints tell what came since."""
        self.hints = hints
        self.stretch = hints.here()
        self.clear_to = 0
        """Nothing is below it that it wants: where it found that the hints behind its stretch are gone."""
        self.again: int | None = None
        """Where a live part has stopped in what it was to read."""

    def follow(self, hints: Hints) -> None:
        """Be told where to look by these from now on, once it is live."""
        with self.partition.lock:
            self.hints, self.live, self.again = hints, False, None

    def has_more(self) -> bool:
        """Tell whether there is something to read; if not, the part is live."""
        partition = self.partition
        with partition.lock:
            place = self._look()
            if place is None:
                return False
            if not self.live and place >= partition.next:
                self.live, self.again, self.stretch = True, None, self.hints.here()
                return False
            return True

    def next_to_read(self) -> tuple[int, int]:
        """Return (first sequence to read, end of what is confirmed); call `read_to` after reading."""
        partition = self.partition
        with partition.lock:
            place, end = self._look(), partition.next
            return end if place is None else place, end

    def read_to(self, position: int, end: int, *, told: bool) -> None:
        """Note that everything below `position` was read, of what was to be read up to `end`.

        The rest is read next, unless hints say where the next matching message is (`told`).
        """
        with self.partition.lock:
            self.again = position if position < end and not told else None

    def _look(self) -> int | None:
        """Return the next sequence to read; None if it is live, and no match came. Under the partition's lock."""
        position = self.position
        while self.live:
            if self.again is not None:
                return max(self.again, position)
            firsts, following = self.stretch.firsts, self.stretch.following
            index = bisect_left(firsts, position)
            if index < len(firsts):
                return firsts[index]
            if following is None:
                return None
            behind = self.hints.behind(self.stretch)
            if behind is None:
                self.live, self.clear_to = False, following
            else:
                self.stretch = behind
        return max(position, self.clear_to)

    def clear(self) -> int | None:
        """Return the sequence below which all matching messages were taken; None while some are read ahead."""
        if self.buffer or self.fetching is not None or self.behind is not None or self.untold:
            return None
        return self.unread()

    def unread(self) -> int:
        """Return the first sequence that was neither read nor passed over, at most that of the next publish."""
        return self.next_to_read()[0]

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
        self.skips, self.untold = [], []
        self.buffer.clear()
        self.head = self.ready = self.charged = 0
        self.behind = None
        self.position = self.covered = position
        with self.partition.lock:
            self.live, self.again, self.clear_to = False, None, 0

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
        skips, passed = self.skips, 0
        if skips and self.lane is not None:
            passed = bisect_right(skips, min(covered, self.lane.row.floor), key=_end_of)
        # Nothing is called from here on, so that an interrupt finds all of it done, or nothing.
        self.covered, self.position, self.behind = covered, position, hole
        self.ready, self.charged = ready, self.charged + charged
        self.buffer += shares
        del skips[:passed]
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
        return sum(min(end, high) - max(start, low) for low, high in touching(self.skips, start, end))


def touching(skips: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges of which some is in [start, end)."""
    return skips[bisect_right(skips, start, key=_end_of) : bisect_left(skips, end, key=_first_of)]


def without_settled(piece: Piece, skips: list[tuple[int, int]]) -> Piece | None:
    """Return a piece without settled messages, covering the same range; None if all of it was settled."""
    settled = touching(skips, piece.start, piece.end)
    if not settled:
        return piece
    sequences = piece.sequences
    keep = [True] * len(sequences)
    for first, end in settled:
        start, stop = bisect_left(sequences, first), bisect_left(sequences, end)
        keep[start:stop] = [False] * (stop - start)
    if not any(keep):
        return None
    columns: list[list[Any]] = [list(compress(column, keep)) for column in piece[2:]]
    return Piece(piece.start, piece.end, *columns)
