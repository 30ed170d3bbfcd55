"""Puts into several queues, and what leaves others for them, in one commit: publish, transactions, dead letters.

Room is reserved queue by queue, in the order of their numbers, so that two who want the same queues never wait for one
another. Then all of it enters one batch of the log as a unit. Queues that are not durable take part: their messages
become visible when the commit holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice, takewhile
from typing import Any

from qflow.delivery import Segment
from qflow.errors import again
from qflow.memory.line import Wake
from qflow.memory.waiting import attend, shelter, sheltered
from qflow.message import Record, is_plain
from qflow.named_tuples import NamedTuple
from qflow.queues.assembly import Assembly, ReserveStep, Reserving
from qflow.queues.dead_letters import Cause, dead_letters
from qflow.queues.exits import Leaving
from qflow.queues.fan_out import FanOut
from qflow.queues.overflow import Decision, Depth
from qflow.queues.puts import NOTHING, Puts
from qflow.queues.putting import TurnedAway
from qflow.storage.log.transaction_log import Put, TransactionLog, Unit


class Insert(NamedTuple):
    """Messages for one lane of one queue."""

    queue: Puts
    number: int
    records: list[Record]


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


class Receipt:
    """What an insert returns: where its messages are in the put of their lane."""

    __slots__ = ("_lane", "count", "first_records", "insert", "offset", "put")

    def __init__(self, insert: Insert, lane: Receipt | None = None, offset: int = 0) -> None:
        """`lane`: the receipt of the first insert of the same lane, unless this is that."""
        self.insert = insert
        self.first_records = insert.records
        self.count = len(insert.records)
        self._lane = lane
        self.offset = offset
        self.put: Put | None = None
        """Of the first insert of a lane; None if the queue's policy turned it away."""

    @property
    def first(self) -> int | None:
        """The first sequence, once it is committed; None if it was turned away."""
        put = self.put if self._lane is None else self._lane.put
        return None if put is None else put.first + self.offset


class Together:
    """Commits inserts. One a broker; thread-safe."""

    def __init__(
        self,
        log: TransactionLog,
        dead_letter_queue: Callable[[Puts], Puts],
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
        receipts, lanes = by_lane(inserts)
        assembly = Assembly(leavings, puts)
        try:
            reserved = shelter(partial(self._begin, lanes, assembly, future, dead))
            if reserved is not None:
                self._prepare_all(lanes, *reserved, timeout, assembly, dead)
                self.enter(assembly, future)
        except BaseException:
            try:
                shelter(partial(self._clear_up, assembly))
            finally:  # see `attend`
                shelter(partial(self._clear_up, assembly))
            raise
        entered = assembly.unit
        if entered is not None:
            if not wait:
                assembly.count_turned_away()
                return receipts
            self.finish(entered)
        assembly.count_turned_away()
        for put in assembly.puts:
            put.lane.publisher.keep_within_bounds()  # type: ignore[attr-defined]
        return receipts

    def finish(self, unit: Unit) -> None:
        """Return when a commit holds that was begun; raises what became of it."""
        self._log.wait(unit)
        if unit.error is not None:
            raise again(unit.error)

    def _begin(
        self, lanes: list[Receipt], assembly: Assembly, future: Future[Any] | None, dead: bool
    ) -> tuple[Receipt | None, int] | None:
        """Reserve room where there is some now. Where that is all, enter: None.

        Else return what has none yet: that of a queue into which something fans out, or the lanes from there on.
        """
        for fan in assembly.fans:
            if (receipt := reserve_fan(fan)) is not None:
                return receipt, 0
        start = 0 if dead else reserve_at_once(lanes, 0, assembly)
        if start < len(lanes):
            return None, start
        self.enter(assembly, future)
        return None

    def _prepare_all(
        self,
        lanes: list[Receipt],
        first: Receipt | None,
        start: int,
        timeout: float | None,
        assembly: Assembly,
        dead: bool,
    ) -> None:
        """Reserve room for what has none yet: in passes over the queues that have it now, for the others one by one."""
        deadline = None if timeout is None else self._monotonic() + timeout

        def prepare(receipts: list[Receipt]) -> None:
            left = None if deadline is None else max(0.0, deadline - self._monotonic())
            self.prepare(receipts, left, assembly, dead)

        if first is not None:
            prepare([first])
            for fan in assembly.fans:
                while (receipt := shelter(partial(reserve_fan, fan))) is not None:
                    prepare([receipt])
        while start < len(lanes):
            receipts = of_one_party(lanes, start)
            if receipts[0].insert.queue.reserves_together:
                self._prepare_together(receipts, assembly)
            else:
                prepare(receipts)
            start += len(receipts)
            if not dead:
                start = shelter(partial(reserve_at_once, lanes, start, assembly))

    def prepare(self, receipts: list[Receipt], timeout: float | None, assembly: Assembly, dead: bool) -> None:
        """Reserve room for all lanes of one queue, and add their puts, or that of their dead letters."""
        queue = receipts[0].insert.queue
        lots = [(receipt.insert.number, receipt.insert.records) for receipt in receipts]
        try:
            puts = self._reserve(queue, lots, timeout, assembly, leaving=assembly.leaving(queue), dead=dead)
        except TurnedAway as error:
            whole = Insert(queue, 0, [record for _, records in lots for record in records])
            now = self.redirect(whole, error.decision, assembly, dead)
        else:
            assembly.puts += puts
            for receipt, put in zip(receipts, puts, strict=True):
                receipt.put = put
            return
        while now is not None:
            try:
                assembly.puts += self._reserve(now.queue, [(0, now.records)], timeout, assembly, dead=True)
            except TurnedAway as error:
                now = self.redirect(now, error.decision, assembly, True)
            else:
                return

    def _reserve(
        self,
        queue: Puts,
        lots: list[tuple[int, list[Record]]],
        timeout: float | None,
        assembly: Assembly,
        *,
        leaving: Depth = NOTHING,
        dead: bool = False,
    ) -> list[Put]:
        """Reserve room for lots of (number of a lane, records) of one queue; see `Puts.begin`."""
        puts = queue.draft_all(lots, dead=dead)
        putting = queue.begin(puts, timeout, leaving=leaving, dead=dead)
        waiting = self.waiting(assembly, putting.step, putting.give_up)
        attend(partial(waiting.step, may_work=True), waiting.give_up)
        return puts

    def _prepare_together(self, receipts: list[Receipt], assembly: Assembly) -> None:
        """Reserve room for all partitions of streams, and add their puts."""
        drafts = draft_together(receipts)
        first: Any = receipts[0].insert.queue
        if not first.reserve_puts_at_once(drafts):
            waiting = self.waiting_together(drafts, assembly)
            attend(partial(waiting.step, may_work=True), waiting.give_up)
        assembly.puts += drafts

    def waiting(self, assembly: Assembly, step: ReserveStep, give_up: Callable[[], object]) -> Reserving:
        """Return steps of reserving that end when a queue is deleted in which the commit has room; see `Reserving`."""
        return Reserving(self._waiting, assembly, step, give_up)

    def waiting_together(self, drafts: list[Put], assembly: Assembly) -> Reserving:
        """The same for partitions of streams, whose room is reserved all at once."""
        first: Any = drafts[0].lane.publisher
        asking = first.begin_puts(drafts)
        step, give_up = partial(first.try_put, drafts, asking), partial(first.give_up_put, drafts, asking)
        return self.waiting(assembly, step, give_up)

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

    def redirect(self, insert: Insert, decision: Decision, assembly: Assembly, dead: bool) -> Insert | None:
        """Return where the messages of an insert go that a limit turned away; None if they are dropped.

        Cost: a commit, where their queue must be declared.
        """
        queue, _, records = insert
        assembly.turned.append((queue, len(records), decision is Decision.DROP))
        if decision is Decision.DROP:
            return None
        if not dead:
            records = dead_letters(queue.name, [Segment(-1, records, 0)], Cause("limit"), self._clock())
        return Insert(self._dead_letter_queue(queue), 0, records)

    def _clear_up(self, assembly: Assembly) -> None:
        """After an error or an interrupt, wherever that came."""
        assembly.withdraw()
        if assembly.unit is not None:
            self._log.now()  # where it was handed over, its caller will not see to that any more

    @sheltered
    def enter(self, assembly: Assembly, future: Future[Any] | None = None, *, soon: bool = True) -> Unit | None:
        """Join puts that have their room, and what is leaving, to one batch; return what to wait for.

        Where the log has no part in it, all of it is done at once: None. What cannot join is withdrawn. `soon`: see
        `TransactionLog`.
        """
        alone, leavings = assembly.puts, assembly.leavings
        puts = alone + assembly.spreads()
        try:
            assembly.check_not_deleted()
            for put in alone:
                publisher: Any = put.lane.publisher
                if publisher.reserves_together:
                    publisher.begin_joining(assembly)
            unit = Unit(puts, parties=leavings)
            for leaving in leavings:
                leaving.unit = unit  # before the look: the end of its queue waits for it, or it finds the end
            unit.settles = [part for leaving in leavings for part in leaving.settles()]
            unit.writes = [write for leaving in leavings for write in leaving.writes]
            if unit.settles or unit.writes or any(put.is_logged for put in puts):
                unit.future = future
                assembly.unit = unit
                return self._log.join(unit, soon)
            for put in puts:
                put.lane.publisher.publish_transient(put)
            unit.parties.clear()
            for leaving in leavings:
                leaving.committed(None)
        except BaseException:
            assembly.withdraw()
            raise
        finally:
            for put in alone:
                publisher = put.lane.publisher
                if publisher.reserves_together:
                    publisher.end_joining(assembly)
        if future is not None:
            future.set_result(None)
        return None


def by_lane(inserts: Iterable[Insert]) -> tuple[list[Receipt], list[Receipt]]:
    """Join inserts for the same lane; return the receipt of each, and of each lane, in the order to reserve in."""
    receipts: list[Receipt] = []
    lanes: dict[tuple[Puts, int], Receipt] = {}
    for insert in inserts:
        lane = lanes.get(insert[:2])
        if lane is None:
            lanes[insert[:2]] = receipt = Receipt(insert)
        else:
            if lane.insert.records is lane.first_records:
                lane.insert = lane.insert._replace(records=list(lane.insert.records))
            receipt = Receipt(insert, lane, len(lane.insert.records))
            lane.insert.records.extend(insert.records)
        receipts.append(receipt)
    return receipts, sorted(lanes.values(), key=_rank)


def _rank(receipt: Receipt) -> tuple[bool, int]:
    """Rank receipts for who reserves room: partitions last, for who has room there must not wait for anything else."""
    queue = receipt.insert.queue
    return queue.reserves_together, queue.owner


def of_one_party(lanes: list[Receipt], start: int) -> list[Receipt]:
    """Return the receipts from `start` on whose room is reserved together: those of a queue, or all of partitions."""
    if start == len(lanes):
        return []
    first = lanes[start].insert.queue
    if first.reserves_together:
        return lanes[start:]
    return list(takewhile(lambda receipt: receipt.insert.queue is first, islice(lanes, start, None)))


def reserve_at_once(lanes: list[Receipt], start: int, assembly: Assembly) -> int:
    """Reserve room in the queues from `start` on that have it now, and add their puts; return where it stopped.

    What stops it takes the long way: a queue in which a put would have to wait, or from which something is leaving, or
    several lanes of one, and partitions of streams, whose room is reserved all at once.

    Cost: 3 µs a queue. What several of them get, the same list, is measured once.
    """
    known: list[Record] | None = None
    for index in range(start, len(lanes)):
        receipt = lanes[index]
        queue, number, records = receipt.insert
        if queue.reserves_together or assembly.has_leaving(queue):
            return index
        if index + 1 < len(lanes) and lanes[index + 1].insert.queue is queue:
            return index
        if records is not known:
            known, sizes, plain = records, list(map(len, records)), is_plain(records)
        put = queue.draft(records, plain, number, sizes=sizes)
        if not queue.reserve_at_once(put):
            return index
        assembly.puts.append(put)
        receipt.put = put
    return len(lanes)


def reserve_fan(fan: FanOut) -> Receipt | None:
    """Reserve room for what fans out, in all queues that have it now; return the receipt of the first that has not."""
    queue = fan.reserve()
    if queue is None:
        return None
    receipt = fan.others[queue] = Receipt(Insert(queue, 0, fan.spread.records))
    return receipt


def draft_together(receipts: list[Receipt]) -> list[Put]:
    """Return puts for partitions of streams, to be reserved all at once."""
    drafts = [receipt.insert.queue.draft(receipt.insert.records, False, 0) for receipt in receipts]
    for receipt, put in zip(receipts, drafts, strict=True):
        receipt.put = put
    return drafts
