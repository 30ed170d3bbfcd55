"""A get on its way that is not served at once: what it has collected, and its place in line."""

from __future__ import annotations

import enum
from collections.abc import Callable
from time import sleep
from typing import Protocol

from qflow.deliveries import Deliveries
from qflow.delivery import Delivery, Segment
from qflow.held_batch import HeldBatch
from qflow.memory.gate import Gate
from qflow.memory.line import FOREVER, PAUSE_S, WORK, Wake, Watcher
from qflow.memory.run_list import RunList
from qflow.message import DELAYED
from qflow.queues.admission import RETRY_S, Admission
from qflow.queues.claims import Claims
from qflow.queues.context import Context, Unlocked
from qflow.queues.dead_letters import Cause
from qflow.queues.exits import Exits, Fate, weigh
from qflow.queues.expiry import Expiry
from qflow.queues.held import Held
from qflow.queues.lanes import TIMED, Lanes, sorted_out
from qflow.queues.leases import Leases
from qflow.queues.restorer import Restorer
from qflow.queues.source import Source
from qflow.takers import Noted

TURNS = 2
"""A get that does not wait has this many turns to let expired messages go that lie before others."""
TAKEN_AT_ONCE, LOOKED_AT_ONCE = 50_000, 5_000
"""Messages that a get takes before it looks for how long: 0.03 µs each; and where it looks at each, up to 3 µs."""
AT_ONCE_S = 0.005
"""After so long the lock goes to who waits for it; a task's get goes on in a thread, for other tasks wait for that."""
MOVING_S = 0.01
"""A get whose time is over looks again so often whether another thread has moved what it waits for."""
MOST_PASSED = 1_000
"""A get goes past so many messages that are to become dead letters, and cannot now."""
REFUSED_SHARE = 16
"""While the disk takes nothing, what is charged for deliveries may come to this part of the capacity above it."""
LOOKS = 100
"""And so often, at most, whether it has made room: where others never end with that, something has to be settled."""


class Lack(enum.Enum):
    """What a get would need to go on."""

    NOTHING = "nothing"
    MESSAGE = "a message"
    ROOM = "room in memory"
    MOVE = "what another thread is moving"
    """It is there, so no time-out makes the queue an empty one: a get waits for it as for a read of its own."""
    EXIT = "room where dead letters go, which lie before it"
    WORK = "work on the disk"
    """Which it was told not to do."""
    TURN = "another turn"
    """It has let go of as many expired messages as go at once: it lets go of the lock before the next ones."""


SHORT = (Lack.ROOM, Lack.EXIT, Lack.MOVE)
"""A get that lacks these is woken when memory is given back, or something was moved."""


class Acquired(Protocol):
    """The queue that a get takes from: `Gets`."""

    context: Context
    gate: Gate
    lanes: Lanes
    admission: Admission
    held: Held
    source: Source
    leases: Leases
    claims: Claims
    restorer: Restorer
    expiry: Expiry
    exits: Exits

    waiting: dict[Getting, float]

    def get_at_once(self, taker: Noted) -> Delivery | None: ...
    def next_moment_s(self) -> float | None: ...


class Getting:
    """See the module. Nobody but its steps changes it."""

    __slots__ = (
        "_deadline", "_done", "_given_up", "_is_over", "_keeps_time", "_looks", "_most", "_passed", "_queue",
        "_single", "_starved", "_turn", "_turns", "_watcher", "collected", "delivery", "is_short", "shown", "stopped",
        "taker",
    )  # fmt: skip

    def __init__(
        self, queue: Acquired, most: int, deadline: float | None, taker: Noted, *, single: bool = False
    ) -> None:
        self._queue = queue
        self.taker = taker
        self._most = most
        self._deadline = deadline
        self._single = single  # it is for one message, which is given out by itself
        self.collected: HeldBatch | None = None  # thousands may wait, and have none
        self.delivery: Delivery | None = None
        self.shown: Deliveries | None = None
        """What is to be the batch as its user has it."""
        self.stopped: Callable[[], bool] | None = None
        """Asked, before it waits, whether it is to end."""
        self.is_short = False
        """It got nothing though a message waits: what consumers hold leaves no room in memory for it."""
        self._passed: HeldBatch | None = None  # what it goes past: back in its place at the end of each step
        self._done = False
        self._given_up = False
        self._is_over = False  # all of that was done: a handler that raises may come in its middle
        self._turn: int | None = None  # its place among those that wait
        self._looks = 0  # for room that others were making
        self._turns = 0  # that it had because there were so many expired messages
        self._starved = False
        self._keeps_time = False  # it waits until something is due, which no other may know
        self._watcher: Watcher | None = None

    @property
    def batch(self) -> HeldBatch:
        """What it gets."""
        if self.collected is None:
            self.collected = HeldBatch(self._queue.claims, [], self.taker)
        return self.collected

    def step(self, wake: Wake | None, may_work: bool) -> float | None:
        """Fill `batch`, or see to be woken.

        Returns:
            None: the batch is what it gets; empty at the time-out. Else see `line`; without `wake`, no watcher is left.

        Raises:
            BrokerClosed, QueueDeleted: it is gone; `give_up` then.
        """
        queue, gate, batches = self._queue, self._queue.gate, self._queue.held.batches
        with queue.context.lock:
            if self._watcher is not None:
                self._unwatch(self._watcher)
            if self._done or self._given_up:
                return None
            is_simple = self._single and self._turn is not None and self.collected is None
            if is_simple and (delivery := queue.get_at_once(self.taker)) is not None:
                self.delivery = delivery
                self._done = True
                queue.waiting.pop(self, None)
                if gate.starved:
                    gate.arrived.notify()
                self._hand_time_on()
                return None
            if self.collected is not None:
                self._renew()  # since the step before: the queue may be empty now
            lack = Lack.MESSAGE
            while not queue.lanes.is_bare or queue.admission.ready:
                self._renew()
                lack = self._gather(may_work)
                if self._passed is not None:
                    lack = self._give_back_passed(lack)
                if self._given_up:
                    return None
                if self.batch in batches:
                    break
                lack = Lack.MESSAGE
                self._renew()  # there may be nothing else in the queue: then nobody looks again
            if lack is Lack.WORK:
                return WORK
            batch = self.collected
            has_some = lack is Lack.NOTHING or (batch is not None and batch.total)
            wait_s = None if has_some or (self.stopped is not None and self.stopped()) else self._patience_s(lack)
            if wait_s is None:
                self._done = True
                self.is_short = lack is Lack.ROOM and not has_some
                queue.waiting.pop(self, None)
                self._finish()
                if lack in SHORT and not has_some:
                    gate.arrived.notify()  # what it was woken for may still be there: another waits for that
                self._hand_time_on()
                return None
            if batch is not None:
                batches.pop(batch, None)  # until it tries again: many may wait
                self.collected = None
            if wake is not None:
                if self._turn is None:
                    queue.waiting[self] = queue.context.monotonic()
                    gate.changed[gate.place] = True
                self._starved = lack in SHORT
                self._watcher = gate.arrived.watch(wake, self._turn)
                self._turn = self._watcher.number
                gate.getters += 1
                if self._starved:
                    gate.starved += 1
                    queue.lanes.refresh()
            return wait_s

    def give_up(self) -> None:
        """Get no more: what it has goes back uncounted, a wake-up it had goes to another; twice is fine."""
        queue = self._queue
        with queue.context.lock:
            if self._is_over:
                return
            self._given_up = True
            if queue.waiting.pop(self, None) is not None:
                queue.gate.note_change()
            if self._watcher is not None:
                self._unwatch(self._watcher)
            for one in (self.delivery, self.collected, self._passed):
                if one is not None:
                    queue.claims.returns.give_up(one)
            queue.gate.arrived.notify()
            self._is_over = True

    def _hand_time_on(self) -> None:
        """Have another wait until the next message is due, if this one did."""
        gate = self._queue.gate
        if self._keeps_time and gate.getters and self._queue.lanes.next_due_in_ms() < FOREVER:
            gate.arrived.notify()

    def _unwatch(self, watcher: Watcher) -> None:
        gate = self._queue.gate
        heard = 0 if watcher.called else -1  # a notification for another message: the bell rings for somebody else
        gate.arrived.unwatch(watcher)
        self._watcher = None  # and no call until that is counted
        gate.getters -= 1
        if gate.arrived.rung:
            gate.arrived.notify(heard)
        if self._starved:
            gate.starved -= 1
            self._queue.lanes.refresh()

    def _renew(self) -> None:
        """Begin again if the batch was purged while nobody held the lock: what it held is settled.

        By another batch: what is known of the size of that one is about what it held.
        """
        batches = self._queue.held.batches
        if self.collected is None or self.collected not in batches:
            self.collected = HeldBatch(self._queue.claims, [], self.taker)
            batches[self.collected] = None

    def _finish(self) -> None:
        """Hand out the batch, or the one message in it. Under the lock."""
        queue, batch = self._queue, self.batch
        since = queue.leases.since()
        if queue.gate.starved and batch.total:
            queue.gate.arrived.notify()  # what is left may be enough for the next one
        if self._single and batch.total:
            self.delivery = delivery = batch.delivery_at(0)
            delivery.settler = queue.claims
            delivery.taker = self.taker
            queue.held.add_single(delivery, since)
        if self._single or not batch.total:
            queue.held.batches.pop(batch, None)
        else:
            queue.held.add_batch(batch, since)
        if (shown := self.shown) is not None:
            shown.held, shown.segments, shown.total = batch, batch.segments, batch.total
        queue.lanes.cover_held()
        queue.lanes.refresh()

    def _gather(self, may_work: bool) -> Lack:
        """Move available messages to the batch; return what it would take to go on, nothing if it has all it wants.

        Called with the lock held; lets go of it for work on the disk, and returns `WORK` where it may not do that.
        """
        queue, batch, most = self._queue, self.batch, self._most
        gate, held, admission = queue.gate, queue.held, queue.admission
        ends = FOREVER
        while batch.total < most and batch in held.batches:
            queue.context.check_open()
            now_s = queue.context.monotonic() if most > LOOKED_AT_ONCE else 0.0
            if now_s >= ends:
                if not may_work:
                    return Lack.WORK
                with Unlocked(queue.context):
                    sleep(PAUSE_S)
                ends = FOREVER
                continue
            ends = min(ends, now_s + AT_ONCE_S)
            if not queue.leases.release_late(may_work):
                return Lack.WORK
            if batch not in held.batches:  # which lets go of the lock
                return Lack.NOTHING
            if queue.lanes.paused:
                return Lack.MESSAGE
            over = admission.cover()
            if over and (batch.total or held.is_any()):  # what passes on slack waits to be spilled
                if not may_work:
                    return Lack.WORK
                if queue.restorer.find_room() or batch not in held.batches or not admission.cover():
                    continue  # looking for room lets go of the lock: a purge may have ended the batch
                if batch.total or not queue.restorer.is_refused or over * REFUSED_SHARE > gate.account.capacity:
                    return self._no_room()
            looks = queue.lanes.must_look()
            segments: list[Segment] = [] if looks else batch.segments
            wanted = min(1 if over else most - batch.total, LOOKED_AT_ONCE if looks else TAKEN_AT_ONCE)
            passed = self._passed.total if looks and not over and self._passed is not None else 0
            taken, behind = queue.source.take(max(wanted, passed), segments)  # more at once, the more it goes past
            if taken:
                if over:
                    gate.get_slack, gate.put_slack = over, 0
                if looks:
                    lack = self._weed(segments, wanted, may_work)
                    if lack is not Lack.NOTHING:
                        return lack
                else:
                    batch.total += taken
                    _append(segments, [segments.pop()])
            elif behind is None:
                if not admission.publish_ready():
                    return Lack.MESSAGE
            elif isinstance(behind, RunList) and queue.expiry.drop_head(behind):
                continue
            elif self._leaves_unread(behind):
                return Lack.MESSAGE
            elif not may_work:
                return Lack.WORK
            elif queue.restorer.is_moving(behind):
                return Lack.MOVE
            elif not queue.restorer.bring(behind):
                return self._no_room()
        return Lack.NOTHING

    def _no_room(self) -> Lack:
        """Tell whether room is being made just now, or there is none until something is settled."""
        if self._looks == LOOKS or not self._queue.restorer.is_busy:
            return Lack.ROOM
        self._looks += 1
        return Lack.MOVE

    def _leaves_unread(self, behind: RunList | int) -> bool:
        """Tell whether the deadline has passed while delayed messages are read, of which some may be due."""
        if isinstance(behind, int) or behind.number < DELAYED or self._deadline is None:
            return False
        return self._queue.context.monotonic() >= self._deadline and not self._queue.source.waits_for_unread()

    def _weed(self, taken: list[Segment], wanted: int, may_work: bool) -> Lack:
        """Have what was taken and is wanted, but what is not to be delivered; EXIT if too much of it cannot leave now.

        Called with the lock held; lets go of it where dead letters are carried away. That may take work on the disk:
        where it may not be done, all is back in its place.
        """
        queue = self._queue
        settings, timed = queue.context.settings, bool(queue.lanes.closed & TIMED)
        most, now_ms = settings.max_deliveries, queue.context.now_ms()
        kept, expired, spent = sorted_out(taken, most, now_ms if timed else None)
        buries = settings.dead_letter is not None and queue.exits.may_bury
        if (expired or spent) and buries and not may_work:
            queue.source.give_back(taken)
            return Lack.WORK
        taken.clear()
        surplus = _cut_off(kept, wanted)
        _append(self.batch.segments, kept)
        self.batch.total += weigh(kept)[0]
        if surplus:
            queue.source.give_back(surplus, gained=False)
        if not (expired or spent):
            return Lack.NOTHING
        if settings.dead_letter is not None and not buries:
            return self._go_past(expired + spent)
        are_late = bool(expired) and not kept
        done = queue.exits.let_go_of(
            (expired, Cause("expired"), Fate.EXPIRED), (spent, Cause("max_deliveries"), Fate.DROPPED)
        )
        if not done:
            return Lack.NOTHING  # they come again at once, and it goes past them
        if are_late:  # so may those behind them: many at once
            if not may_work:
                return Lack.WORK
            if queue.expiry.expire(hurries=self._turns > 0):
                return Lack.TURN
        return Lack.NOTHING

    def _go_past(self, segments: list[Segment]) -> Lack:
        """Leave out messages that cannot leave now; EXIT if there are too many of them."""
        queue, count = self._queue, weigh(segments)[0]
        if self._passed is None:
            self._passed = HeldBatch(queue.claims, [], self.taker)
            queue.held.batches[self._passed] = None
        if self._passed.total + count > MOST_PASSED:
            queue.source.give_back(segments, gained=False)
            return Lack.EXIT
        self._passed.segments += segments
        self._passed.total += count
        return Lack.NOTHING

    def _give_back_passed(self, lack: Lack) -> Lack:
        """Put what it went past back in its place; return what it lacks: where nothing else is there, an exit."""
        queue, passed = self._queue, self._passed
        self._passed = None
        if passed in queue.held.batches:  # else it was purged
            del queue.held.batches[passed]
            queue.source.give_back(passed.segments, gained=False)
        return Lack.EXIT if lack is Lack.MESSAGE else lack

    def _patience_s(self, lack: Lack) -> float | None:
        """Return how long to wait for a message or for room, at most; None when the deadline has passed."""
        if lack is Lack.TURN and self._turns < TURNS:
            self._turns += 1
            return PAUSE_S
        # Room may come from another queue, which does not know of this one.
        wait = RETRY_S if lack in SHORT else PAUSE_S if lack is Lack.TURN else FOREVER
        moment = self._queue.next_moment_s()
        self._keeps_time = moment is not None and self._queue.lanes.next_due_in_ms() < FOREVER
        if moment is not None:
            wait = min(wait, moment)
        if self._deadline is not None:
            left = self._deadline - self._queue.context.monotonic()
            if lack is Lack.MOVE:
                left = max(left, MOVING_S)
            if left <= 0:
                return None
            wait = min(wait, left)
        return wait


def _append(segments: list[Segment], more: list[Segment]) -> None:
    """Add segments; what follows on the last one, of a run that was taken in parts, goes into that."""
    for part in more:
        if segments and (last := segments[-1]).first + len(last.records) == part.first and last.marks == part.marks:
            last.records.extend(part.records)
        else:
            segments.append(part)


def _cut_off(segments: list[Segment], most: int) -> list[Segment]:
    """Leave so many messages of segments; return the others."""
    surplus: list[Segment] = []
    count = weigh(segments)[0]
    while count > most:
        first, records, marks = segments.pop()
        kept = max(0, len(records) - (count - most))
        surplus.append(Segment(first + kept, records[kept:], marks))
        count -= len(records) - kept
        if kept:
            segments.append(Segment(first, records[:kept], marks))
    return surplus
