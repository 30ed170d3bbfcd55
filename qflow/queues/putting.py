"""A put on its way that could not pass at once: what it takes, and its place in line."""

from __future__ import annotations

from typing import Protocol

from qflow.config import Overflow
from qflow.memory.gate import Gate
from qflow.memory.line import FOREVER, WORK, Wake, Watcher
from qflow.memory.waiting import collecting, in_place, straight
from qflow.queues.admission import Admission
from qflow.queues.context import Context, Unlocked
from qflow.queues.lanes import Lanes
from qflow.queues.overflow import Decision, Depth, check_can_ever_fit, excess, when_full
from qflow.queues.ring import Ring
from qflow.queues.spiller import Spiller
from qflow.storage.log.transaction_log import Put

BLOCK = Overflow.BLOCK
"""The policy that waits, by its name: `stand` calls nothing under the lock."""


class TurnedAway(Exception):
    """What arrived was not admitted, and the queue's policy says what happens to it."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision


class Reserved(Protocol):
    """The queue that a put is on its way into: `Puts`."""

    context: Context
    gate: Gate
    lanes: Lanes
    admission: Admission
    spiller: Spiller
    ring: Ring

    def refused(self, put: Put) -> None: ...
    def publish_transient(self, put: Put) -> None: ...


class Putting:
    """See the module. Nobody but its steps changes it."""

    __slots__ = (
        "_dead", "_deadline", "_is_over", "_own", "_queue", "_turn", "_watcher", "alone", "charged", "count", "depth",
        "done", "given_up", "in_turn", "passed", "puts", "size", "wake",
    )  # fmt: skip

    def __init__(
        self, queue: Reserved, puts: list[Put], size: Depth, depth: Depth, deadline: float | None, dead: bool, own: int
    ) -> None:
        """Messages of this size make the queue deeper by `depth`, when what leaves in the same commit has left.

        Dead letters only heed what the policy does with messages: no limit holds them back. `own`: so many bytes are on
        their way into the queue with the same commit, and are not waited for.
        """
        self._queue = queue
        self.puts = puts
        self.count = len(puts)
        self.size = size
        self.depth = depth
        self.charged = puts[0].charged if len(puts) == 1 else sum(put.charged for put in puts)
        self._deadline = deadline
        self._dead = dead
        self._own = own
        self.done = False  # it has what it takes
        self.given_up = False
        self._is_over = False  # all of that was done: a handler that raises may come in its middle
        self._watcher: Watcher | None = None
        self._turn: int | None = None  # its place among those that wait for memory
        self.alone = False
        self.in_turn = False
        self.passed = False
        self.wake: Wake | None = None

    def step(self, wake: Wake | None, may_work: bool) -> float | None:
        """Reserve room for the puts, or see to be woken.

        Returns:
            None: they have their room, and are to join a batch, be published or `refused`. Else see `line`; without
            `wake`, no watcher is left behind.

        Raises:
            QueueFull, DiskFull, TurnedAway, InvalidArgument, BrokerClosed, QueueDeleted: as a put; `give_up` then.
        """
        queue = self._queue
        gate, admission = queue.gate, queue.admission
        with queue.context.lock:
            self.wake = None
            if self._watcher is not None:
                self._unwatch(self._watcher)
            if admission.ready:
                admission.publish_ready()
            if self.done:
                admission.forget_blocked(self)
                admission.leave_line(self)
                return None
            if self.given_up:
                return None
            wait_s = self._try_reserve(may_work)
            if self.given_up:
                return None
            if wait_s is None:
                # No call since it was charged, so that an interrupt finds it done, or not charged.
                messages, size = self.size
                admission.pending += self.count
                admission.pending_messages += messages
                admission.pending_bytes += size
                gate.incoming += self.charged
                self.done = True
                gate.forget_places()
                if gate.put_slack:
                    queue.lanes.refresh()
                admission.forget_blocked(self)
                admission.leave_line(self)
                admission.count_places()
                if gate.room.watching:
                    gate.room.notify()  # what is left may be enough for the next one
                # It is put, so with a time-out the thread returns at that, whether or not its turn has come.
                may_give_way = self.in_turn and not gate.put_slack and (left_s := self._left_s()) > 0
                if may_give_way and wake is not None and admission.give_way(self, wake):
                    return left_s
            elif wait_s != WORK and wake is not None:
                self.wake = wake
                admission.note_blocked(self)
                if self.passed or self not in admission.line:
                    self._watcher = gate.room.watch(wake, self._turn)
                    self._turn = self._watcher.number
                    queue.lanes.refresh()
            return wait_s

    @straight
    def stand(self, wake: Wake) -> bool:
        """Wait at a limit behind others, as a `step` would; False where that takes a closer look. Cost: 0.5 µs.

        Whoever makes room admits it; what came in its way meanwhile, a `step` finds after the wake-up.
        """
        context, gate, admission = self._queue.context, self._queue.gate, self._queue.admission
        since_s = context.monotonic()
        with context.lock:  # a straight line; see `waiting`
            line = admission.line
            if not line or context.ended is not None or collecting:
                return False
            settings = context.settings
            if settings.on_overflow is not BLOCK:
                return False
            if settings.limit_bytes is not None and self.size.bytes > settings.limit_bytes:
                return False
            self.wake = wake
            line[self] = None
            admission.blocked[self] = since_s
            gate.changed[gate.place] = True
        return True

    @straight
    def go_on(self) -> bool:
        """Publish one put of a queue that is not logged, in its first lane, if it was admitted; else False.

        It does what `step` and `publish` would, where nobody else is to be told. Cost: 0.7 µs.
        """
        queue, put = self._queue, self.puts[0]
        context, gate, admission, lanes = queue.context, queue.gate, queue.admission, queue.lanes
        records, size, charged = put.records, put.size, put.charged
        published = False
        try:
            with context.lock:  # a straight line; see `waiting`
                admitted, runs = admission.admitted, lanes.runs
                if self not in admitted or admission.ready or context.ended is not None or collecting:
                    return False
                del admitted[self], admission.blocked[self]
                gate.changed[gate.place] = True
                put.first = runs.next
                runs.next = put.first + 1
                tail = runs.tail
                tail += records
                lanes.message_bytes += size
                gate.incoming -= charged
                admission.pending -= 1
                admission.pending_messages -= 1
                admission.pending_bytes -= size
                published = True
            if not admitted or gate.arrived.watching or gate.room.watching:
                in_place(self._let_others_look)
        except BaseException:
            if published:
                in_place(self._let_others_look)
            raise
        return True

    def _let_others_look(self) -> None:
        """After it was published: have others admitted if it was the last, and wake who waits for it."""
        gate, admission = self._queue.gate, self._queue.admission
        with self._queue.context.lock:
            admission.went_on()
            gate.arrived.notify()
            if gate.room.watching:
                gate.room.notify()

    def stop_watching(self) -> None:
        """See `Putter`."""
        if self._watcher is not None:
            self._unwatch(self._watcher)

    def publish(self) -> None:
        """See `Putter`."""
        for put in self.puts:
            self._queue.publish_transient(put)

    def give_up(self) -> None:
        """Ask for room no more, and give back what puts had that did not join a batch; twice is fine."""
        with self._queue.context.lock:
            if self._is_over:
                return
            self.given_up = True
            self.wake = None
            self._queue.admission.forget_blocked(self)
            if self._watcher is not None:
                self._unwatch(self._watcher)
            for put in self.puts if self.done else ():
                if not put.joined and put.first < 0:
                    self._queue.refused(put)
            self._queue.admission.leave_line(self)
            self._queue.admission.went_on()  # again, where a handler that raises came as it left
            if self._queue.gate.room.watching:
                self._queue.gate.room.notify()  # it may have been woken for room that is another's now
            self._is_over = True

    def _unwatch(self, watcher: Watcher) -> None:
        self._queue.gate.room.unwatch(watcher)
        self._watcher = None
        self._queue.lanes.refresh()

    def _try_reserve(self, may_work: bool) -> float | None:
        """Take memory if the limits are passed; None when it did, else how long to wait at most.

        Called with the lock held; lets go of it only for work on the disk, and returns `WORK` where it may not do that.
        """
        queue, charged = self._queue, self.charged
        gate, admission, spiller = queue.gate, queue.admission, queue.spiller
        while True:
            queue.context.check_open()
            if queue.context.has_limit and (wait_s := self._pass_limit(may_work)) is not None:
                return wait_s
            if self.given_up:
                return None
            if gate.charge(charged):
                return None
            fits = charged <= gate.account.capacity
            admission.cover()
            missing = gate.over + (charged if fits else 0)
            if missing > 0:
                if not may_work:
                    return WORK
                with Unlocked(queue.context):
                    moved = spiller.find_room(missing)
                queue.context.check_open()
                if self.given_up:
                    return None
                has_depth = self._dead or admission.decide(self.depth) is Decision.ADMIT
                if moved or (fits and gate.could_charge(charged)) or not has_depth:
                    continue
            if spiller.error is not None and missing > 0:
                return admission.patience_s(self._deadline, spiller.error)
            if (gate.put_slack and gate.incoming > self._own) or spiller.spilling:
                return admission.patience_s(self._deadline if gate.put_slack else None)
            gate.pass_alone(charged)  # and is spilled as soon as it is visible
            return None

    def _pass_limit(self, may_work: bool) -> float | None:
        """Return None if messages may pass the limits now, else how long to wait in line; as `_try_reserve`.

        Raises:
            QueueFull, TurnedAway: they may not. InvalidArgument: they can never, since a limit was lowered.
        """
        queue, admission, settings = self._queue, self._queue.admission, self._queue.context.settings
        while True:
            if not self._dead:
                check_can_ever_fit(queue.context.name, settings, *self.size)
            is_first = admission.is_next(self)
            if not is_first and not self._dead and when_full(settings) is Decision.WAIT:
                return self._join_line()
            decision = admission.decide(self.depth)
            if decision is Decision.ADMIT:
                held_back = self in admission.line and admission.is_held_back() and not self.passed
                if self._dead or (is_first and (not held_back or queue.context.is_past(self._deadline))):
                    self.passed = True
                    return None
            else:
                admission.note_limit(reached=True)
            if decision is Decision.REFUSE and not self._dead:
                raise admission.full()
            if decision in (Decision.DROP, Decision.DEAD_LETTER):
                raise TurnedAway(decision)
            if decision is Decision.MAKE_ROOM and (self._dead or is_first):
                if not may_work and queue.ring.reads():
                    return WORK
                dropped = queue.ring.drop(excess(settings, admission.depth(), self.depth))
                queue.context.check_open()
                if self.given_up:
                    return None
                if dropped:
                    settings = queue.context.settings
                    continue
            if self._dead:
                return None
            return self._join_line()

    def _join_line(self) -> float:
        """Wait in line until room is found; return for how long at most. Raises QueueFull: the deadline has passed."""
        admission = self._queue.admission
        wait_s = self._left_s()
        if wait_s <= 0:
            raise admission.full()
        admission.join_line(self)
        return wait_s

    def _left_s(self) -> float:
        """Return how long it may wait."""
        return FOREVER if self._deadline is None else self._deadline - self._queue.context.monotonic()


def putting_of(queue: Reserved, put: Put) -> Putting:
    """Return one put on its way that waits for as long as it takes."""
    depth = depth_of([put])
    return Putting(queue, [put], depth, depth, None, False, 0)


def depth_of(puts: list[Put]) -> Depth:
    """Return how much deeper puts make their queue."""
    if len(puts) == 1:
        return Depth(len(puts[0].records), puts[0].size)
    return Depth(sum(len(put.records) for put in puts), sum(put.size for put in puts))
