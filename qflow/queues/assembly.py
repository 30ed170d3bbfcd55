"""What one commit of several queues is made of, while that is put together; and how it waits for room.

A queue is not kept from its end by a commit that has room in it and waits for some elsewhere: that one gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from typing import Any

from qflow.errors import InDoubt, QueueDeleted
from qflow.memory.line import Wake
from qflow.message import Record, is_plain
from qflow.named_tuples import NamedTuple
from qflow.queues.exits import Leaving
from qflow.queues.fan_out import FanOut
from qflow.queues.overflow import Depth, plus
from qflow.queues.puts import NOTHING, Puts
from qflow.storage.log.transaction_log import Put, Unit

DEAD_LETTERS_S = 2.0
"""For so long dead letters of what limits turned away wait for room. Their queue may come before others in which the
commit has room by then, so who has room there may wait for that."""


class Insert(NamedTuple):
    """Messages for one lane of one queue."""

    queue: Puts
    number: int
    records: list[Record]


class Receipt:
    """What an insert returns: where its messages are in the put of their lane."""

    __slots__ = ("_lane", "count", "first_records", "insert", "is_dead", "offset", "put")

    def __init__(self, insert: Insert, lane: Receipt | None = None, offset: int = 0, *, is_dead: bool = False) -> None:
        """`lane`: the receipt of the first insert of the same lane, unless this is that."""
        self.is_dead = is_dead
        """They are dead letters of what a limit turned away."""
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

    def patience_s(self, timeout: float | None) -> float | None:
        """Return how long it waits for room, where the commit may wait so long; None = without end."""
        return timeout if not self.is_dead else DEAD_LETTERS_S if timeout is None else min(timeout, DEAD_LETTERS_S)


class Assembly:
    """What one commit is made of, while that is put together."""

    def __init__(
        self,
        inserts: Iterable[Insert],
        leavings: Iterable[Leaving],
        puts: Iterable[Put | FanOut] = (),
        *,
        dead: bool = False,
    ) -> None:
        """`dead`: they are dead letters: no limit holds them back."""
        self.receipts, self._lanes = by_lane(inserts)
        """What each insert returns."""
        self.dead = dead
        self._start = 0  # of the lanes from there on no room is reserved yet
        self.blocked: list[Receipt] = []
        """Of one queue, or of partitions, where there was no room at once."""
        self.puts: list[Put] = []
        """Each for one lane. They have their room."""
        self.fans: list[FanOut] = []
        for put in puts:
            (self.fans if isinstance(put, FanOut) else self.puts).append(put)  # type: ignore[arg-type]
        self.leavings = list(leavings)
        self.turned: list[tuple[Puts, int, bool]] = []
        """(queue, messages, they are dropped) of what limits turned away."""
        self._dead_letters: dict[Puts, Receipt] = {}  # of that, by their queue; they have no room yet
        self.unit: Unit | None = None
        """All of it, once it is to join a batch."""
        self.has_passed = False
        """It is not logged, and was done."""
        self._leave: dict[object, Depth] = {}
        for leaving in self.leavings:
            before = self._leave.get(leaving.queue)
            self._leave[leaving.queue] = leaving.depth if before is None else plus(before, leaving.depth)

    @property
    def is_done(self) -> bool:
        """After it was begun: it holds, or what is not logged was done at once."""
        unit = self.unit
        return not self.blocked and (unit is None or (unit.done and unit.error is None))

    @property
    def is_handed_over(self) -> bool:
        """Its caller can have it undone no more."""
        return self.has_passed or (self.unit is not None and self.unit.joined)

    @property
    def is_refused(self) -> bool:
        """It was handed over, and nothing was done."""
        error = None if self.unit is None else self.unit.error
        return error is not None and not isinstance(error, InDoubt)

    def reserve(self) -> list[Receipt]:
        """Reserve room where there is some now, and add the puts; return what is to wait for room next, or nothing.

        That is of one queue, or all of the partitions of streams, and reserved by the caller. What stops this is a
        queue or streams in which a put would have to wait, a queue from which something is leaving, or several lanes
        of one. Dead letters of what limits turned away come behind all queues: whoever waits for one of these has room
        in no other one that comes behind it.

        Cost: 3 µs a queue, 0.5 µs where messages fan out.
        """
        for fan in self.fans:
            if (receipt := _reserve_fan(fan)) is not None:
                return [receipt]
        if not self.dead:
            self._reserve_lanes()
        blocked = _of_one_party(self._lanes, self._start)
        if self._dead_letters and (not blocked or blocked[0].insert.queue.reserves_together):
            return [self._dead_letters.pop(next(iter(self._dead_letters)))]
        self._start += len(blocked)
        return [] if blocked and self._reserve_together(blocked) else blocked

    def _reserve_together(self, receipts: list[Receipt]) -> bool:
        """Reserve room in partitions if all of them have it now; False if not, or if they are none."""
        first: Any = receipts[0].insert.queue
        if not first.reserves_together:
            return False
        drafts = draft_together(receipts)
        if not first.reserve_puts_at_once(drafts):
            return False
        self.puts += drafts
        return True

    def _reserve_lanes(self) -> None:
        """Reserve room in one queue after the other. What several of them get, the same list, is measured once."""
        lanes, known = self._lanes, None
        for index in range(self._start, len(lanes)):
            receipt = lanes[index]
            queue, number, records = receipt.insert
            if queue.reserves_together or self._has_leaving(queue):
                return
            if index + 1 < len(lanes) and lanes[index + 1].insert.queue is queue:
                return
            if records is not known:
                known, sizes, plain = records, list(map(len, records)), is_plain(records)
            put = queue.draft(records, plain, number, sizes=sizes)
            put.refused = True  # until it has its room, so that an interrupt finds it here with that, or without
            self.puts.append(put)
            if not queue.reserve_at_once(put):
                del self.puts[-1]
                return
            receipt.put = put
            self._start = index + 1

    def redirect(self, queue: Puts, records: list[Record]) -> None:
        """Have dead letters of what a limit turned away go there, together with others of this commit."""
        if queue in self._dead_letters:
            self._dead_letters[queue].insert.records.extend(records)
        else:
            self._dead_letters[queue] = Receipt(Insert(queue, 0, records), is_dead=True)

    def charged_in(self, queue: Puts) -> int:
        """Return what a queue is charged for messages of this commit that have their room."""
        charged = sum(put.charged for put in self.puts if put.lane.publisher is queue)
        return charged + sum(spread.charged for spread in self.spreads() if queue.lane in spread.lanes)

    def spreads(self) -> list[Put]:
        """Return what fans out into queues that have room for it."""
        return [fan.spread for fan in self.fans if fan.spread.lanes]

    def leaving(self, queue: Puts) -> Depth:
        """Return what leaves a queue, the first time."""
        return self._leave.pop(queue.context, NOTHING)

    def _has_leaving(self, queue: Puts) -> bool:
        """Tell whether something leaves a queue that `leaving` was not asked for."""
        return bool(self._leave) and queue.context in self._leave

    def check_not_deleted(self) -> None:
        """Refuse to go on if a queue was deleted since room in it was reserved, perhaps long ago."""
        for fan in self.fans:
            fan.check_not_deleted()
        for put in self.puts:
            publisher: Any = put.lane.publisher
            if not publisher.reserves_together:
                publisher.check_not_deleted()

    def is_in_vain(self) -> bool:
        """Tell whether `check_not_deleted` would refuse to go on."""
        try:
            self.check_not_deleted()
        except QueueDeleted:
            return True
        return False

    def give_back(self) -> None:
        """Give back what was reserved, which joins no batch; by any thread, and twice is fine."""
        for put in [*self.puts, *self.spreads()]:
            put.give_back()

    def withdraw(self) -> None:
        """Give back what was reserved, if it did not join a batch; what was leaving stays."""
        if self.unit is None or not self.unit.joined:
            self.give_back()
        for leaving in self.leavings:
            leaving.give_up()

    def count_turned_away(self) -> None:
        """Count messages that queues turned away, now that what came of it is certain."""
        for queue, messages, dropped in self.turned:
            queue.count_turned_away(messages, dropped=dropped)


ReserveStep = Callable[[Wake | None, bool], float | None]
"""A step of reserving room; see `line`."""


class Reserving:
    """Steps of reserving that are over when a queue was deleted in which the commit has room by then.

    Between two of them, `Together.leave_deleted` finds the commit in the table.
    """

    __slots__ = ("_assembly", "_give_up", "_step", "_table")

    def __init__(
        self, table: dict[Assembly, Wake | None], assembly: Assembly, step: ReserveStep, give_up: Callable[[], object]
    ) -> None:
        self._table = table
        self._assembly = assembly
        self._step = step
        self._give_up = give_up

    def step(self, wake: Wake | None, may_work: bool) -> float | None:
        """Take a step; raises what that raises, and QueueDeleted: `give_up` then."""
        wait_s = None
        self._table[self._assembly] = wake  # before the look: either the end finds it, or it finds the end
        try:
            self._assembly.check_not_deleted()
            wait_s = self._step(wake, may_work)
        finally:
            if wait_s is None:  # also where it had been given up
                self._table.pop(self._assembly, None)
        return wait_s

    def give_up(self) -> None:
        """Wait no more; twice is fine."""
        self._table.pop(self._assembly, None)
        self._give_up()


class Preparing(NamedTuple):
    """One queue in which a commit reserves room, for all lanes of it that it puts into; or for dead letters."""

    assembly: Assembly
    queue: Puts
    receipts: list[Receipt]
    """Of these puts, to tell of them; none where they do already."""
    puts: list[Put]
    waiting: Reserving
    dead: bool = False

    def note(self) -> None:
        """The puts have their room: they are part of the commit, and their receipts tell of them."""
        self.assembly.puts += self.puts
        for receipt, put in zip(self.receipts, self.puts, strict=False):
            receipt.put = put


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


def _of_one_party(lanes: list[Receipt], start: int) -> list[Receipt]:
    """Return the receipts from `start` on whose room is reserved together: those of a queue, or all of partitions."""
    if start == len(lanes):
        return []
    first = lanes[start].insert.queue
    if first.reserves_together:
        return lanes[start:]
    return list(takewhile(lambda receipt: receipt.insert.queue is first, islice(lanes, start, None)))


def _reserve_fan(fan: FanOut) -> Receipt | None:
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
