"""Messages that the members of a cursor hold until they are settled: leases, acks and nacks, and what comes back.

Settled messages go to the log as ranges of sequences; all others go back to their places, to be delivered again.
Deliveries and batches call it as their *settler*.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from qflow.delivery import Return
from qflow.errors import AlreadySettled, BrokerFailed, ForkedProcess, in_doubt
from qflow.memory.ledger import Ledger
from qflow.memory.line import Line
from qflow.memory.waiting import collecting, is_inside, shelter, sheltered, straight
from qflow.storage.log.rows import Settled
from qflow.storage.log.transaction_log import MOST_STANDING, Lane, Request, Unit
from qflow.streams.batches import NONE, StreamBatch, place_of
from qflow.streams.deliveries import Share, root_of
from qflow.streams.holding import Holding
from qflow.streams.shared import Shared

Held = list[tuple[StreamBatch, list[int] | None]]
"""Batches, with the indexes of their messages; None = all that are left."""


class Claims(Holding):
    """See the module. Thread-safe; the lock and the line of waiting gets are the cursor's."""

    def __init__(self, name: str, owner: int, lock: Any, line: Line, shared: Shared) -> None:
        super().__init__(name, owner, lock, line, shared)
        self._log = shared.log
        self._done: list[tuple[Lane, Settled]] = []
        """Settled, and not handed to the log yet, which fetches it; see `call_log`."""
        self._called = False
        """The log was asked to fetch `_done`."""

    @sheltered
    def abandon(self, taker: object) -> None:
        """Put back what an earlier iteration of the same thread has left, as another one begins."""
        with self.lock:
            self.give_back_unshown(taker)
            for batch in [batch for batch in self.ahead if self.owner and root_of(batch.taker) == taker]:
                self._when_stays(batch, partial(self._return, batch, 0.0, repeated=True))

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
        kept = batch.kept
        if (
            not wait
            and index not in batch.taken
            and not collecting
            and (span := batch.span_at(index, kept)) is not None
        ):
            done: tuple[tuple[Lane, Settled], ...] = ()
            if self.owner:  # without a name nothing is logged
                part, start, end = span
                done = ((part.lane, Settled(start, end, 0, 0)),)
                self._log.check_usable()
            one = {index}
            try:
                with self.lock:  # straight lines; see `waiting`
                    settled = batch.settled
                    passes = batch.unsettled > 1 and settled is not None and index not in settled
                    passes = passes and batch.kept is kept and not (self.starved or batch.bound)
                    if passes:
                        batch.settled = settled = settled or one
                        settled |= one
                        batch.unsettled -= 1
                        self.unsettled -= 1
                        self.acked_total += 1
                        self._done += done
                if passes:
                    if batch.unsettled <= batch.lets_go_at:
                        self._let_go(batch)
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

    @straight
    def _let_go(self, batch: StreamBatch) -> None:
        """Refer no more to settled messages of a batch, which is interrupted not done; `freed` grows."""
        if batch.bound or batch.leaving or batch.taken:
            return  # what is bound is let go of as its commit ends
        unsettled, settled, kept = batch.unsettled, batch.settled, batch.kept
        cut, freed = batch.cut()
        with self.lock:  # straight lines; see `waiting`
            is_same = batch.unsettled == unsettled and batch.settled is settled and batch.kept is kept
            if is_same and settled is not None and not (batch.bound or batch.leaving or batch.taken):
                batch.lets_go_at = unsettled // 3
                if cut is not kept:
                    batch.kept = cut
                    batch.settled = NONE
                    batch.charged -= freed
                    self.freed += freed

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
                span = batch.span_at(index)
                assert span is not None
                part, start, end = span
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
                if batch.settled is None:
                    batch.let_go()

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

    def _return_index(self, batch: StreamBatch, index: int, delay_s: float) -> None:
        if batch.is_settled(index):
            return
        self._put_back(batch, [batch.share_at(index)], delay_s, repeated=True)
        batch.note_settled([index])
        if not batch.unsettled:
            self._drop(batch, 0)
            batch.let_go()
        elif batch.unsettled <= batch.lets_go_at:
            self.freed += batch.let_go()
            self.give_memory_back()
        self.line.notify()

    @sheltered
    def extend_batch(self, batch: Any, seconds: float) -> None:
        """Let a batch be held longer, never shorter."""
        with self.lock:
            until = self.held[batch] if self._check_held(batch) else None
            if until is not None:
                self._hold_until(batch, max(until, self._monotonic() + seconds))

    @sheltered
    def release(self, batch: StreamBatch) -> None:
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
                if batch.settled is None or batch.unsettled <= batch.lets_go_at:
                    self.freed += batch.let_go()
                if batch in self.held and not batch.bound:
                    self._lease(batch, self._monotonic())
            self.give_memory_back()
            self.line.notify_all()

    def shares(self, ledger: Ledger) -> bool:
        """Tell whether the cursor belongs to the broker with this ledger."""
        return self._room.ledger is ledger

    def die(self, lock: Any) -> None:
        """In a forked child: refuse everything. Takes no lock: another thread may have held it."""
        self.ended = ForkedProcess
        self.lock = lock


class Leaving:
    """Deliveries that are settled in one commit with other work; a party of the unit. See `Together`."""

    depth = None
    writes = ()

    def __init__(self, claims: Claims, held: Held) -> None:
        self.queue = claims
        self.unit: Unit | None = None
        self._held = held
        self._checked = False

    def settles(self) -> list[tuple[Lane, list[Settled]]]:
        """Return what the log is to settle, by lane; called just before the unit joins a batch.

        Raises:
            AlreadySettled: some went back meanwhile: the subscription was closed, or moved by `seek`.
        """
        self.queue.check_leaving(self._held)
        self._checked = True
        return settles_of(share for batch, positions in self._held for share in batch.shares_at(positions))

    def committed(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        held, self._held = self._held, []
        self.queue.left(held, self._checked)

    def refused(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        held, self._held = self._held, []
        self.queue.stays(held, self._checked)

    def give_up(self) -> None:
        """Hold the deliveries as before: the commit was not made."""
        if self.unit is None or not self.unit.joined:
            self.refused(None)


def settles_of(shares: Iterable[Share]) -> list[tuple[Lane, list[Settled]]]:
    """Return the settles of shares, by lane; none for a cursor that is not durable."""
    settles: dict[Lane, list[Settled]] = {}
    for part, piece, _ in shares:
        if part.lane is not None:
            settles.setdefault(part.lane, []).append(Settled(piece.start, piece.end, 0, 0))
    return list(settles.items())
