"""What the members of a cursor hold: batches, with their leases, and what comes back. Under the cursor's lock."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from functools import partial
from typing import Any

from qflow.delivery import ONE_ATTEMPT
from qflow.errors import AlreadySettled, BrokerClosed, QflowError, StreamDeleted
from qflow.memory.line import Line
from qflow.streams.batches import StreamBatch
from qflow.streams.deliveries import Share, root_of
from qflow.streams.part import Part
from qflow.streams.shared import Shared


class Held:
    """See the module."""

    def __init__(self, name: str, owner: int, lock: Any, line: Line, shared: Shared) -> None:
        self.name = name
        """The stream's name, which deliveries return as `queue`."""
        self.owner = owner
        """The cursor's number in the log; 0 if it is not durable, and nothing of it is logged."""
        self.members: dict[Any, None] = {}
        """Subscriptions that have the cursor open."""
        self.ended: type[QflowError] | None = None
        self.batches: dict[StreamBatch, float | None] = {}
        """What is held, and when its lease ends on the monotonic clock; None = without end."""
        self.ahead: dict[StreamBatch, int] = {}
        """Batches that an iteration returns one message at a time, with `returned.came` as it got them."""
        self.unsettled = 0
        self.returned = Returned(shared.monotonic)
        self.freed = 0
        """Bytes that are charged for nothing any more, and not given back yet."""
        self.starved = False
        """A get found no memory for its messages; it is woken when there is some."""
        self.delivered_total = self.acked_total = self.redelivered_total = 0
        self.lock = lock
        self.line = line
        """The line of waiting gets, where whoever wakes one has it wake the next if it leaves something."""
        self.ledger = shared.room.ledger
        self._room = shared.room
        self._monotonic = shared.monotonic
        self._lease_at = math.inf
        """The earliest time at which a lease may end."""

    # Who may hold ----------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.ended is BrokerClosed:
            raise BrokerClosed(f"the broker of stream {self.name!r} is closed: open the spool again")
        if self.ended is not None:
            raise StreamDeleted(f"stream {self.name!r}, or this subscription of it, was deleted: declare it again")

    def check(self, batch: StreamBatch, index: int | None = None) -> bool:
        """Tell whether a message of a batch, or all of it, can be settled; False if that does nothing, after a seek.

        Raises:
            AlreadySettled: it was settled, or taken back. BrokerClosed, StreamDeleted.
        """
        if index in batch.taken:
            return False
        if batch in self.batches:
            return True
        if not batch.total or (index is None and batch.taken) or self.ended is StreamDeleted:
            return False
        self.check_open()
        raise AlreadySettled(f"this batch of stream {self.name!r} was settled, or went back, before")

    # For how long ----------------------------------------------------------------------------------------------------

    def give(self, batch: StreamBatch) -> None:
        """Note that a member holds a batch from now on."""
        self.lease(batch)
        self.unsettled += batch.total
        self.delivered_total += batch.total

    def lease(self, batch: StreamBatch) -> None:
        """Begin the lease of a batch, or begin it anew."""
        timeout_s = batch.member.ack_timeout_s
        self._hold_until(batch, None if timeout_s is None else self._monotonic() + timeout_s)

    def extend(self, batch: StreamBatch, seconds: float) -> None:
        """Let a batch be held longer, never shorter."""
        until = self.batches[batch]
        if until is not None:
            self._hold_until(batch, max(until, self._monotonic() + seconds))

    def _hold_until(self, batch: StreamBatch, until: float | None) -> None:
        self.batches[batch] = until
        if until is not None:
            self._lease_at = min(self._lease_at, until)

    def patience(self, now: float, most: float | None) -> float:
        """Return the seconds until a lease or a delay ends, which wakes no waiting get; at most `most`."""
        wait = min(self._lease_at, self.returned.due) - now
        return max(0.001, wait if most is None else min(wait, most))

    def expire(self, now: float) -> None:
        """Put back messages whose lease has ended, and make those available whose delay has ended."""
        self.returned.ripen(now)
        if now >= self._lease_at:
            for batch in [batch for batch, until in self.batches.items() if until is not None and until <= now]:
                self.put_back(batch)
            self._lease_at = min((until for until in self.batches.values() if until is not None), default=math.inf)

    # What goes back --------------------------------------------------------------------------------------------------

    def put_back(
        self, batch: StreamBatch, index: int | None = None, delay_s: float = 0.0, *, is_seen: bool = True
    ) -> None:
        """Put one message of a batch, or all that is left, back in its place, if it is still held.

        It is delivered again, and counts as that if it `is_seen`; what an iteration has not returned never does.
        Where a commit is under way that settles some of the batch, it goes back when that has ended.
        """
        if batch.leaving:
            batch.later.append(partial(self.put_back, batch, index, delay_s, is_seen=is_seen))
            return
        if batch not in self.batches or (index is not None and batch.is_settled(index)):
            return
        if index is None:
            seen = batch.shown if batch.shown is not None else batch.total if is_seen else 0
            self._return(batch, batch.left_shares(0, seen), delay_s, repeated=True)
            self._return(batch, batch.left_shares(seen), 0.0, repeated=False)
            batch.settled = None
        else:
            self._return(batch, [batch.share_at(index)], delay_s, repeated=True)
            batch.note_settled([index])
        self._tidy(batch)
        self.line.notify()

    def put_back_all(self, member: Any) -> None:
        """Put back all that a member holds which was closed."""
        for batch in [batch for batch in self.batches if batch.member is member]:
            self.put_back(batch)

    def put_back_unshown(self, taker: object) -> None:
        """Put back what an iteration has acquired and not returned, before another get of the same thread or task."""
        for batch in self.ahead_of(taker):
            assert batch.shown is not None
            shares = batch.left_shares(batch.shown)
            if shares:
                self._return(batch, shares, 0.0, repeated=False)
                batch.note_settled(range(batch.shown, batch.total))
                self._tidy(batch)

    def ahead_of(self, taker: object) -> list[StreamBatch]:
        """Return the batches that iterations of a thread or task have."""
        return [batch for batch in self.ahead if root_of(batch.taker) == taker]

    def unshown(self) -> list[Share]:
        """Return what iterations have acquired and not returned yet."""
        return [share for batch in self.ahead for share in batch.left_shares(batch.shown or 0)]

    def not_shown(self) -> list[Share]:
        """Return all that left the buffers and is still to be got: what came back, and `unshown`."""
        return self.returned.shares() + self.unshown()

    def leave_part(self, part: Part) -> int:
        """Take back what is held of one partition; return the bytes charged for what had come back from it."""
        charged = self.returned.drop(part)
        for batch in list(self.batches):
            self.unsettled -= batch.take_part(part)
            if not batch.unsettled:
                self._tidy(batch)
        return charged

    def forget(self) -> int:
        """Forget everything; return the bytes that were charged for it."""
        charged = sum(batch.charged for batch in self.batches) + self.returned.drop() + self.freed
        self.freed = 0
        for batch in self.batches:
            batch.settled = None
        self.batches, self.ahead, self.unsettled = {}, {}, 0
        return charged

    def _return(self, batch: StreamBatch, shares: list[Share], delay_s: float, *, repeated: bool) -> None:
        """Put a part of a batch in its place; with `repeated`, its delivery counts."""
        for part, piece, marks in shares:
            share = Share(part, piece, marks + ONE_ATTEMPT if repeated else marks)
            count = len(piece.records)
            self.unsettled -= count
            batch.charged -= share.charged
            if repeated:
                self.redelivered_total += count
            else:
                self.delivered_total -= count
            self.returned.add(share, self._monotonic() + delay_s if delay_s else None)
            self.returned.came += repeated and not delay_s

    # What is settled -------------------------------------------------------------------------------------------------

    def settle(self, batch: StreamBatch, indexes: list[int] | None) -> None:
        """Count messages of a batch as settled, but for those that were before; None = all that is left."""
        if indexes is None:
            fresh, batch.settled = batch.unsettled, None
        else:
            fresh = batch.note_settled(indexes)
        self.unsettled -= fresh
        self.acked_total += fresh
        self._tidy(batch)
        if batch.settled is None:
            batch.let_go()

    def settle_previous(self, taker: object) -> None:
        """Settle what a thread or task got before: without a name, asking for more does that, and nothing is logged."""
        for batch in [batch for batch in self.batches if root_of(batch.taker) == taker and not batch.bound]:
            self.settle(batch, None)

    def _tidy(self, batch: StreamBatch) -> None:
        """Forget a batch of which nothing is left, or have it let go of what is settled; give back its memory.

        One that is forgotten still has its messages: a get may be about to return it. Who settles it lets go of them.
        """
        if batch.settled is None or not batch.unsettled:
            batch.settled = None
            self.freed += batch.charged  # no call between: an interrupt finds both done, or none
            del self.batches[batch]
            self.ahead.pop(batch, None)
        elif batch.unsettled <= batch.lets_go_at:
            self.freed += batch.let_go()
        self.give_memory_back()
        if self.starved:  # there is more room than before
            self.starved = False
            self.line.notify_all()

    def give_memory_back(self) -> None:
        """Give back what was charged for messages of batches that are settled."""
        if self.freed:  # below 0: pieces that are left of batches of which the rest went back
            self._room.settle(self)


class Returned:
    """Messages that came back, to be delivered again: at once, or after a delay."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.came = 0
        """How often messages became available that had been delivered: they come before what is read ahead."""
        self.messages = 0
        """Messages that can be delivered now."""
        self.later: list[tuple[float, int, Share]] = []  # (due time, number, share)
        self._again: list[tuple[int, int, Share]] = []  # (first sequence, number, share)
        self._number = 0

    def add(self, share: Share, due: float | None = None) -> None:
        """Put a share back in its place; not to be delivered before `due`, if given."""
        self._number += 1
        if due is None:
            insort(self._again, (share.piece.start, self._number, share))
            self.messages += len(share.piece.records)
        else:
            insort(self.later, (due, self._number, share))

    def ripen(self, now: float) -> None:
        """Make the shares available whose delay has ended."""
        while self.later and self.later[0][0] <= now:
            self.add(self.later.pop(0)[2])
            self.came += 1

    def overtakes(self, came: int | None) -> bool:
        """Tell whether more became available than `came`, or is due. Takes no lock."""
        return came != self.came or any(due <= self._monotonic() for due, _, _ in self.later[:1])

    @property
    def due(self) -> float:
        """When the next delay ends, on the monotonic clock."""
        return self.later[0][0] if self.later else math.inf

    def take(self, most: int) -> list[Share]:
        """Return shares that can be delivered now, of at most `most` messages."""
        shares: list[Share] = []
        while self._again and most > 0:
            share = self._again.pop(0)[2]
            piece = share.piece
            count = len(piece.records)
            self.messages -= count
            if count > most:
                self.add(share._replace(piece=piece.part(most, count)))
                share = share._replace(piece=piece.part(0, most))
            shares.append(share)
            most -= count
        return shares

    def shares(self) -> list[Share]:
        """Return all shares."""
        return [share for _, _, share in (*self._again, *self.later)]

    def drop(self, part: Part | None = None) -> int:
        """Forget the shares of a part, or all; return the bytes that were charged."""
        charged = sum(share.charged for share in self.shares() if part is None or share.part is part)
        self._again = [one for one in self._again if part is not None and one[2].part is not part]
        self.later = [one for one in self.later if part is not None and one[2].part is not part]
        self.messages = sum(len(share.piece.records) for _, _, share in self._again)
        return charged

    def __bool__(self) -> bool:
        return bool(self._again or self.later)
