"""The positions of a cursor: where it is in each partition, how far it is behind, and `seek`."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any

from qflow.errors import InvalidArgument
from qflow.memory.line import PAUSE_S
from qflow.memory.waiting import sheltered
from qflow.message import offset_of
from qflow.storage.log.rows import Row, Settled, clear_marks
from qflow.storage.log.transaction_log import Lane
from qflow.streams.claims import Claims
from qflow.streams.counting import count_matching
from qflow.streams.history import History
from qflow.streams.part import Part
from qflow.streams.room import QUIET_S
from qflow.streams.shared import Shared


class Positions:
    """See the module. Thread-safe; the lock and the line of waiting gets are the cursor's."""

    def __init__(self, history: History, topic_filter: str, parts: list[Part], claims: Claims, shared: Shared) -> None:
        self.moving = False
        """A seek is being written to the log; nothing is delivered meanwhile."""
        self._history = history
        self._filter = topic_filter
        self._parts = parts
        self._claims = claims
        self._held = claims.held
        self._log = shared.log
        self._room = shared.room

    @sheltered
    def positions(self) -> list[int]:
        """Return the next offset to be delivered, of each partition."""
        with self._held.lock:
            return [offset_of(self._position(part)) for part in self._parts]

    def _position(self, part: Part) -> int:
        if not self._held.members and part.lane is not None:
            return part.lane.row.floor
        waiting = [share.piece.sequences[0] for share in self._held.not_shown() if share.part is part]
        if part.buffer:
            waiting.append(part.buffer[0].piece.sequences[part.head])
        return min(waiting, default=part.unread())

    @sheltered
    def lag(self) -> int:
        """Return how many messages it is behind, of all topics; see `Subscription.lag`."""
        with self._held.lock:
            held = self._held
            spans = [(share.part, share.piece.sequences[0], share.piece.end) for share in held.returned.shares()]
            spans += [(share.part, share.piece.start, share.piece.end) for share in held.unshown()]
            not_shown: int = sum(end - start - part.settled_in(start, end) for part, start, end in spans)
            return not_shown + sum(map(Part.lag, self._parts))

    @sheltered
    def matching(self) -> int:
        """Return how many messages it is behind of those its filter matches; see `Subscription.stats`."""
        with self._held.lock:
            known = sum(len(share.piece.records) for share in self._held.not_shown())
            known += sum(part.ready for part in self._parts)
            spans = [(part.unread(), part.partition.next) for part in self._parts]
        history = self._history
        interest = history.interest(self._filter)  # not the cursor's, which another thread may be using
        return known + count_matching(self._log, history.owner, self._held.owner, spans, interest)

    @sheltered
    def seek(self, member: Any, positions: dict[int, int]) -> None:
        """Go on at these sequences, by partition; what is held of these partitions is taken back.

        Cost: durable, a commit.
        """
        moving = False
        try:
            with self._held.lock:
                self._wait_until_left()
                self._held.check_open()
                if member not in self._held.members:
                    raise InvalidArgument("the subscription is closed: subscribe again")
                moved = [(self._parts[number], place) for number, place in positions.items()]
                for part, place in moved:
                    self._leave_place(part, place)
                moving = self.moving = True
            self._claims.call_log()
            lanes = [(part.lane, place) for part, place in moved if part.lane is not None]
            if lanes:
                self._move(lanes)
        finally:
            if moving:
                with self._held.lock:
                    self.moving = False
                    self._held.line.notify_all()

    def _wait_until_moved(self) -> None:
        """Return when no other thread is at a seek. Lets go of the lock meanwhile."""
        while self.moving:
            self._held.lock.release()
            try:
                sleep(PAUSE_S)
            finally:
                self._held.lock.acquire()

    def _wait_until_left(self) -> None:
        """Return when neither a seek nor a commit is on its way that settles some of what is held; else as that one.

        A seek takes back what is held: a commit that settles it comes before, or finds it gone.
        """
        ends = monotonic() + QUIET_S  # an interrupt may have struck who began it
        self._wait_until_moved()
        while self._held.owner and any(batch.leaving for batch in self._held.batches) and monotonic() < ends:
            self._held.lock.release()
            try:
                self._log.drain()
                sleep(PAUSE_S)
            finally:
                self._held.lock.acquire()
            self._wait_until_moved()

    def _leave_place(self, part: Part, place: int) -> None:
        """Take back what is held of one partition, and read on there from `place`. Under the lock."""
        charged = part.charged + self._held.leave_part(part)
        part.restart(place)
        part.doubtful = max(part.doubtful, part.seen)
        self._room.let_go(charged)

    def _move(self, moved: list[tuple[Lane, int]]) -> None:
        """Write the new positions of a durable cursor, after all settles so far."""
        self._log.drain()
        before = [lane.row for lane, _ in moved]

        def write(txn: Any) -> None:
            for lane, place in moved:
                lane.row = Row(next=max(lane.row.next, place), floor=place)
                clear_marks(txn, lane.owner, lane.lane)

        try:
            self._log.commit(self._log.write(write, [lane for lane, _ in moved]))
        except BaseException:
            for (lane, _), row in zip(moved, before, strict=True):
                lane.row = row
            raise

    @sheltered
    def stand_still(self) -> None:
        """Return when no seek is being written."""
        with self._held.lock:
            self._wait_until_moved()

    @sheltered
    def recall(self, skips: list[list[tuple[int, int]]]) -> None:
        """Begin at the floors, given the ranges settled above them, by partition. Nobody has the cursor open."""
        with self._held.lock:
            for part, ranges in zip(self._parts, skips, strict=True):
                assert part.lane is not None
                part.doubtful = max(part.doubtful, part.seen)
                part.restart(part.lane.row.floor)
                part.skips = ranges

    def pass_over(self) -> list[tuple[Lane, list[Settled]]]:
        """Return settles of messages that the filter passed over, if nothing is held or came back. Under the lock."""
        settles: list[tuple[Lane, list[Settled]]] = []
        for part in self._parts:
            place = part.clear()
            if part.lane is not None and place is not None and place > part.covered:
                settles.append((part.lane, [Settled(part.covered, place, 0, 0)]))
                part.covered = place
        return settles
