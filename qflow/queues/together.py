"""Puts into several queues, and what leaves others for them, in one commit: publish, transactions, dead letters.

Room is reserved queue by queue, in the order of their numbers, so that two who want the same queues never wait for one
another. Then all of it enters one batch of the log as a unit. Queues that are not durable take part: their messages
become visible when the commit holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from qflow.delivery import Segment
from qflow.errors import again
from qflow.memory.line import Wake
from qflow.memory.waiting import attend, shelter, sheltered
from qflow.queues.assembly import Assembly, Insert, Preparing, Receipt, ReserveStep, Reserving, draft_together
from qflow.queues.context import Context
from qflow.queues.dead_letters import Cause, dead_letters
from qflow.queues.exits import Leaving
from qflow.queues.fan_out import FanOut
from qflow.queues.overflow import Decision
from qflow.queues.puts import Puts
from qflow.queues.putting import TurnedAway
from qflow.storage.log.transaction_log import Put, TransactionLog, Unit


class Rider:
    """What goes along in the unit of a commit and takes nothing out of a queue: only what it writes."""

    depth = None
    writes: Sequence[Callable[[Any], Any]] = ()
    unit: Any = None

    @property
    def queue(self) -> object:
        """Nobody else's, so that it takes nothing of the depth of one."""
        return self

    def settles(self) -> list[Any]:
        """Nothing leaves a queue."""
        return []

    def committed(self, unit: Any) -> None:
        """Nothing is left to do."""

    def refused(self, unit: Any) -> None:
        """Nothing was done."""

    def give_up(self) -> None:
        """Nothing is held."""


class Together:
    """Commits inserts. One a broker; thread-safe."""

    def __init__(
        self,
        log: TransactionLog,
        dead_letter_queue: Callable[[Context], Puts],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._log = log
        self._dead_letter_queue = dead_letter_queue
        self._clock = clock
        self._monotonic = monotonic
        self._waiting: dict[Assembly, Wake | None] = {}  # commits that wait for room, with what wakes them

    def commit(
        self,
        inserts: Iterable[Insert],
        leavings: Iterable[Leaving] = (),
        *,
        puts: Iterable[Put | FanOut] = (),
        timeout: float | None = None,
        wait: bool = True,
        future: Future[Any] | None = None,
        dead: bool = False,
    ) -> list[Receipt]:
        """Put all inserts, and let go of what is leaving, in one commit.

        Args:
            puts: others that go along, which have their room; it is given back if nothing is done. Room for what fans
                out is reserved here, before that for all else.
            timeout: seconds to wait for room, in all queues together; None = without end.
            wait: return when it holds; else the writer does it by itself, and `future` has None then.
            dead: they are dead letters: no limit holds them back.

        Returns:
            The receipt of each insert.

        Raises:
            All that a put raises; nothing was done then, and what was leaving stays.
        """
        assembly = Assembly(inserts, leavings, puts, dead=dead)
        try:
            shelter(partial(self.begin, assembly, future, alone=wait and future is None))
            self.go_on(assembly, timeout, future, wait=wait)
        except BaseException:
            try:
                shelter(partial(self.clear_up, assembly))
            finally:  # see `attend`
                shelter(partial(self.clear_up, assembly))
            raise
        return assembly.receipts

    def begin(self, assembly: Assembly, future: Future[Any] | None = None, *, alone: bool) -> None:
        """Reserve room where there is some now; where that is all, enter. Where nothing strikes.

        `alone`: the caller waits for it next; see `TransactionLog.join`.
        """
        assembly.blocked = assembly.reserve()
        if not assembly.blocked:
            self.enter(assembly, future, alone=alone)

    def go_on(
        self, assembly: Assembly, timeout: float | None, future: Future[Any] | None = None, *, wait: bool = True
    ) -> None:
        """Wait for room for what has none yet, enter, and return when it holds, or without `wait` at once."""
        blocked = assembly.blocked
        if blocked:
            deadline = None if timeout is None else self._monotonic() + timeout
            while blocked:
                left = None if deadline is None else max(0.0, deadline - self._monotonic())
                self._prepare(blocked, left, assembly)
                blocked = shelter(assembly.reserve)
            self.enter(assembly, future, alone=wait and future is None)
        entered = assembly.unit
        if wait and entered is not None:
            self.finish(entered)
        assembly.count_turned_away()
        if wait or entered is None:
            for put in assembly.puts:
                put.lane.publisher.keep_within_bounds()  # type: ignore[attr-defined]

    def finish(self, unit: Unit) -> None:
        """Return when a commit holds that was begun; raises what became of it."""
        self._log.wait(unit)
        if unit.error is not None:
            raise again(unit.error)

    def _prepare(self, receipts: list[Receipt], timeout: float | None, assembly: Assembly) -> None:
        """Reserve room for all lanes of one queue, and add their puts; dead letters of them are for a later call."""
        place = self.preparing(receipts, timeout, assembly)
        try:
            attend(partial(place.waiting.step, may_work=True), place.waiting.give_up)
        except TurnedAway as error:
            self.redirect(place, error.decision)
        else:
            place.note()

    def preparing(self, receipts: list[Receipt], timeout: float | None, assembly: Assembly) -> Preparing:
        """Return what is to be waited for before all lanes of one queue have room; or all partitions of streams."""
        queue, dead = receipts[0].insert.queue, assembly.dead or receipts[0].is_dead
        if queue.reserves_together:
            puts = draft_together(receipts)
            first: Any = puts[0].lane.publisher
            return Preparing(assembly, queue, [], puts, self._waiting_for(assembly, *first.reserving(puts)))
        puts = queue.draft_all([(receipt.insert.number, receipt.insert.records) for receipt in receipts], dead=dead)
        timeout = receipts[0].patience_s(timeout)
        own = assembly.charged_in(queue) if receipts[0].is_dead else 0
        putting = queue.begin(puts, timeout, leaving=assembly.leaving(queue), dead=dead, own=own)
        return Preparing(
            assembly, queue, receipts, puts, self._waiting_for(assembly, putting.step, putting.give_up), dead
        )

    def _waiting_for(self, assembly: Assembly, step: ReserveStep, give_up: Callable[[], object]) -> Reserving:
        """Return steps of reserving that end when a queue is deleted in which the commit has room; see `Reserving`."""
        return Reserving(self._waiting, assembly, step, give_up)

    def redirect(self, place: Preparing, decision: Decision) -> None:
        """Have messages that a limit turned away go where dead letters go; nowhere if they are dropped.

        Cost: a commit, where their queue must be declared.
        """
        records = [record for put in place.puts for record in put.records]
        place.assembly.turned.append((place.queue, len(records), decision is Decision.DROP))
        if decision is Decision.DROP:
            return
        if not place.dead:
            records = dead_letters(place.queue.name, [Segment(-1, records, 0)], Cause("limit"), self._clock())
        place.assembly.redirect(self._dead_letter_queue(place.queue.context), records)

    def leave_deleted(self) -> None:
        """Have commits that wait for room elsewhere give back what they have in queues that were deleted, and fail.

        It is given back here: whoever waits may be kept from that, by a signal handler, or a loop that is busy. What
        enters a batch has asked before whether a queue was deleted, and waits no more.

        Cost: O(commits that wait for room, and their queues).
        """
        for assembly in list(self._waiting):
            if assembly.is_in_vain():
                assembly.give_back()
                wake = self._waiting.get(assembly)
                if wake is not None:
                    wake()

    def clear_up(self, assembly: Assembly) -> None:
        """After an error or an interrupt, wherever that came."""
        assembly.withdraw()
        if assembly.unit is not None:
            self._log.now()  # where it was handed over, its caller will not see to that any more

    @sheltered
    def enter(
        self, assembly: Assembly, future: Future[Any] | None = None, *, soon: bool = True, alone: bool = False
    ) -> Unit | None:
        """Join puts that have their room, and what is leaving, to one batch; return what to wait for.

        Where the log has no part in it, all of it is done at once: None. What cannot join is withdrawn. For `soon` and
        `alone` see `TransactionLog.join`.
        """
        leavings, puts = assembly.leavings, assembly.puts + assembly.spreads()
        partitions: list[Any] = [put.lane.publisher for put in assembly.puts if put.topics is not None]
        try:
            assembly.check_not_deleted()
            for partition in partitions:
                partition.begin_joining(assembly)
            unit = Unit(puts, parties=leavings)
            for leaving in leavings:
                leaving.unit = unit  # before the look: the end of its queue waits for it, or it finds the end
            unit.settles = [part for leaving in leavings for part in leaving.settles()]
            unit.writes = [write for leaving in leavings for write in leaving.writes]
            if unit.settles or unit.writes or any(put.is_logged for put in puts):
                unit.future = future
                assembly.unit = unit
                return self._log.join(unit, soon, alone=alone and not partitions)
            for put in puts:
                put.lane.publisher.publish_transient(put)
            unit.parties.clear()
            for leaving in leavings:
                leaving.committed(None)
            assembly.has_passed = True
        except BaseException:
            assembly.withdraw()
            raise
        finally:
            for partition in partitions:
                partition.end_joining(assembly)
        if future is not None:
            future.set_result(None)
        return None
