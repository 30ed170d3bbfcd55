"""What leaves a queue otherwise than by an ack: with a commit, as a dead letter, deleted, purged, dropped, expired.

The life of a message:

    state      event                                     next
    -          put confirmed                             AVAILABLE   in a lane, or in a schedule until it is due
    AVAILABLE  get                                       ACQUIRED    in `Held`, by itself or in a batch
    AVAILABLE  expired, dropped                          SETTLED, or LEAVING where it becomes a dead letter
    AVAILABLE  deleted                                   LEAVING
    ACQUIRED   ack                                       SETTLED     logged by value
    ACQUIRED   ack in a transaction                      LEAVING
    ACQUIRED   nack(requeue=False), too many deliveries  LEAVING, or SETTLED without a dead-letter queue
    ACQUIRED   nack, ack timeout, close                  AVAILABLE   in its original place, one more delivery counted
    LEAVING    the commit holds                          SETTLED
    LEAVING    the commit is refused                     what it was before; AVAILABLE if its holder has gone
    any        purge, or its queue is deleted            SETTLED     late acks do nothing

Under the queue's lock where a description says nothing else; what reads, or carries dead letters away, lets go of it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from itertools import repeat, starmap
from typing import Any

from qflow.delivery import Delivery, Segment
from qflow.events import EventKind
from qflow.held_batch import HeldBatch
from qflow.memory.group import AHEAD, GROUP_BYTES
from qflow.memory.run import NOTHING, Place
from qflow.message import OVERHEAD_BYTES, RETURNED, Record, charge
from qflow.queues.admission import RETRY_S, Admission
from qflow.queues.apart import HeldOne, Term
from qflow.queues.context import Unlocked
from qflow.queues.dead_letters import REJECTED, Cause, parted
from qflow.queues.held import Held
from qflow.queues.lanes import Lanes
from qflow.queues.overflow import Depth
from qflow.queues.source import Source
from qflow.queues.spiller import Spiller
from qflow.storage.log.broken_lanes import check_written
from qflow.storage.log.rows import Settled
from qflow.storage.log.transaction_log import Lane, Unit

FOREVER_MS = 2**62
REJECTED_AGAIN_MS = 1000
"""What was rejected, and finds no room as a dead letter, is delivered again after so long; the next time, after twice
that."""
LET_GO_AT_ONCE = 1000
"""Messages that are freed before others are let pass: 0.1 to 0.5 ms."""
MOST_DOUBLED = 6
"""It is doubled so many times."""


class Fate(enum.StrEnum):
    """What a message is counted as, once it is gone."""

    ACKED = "acked"
    EXPIRED = "expired"
    DROPPED = "dropped"
    DEAD_LETTERED = "dead-lettered"
    DELETED = "deleted"


class Leaving:
    """Messages on their way out of a queue with a commit. They are charged until that holds."""

    writes: tuple[Any, ...] = ()

    __slots__ = (
        "_exits", "batches", "cause", "cut", "fate", "gone", "has_left", "held", "in_log", "parts", "queue", "segments",
        "unit",
    )  # fmt: skip

    def __init__(self, exits: Exits, segments: list[Segment], fate: Fate, held: dict[HeldOne, Term]) -> None:
        self._exits = exits
        self.queue = exits.context
        self.segments = segments
        self.fate = fate
        self.cause: Cause | None = None
        """Why they become dead letters, if they do."""
        self.held = held
        """The deliveries and batches that held them: if the commit is refused, they do again."""
        self.batches: dict[HeldBatch, None] = {}
        """Those from which it takes some, or all that was left; each counts it."""
        self.parts: list[tuple[Delivery, HeldBatch, int]] = []
        """Which deliveries were in a batch, and where: they go back there."""
        self.cut: list[tuple[HeldBatch, list[tuple[int, Record]], Term]] = []
        """What it takes of batches of which something is held again, by position, and their terms."""
        self.gone: set[HeldOne] = set()
        """Those that have let go of what they held: if it is refused, that goes back to the queue."""
        self.unit: Unit | None = None
        """What takes them away, once they are to join a batch."""
        self.has_left = False
        """They are gone by this, and by nothing that came before it."""
        self.in_log: Any = None
        """What leaves in place of segments, as memory does not have it; see `deleting.InLog`."""

    @property
    def depth(self) -> Depth:
        """How much of the queue's depth it takes with it."""
        return Depth(*weigh(self.segments)) if self.in_log is None else Depth(1, self.in_log.size)

    def settles(self) -> list[tuple[Lane, list[Settled]]]:
        """Return what the log is to settle, by lane."""
        return self._exits.lanes.settled_parts(self.segments) if self.in_log is None else [self.in_log.settled()]

    @property
    def is_delivered(self) -> bool:
        """Somebody held them; else they were in their place."""
        return bool(self.held or self.cut)

    def takes_from(self, one: HeldOne) -> bool:
        """Tell whether it takes a delivery, or some of a batch."""
        return one in self.held or one in self.batches

    def leave_hold(self, batch: HeldBatch) -> None:
        """Take what is left of a batch by position, for it is to hold something again. Under the lock."""
        self.cut.append((batch, batch.left_records(), self.held.pop(batch)))
        batch.end()

    def end(self) -> None:
        """It is over for the batches that it takes from. Under the lock, once."""
        for batch in self.batches:
            batch.leaving -= 1
            batch.tidy()

    def committed(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        self._exits.left(self)

    def refused(self, unit: Unit | None) -> None:
        """Called by the writer, or by the caller where nothing is logged."""
        self._exits.stays(self)

    def give_up(self) -> None:
        """Called by who was stopped on the way: nothing leaves, unless it was handed over: the writer knows then."""
        if self.unit is None or not self.unit.joined:
            self._exits.stays(self)


class Exits:
    """Lets messages go, and counts them."""

    def __init__(self, lanes: Lanes, admission: Admission, held: Held, source: Source, spiller: Spiller) -> None:
        self.context = lanes.context
        self._gate = lanes.gate
        self.lanes = lanes
        self._admission = admission
        self._held = held
        self._source = source
        self._spiller = spiller
        self.bury = lanes.context.shared.bury
        self.counts = dict.fromkeys(Fate, 0)
        self.purged_total = 0
        self.dropped: list[Any] = []
        """Lists of messages, or of groups of them, that were purged: `let_go_of_dropped` takes them apart."""
        self._bury_again_at = 0.0
        self._reject_again_at = 0.0
        self.come_back: Callable[[list[HeldOne]], object]
        """Returns what is held to the queue: that of `Returns`."""

    def forget(self, segments: list[Segment], fate: Fate) -> None:
        """Uncharge and count messages that are gone."""
        count, size = weigh(segments)
        self.count_off(count, size, fate, size + OVERHEAD_BYTES * count)

    def count_off(self, count: int, size: int, fate: Fate, discharged: int = 0) -> None:
        """Count messages of `size` bytes as gone, and give back what they were charged."""
        if fate is Fate.ACKED:
            self.lanes.acked += count
        else:
            self.lanes.gone += count
            self.counts[fate] += count
        self.lanes.message_bytes -= size
        self._admission.rebalance(discharged)

    def settle_away(self, segments: list[Segment], fate: Fate) -> None:
        """Have the log settle messages that nobody gets, and forget them."""
        log = self.context.usable_log
        if log is not None:
            log.settle_all(self.lanes.settled_parts(segments))
        self.forget(segments, fate)

    def count_turned_away(self, messages: int, *, dropped: bool) -> None:
        """Count what was not admitted at a limit. Takes the lock."""
        with self.context.lock:
            self.counts[Fate.DROPPED if dropped else Fate.DEAD_LETTERED] += messages

    # With a commit ---------------------------------------------------------------------------------------------------

    def begin(self, segments: list[Segment], fate: Fate, held: dict[HeldOne, Term]) -> Leaving:
        """Have messages leave that their holders have no more."""
        leaving = Leaving(self, segments, fate, held)
        self._held.leaving[leaving] = None
        self._held.drop(held, ends=False)
        return leaving

    def left(self, leaving: Leaving) -> None:
        """Forget messages whose leaving is committed. Takes the lock."""
        with self.context.lock:
            if leaving in self._held.leaving:
                self._count_left(leaving)
            if leaving.in_log is not None:
                leaving.in_log.let_go()

    def _count_left(self, leaving: Leaving) -> None:
        """`left`, of what nothing took away before. Under the lock."""
        del self._held.leaving[leaving]
        leaving.has_left = True
        leaving.end()
        for one in leaving.held:
            if not isinstance(one, Delivery):
                one.end()
        self.forget(leaving.segments, leaving.fate)
        if leaving.in_log is not None:
            leaving.in_log.discharge()
            self.count_off(1, leaving.in_log.size, leaving.fate)
        if leaving.cause is not None:
            count = weigh(leaving.segments)[0]
            if leaving.fate is Fate.EXPIRED:
                self.counts[Fate.DEAD_LETTERED] += count
            self.context.tell(EventKind.DEAD_LETTERED, leaving.cause.told(count))

    def stays(self, leaving: Leaving) -> None:
        """Undo `begin`: whoever held the messages has them again; the others are in their place. Takes the lock."""
        with self.context.lock:
            if leaving.in_log is not None:
                leaving.in_log.let_go()
            if leaving not in self._held.leaving:
                return
            del self._held.leaving[leaving]
            if not leaving.is_delivered and leaving.segments:
                self._give_back(leaving.segments, leaving.cause)
                if leaving.fate not in (Fate.DELETED, Fate.ACKED):
                    self._bury_again_at = self.context.monotonic() + RETRY_S
                    if leaving.cause is not None and leaving.cause.reason == REJECTED:
                        self._reject_again_at = self._bury_again_at
            self._hold_again(leaving)

    def _hold_again(self, leaving: Leaving) -> None:
        """Have everything held as it was; or in the queue, if its holders have gone."""
        held, gone = self._held, leaving.gone
        for batch in [batch for batch in leaving.batches if batch not in held]:
            for other in held.leaving:
                if batch in other.held:
                    other.leave_hold(batch)
        held.hold_again(leaving.held)
        for cut in leaving.cut:
            held.take_back(*cut)
        alone = {one for one, batch, _ in leaving.parts if one in gone or batch in gone}
        for one, batch, index in leaving.parts:
            if one not in alone:
                held.rejoin(one, batch, index)
        leaving.end()  # behind that: a look without the lock finds what is left of a batch, or that it is leaving
        back = [one for one in alone.union(gone) if one in held]
        if back:
            self.come_back(back)
        self.lanes.cover_held()

    # Dead letters ----------------------------------------------------------------------------------------------------

    @property
    def may_bury(self) -> bool:
        """Tell whether dead letters are let go of: for a while after some could not leave, none is."""
        return self.context.monotonic() >= self._bury_again_at

    def _may_leave(self, cause: Cause) -> bool:
        """Tell the same of those with one cause: what is rejected waits for room, and others that had none at once."""
        if cause.reason != REJECTED:
            return self.may_bury
        return self.context.monotonic() >= self._reject_again_at

    def let_go_of(self, *parties: tuple[list[Segment], Cause, Fate]) -> bool:
        """Make messages that neither wait nor are acquired dead letters, or settle them without such a queue.

        Lets go of the lock to carry them away.

        Args:
            parties: (messages, cause, what they are counted as if they are dropped) of those with one fate. Large ones
                leave some at a time; nothing is left of their list.

        Returns:
            False if some could not leave now and are in their place again.
        """
        wanted = [party for party in parties if party[0]]
        if self.context.settings.dead_letter is None:
            for segments, _, fate in wanted:
                self.settle_away(segments, fate)
            return True
        if wanted and not self._may_leave(wanted[0][1]):  # which is not put off by who asks meanwhile
            for segments, cause, _ in wanted:
                self._give_back(segments, cause, gained=False)
            return False
        leavings = deque(
            (self._begin_dead(some, cause, fate), cause, follows)
            for segments, cause, fate in wanted
            for some, follows in parted(segments)
        )
        done = True
        try:
            while leavings:
                leaving, cause, follows = leavings[0]
                if leaving in self._held.leaving and not (done and self._carry_away(leaving, cause, follows)):
                    self.stays(leaving)
                    done = False
                del leavings[0]  # what has left is let go of before the next ones are copied
        except BaseException:
            for leaving, _, _ in leavings:
                leaving.cause = None  # that it was stopped is no reason to hold it back
                leaving.give_up()
            raise
        return done

    def _give_back(self, segments: list[Segment], cause: Cause | None, *, gained: bool = True) -> None:
        """Put back what could not leave: what was rejected later, the later the more often it was delivered.

        Else who rejects it again would get nothing else.
        """
        if cause is None or cause.reason != REJECTED:
            self._source.give_back(segments, gained=gained, was_due=cause is not None)  # else it was deleted
            return
        for segment in segments:
            delay_ms = REJECTED_AGAIN_MS << min(max(0, (segment.marks >> 1) - 1), MOST_DOUBLED)
            self._source.give_back([segment], self.lanes.now_ms(RETURNED) + delay_ms)

    def _begin_dead(self, segments: list[Segment], cause: Cause, fate: Fate) -> Leaving:
        """Have messages leave as dead letters."""
        leaving = self.begin(segments, Fate.EXPIRED if fate is Fate.EXPIRED else Fate.DEAD_LETTERED, {})
        leaving.cause = cause
        return leaving

    def _carry_away(self, leaving: Leaving, cause: Cause, waits: bool) -> bool:
        """Have messages buried, and committed where it `waits` for that; False if that failed. Lets go of the lock."""
        with Unlocked(self.context):
            return self.bury(self.context, leaving.segments, cause, leaving, waits)

    # Everything at once -----------------------------------------------------------------------------------------------

    def purge(self) -> int:
        """Settle every message, acquired ones included; return how many. Takes the lock."""
        purged = self._purge()
        self.let_go_of_dropped()
        return purged

    def _purge(self) -> int:
        log = self.context.log
        with self.context.lock:
            self.context.check_open()
            before = self.purged_total
            if log is None:
                self.drop_all()
                return self.purged_total - before
            self._admission.pending += 1  # what is not logged waits in line behind it
        try:
            with self.context.lock:  # a lane that begins after the look has its first put behind this
                batch = log.purge(self.lanes.logged.values())
            log.wait(batch)
        finally:
            with self.context.lock:
                self._admission.pending -= 1
        check_written(batch, list(self.lanes.logged.values()))
        return self.purged_total - before

    def purged(self, ends: dict[int, int]) -> None:
        """Drop everything: that all lanes are settled below these ends is committed. Takes the lock."""
        with self.context.lock:
            if any(self.lanes.purged_below.get(number, -1) < end for number, end in ends.items()):
                self.drop_all(ends)

    def drop_all(self, ends: dict[int, int] | None = None) -> None:
        """Forget every message, acquired ones included, and every number of a lane below its end.

        They stay charged until `let_go_of_dropped` has freed them.
        """
        ends = ends or {}
        lanes = self.lanes
        dropped = lanes.messages()
        self.purged_total += dropped
        lanes.gone += dropped
        lanes.message_bytes = 0
        self._held.drop_all()
        for number, runs in lanes.lists.items():
            for run in runs.drop_all(ends.get(number, 0)):
                run.claim = None
                if run.place is Place.SPILLED:
                    self._spiller.trash.append(run.slots)
                self.dropped.append(run.records)
                run.records = NOTHING
            lanes.purged_below[number] = runs.next
        for schedule in lanes.schedules.values():
            slots, shelves = schedule.drop_all()
            self._spiller.trash += slots
            self.dropped += shelves
        lanes.skipped += lanes.messages()
        lanes.renew_front()
        self._gate.dropped += self._gate.visible
        self._admission.rebalance()

    def let_go_of_dropped(self) -> None:
        """Free what `drop_all` has dropped, bit by bit, and give back what that was charged. Takes the lock.

        A million messages at once would keep the interpreter from all threads for a quarter of a second.
        """
        gate = self._gate
        while self.dropped or gate.dropped:
            some: list[Record] = []
            with self.context.lock:
                charged = self._take_dropped(some)
            del some
            with self.context.lock:
                given_back = min(charged, gate.dropped) if self.dropped else gate.dropped
                if given_back:
                    gate.dropped -= given_back
                    self._admission.rebalance(given_back)
            self.context.shared.let_pass()

    def _take_dropped(self, some: list[Record]) -> int:
        """Move about a thousand messages that were dropped to `some`; return what they were charged."""
        grouped = 0
        while self.dropped and len(some) < LET_GO_AT_ONCE:
            part = self.dropped[-1]
            if isinstance(part, deque):
                some += starmap(part.pop, repeat((), min(len(part), LET_GO_AT_ONCE - len(some))))
            while part and len(some) < LET_GO_AT_ONCE:
                some += part.pop()[AHEAD:]
                grouped += GROUP_BYTES
            if not part:
                self.dropped.pop()
        return charge(some) + grouped


def weigh(segments: list[Segment]) -> tuple[int, int]:
    """Return how many messages there are, and their bytes."""
    return (
        sum(len(records) for _, records, _ in segments),
        sum(sum(map(len, records)) for _, records, _ in segments),
    )
