"""Whether, and when, messages are admitted: limits, the line at a limit, reserved room. Above `Backlog`.

Room and depth are reserved before a put joins the log's open batch, and count from then on, so a limit is never passed,
by however many producers. `publish` makes a put visible once it is committed; `refused` gives back what it reserved.
Who has to wait does so in line: at a limit, first come first served. A put may be made step by step (`try_put`), by who
has no thread to wait with.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from qflow import config
from qflow.config import Overflow, QueueSettings
from qflow.delivery import Segment
from qflow.errors import (
    BrokerClosed,
    DiskFull,
    MessageTooLarge,
    QflowError,
    QueueDeleted,
    QueueFull,
    TransactionTooLarge,
)
from qflow.events import EventKind
from qflow.memory.group import GROUP_BYTES, Group, groups_of
from qflow.memory.line import FOREVER, WORK, Wake, Watcher
from qflow.memory.run_list import OWN_RUN
from qflow.memory.waiting import attend, collecting, refuse_finalizer, shelter, sheltered, straight
from qflow.message import (
    DELAYED,
    OVERHEAD_BYTES,
    Record,
    by_due,
    charge,
    is_plain,
    lane_of,
)
from qflow.queues.backlog import NOWHERE, RETRY_S, Backlog, Unlocked
from qflow.queues.overflow import Decision, Depth, check_can_ever_fit, decide, excess, may_resume
from qflow.storage.log.transaction_log import Lane, Put

NOTHING = Depth(0, 0)


class Undertaker(Protocol):
    """Who takes dead letters to their queue: the broker."""

    def __call__(self, queue: Any, segments: list[Segment], reason: str, leaving: Any) -> bool: ...


class TurnedAway(Exception):
    """What arrived was not admitted, and the queue's policy says what happens to it."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)
        self.decision = decision


class Asking:
    """A put that could not pass at once: what it takes, and its place in line. Nobody but its queue changes it."""

    __slots__ = (
        "charged", "counted", "dead", "deadline", "depth", "done", "given_up", "passed", "waits", "wake", "watcher",
    )  # fmt: skip

    def __init__(self, depth: Depth, charged: int, deadline: float | None, dead: bool) -> None:
        self.depth = depth
        """How much deeper it makes the queue, when what leaves in the same commit has left."""
        self.charged = charged
        self.deadline = deadline
        self.dead = dead
        """It is a dead letter: no limit holds it back."""
        self.waits = False
        """It is in line."""
        self.passed = False
        """It was admitted and needs memory only: the mark below the limit does not hold it back any more."""
        self.done = False
        """It has what it takes. For who goes by steps, as all that follows."""
        self.given_up = False
        self.wake: Wake | None = None
        """Has it try again: when it is first in line, or by the watcher."""
        self.counted = False
        """Among the putters who wait."""
        self.watcher: Watcher | None = None


class Admission(Backlog):
    """See the module."""

    def __init__(
        self,
        name: str,
        settings: QueueSettings,
        *,
        undertaker: Undertaker,
        max_transaction_bytes: int,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        **parts: Any,
    ) -> None:
        """Made by `Broker`; `parts` are those of `Backlog`."""
        super().__init__(name, priorities=settings.priorities, **parts)
        self.settings = settings
        self._undertaker = undertaker
        self._clock = clock
        self._max_transaction_bytes = max_transaction_bytes
        self._monotonic = monotonic
        self._largest = settings.max_message_bytes + OVERHEAD_BYTES
        self._ended: type[QflowError] | None = None
        """Why nothing works any more: BrokerClosed or QueueDeleted."""
        self._pending = 0  # puts that are on their way through the log
        self._pending_messages = self._pending_bytes = 0  # their depth
        self._acked = self._dropped = self._expired = self._dead_lettered = 0
        self._line: deque[Asking] = deque()  # puts that wait at a limit, first come first served
        self._timed = False  # some message may expire
        self._was_over = False  # the bounds, when maintenance looked
        self._unlogged_lanes: dict[int, Lane] = {}  # how commits know the lanes of a queue that is not logged

    # Messages on their way --------------------------------------------------------------------------------------------

    def prepare(
        self,
        lots: list[tuple[int, list[Record]]],
        timeout: float | None,
        *,
        leaving: Depth = NOTHING,
        dead: bool = False,
    ) -> list[Put]:
        """Reserve room for messages that join a batch: until they are published or `refused`, they are on their way.

        What is leaving the queue in the same commit makes room for them at its limits. Dead letters pass the limits:
        they were confirmed before, and have nowhere else to go.

        Args:
            lots: (number of a lane, records): all lanes at once, for one after the other might wait for each other.
        """
        puts = self.draft_all(lots, dead=dead)
        asking = self.begin_put(puts, timeout, leaving=leaving, dead=dead)
        attend(partial(self.try_put, puts, asking, may_work=True), partial(self.give_up_put, puts, asking))
        return puts

    def draft_all(self, lots: list[tuple[int, list[Record]]], *, dead: bool = False) -> list[Put]:
        """Return puts that have reserved nothing yet, after checking that they may pass together; see `prepare`."""
        puts = [self.draft(records, is_plain(records), number, dead=dead) for number, records in lots]
        if len(puts) > 1 and self._has_limit() and not dead:
            check_can_ever_fit(self._name, self.settings, _depth_of(puts))
        return puts

    def draft(self, records: list[Record], plain: bool, number: int, *, dead: bool = False) -> Put:
        """Return a put that has reserved nothing yet, after checking that it may pass."""
        sizes = list(map(len, records))
        size = sum(sizes)
        charged = self._charge_for(records, size, number, dead=dead)
        return Put(self._commit_lane(number), records, sizes, plain, size, charged)

    def _charge_for(self, records: list[Record], size: int, number: int, *, dead: bool = False) -> int:
        """Return what records of `size` bytes together are charged, after checking that they may pass."""
        settings = self.settings
        if not dead:
            if size > settings.max_message_bytes:
                largest = max(map(len, records))
                if largest > settings.max_message_bytes:
                    raise MessageTooLarge(
                        f"a message of {largest} bytes is more than max_message_bytes={settings.max_message_bytes} of "
                        f"queue {self._name!r}: split it, or declare the queue with a larger one"
                    )
            if size > self._max_transaction_bytes and len(records) > 1:
                raise TransactionTooLarge(
                    f"{len(records)} messages of {size} bytes together are more than max_transaction_bytes="
                    f"{self._max_transaction_bytes}: put them in smaller batches"
                )
            if self._has_limit():
                check_can_ever_fit(self._name, settings, Depth(len(records), size))
        return size + OVERHEAD_BYTES * len(records) + (_for_groups(1, len(records)) if number >= DELAYED else 0)

    def _commit_lane(self, number: int) -> Lane:
        """Return a lane as commits know it."""
        if self._log is not None:
            return self._lanes[number]
        lane = self._unlogged_lanes.get(number)
        if lane is None:
            lane = self._unlogged_lanes[number] = Lane(self._owner, number, None, self)
        return lane

    def put_unlogged(self, records: list[Record], number: int) -> int | None:
        """Append messages that are not logged at once, if nothing of the queue is on its way before them."""
        size = sum(map(len, records))
        charged = self._charge_for(records, size, number)
        with self._lock:
            lane = self._lanes[number]
            lane.leaves_gaps = True
            beyond = lane.next + len(records) > lane.row.next
            if self._pending or beyond or not self._admits(Depth(len(records), size)):
                return None
            self._check_open()
            if not self._charge(charged):
                return None
            self._count_in(len(records), size, charged)
            first = lane.next
            lane.next = first + len(records)
            self._publish(first, records, size, charged, 0)
            return first

    @sheltered
    def count_turned_away(self, messages: int, *, dropped: bool) -> None:
        """Count what was not admitted at a limit."""
        with self._lock:
            if dropped:
                self._dropped += messages
            else:
                self._dead_lettered += messages

    # Room -------------------------------------------------------------------------------------------------------------

    def _depth(self) -> Depth:
        """Return how deep the queue is, what is on its way included. Under the lock."""
        return Depth(self._messages() + self._pending_messages, self._message_bytes + self._pending_bytes)

    def _admits(self, arriving: Depth) -> bool:
        """Tell whether messages pass without waiting for anybody. Under the lock."""
        return not self._line and self._has_depth_for(arriving)

    def _full(self) -> QueueFull:
        settings = self.settings
        return QueueFull(
            f"queue {self._name!r} is at its limit (limit_messages={settings.limit_messages}, "
            f"limit_bytes={settings.limit_bytes}): settle messages, or wait longer with timeout_s"
        )

    def _pass_limit(self, asking: Asking, may_work: bool) -> float | None:
        """Return None if messages may pass the limits now, else how long to wait in line; as `_try_reserve`.

        Dead letters only heed what the policy does with messages, and never wait.

        Raises:
            QueueFull, TurnedAway: they may not.
        """
        arriving = asking.depth
        while True:
            is_first = not self._line or self._line[0] is asking
            decision = decide(self.settings, self._depth(), arriving)
            if decision is Decision.ADMIT:
                held_back = asking.waits and self._is_held_back() and not asking.passed
                if asking.dead or (is_first and (not held_back or self._is_past(asking.deadline))):
                    asking.passed = True
                    return None
            else:
                self._note_limit(reached=True)
            if decision is Decision.REFUSE and not asking.dead:
                raise self._full()
            if decision in (Decision.DROP, Decision.DEAD_LETTER):
                raise TurnedAway(decision)
            if decision is Decision.MAKE_ROOM and (asking.dead or is_first):
                if not may_work and self._drops_from_disk():
                    return WORK
                dropped = self._drop_oldest(excess(self.settings, self._depth(), arriving))
                self._check_open()
                if asking.given_up:
                    return None
                if dropped:
                    continue
            if asking.dead:
                return None
            if not asking.waits:
                asking.waits = True
                self._line.append(asking)
            return self._patience_s(asking.deadline, None)

    def _leave_line(self, asking: Asking) -> None:
        """Wait at a limit no more, and let the next one look. Under the lock."""
        if asking.waits:
            asking.waits = False
            self._line.remove(asking)
            if self._line:
                wake = self._line[0].wake
                if wake is not None:
                    wake()

    def _deadline(self, timeout: float | None) -> float | None:
        """Return when so many seconds are over, on the monotonic clock."""
        return None if timeout is None else self._monotonic() + timeout

    def _is_past(self, deadline: float | None) -> bool:
        return deadline is not None and self._monotonic() >= deadline

    def _note_limit(self, *, reached: bool) -> None:
        """Remember that the queue is at its limit, or has come down to the mark, and tell. Under the lock."""
        if reached is not self._at_limit:
            self._at_limit = reached
            self._refresh()
            self._tell(EventKind.LIMIT_REACHED if reached else EventKind.LIMIT_LEFT, self._name)

    def _drops_from_disk(self) -> bool:
        """Tell whether `_drop_oldest` would read, as things are. Under the lock."""
        raise NotImplementedError

    def _drop_oldest(self, surplus: Depth) -> bool:
        """Drop waiting messages to make room; False if there are none. With the lock held; it may let go of it."""
        raise NotImplementedError

    def _count_in(self, messages: int, size: int, charged: int) -> None:
        """Count messages as on their way in; what they are charged is charged. Under the lock."""
        self._incoming += charged
        self._pending_messages += messages
        self._pending_bytes += size

    @straight
    def enter_at_once(self, put: Put, *, urgent: bool | None = None) -> bool:
        """Have a put handed over, or visible where it is not logged, if nothing stands in its way. Cost: 1 µs.

        A straight line: an interrupt finds all of it done, or nothing.

        Args:
            urgent: somebody waits for it; None if the log is called by itself, `now`.
        """
        if "a" in collecting:
            refuse_finalizer()
        records, size, charged, lane = put.records, put.size, put.charged, put.lane
        messages = len(records)
        number = lane.lane
        if lane.is_logged:
            log = self._log
            assert log is not None
            log.check_usable()
            requests, one = log.requests, (put,)
            entered = False
            try:
                with self._lock:  # a straight line; see `waiting`
                    used = self._used + charged
                    if used > self._passing:
                        return False
                    self._used = used
                    self._incoming += charged
                    self._pending_messages += messages
                    self._pending_bytes += size
                    self._pending += 1
                    entered = put.joined = True
                    requests += one
                log.handed_over(put, urgent=urgent)
            except BaseException:
                log.rouse()
                if entered and not put.joined:  # it came too late
                    shelter(partial(self.refused, put))
                raise
            return True
        if number >= DELAYED:
            return False
        joins = messages < OWN_RUN
        with self._lock:  # a straight line; see `waiting`
            runs = self._lists[number]
            used = self._used + charged
            if used > self._passing or self._getters:
                return False
            tail = runs.open.records
            if not joins and tail:  # it would be a run of its own
                return False
            first = runs.next
            if self._front_number < number and self._front is not NOWHERE:
                self._front, self._front_number = runs, number
            self._used = used
            self._message_bytes += size
            runs.next = first + messages
            tail += records
            put.first = first
        return True

    def _try_reserve(self, asking: Asking, may_work: bool) -> float | None:
        """Take memory for a put that passes the limits; None when it did, else how long to wait at most.

        Called with the lock held; lets go of it only for work on the disk, and returns `WORK` where it may not do that.
        """
        account, charged = self._account, asking.charged
        while True:
            self._check_open()
            if self._has_limit() and (wait_s := self._pass_limit(asking, may_work)) is not None:
                return wait_s
            if asking.given_up:
                return None
            if self._charge(charged):
                return None
            fits = charged <= account.capacity
            self._cover()
            excess = self._used + (charged if fits else 0) - self._account.borrowed
            if excess > 0:
                if not may_work:
                    return WORK
                with Unlocked(self._lock):
                    moved = self._find_room(excess)
                self._check_open()
                if asking.given_up:
                    return None
                has_depth = asking.dead or self._has_depth_for(asking.depth)
                if moved or (fits and self._could_charge(charged)) or not has_depth:
                    continue
            if self._spill_error is not None and excess > 0:
                return self._patience_s(asking.deadline, self._spill_error)
            if (self._put_slack and self._incoming) or self._spilling:
                return self._patience_s(asking.deadline if self._put_slack else None, None)
            # It passes, alone, and is spilled as soon as it is visible.
            self._ledger.borrow_most(account, self._used + charged - account.borrowed)
            self._put_slack = max(0, self._used + charged - account.borrowed - self._get_slack)
            self._used += charged
            self._refresh()
            return None

    def begin_put(
        self, puts: list[Put], timeout_s: float | None, *, leaving: Depth = NOTHING, dead: bool = False
    ) -> Asking:
        """Begin to reserve for puts by a caller who has no thread to wait with: `try_put` until they have their room.

        All lanes at once, as in `prepare`.
        """
        messages, size = _depth_of(puts)
        depth = Depth(messages - leaving.messages, size - leaving.bytes)
        charged = sum(put.charged for put in puts)
        return Asking(depth, charged, self._deadline(config.parse_timeout(timeout_s)), dead)

    def try_put(self, puts: list[Put], asking: Asking, wake: Wake | None, *, may_work: bool) -> float | None:
        """A step of puts by a caller who has no thread to wait with: reserve for them, or see to be woken.

        Returns:
            None: they have their room, and are to join a batch, be published or `refused`. Else see `line`; without
            `wake`, no watcher is left behind.

        Raises:
            QueueFull, DiskFull, TurnedAway, BrokerClosed, QueueDeleted: as a put; `give_up_put` it then.
        """
        with self._lock:
            self._unwatch_room(asking)
            if asking.done or asking.given_up:
                return None
            asking.wake = None
            wait_s = self._try_reserve(asking, may_work)
            if asking.given_up:
                return None
            if wait_s is None:
                self._count_in(*_depth_of(puts), asking.charged)
                self._pending += len(puts)
                asking.done = True
                self._leave_line(asking)
            elif wait_s != WORK and wake is not None:
                asking.wake = wake
                asking.counted = True
                self._putters += 1
                if asking.waits and self._line[0] is not asking:  # who leaves the line wakes the next
                    wait_s = FOREVER if asking.deadline is None else asking.deadline - self._monotonic()
                else:
                    asking.watcher = self._room.watch(wake, 0)
                self._refresh()
            return wait_s

    def give_up_put(self, puts: list[Put], asking: Asking) -> None:
        """Ask for room no more, and give back what puts had that did not join a batch; twice is fine."""
        with self._lock:
            asking.given_up = True
            self._unwatch_room(asking)
            self._leave_line(asking)
            for put in puts if asking.done else ():
                if not put.joined and put.first < 0:
                    self.refused(put)

    def _unwatch_room(self, asking: Asking) -> None:
        if asking.watcher is not None:
            self._room.unwatch(asking.watcher)
            asking.watcher = None
        if asking.counted:
            asking.counted = False
            self._putters -= 1
            self._refresh()

    def _has_depth_for(self, arriving: Depth) -> bool:
        """Tell whether the limits admit so much. Under the lock."""
        return not self._has_limit() or decide(self.settings, self._depth(), arriving) is Decision.ADMIT

    def _could_charge(self, charged: int) -> bool:
        account = self._account
        free = min(account.capacity - account.borrowed, self._ledger.free())
        return self._used + charged <= account.borrowed + free

    def _patience_s(self, deadline: float | None, disk: Exception | None) -> float:
        """Return how long to wait until it is time to look again, at most.

        Raises:
            QueueFull, DiskFull: the deadline has passed.
        """
        wait = RETRY_S
        if deadline is not None:
            wait = min(wait, deadline - self._monotonic())
        if wait <= 0 or (disk is not None and self.settings.on_overflow is Overflow.REJECT):
            if disk is None and not self._has_limit():
                raise QueueFull(f"queue {self._name!r} found no memory in time: others wait with what they reserved")
            if disk is None:
                raise self._full()
            raise DiskFull(f"queue {self._name!r} is out of memory and could not spill: {disk}") from disk
        return wait

    def keep_within_bounds(self) -> None:
        """Spill what is above the bounds, if anything is."""
        if self._used > self._account.borrowed:
            shelter(self.spill_excess)

    def spill_excess(self) -> None:
        """After messages passed on slack or came back: spill until the queue is within its bounds."""
        while True:
            with self._lock:
                self._cover()
                excess = self._used - min(self._account.borrowed, self._account.capacity)
            if excess <= 0 or not self._find_room(excess):
                return

    def spill_left_over(self) -> bool:
        """Spill what was above the bounds at the last call, too: who puts spills, mostly, and returns when it is done.

        Returns:
            whether it is to be called again soon: something is above the bounds, and was not before.
        """
        before = self._was_over
        self._was_over = self._used > self._account.borrowed or self._put_slack > 0 or self._get_slack > 0
        if self._was_over and before:
            self.spill_excess()
        return self._was_over and not before

    def would_admit(self, messages: int, size: int) -> bool:
        """Tell whether so many messages, of so many bytes together, pass the limits as things are."""
        with self._lock:
            return self._admits(Depth(messages, size))

    # Called by the writer of the log ----------------------------------------------------------------------------------

    def publish(self, first: int, records: list[Record], size: int, puts: int) -> None:
        """Make confirmed messages of `size` bytes together visible."""
        charged = size + OVERHEAD_BYTES * len(records)
        if lane_of(first) >= DELAYED:
            charged += _for_groups(puts, len(records))
        with self._lock:
            self._publish(first, records, size, charged, puts)

    def publish_transient(self, put: Put) -> None:
        """Make the messages of a queue that is not logged visible, with their batch if they have one."""
        with self._lock:
            first = self._lists[put.lane.lane].next
            self._publish(first, put.records, put.size, put.charged, 1)
            put.first = first

    def purged(self, ends: dict[int, int]) -> None:
        """Drop everything below these ends, by lane: their settling is committed."""
        raise NotImplementedError

    def refused(self, put: Put) -> None:
        """Give back the room of a put that was not confirmed; callers who are interrupted at that may do it again."""
        with self._lock:
            if put.refused:
                return
            messages = len(put.records)
            put.refused = True
            self._pending -= 1
            self._pending_messages -= messages
            self._pending_bytes -= put.size
            self._incoming -= put.charged
            self._used -= put.charged
            self._look_around()

    def _publish(self, first: int, records: list[Record], size: int, charged: int, puts: int) -> None:
        """Append what was reserved. Under the lock."""
        runs = self._list_of(first)
        count = len(records)
        gap = first - runs.next
        gone = self._ended is not None
        number = runs.number
        schedule = self._schedules[number] if number >= DELAYED and not gone else None
        groups: list[Group] = []
        overhead = 0
        if schedule is not None:
            groups = [
                group
                for due_ms, start, stop in by_due(records)
                for group in groups_of(due_ms, first + start, records[start:stop], 0)
            ]
            overhead = schedule.overhead_bytes
            runs.renew_open(first + count)
        else:
            tail = runs.tail_for(first, count)
        # No call from here on, so that an interrupt finds all of it done or nothing.
        runs.next = first + count
        if gone:
            runs.open.first = runs.next
            self._used -= charged
            self._gone += count
        elif schedule is not None:
            schedule.incoming += groups
        else:
            tail += records
        self._tail = self._runs.open.records
        if self._front_number < number < DELAYED and self._front is not NOWHERE:
            self._front, self._front_number = runs, number
        self._pending -= puts
        self._skipped += gap
        self._incoming -= charged
        self._pending_messages -= count
        self._pending_bytes -= size
        self._message_bytes += size
        if schedule is not None:  # what was reserved for its groups, against what they take
            self._used += schedule.overhead_bytes - overhead - (charged - charge(records))
            self._cover_delayed()
        if self._getters:
            self._arrived.notify(count)
        if self._putters:
            self._room.notify_all()

    # State ------------------------------------------------------------------------------------------------------------

    def _messages(self) -> int:
        return self._all_next() - self._skipped - self._gone - self._acked

    def _is_held_back(self) -> bool:
        """Tell whether blocked puts wait for the mark below the limit. Under the lock."""
        if not self._at_limit or self.settings.on_overflow is not Overflow.BLOCK:
            return False
        self._look_at_mark()
        return self._at_limit

    def _look_at_mark(self) -> None:
        """Tell if the depth is down at the mark. (Of a ring, once a second: it is so at each put.) Under the lock."""
        if self._at_limit and may_resume(self.settings, self._depth()):
            self._note_limit(reached=False)

    def _wakes_putters(self) -> bool:
        line = self._line
        held_back = self._is_held_back() and self._putters == len(line) and not (line and line[0].passed)
        return not held_back and (not self._put_slack or self._has_limit())

    def _trim_slack(self) -> int:
        self._is_held_back()
        return super()._trim_slack()

    def _puts_pass(self) -> bool:
        return self._ended is None and not self._putters and not self._line and not self._has_limit()

    def _passes_plain(self) -> bool:
        return self.settings.ttl_s is None

    def _has_limit(self) -> bool:
        return self.settings.limit_bytes is not None or self.settings.limit_messages is not None

    @sheltered
    def check_open(self) -> None:
        """Raise BrokerClosed or QueueDeleted if that is what happened."""
        with self._lock:
            self._check_open()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._gone_error()

    def check_not_deleted(self) -> None:
        """Refuse to go on if the queue was deleted since room in it was reserved, perhaps long ago."""
        if self._ended is QueueDeleted:
            raise self._gone_error()

    def _gone_error(self) -> QflowError:
        if self._ended is BrokerClosed:
            return BrokerClosed(f"the broker of queue {self._name!r} is closed: open the spool again")
        return QueueDeleted(f"queue {self._name!r} was deleted: declare it again")


def _depth_of(puts: list[Put]) -> Depth:
    """Return how much deeper puts make their queue."""
    return Depth(sum(len(put.records) for put in puts), sum(put.size for put in puts))


def _for_groups(puts: int, messages: int) -> int:
    """Return what puts of delayed messages reserve for their groups in the schedule, which take that or less."""
    return GROUP_BYTES * puts + messages
