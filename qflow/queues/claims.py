"""What was delivered, until it is settled: acks, returns, deliveries that a transaction settles.

Hot paths are straight lines with one comparison for all that could be different. (CPython 3.11: ack 0.3 µs.) Changes of
state in them come after the last call that can raise, because an interrupt can strike at a call and nowhere else.
Methods take the lock themselves where their description says nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from qflow.delivery import Delivery, Return
from qflow.errors import AlreadySettled, BrokerFailed, in_doubt
from qflow.held_batch import NOTHING, HeldBatch
from qflow.memory.waiting import collecting, is_inside, refuse_finalizer, sheltered, straight
from qflow.message import BATCH_BYTES, LANE_SHIFT, OVERHEAD_BYTES, SINGLE_BYTES, is_logged, lane_of
from qflow.queues import portions
from qflow.queues.admission import Admission
from qflow.queues.apart import HeldOne, place_of
from qflow.queues.exits import Exits, Fate, Leaving
from qflow.queues.held import Held, segments_of
from qflow.queues.lanes import Lanes
from qflow.queues.returns import Returns
from qflow.queues.source import Source
from qflow.queues.spiller import Spiller
from qflow.storage.log.broken_lanes import check_written
from qflow.storage.log.settling import Settling, SettlingOne
from qflow.storage.log.transaction_log import Request

_SINGLE_CHARGE = OVERHEAD_BYTES + SINGLE_BYTES


class Claims:
    """See the module. What deliveries and batches call is named as in `delivery.Settler`."""

    def __init__(
        self, lanes: Lanes, admission: Admission, held: Held, source: Source, spiller: Spiller, exits: Exits
    ) -> None:
        self._context = context = lanes.context
        self.name, self.owner = context.name, context.owner
        self._log = context.log
        self._gate = lanes.gate
        self.ledger = lanes.gate.ledger
        self._lanes = lanes
        self._admission = admission
        self._held = held
        self._singles = held.singles
        self._spiller = spiller
        self._exits = exits
        self.returns = Returns(lanes, held, source, exits)

    # Settle ----------------------------------------------------------------------------------------------------------

    @sheltered
    def settle_all(self, deliveries: list[Delivery]) -> tuple[Request | None, AlreadySettled | None]:
        """Ack deliveries in one batch of the log; return what to wait for, and why one of them was left out."""
        with self._context.lock:
            wanted, problem = self._singled(deliveries)
            return self._settle(wanted), problem

    def _singled(self, deliveries: list[Delivery]) -> tuple[dict[HeldOne, None], AlreadySettled | None]:
        """Return deliveries, of batches too, as single ones; and why one of them is left out. Under the lock."""
        problem: AlreadySettled | None = None
        wanted: dict[HeldOne, None] = {}
        for delivery in deliveries:
            try:
                if delivery in wanted:
                    raise AlreadySettled(f"message {delivery.sequence} of queue {self.name!r} is there twice")
                batch, index = place_of(delivery)
                if batch is not None:
                    is_held = self.leave_batch(batch, index, delivery, stays=False) is not None
                else:
                    is_held = delivery in self._singles or self._is_held(delivery)
                if is_held:
                    wanted[delivery] = None
            except AlreadySettled as error:
                problem = error
        return wanted, problem

    def _settle(self, held: Collection[HeldOne]) -> Request | None:
        """Ack what is held; return what to wait for. Under the lock."""
        segments = segments_of(held)
        joined = self._lanes.log_settled(segments)
        self._held.drop(held)
        self._exits.forget(segments, Fate.ACKED)
        return joined

    @straight
    def settle_one(self, delivery: Delivery, wait: bool) -> None:
        """Ack one delivery; see `Delivery.ack`."""
        if self._log is not None:
            self._settle_logged(delivery, wait)
            return
        size = len(delivery.record)
        looks = False
        lanes, gate, singles = self._lanes, self._gate, self._singles
        try:
            with self._context.lock:  # a straight line; see `waiting`
                if delivery in singles and not collecting:
                    lanes.acked = acked = lanes.acked + 1
                    gate.used = used = gate.used - size - _SINGLE_CHARGE
                    lanes.message_bytes -= size
                    del singles[delivery]
                    gate.changed[gate.place] = True
                    if used >= gate.give_back_below or acked < gate.quiet_until:
                        return
                    if lanes.message_bytes > gate.quiet_bytes:
                        return
                    looks = True
            if looks:
                self._let_others_look()
            else:
                self._settle_long(delivery)
        except BaseException:
            self._let_others_look()
            raise

    @straight
    def settle_at_once(self, delivery: Delivery) -> bool:
        """Ack one delivery that is not logged, where nobody has to be told; else False: nothing was done. For tasks."""
        size = len(delivery.record)
        lanes, gate, singles = self._lanes, self._gate, self._singles
        with self._context.lock:  # as in `settle_one`
            acked = lanes.acked + 1
            used = gate.used - size - _SINGLE_CHARGE
            left = lanes.message_bytes - size
            quiet = used >= gate.give_back_below or acked < gate.quiet_until or left > gate.quiet_bytes
            if quiet and delivery in singles and not collecting:
                lanes.acked = acked
                gate.used = used
                lanes.message_bytes = left
                del singles[delivery]
                gate.changed[gate.place] = True
                return True
        return False

    @straight
    def _settle_logged(self, delivery: Delivery, wait: bool) -> None:
        """Ack one delivery of a queue that has a log."""
        if collecting:
            refuse_finalizer()
        log: Any = self._log
        record, sequence = delivery.record, delivery.sequence
        size = len(record)
        settling = SettlingOne(self._lanes.logged[sequence >> LANE_SHIFT], sequence, size, is_logged(record))
        log.check_usable()
        requests, one, turn = log.requests, (settling,), log.turn
        context, lanes, gate = self._context, self._lanes, self._gate
        joined: Request | None = settling
        found = looks = False
        try:
            with context.lock:  # a straight line; see `waiting`
                singles = self._singles
                if delivery in singles:
                    found = True
                    lanes.acked += 1
                    gate.used = used = gate.used - size - _SINGLE_CHARGE
                    lanes.message_bytes -= size
                    del singles[delivery]
                    gate.changed[gate.place] = True
                    if wait and turn.open and turn.request is None and not requests:
                        turn.request = settling
                    else:
                        requests += one
                    looks = used < gate.give_back_below and lanes.acked >= gate.quiet_until
            if looks:
                self._let_others_look()
            if found:
                log.handed_over(settling, urgent=wait)
            else:
                joined = self._settle_long(delivery)
        except BaseException:
            log.interrupted(settling)
            self._let_others_look()
            raise
        self.finish(joined, wait)

    @sheltered
    def _settle_long(self, one: HeldOne) -> Request | None:
        """Ack what is held apart, or what is left of a batch; or tell why it is not held.

        Returns:
            what was handed over to the log, of a long batch last.
        """
        with self._context.lock:
            if not self._is_held(one):
                return None
            if not isinstance(one, HeldBatch) or not portions.has_many_pieces(one):
                return self._settle([one])
            rest = portions.hand_over(self._held, one)
        return self.returns.settle(rest, self._settle)

    @sheltered
    def _let_others_look(self) -> None:
        """After something was settled: return slack, lend less, wake who waits."""
        with self._context.lock:
            self._admission.rebalance()

    def settle_batch(self, batch: HeldBatch, index: int | None, wait: bool) -> None:
        """Ack one delivery of a batch, or what is left of it, of a long one a portion at a time."""
        if index is not None:
            self._settle_part(batch, index, wait)
            self.finish(None, wait)
        elif portions.has_many_pieces(batch) or not self._settle_whole(batch, wait):
            self.finish(self._settle_long(batch), wait)

    @straight
    def _settle_whole(self, batch: HeldBatch, wait: bool) -> bool:
        """Ack a batch of which nothing was settled before, as `settle_one`; return whether it was one."""
        messages, size = batch.left_size()
        if batch.kept is not None or not messages or collecting:
            return False
        log = self._log
        requests: Any = None
        one: tuple[Request, ...] = ()
        if log is not None:
            settling = Settling(self._lanes.settled_parts(batch.segments))
            log.check_usable()
            requests, one = log.requests, (settling,)
        charged = size + OVERHEAD_BYTES * messages + BATCH_BYTES
        context, lanes, gate, held = self._context, self._lanes, self._gate, self._held
        found = looks = False
        try:
            with context.lock:  # a straight line; see `waiting`
                batches = held.batches
                if batch in batches and batch.kept is None:
                    found = True
                    lanes.acked += messages
                    gate.used = used = gate.used - charged
                    batch.is_over = True
                    batch.segments = NOTHING
                    del batches[batch]
                    held.charged -= 1
                    if log is not None:
                        requests += one
                    lanes.message_bytes -= size
                    gate.changed[gate.place] = True
                    looks = used < gate.give_back_below and lanes.acked >= gate.quiet_until
            if looks:
                self._let_others_look()
            if found and log is not None:
                log.handed_over(settling, urgent=wait)
        except BaseException:
            if log is not None:
                log.interrupted(settling)
            self._let_others_look()
            raise
        if found and log is not None:
            self.finish(settling, wait)
        return found

    @sheltered
    def _settle_part(self, batch: HeldBatch, index: int, wait: bool) -> None:
        delivery = self.leave_batch(batch, index, stays=False)
        if delivery is not None:
            self.settle_one(delivery, wait)

    def finish(self, joined: Request | None, wait: bool) -> None:
        """Return when a settle is synced, if it is waited for; raise what became of it then.

        Else it returns when the log has those before it, if these are too many, unless others may wait for this thread.
        """
        log: Any = self._log
        if wait and joined is not None:
            log.wait(joined)
            self.check_settled(joined)
        elif not wait and log is not None and log.crowded and not is_inside():
            if joined is None:
                log.drain()
            else:
                log.wait(joined)  # which goes past what `drain` waits for, as a large put

    def check_settled(self, joined: Request) -> None:
        """Raise what became of what was settled before a request that is done."""
        check_written(joined, list(self._lanes.logged.values()))

    @property
    def is_crowded(self) -> bool:
        """Acks that nobody waits for are to wait for those before them: they take memory."""
        return self._log is not None and self._log.crowded

    def join_settles(self) -> Request | None:
        """Return what to wait for until every settle so far is synced; None where nothing is logged."""
        if self._log is None:
            return None
        try:
            return self._log.settle(self._lanes.logged[0], [])
        except BrokerFailed as error:
            raise in_doubt(error) from error

    # Give back -------------------------------------------------------------------------------------------------------

    def return_one(self, delivery: Delivery, how: Return) -> None:
        """Take one delivery back; see `Delivery.nack`."""
        self.return_all([delivery], how)

    def return_all(self, deliveries: list[Delivery], how: Return) -> None:
        """Take deliveries back together; dead letters in few commits; `AlreadySettled` of one comes last."""
        self._return_all(deliveries, how)
        self._hold_up(how)

    @sheltered
    def _return_all(self, deliveries: list[Delivery], how: Return) -> None:
        with self._context.lock:
            wanted, problem = self._singled(deliveries)
            self.returns.take_back(wanted, how)
            for one in deliveries if problem is not None else ():
                self.return_if_refused(one)
        if problem is not None:
            raise problem

    def return_batch(self, batch: HeldBatch, index: int | None, how: Return) -> None:
        """Take back one delivery of a batch, or what is left of it."""
        self._return_batch(batch, index, how)
        self._hold_up(how)

    def _hold_up(self, how: Return) -> None:
        self._spiller.keep_within_capacity()
        if self.returns.is_logged(how):
            self.finish(None, False)

    @sheltered
    def _return_batch(self, batch: HeldBatch, index: int | None, how: Return) -> None:
        with self._context.lock:
            if index is not None:
                one: HeldOne | None = self.leave_batch(batch, index, stays=False)
            else:
                if batch not in self._held:
                    self.return_if_refused(batch)
                one = batch if self._holds(batch) else None
            rest = self.returns.begin(one, how) if one is not None else None
        self.returns.go_on(rest, how)

    @sheltered
    def give_up(self, one: HeldOne) -> None:
        """Take back a message, or what is left of a batch, that was handed to nobody; nothing if it is not acquired."""
        with self._context.lock:
            self.return_if_refused(one)
            rest = self.returns.begin(one, None)
        self.returns.go_on(rest, None)

    @sheltered
    def give_up_from(self, batch: HeldBatch, first: int) -> None:
        """`give_up` of the deliveries of a batch from a position on."""
        with self._context.lock:
            for index in batch.unsettled(first) if batch in self._held else ():
                delivery = self.leave_batch(batch, index, stays=False)
                assert delivery is not None
                self.returns.give_up(delivery)

    @sheltered
    def abandon(self, batch: HeldBatch) -> None:
        """Take back what is left of a batch whose holder has gone, and what is leaving if its commit is refused."""
        with self._context.lock:
            self.return_if_refused(batch)
            rest = self.returns.begin(batch) if batch in self._held else None
        self.returns.go_on(rest)

    def return_if_refused(self, one: HeldOne) -> None:
        """Have what is leaving go back to the queue if its commit is refused: nobody holds it then. Under the lock."""
        if not self._held.leaving or not (isinstance(one, Delivery) or one.leaving):
            return
        for leaving in self._held.leaving:
            if leaving.takes_from(one):
                leaving.gone.add(one)

    # In a batch ------------------------------------------------------------------------------------------------------

    def leave_batch(
        self, batch: HeldBatch, index: int, delivery: Delivery | None = None, *, stays: bool = True
    ) -> Delivery | None:
        """Make one delivery of a batch a single one, for a while if it `stays`; None if it was purged."""
        with self._context.lock:
            if not batch.is_over:
                batch.check_unsettled(index)
            if not self._holds(batch):
                return None
            delivery = delivery or batch.delivery_at(index)
            delivery.settler = self
            is_last = batch.left_count == 1
            if not is_last:
                batch.note_settled(index)
            self._held.leave_batch(delivery, batch, stays)
            if is_last:
                self._held.drop([batch])
            self._lanes.cover_held()
            return delivery

    def _holds(self, batch: HeldBatch) -> bool:
        """Tell whether a batch is acquired; False if it was purged. Under the lock."""
        if batch in self._held:
            return True
        if batch.is_over or batch.leaving:
            raise AlreadySettled(f"this batch of queue {self.name!r} was settled before")
        self._context.check_not_closed()
        return False

    def _is_held(self, one: HeldOne) -> bool:
        """Tell whether it is acquired; False: it was purged. Under the lock. Raises AlreadySettled."""
        if not isinstance(one, Delivery):
            return self._holds(one)
        batch, index = place_of(one)
        if batch is not None:
            batch.check_unsettled(index)
            return self._holds(batch)
        if one not in self._held:
            self._check_late(one.sequence)
            return False
        return True

    def _check_late(self, sequence: int) -> None:
        """Explain why a delivery is not acquired; return if it was purged or its queue deleted."""
        self._context.check_not_closed()
        if sequence >= self._lanes.purged_below.get(lane_of(sequence), 0) and self._context.ended is None:
            raise AlreadySettled(f"message {sequence} of queue {self.name!r} was settled, or returned, before")

    # More time -------------------------------------------------------------------------------------------------------

    @sheltered
    def extend_one(self, one: HeldOne, seconds: float) -> None:
        """Give a holder more time; see `Delivery.extend`."""
        with self._context.lock:
            if self._is_held(one):
                self._held.extend(one, self._context.monotonic() + seconds)

    extend_batch = extend_one

    # In a transaction ------------------------------------------------------------------------------------------------

    def begin_leaving(self, deliveries: list[HeldOne]) -> Leaving:
        """Take deliveries from their holders, to be settled by a transaction.

        Raises:
            AlreadySettled: one of them is not acquired any more; nothing was done.
        """
        with self._context.lock:
            self._context.check_not_closed()
            wanted = [] if self._context.ended else [(one, *place_of(one)) for one in deliveries if self._is_held(one)]
            parts = [(one, batch, at) for one, batch, at in wanted if isinstance(one, Delivery) and batch is not None]
            batches = dict.fromkeys([batch for _, batch, _ in parts])
            batches |= dict.fromkeys([one for one, _, _ in wanted if not isinstance(one, Delivery)])
            for batch in batches:
                batch.leaving += 1  # first: see `Exits.stays`
            for one, batch, index in parts:
                self.leave_batch(batch, index, one, stays=False)
            held = {one: self._held.term(one) for one, _, _ in wanted if one in self._held}
            leaving = self._exits.begin(segments_of(held), Fate.ACKED, held)
            leaving.batches, leaving.parts = batches, parts
            return leaving
