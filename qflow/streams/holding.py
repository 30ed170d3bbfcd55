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


class Holding:
    """See the module."""

    def __init__(self, name: str, owner: int, lock: Any, line: Line, shared: Shared) -> None:
        self.name = name
        """The stream's name, which deliveries return as `queue`."""
        self.owner = owner
        """The cursor's number in the log; 0 if it is not durable, and nothing of it is logged."""
        self.members: dict[Any, None] = {}
        """Subscriptions that have the cursor open."""
        self.ended: type[QflowError] | None = None
        self.held: dict[StreamBatch, float | None] = {}
        """Batches that are held, and when their lease ends on the monotonic clock; None = without end."""
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

    # Giving: called with the lock ------------------------------------------------------------------------------------

    def give(self, batch: StreamBatch, now: float) -> None:
        """Note that a member holds a batch from now on."""
        self._lease(batch, now)
        self.unsettled += batch.total
        self.delivered_total += batch.total

    def _lease(self, batch: StreamBatch, now: float) -> None:
        timeout_s = batch.member.ack_timeout_s
        self._hold_until(batch, None if timeout_s is None else now + timeout_s)

    def _hold_until(self, batch: StreamBatch, until: float | None) -> None:
        self.held[batch] = until
        if until is not None:
            self._lease_at = min(self._lease_at, until)

    def patience(self, now: float, most: float | None) -> float:
        """Return the seconds until a lease or a delay ends, which wakes no waiting get; at most `most`."""
        wait = min(self._lease_at, self.returned.due) - now
        return max(0.001, wait if most is None else min(wait, most))

    def give_back(self, batch: StreamBatch) -> None:
        """Put back a batch that nobody has seen, if it is still held; it does not count as delivered."""
        if batch in self.held:
            self._return(batch, 0.0, repeated=False)

    def give_back_all(self, member: Any) -> None:
        """Put back all that a member holds which was closed."""
        for batch in [batch for batch in self.held if batch.member is member]:
            self._when_stays(batch, partial(self._return, batch, 0.0, repeated=True))

    def give_back_unshown(self, taker: object) -> None:
        """Put back what an iteration has acquired and not returned, before another get of the same thread or task."""
        for batch in [batch for batch in self.ahead if root_of(batch.taker) == taker]:
            assert batch.shown is not None
            shares = batch.left_shares(batch.shown)
            if shares:
                self._put_back(batch, shares, 0.0, repeated=False)
                batch.note_settled(range(batch.shown, batch.total))
                if not batch.unsettled:
                    self._drop(batch, 0)

    def settle_previous(self, taker: object) -> None:
        """Settle what a thread or task got before: without a name, asking for more does that, and nothing is logged."""
        for batch in [batch for batch in self.held if root_of(batch.taker) == taker and not batch.bound]:
            self._drop(batch, batch.unsettled)

    def unshown(self) -> list[Share]:
        """Return what iterations have acquired and not returned yet."""
        return [share for batch in self.ahead for share in batch.left_shares(batch.shown or 0)]

    def not_shown(self) -> list[Share]:
        """Return all that left the buffers and is still to be got: what came back, and `unshown`."""
        return self.returned.shares() + self.unshown()

    def forget(self) -> int:
        """Forget everything; return the bytes that were charged for it."""
        charged = sum(batch.charged for batch in self.held) + self.returned.drop() + self.freed
        self.freed = 0
        for batch in self.held:
            batch.settled = None
        self.held, self.ahead, self.unsettled = {}, {}, 0
        return charged

    def leave_part(self, part: Part) -> int:
        """Take back what is held of one partition; return the bytes charged for what had come back from it."""
        charged = self.returned.drop(part)
        for batch in list(self.held):
            self.unsettled -= len(batch.take_part(part))
            if batch.settled is not None and not batch.unsettled:
                self._drop(batch, 0)
        return charged

    def _when_stays(self, batch: StreamBatch, put_back: Callable[[], object]) -> None:
        """Put messages of a batch back; once it has ended, if a commit is under way that settles some of the batch."""
        if batch.leaving:
            batch.later.append(put_back)
        else:
            put_back()

    # Under the lock --------------------------------------------------------------------------------------------------

    def _check_held(self, batch: StreamBatch, *, whole: bool = True) -> bool:
        """Tell whether a batch can be settled; False if settling it does nothing any more, after a seek.

        Raises:
            AlreadySettled: it was settled, or taken back. BrokerClosed, StreamDeleted.
        """
        if batch in self.held:
            return True
        if not batch.total or (whole and batch.taken):
            return False
        if self.ended is StreamDeleted:
            return False
        self.check_open()
        raise AlreadySettled(f"this batch of stream {self.name!r} was settled, or went back, before")

    def _settled(self, batch: StreamBatch, indexes: list[int] | None) -> None:
        """Count what is settled of a batch, but for what was before; None = all that was left."""
        if indexes is None:
            self._drop(batch, batch.unsettled)
            return
        fresh = set(indexes).difference(batch.settled or ())
        batch.note_settled(fresh)
        if not batch.unsettled:
            self._drop(batch, len(fresh))
            return
        self.unsettled -= len(fresh)
        self.acked_total += len(fresh)
        if batch.unsettled <= batch.lets_go_at:
            self.freed += batch.let_go()
        self.give_memory_back()
        self._feed()

    def _drop(self, batch: StreamBatch, acked: int) -> None:
        """Forget a batch of which nothing is left, and give back its memory."""
        del self.held[batch]
        self.ahead.pop(batch, None)
        batch.settled = None
        if acked:  # else a get may be about to return it: whoever settles what it has lets go of it
            batch.let_go()
        self.unsettled -= acked
        self.acked_total += acked
        self.freed += batch.charged
        self.give_memory_back()
        self._feed()

    def give_memory_back(self) -> None:
        """Give back what was charged for messages of batches that are settled."""
        freed, self.freed = self.freed, 0
        if freed > 0:
            self._room.let_go(freed)
        elif freed:  # pieces that are left of batches of which the rest went back
            self._room.hold(-freed, least=True)

    def _feed(self) -> None:
        """Wake the gets that found no memory: there is more than before."""
        if self.starved:
            self.starved = False
            self.line.notify_all()

    def _return(self, batch: StreamBatch, delay_s: float, *, repeated: bool) -> None:
        shown = batch.left_shares(0, batch.shown) if repeated or batch.shown is not None else []
        ahead = batch.left_shares(batch.shown or 0) if not repeated or batch.shown is not None else []
        self._put_back(batch, shown, delay_s, repeated=True)
        self._put_back(batch, ahead, 0.0, repeated=False)
        self._drop(batch, 0)
        self.line.notify()

    def _put_back(self, batch: StreamBatch, shares: list[Share], delay_s: float, *, repeated: bool) -> None:
        """Put a part of a batch back in its place; with `repeated`, its delivery counts."""
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

    def expire(self, now: float) -> None:
        """Put back messages whose lease has ended, and make those available whose delay has ended."""
        self.returned.ripen(now)
        if now >= self._lease_at:
            for batch in [batch for batch, until in self.held.items() if until is not None and until <= now]:
                self._return(batch, 0.0, repeated=True)
            self._lease_at = min((until for until in self.held.values() if until is not None), default=math.inf)


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
