"""Messages that the members of a cursor hold until they are settled: leases, acks and nacks, and what comes back.

Settled messages go to the log as ranges of sequences; all others go back to their places, to be delivered again.
Deliveries and batches call it as their *settler*.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from qflow.delivery import ONE_ATTEMPT, Return
from qflow.errors import AlreadySettled, BrokerClosed, BrokerFailed, ForkedProcess, QflowError, StreamDeleted, in_doubt
from qflow.memory.ledger import Ledger
from qflow.memory.line import Line
from qflow.memory.waiting import collecting, is_inside, shelter, sheltered, straight
from qflow.storage.log.rows import Settled
from qflow.storage.log.transaction_log import MOST_STANDING, Lane, Request
from qflow.streams.deliveries import Share, StreamDeliveries, place_of, root_of
from qflow.streams.leaving import Held, Leaving, settles_of
from qflow.streams.part import Part
from qflow.streams.returned import Returned
from qflow.streams.shared import Shared


class Claims:
    """See the module. Thread-safe; the lock and the line of waiting gets are the cursor's."""

    def __init__(self, name: str, owner: int, lock: Any, line: Line, shared: Shared) -> None:
        self.name = name
        """The stream's name, which deliveries return as `queue`."""
        self.owner = owner
        """The cursor's number in the log; 0 if it is not durable, and nothing of it is logged."""
        self.ack_timeout_s: float | None = None
        self.members: dict[Any, None] = {}
        """Subscriptions that have the cursor open."""
        self.ended: type[QflowError] | None = None
        self.held: dict[StreamDeliveries, float | None] = {}
        """Batches that are held, and when their lease ends on the monotonic clock; None = without end."""
        self.ahead: dict[StreamDeliveries, int] = {}
        """Batches that an iteration returns one message at a time, with `returned.came` as it got them."""
        self.unsettled = 0
        self.returned = Returned(shared.monotonic)
        self.starved = False
        """A get found no memory for its messages; it is woken when there is some."""
        self.delivered_total = self.acked_total = self.redelivered_total = 0
        self.lock = lock
        self.line = line
        """The line of waiting gets, where whoever wakes one has it wake the next if it leaves something."""
        self._log = shared.log
        self._room = shared.room
        self._monotonic = shared.monotonic
        self._lease_at = math.inf
        """The earliest time at which a lease may end."""
        self._done: list[tuple[Lane, Settled]] = []
        """Settled, and not handed to the log yet, which fetches it; see `call_log`."""
        self._called = False
        """The log was asked to fetch `_done`."""

    # Who may hold ----------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.ended is BrokerClosed:
            raise BrokerClosed(f"the broker of stream {self.name!r} is closed: open the spool again")
        if self.ended is not None:
            raise StreamDeleted(f"stream {self.name!r}, or this subscription of it, was deleted: declare it again")

    # Giving: called with the lock ------------------------------------------------------------------------------------

    def give(self, batch: StreamDeliveries, now: float) -> None:
        """Note that a member holds a batch from now on."""
        self._lease(batch, None if self.ack_timeout_s is None else now + self.ack_timeout_s)
        self.unsettled += batch.total
        self.delivered_total += batch.total

    def _lease(self, batch: StreamDeliveries, until: float | None) -> None:
        self.held[batch] = until
        if until is not None:
            self._lease_at = min(self._lease_at, until)

    def patience(self, now: float, most: float | None) -> float:
        """Return the seconds until a lease or a delay ends, which wakes no waiting get; at most `most`."""
        wait = min(self._lease_at, self.returned.due) - now
        return max(0.001, wait if most is None else min(wait, most))

    def give_back(self, batch: StreamDeliveries) -> None:
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
            self._drop(batch, len(batch) - len(batch.settled or ()))

    @sheltered
    def abandon(self, taker: object) -> None:
        """Put back what an earlier iteration of the same thread has left, as another one begins."""
        with self.lock:
            self.give_back_unshown(taker)
            for batch in [batch for batch in self.ahead if self.owner and root_of(batch.taker) == taker]:
                self._when_stays(batch, partial(self._return, batch, 0.0, repeated=True))

    def unshown(self) -> list[Share]:
        """Return what iterations have acquired and not returned yet."""
        return [share for batch in self.ahead for share in batch.left_shares(batch.shown or 0)]

    def not_shown(self) -> list[Share]:
        """Return all that left the buffers and is still to be got: what came back, and `unshown`."""
        return self.returned.shares() + self.unshown()

    def forget(self) -> int:
        """Forget everything; return the bytes that were charged for it."""
        charged = sum(batch.charged for batch in self.held) + self.returned.drop()
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

    # Settling: what a delivery calls ---------------------------------------------------------------------------------

    def settle_batch(self, batch: Any, wait: bool) -> None:
        """Settle what is left of a batch."""
        logged = shelter(lambda: self._settle_batch(batch))
        if wait and logged is not None:
            self._log.commit(logged)
        elif not wait and self.is_crowded:
            self._hold_up()

    def _settle_batch(self, batch: Any) -> Request | None:
        with self.lock:
            if not self._check_held(batch):
                return None
            batch.check_free()
            free = batch.free() if batch.bound else None
            settles = settles_of(batch.shares_at(free))
            logged = self._log.settle_all(settles) if settles else None  # under the lock: a seek comes before, or after
            self._settled(batch, free)
        return logged

    @straight
    def settle_part(self, batch: Any, index: int, wait: bool) -> None:
        """Settle one message of a batch. Cost: 1 µs, as long as others of it are left."""
        if not wait and index not in batch.taken and "a" not in collecting:
            done: tuple[tuple[Lane, Settled], ...] = ()
            if self.owner:  # without a name nothing is logged
                part, start, end = batch.span_at(index)
                done = ((part.lane, Settled(start, end, 0, 0)),)
                self._log.check_usable()
            one = {index}
            try:
                with self.lock:  # straight lines; see `waiting`
                    settled = batch.settled
                    passes = batch.unsettled > 1 and settled is not None and index not in settled
                    passes = passes and not (self.starved or batch.bound)
                    if passes:
                        batch.settled = settled = settled or one
                        settled |= one
                        batch.unsettled -= 1
                        self.unsettled -= 1
                        self.acked_total += 1
                        self._done += done
                if passes:
                    if done and not self._called:
                        self.call_log()
                    if len(self._done) > MOST_STANDING:
                        self._hold_up()
                    return
            except BaseException:
                shelter(self.call_log)
                raise
        logged = shelter(lambda: self._settle_part(batch, index))
        if wait and logged is not None:
            self._log.commit(logged)
        elif not wait and self.is_crowded:
            self._hold_up()

    @property
    def is_crowded(self) -> bool:
        """Acks that nobody waits for are to wait for those before them."""
        return bool(self.owner) and (len(self._done) > MOST_STANDING or self._log.crowded)

    def _hold_up(self) -> None:
        """Return when the log has what is settled, unless others may wait for this thread."""
        if not is_inside():
            self._log.drain()

    def _settle_part(self, batch: Any, index: int) -> Request | None:
        with self.lock:
            if index in batch.taken or not self._check_held(batch, whole=False):
                return None
            batch.check_free(index)
            logged = None
            if self.owner:
                part, start, end = batch.span_at(index)
                logged = self._log.settle(part.lane, [Settled(start, end, 0, 0)])
            self._settled(batch, [index])
        return logged

    def call_log(self) -> None:
        """Ask the log to fetch what is settled, which it does within milliseconds. Called without the lock."""
        if self._done:
            self._called = True  # first: the writer may fetch it at once
            try:
                self._log.collect(self._bring_done)
            except BaseException:
                self._called = False
                raise

    def _bring_done(self) -> list[tuple[Lane, Settled]]:
        """Return what is settled. Called by the writer, as part of a batch."""
        with self.lock:
            done, self._done, self._called = self._done, [], False
        return done

    def settle_one(self, delivery: Any, wait: bool) -> None:
        """Not called: every delivery of a stream belongs to a batch."""
        raise NotImplementedError

    return_one = extend_one = settle_one

    def join_settles(self) -> Request | None:
        """Return what to wait for until every settle so far is synced; None where nothing is logged."""
        try:
            return self._log.collect(self._bring_done) if self.owner else None
        except BrokerFailed as error:
            raise in_doubt(error) from error

    def return_batch(self, batch: Any, how: Return) -> None:
        """Put what is left of a batch back in its place, to be delivered again; with `requeue=False` settle it.

        There are no dead letters to keep a reason.
        """
        if how.requeue:
            shelter(lambda: self._return_batch(batch, how.delay_s))
        else:
            self.settle_batch(batch, False)

    def _return_batch(self, batch: Any, delay_s: float) -> None:
        with self.lock:
            if self._check_held(batch):
                self._when_stays(batch, partial(self._return, batch, delay_s, repeated=True))

    def return_part(self, batch: Any, index: int, how: Return) -> None:
        """Put one message of a batch back, as `return_batch` does."""
        if how.requeue:
            shelter(lambda: self._return_part(batch, index, how.delay_s))
        else:
            self.settle_part(batch, index, False)

    def _return_part(self, batch: Any, index: int, delay_s: float) -> None:
        with self.lock:
            if index in batch.taken or not self._check_held(batch, whole=False):
                return
            batch.check_unsettled(index)
            self._when_stays(batch, partial(self._return_index, batch, index, delay_s))

    def _return_index(self, batch: StreamDeliveries, index: int, delay_s: float) -> None:
        if batch.settled is None or index in batch.settled:
            return
        self._put_back(batch, [batch.share_at(index)], delay_s, repeated=True)
        batch.note_settled([index])
        if not batch.unsettled:
            self._drop(batch, 0)
        self.line.notify()

    @sheltered
    def extend_batch(self, batch: Any, seconds: float) -> None:
        """Let a batch be held longer, never shorter."""
        with self.lock:
            until = self.held[batch] if self._check_held(batch) else None
            if until is not None:
                self._lease(batch, max(until, self._monotonic() + seconds))

    @sheltered
    def release(self, batch: StreamDeliveries) -> None:
        """Put back what an iteration has not returned, and what it returned and did not settle."""
        with self.lock:
            self._when_stays(batch, partial(self.give_back, batch))

    # In one commit with something else -------------------------------------------------------------------------------

    @sheltered
    def begin_leaving(self, held: list[Any]) -> Leaving:
        """Take deliveries, or batches, that are settled in one commit with something else."""
        with self.lock:
            wanted = list(map(place_of, held))
            for batch, position in wanted:
                if not self._check_held(batch):
                    raise AlreadySettled(f"{batch!r} was taken back by a seek, or its stream or subscription deleted")
                batch.check_free(position)
            wanted.sort(key=lambda place: place[1] is None)  # a batch is what its messages leave
            leaving: Held = [(batch, batch.bind(position)) for batch, position in wanted]
            self.held |= dict.fromkeys(batch for batch, _ in wanted)  # no lease ends while the commit waits for room
            return Leaving(self, leaving)

    @sheltered
    def check_leaving(self, held: Held) -> None:
        """Refuse what went back while the commit waited for room; what is held stays held until the commit ends."""
        with self.lock:
            for batch, positions in held:
                if not self._check_held(batch):
                    raise AlreadySettled(f"deliveries of stream {self.name!r} went back before their commit")
                for position in positions or ():
                    batch.check_unsettled(position)
            for batch, _ in held:
                batch.leaving += 1

    @sheltered
    def left(self, held: Held, checked: bool) -> None:
        """Forget what was settled in a commit."""
        with self.lock:
            for batch, positions in held:
                if batch in self.held:
                    self._settled(batch, positions)
        self.stays(held, checked)

    @sheltered
    def stays(self, held: Held, checked: bool) -> None:
        """After a commit: put back what was to be meanwhile, and begin the leases of what is held anew."""
        with self.lock:
            for batch, positions in held:
                batch.unbind(positions)
                batch.leaving -= checked
                while batch.later and batch in self.held and not batch.leaving:
                    batch.later.pop(0)()
                if batch in self.held and not batch.bound:
                    self._lease(batch, None if self.ack_timeout_s is None else self._monotonic() + self.ack_timeout_s)
            self.line.notify_all()

    def _when_stays(self, batch: StreamDeliveries, put_back: Callable[[], object]) -> None:
        """Put messages of a batch back; once it has ended, if a commit is under way that settles some of the batch."""
        if batch.leaving:
            batch.later.append(put_back)
        else:
            put_back()

    def shares(self, ledger: Ledger) -> bool:
        """Tell whether the cursor belongs to the broker with this ledger."""
        return self._room.ledger is ledger

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything. Takes no lock: another thread may have held it."""
        self.ended = ForkedProcess
        self.lock = lock

    # Under the lock --------------------------------------------------------------------------------------------------

    def _check_held(self, batch: StreamDeliveries, *, whole: bool = True) -> bool:
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

    def _settled(self, batch: StreamDeliveries, indexes: list[int] | None) -> None:
        """Count what is settled of a batch, but for what was before; None = all that was left."""
        if indexes is None:
            self._drop(batch, len(batch) - len(batch.settled or ()))
            return
        fresh = set(indexes).difference(batch.settled or ())
        batch.note_settled(fresh)
        if not batch.unsettled:
            self._drop(batch, len(fresh))
            return
        self.unsettled -= len(fresh)
        self.acked_total += len(fresh)
        self._feed()

    def _drop(self, batch: StreamDeliveries, acked: int) -> None:
        """Forget a batch of which nothing is left, and give back its memory."""
        del self.held[batch]
        self.ahead.pop(batch, None)
        batch.settled = None
        self.unsettled -= acked
        self.acked_total += acked
        self._room.let_go(batch.charged)
        self._feed()

    def _feed(self) -> None:
        """Wake the gets that found no memory: there is more than before."""
        if self.starved:
            self.starved = False
            self.line.notify_all()

    def _return(self, batch: StreamDeliveries, delay_s: float, *, repeated: bool) -> None:
        """Put all that is left of a batch back in its place."""
        shown = batch.left_shares(0, batch.shown) if repeated or batch.shown is not None else []
        ahead = batch.left_shares(batch.shown or 0) if not repeated or batch.shown is not None else []
        self._put_back(batch, shown, delay_s, repeated=True)
        self._put_back(batch, ahead, 0.0, repeated=False)
        self._drop(batch, 0)
        self.line.notify()

    def _put_back(self, batch: StreamDeliveries, shares: list[Share], delay_s: float, *, repeated: bool) -> None:
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
