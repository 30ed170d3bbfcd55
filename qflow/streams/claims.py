"""What deliveries and batches of a cursor call as their *settler*: acks and nacks, and commits that settle some.

Settled messages go to the log as ranges of sequences; all others go back to their places, to be delivered again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qflow.delivery import Return
from qflow.errors import AlreadySettled, BrokerFailed, in_doubt
from qflow.memory.waiting import collecting, is_inside, shelter, sheltered, straight
from qflow.storage.log.broken_lanes import check_written
from qflow.storage.log.rows import Settled
from qflow.storage.log.transaction_log import MOST_STANDING, Lane, Request, TransactionLog, Unit
from qflow.streams.batches import NONE, StreamBatch, place_of
from qflow.streams.deliveries import Share
from qflow.streams.held import Held

Places = list[tuple[StreamBatch, list[int] | None]]
"""Batches, with the indexes of their messages; None = all that are left."""


class Claims:
    """See the module. Thread-safe; the lock is the cursor's."""

    def __init__(self, held: Held, log: TransactionLog, lanes: list[Lane]) -> None:
        """`lanes`: those of the log that record what is settled."""
        self.held = held
        self._lanes = lanes
        self.name, self.owner, self.ledger = held.name, held.owner, held.ledger
        self._log = log
        self._done: list[tuple[Lane, Settled]] = []
        """Settled, and not handed to the log yet, which fetches it; see `call_log`."""
        self._called = False
        """The log was asked to fetch `_done`."""

    # Settling: what a delivery calls ---------------------------------------------------------------------------------

    @straight
    def settle_batch(self, batch: Any, index: int | None, wait: bool) -> None:
        """Settle one message of a batch, or all that is left. Cost: 1 µs for one, as long as others are left."""
        held, kept = self.held, batch.kept
        if (
            not wait
            and index is not None
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
                with held.lock:  # straight lines; see `waiting`
                    settled = batch.settled
                    passes = batch.unsettled > 1 and settled is not None and index not in settled
                    passes = passes and batch.kept is kept and not (held.starved or batch.bound)
                    if passes:
                        batch.settled = settled = settled or one
                        settled |= one
                        batch.unsettled -= 1
                        held.unsettled -= 1
                        held.acked_total += 1
                        self._done += done
                if passes:
                    if batch.unsettled <= batch.lets_go_at:
                        self._let_go(batch)
                    if done and not self._called:
                        self.call_log()
                    if len(self._done) > MOST_STANDING:
                        self._finish(None, False)
                    return
            except BaseException:
                shelter(self.call_log)
                raise
        self._finish(shelter(lambda: self._settle(batch, index)), wait)

    @straight
    def _let_go(self, batch: StreamBatch) -> None:
        """Refer no more to settled messages of a batch, which is interrupted not done; `freed` grows."""
        if batch.bound or batch.leaving or batch.taken:
            return  # what is bound is let go of as its commit ends
        held = self.held
        unsettled, settled, kept = batch.unsettled, batch.settled, batch.kept
        cut, freed = batch.cut()
        with held.lock:  # straight lines; see `waiting`
            is_same = batch.unsettled == unsettled and batch.settled is settled and batch.kept is kept
            if is_same and settled is not None and not (batch.bound or batch.leaving or batch.taken):
                batch.lets_go_at = unsettled // 3
                if cut is not kept:
                    batch.kept = cut
                    batch.settled = NONE
                    batch.charged -= freed
                    held.freed += freed

    def _settle(self, batch: StreamBatch, index: int | None) -> Request | None:
        """Settle one message of a batch, or all that is left; return what was handed over to the log."""
        with self.held.lock:
            if not self.held.check(batch, index):
                return None
            batch.check_free(index)
            indexes = None if index is None or batch.total == 1 else [index]
            if indexes is None and batch.bound:
                indexes = batch.free()
            settles = settles_of(batch.shares_at(indexes))
            logged = self._log.settle_all(settles) if settles else None  # under the lock: a seek comes before, or after
            self.held.settle(batch, indexes)
        return logged

    def _finish(self, logged: Request | None, wait: bool) -> None:
        """Return when a settle is synced, if it is waited for; else when the log has those before it, if it must."""
        if wait and logged is not None:
            self._log.wait(logged)
            self.check_settled(logged)
        elif not wait and self.is_crowded and not is_inside():
            self._log.drain()

    def check_settled(self, joined: Request) -> None:
        """Raise what became of what was settled before a request that is done."""
        check_written(joined, self._lanes)

    @property
    def is_crowded(self) -> bool:
        """Acks that nobody waits for are to wait for those before them."""
        return bool(self.owner) and (len(self._done) > MOST_STANDING or self._log.crowded)

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
        with self.held.lock:
            done, self._done, self._called = self._done, [], False
        return done

    def join_settles(self) -> Request | None:
        """Return what to wait for until every settle so far is synced; None where nothing is logged."""
        try:
            return self._log.collect(self._bring_done) if self.owner else None
        except BrokerFailed as error:
            raise in_doubt(error) from error

    # Giving back, and holding longer ---------------------------------------------------------------------------------

    def return_batch(self, batch: Any, index: int | None, how: Return) -> None:
        """Put one message of a batch, or all that is left, back in its place; with `requeue=False` settle it.

        There are no dead letters to keep a reason.
        """
        if how.requeue:
            self._return(batch, index, how.delay_s)
        else:
            self.settle_batch(batch, index, False)

    @sheltered
    def _return(self, batch: StreamBatch, index: int | None, delay_s: float) -> None:
        with self.held.lock:
            if self.held.check(batch, index):
                if index is not None:
                    batch.check_unsettled(index)
                self.held.put_back(batch, index, delay_s)
                if batch.settled is None:
                    batch.let_go()

    @sheltered
    def extend_batch(self, batch: Any, seconds: float) -> None:
        """Let a batch be held longer, never shorter."""
        with self.held.lock:
            if self.held.check(batch):
                self.held.extend(batch, seconds)

    @sheltered
    def release(self, batch: StreamBatch) -> None:
        """Put back what an iteration has not returned, and what it returned and did not settle."""
        with self.held.lock:
            self.held.put_back(batch, is_seen=False)

    @sheltered
    def abandon(self, taker: object) -> None:
        """Put back what an earlier iteration of the same thread has left, as another one begins."""
        with self.held.lock:
            self.held.put_back_unshown(taker)
            for batch in self.held.ahead_of(taker) if self.owner else ():
                self.held.put_back(batch)

    # In one commit with something else -------------------------------------------------------------------------------

    @sheltered
    def begin_leaving(self, deliveries: list[Any]) -> Leaving:
        """Take deliveries, or batches, that are settled in one commit with something else."""
        held = self.held
        with held.lock:
            wanted = list(map(place_of, deliveries))
            for batch, position in wanted:
                if not held.check(batch):
                    raise AlreadySettled(f"{batch!r} was taken back by a seek, or its stream or subscription deleted")
                batch.check_free(position)
            wanted.sort(key=lambda place: place[1] is None)  # a batch is what its messages leave
            leaving: Places = [(batch, batch.bind(position)) for batch, position in wanted]
            held.batches |= dict.fromkeys(batch for batch, _ in wanted)  # no lease ends while it waits for room
            return Leaving(self, leaving)

    @sheltered
    def check_leaving(self, leaving: Places) -> None:
        """Refuse what went back while the commit waited for room; what is held stays held until the commit ends."""
        with self.held.lock:
            for batch, positions in leaving:
                if not self.held.check(batch):
                    raise AlreadySettled(f"deliveries of stream {self.name!r} went back before their commit")
                for position in positions or ():
                    batch.check_unsettled(position)
            for batch, _ in leaving:
                batch.leaving += 1

    @sheltered
    def end_leaving(self, leaving: Places, *, is_checked: bool, is_committed: bool) -> None:
        """After a commit: settle that, or put back what was to be meanwhile, and lease anew what is held."""
        held = self.held
        with held.lock:
            for batch, positions in leaving if is_committed else ():
                if batch in held.batches:
                    held.settle(batch, positions)
            for batch, positions in leaving:
                batch.unbind(positions)
                batch.leaving -= is_checked
                while batch.later and not batch.leaving:
                    batch.later.pop(0)()
                if batch.settled is None or batch.unsettled <= batch.lets_go_at:
                    held.freed += batch.let_go()
                if batch in held.batches and not batch.bound:
                    held.lease(batch)
            held.give_memory_back()
            held.line.notify_all()


class Leaving:
    """Deliveries that are settled in one commit with other work; a party of the unit. See `Together`."""

    depth = None
    writes = ()

    def __init__(self, claims: Claims, held: Places) -> None:
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
        self._end(True)

    def refused(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        self._end(False)

    def _end(self, is_committed: bool) -> None:
        held, self._held = self._held, []
        self.queue.end_leaving(held, is_checked=self._checked, is_committed=is_committed)

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
