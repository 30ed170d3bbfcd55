"""Messages leave memory for the spill store.

When there is no room, the tail-most chunk of this queue is spilled, or, where the broker's capacity is the bound, of
the queue that has most. A run on the move carries a claim, and what was moved counts only if the claim still stands.
Methods take the lock themselves where their description says nothing else.
"""

from __future__ import annotations

import math
from functools import partial
from time import perf_counter, sleep
from typing import Any

from qflow.delivery import ONE_ATTEMPT, Segment
from qflow.errors import StorageError
from qflow.events import EventKind
from qflow.memory.chunk import Chunk
from qflow.memory.group import marks_of
from qflow.memory.line import PAUSE_S
from qflow.memory.run import Run
from qflow.memory.waiting import is_inside, shelter
from qflow.message import DELAYED, LANE_SHIFT
from qflow.queues.admission import Admission
from qflow.queues.context import Unlocked
from qflow.queues.lanes import Lanes
from qflow.storage.log.transaction_log import Request
from qflow.storage.spill.store import NO_COUNTERS, Ranges, Slots, SpillArea, SpillCounters, SpillStore

STEP_BYTES = 4 * 2**20
"""Of large messages, so much is spilled in one step, or a single one: others may wait for it."""
AT_ONCE_S = 0.05
"""How long maintenance, or a thread for the disk, spills of one queue before others have their turn."""
RECOVERED_S = 10.0
"""A disk has recovered that has refused nothing for so long: one that is nearly full refuses and takes by turns."""


class Spiller:
    """See the module."""

    def __init__(self, lanes: Lanes, admission: Admission, store: SpillStore) -> None:
        self._context = lanes.context
        self._gate = lanes.gate
        self._lanes = lanes
        self._admission = admission
        self._store = store
        self._area: SpillArea | None = None  # most queues never spill
        self.spilling = False
        self.error: StorageError | None = None
        """Why the disk did not take what was spilled last."""
        self.refused_s: float | None = None
        """When it did not (monotonic), until it has recovered."""
        self.trash: list[Slots] = []
        """Of messages that were purged; freed by maintenance."""
        self.under_way: set[object] = set()
        """Writes and frees that have begun, of slots that no list has meanwhile."""
        self.has_spilled = False
        """Something was, and since then not everything has been found in memory."""
        self._begun = 0  # steps that were begun
        self._was_over = False  # the bounds, when maintenance looked
        self._asked_for = math.inf  # when maintenance spilled last, where it has not come to an end

    @property
    def area(self) -> SpillArea:
        """Where it spills; made when it is first asked for."""
        if self._area is None:
            with self._context.lock:
                if self._area is None:
                    context = self._context
                    self._area = self._store.area(context.name, context.owner, context.incarnation)
        return self._area

    def counters(self) -> SpillCounters:
        """See `SpillArea.counters`."""
        return NO_COUNTERS if self._area is None else self._area.counters()

    def problems(self, used: Ranges) -> list[str]:
        """See `SpillArea.problems`."""
        return [] if self._area is None and not used.ranges else self.area.problems(used)

    def spill_tail(self, wanted: int) -> bool:
        """Move about `wanted` bytes from the tail to the spill store, or less: no more than is quickly done.

        Returns:
            whether anything was moved. Only one caller spills at a time; the others see False and wait at the gate's
            `room`.
        """
        claim = object()
        with self._context.lock:
            if self.spilling:
                return False
            capacity = self._gate.account.capacity
            chunk = max(min(wanted, STEP_BYTES), capacity // 64, min(self.area.chunk_bytes, capacity // 8))
            number, moving = self._lanes.claim_victim(claim, chunk, self.area.chunk_messages)
            if moving is None:
                self.error = None  # nothing waits for the disk any more
                return False
            self.spilling = True
            self._begun += 1
            self.under_way.add(claim)
            first, records = moving.first, list(moving.records) if isinstance(moving, Run) else []
        slots = counts = None
        error: StorageError | None = None
        installed = False
        try:
            if isinstance(moving, Chunk):
                slots = self.area.write(position(number, first), moving.packed())
            else:
                slots = self.area.write(first, records)
        except StorageError as failure:
            error = failure
        finally:
            with self._context.lock:
                self.spilling = False
                self._note(error)
                installed, counts = self.install(number, moving, claim, slots)
                if installed and not self.has_spilled:
                    self.has_spilled = True
                    self._context.tell(EventKind.SPILL_STARTED)
            try:
                if slots is not None and not installed:
                    self.area.free(slots)
            finally:
                self.under_way.discard(claim)
        if counts is not None and self._context.log is not None:
            self._context.log.wait(counts)  # else thousands would stand before the writer, and all puts behind them
        return installed

    def install(self, number: int, moving: Run | Chunk, claim: object, slots: Any) -> tuple[bool, Request | None]:
        """Make what was written leave memory; False if it stays there. Under the lock.

        Memory does not know any more then how often delayed messages were delivered: that is logged, and what is
        returned with it is the request.
        """
        groups = moving.groups if isinstance(moving, Chunk) else []
        freed = self._lanes.install_spilled(number, moving, claim, slots)
        self._admission.rebalance(freed or 0)
        segments = [Segment(first, records, marks_of(tag)) for _, first, tag, *records in groups]
        delivered = [segment for segment in segments if segment.marks >= ONE_ATTEMPT]
        counts = self._lanes.log_attempts(delivered) if freed is not None and delivered else None
        return freed is not None, counts

    def _note(self, error: StorageError | None) -> None:
        """Remember whether the disk took what was spilled, and tell if not. Under the lock."""
        self.error = error
        if error is not None:
            if self.refused_s is None:
                self._context.tell(EventKind.DISK_FULL, str(error))
            self.refused_s = self._context.monotonic()

    def note_what_came_back(self) -> None:
        """Tell if the disk has recovered, or nothing lies in the spill store any more. Under the lock."""
        refused_s = self.refused_s
        if refused_s is not None and self.error is None and self._context.monotonic() - refused_s >= RECOVERED_S:
            self.refused_s = None
            self._context.tell(EventKind.DISK_RECOVERED)
        if self.has_spilled and not self._lanes.spilled_messages():
            self.has_spilled = False
            self._context.tell(EventKind.SPILL_STOPPED)

    def give_way(self, wanted: int, spill: bool) -> bool:
        """Return memory to the broker: what is borrowed and not used, else what spilling a chunk frees."""
        if spill and not self.spill_tail(wanted):
            return False
        with self._context.lock:
            return self._gate.give_back_all()

    def find_room(self, missing: int) -> bool:
        """Free `missing` bytes for this queue: others give way, or the own tail is spilled."""
        account, ledger = self._gate.account, self._gate.ledger
        if account.borrowed < account.capacity and ledger.free() < missing and ledger.relieve(account, missing):
            return True
        return self.spill_tail(missing)

    def find_room_for(self, needed: int) -> bool:
        """Free `needed` bytes. Called with the lock held; lets go of it."""
        missing = max(1, self._gate.over + needed)
        with Unlocked(self._context):
            return self.find_room(missing)

    @property
    def exceeds(self) -> bool:
        """Something passed on slack, and is to be spilled."""
        return self._gate.over > 0

    def keep_within_bounds(self) -> None:
        """Spill what is above the bounds, if anything is."""
        if self.exceeds:
            self.spill_excess()

    def keep_within_capacity(self) -> None:
        """The same after messages went back, which may be on slack for a while; not where others wait for this thread.

        Who lets them wait, as an event loop does, has another one do that.
        """
        if self.exceeds_capacity and not is_inside():
            self.spill_excess()

    @property
    def exceeds_capacity(self) -> bool:
        """More is charged than the queue may have."""
        return self._gate.used > self._gate.account.capacity

    def spill_excess(self, most_s: float = math.inf, asked_for: float = math.inf) -> float | None:
        """After messages passed on slack or came back: spill until the queue is within its bounds, or for so long.

        Between two steps the main thread takes what a handler raises; maintenance goes on with what is left. Another
        thread may take some of them: this one goes on behind it, but where it has only a while.

        Returns:
            None, or where something may be left, what to go on with as `asked_for`.
        """
        ends, waits = perf_counter() + most_s, most_s == math.inf
        left = shelter(partial(self._spill_some, asked_for, waits))
        while left is not None and perf_counter() < ends:
            left = shelter(partial(self._spill_some, left, waits))
        return left

    def spill_for_a_while(self, asked_for: float = math.inf) -> float | None:
        """`spill_excess` where others wait for this thread."""
        return self.spill_excess(AT_ONCE_S, asked_for)

    def _spill_some(self, asked_for: float, waits: bool) -> float | None:
        """Take a step of it, or let another thread take one; return what the next is given, None if there is none.

        What passed alone is spilled before others are asked to give way for it; not again where that brought nothing:
        what they give may belong to the share that is left to them. `asked_for`: the excess when they were asked last.
        """
        account = self._gate.account
        with self._context.lock:
            self._admission.cover()
            excess = self._gate.used - min(account.borrowed, account.capacity)
            alone = self._gate.put_slack > 0
            begun, is_others = self._begun, self.spilling
        if excess <= 0 or (is_others and not waits):
            return None
        if is_others:
            sleep(PAUSE_S)
            return asked_for
        if alone and self.spill_tail(excess):
            return asked_for
        if (alone and excess >= asked_for) or not self.find_room(excess):
            came_before = waits and self.error is None and self._begun != begun  # another began just then
            return asked_for if came_before else None
        return excess

    def spill_left_over(self) -> bool:
        """Spill for a while what was above the bounds at the last call, too: mostly the putting thread has done that.

        Returns:
            whether it is to be called again soon: something is above the bounds, and was not before, or is left.
        """
        if self.error is not None:
            with self._context.lock:
                if not self._lanes.messages():
                    self.error = None  # nothing waits for the disk any more
        before, gate = self._was_over, self._gate
        self._was_over = self.exceeds or gate.slack > 0
        is_lowered = not self._was_over and self.exceeds_capacity  # under what was coming
        if is_lowered or (self._was_over and before):
            left = self.spill_for_a_while(self._asked_for)
            self._asked_for = math.inf if left is None else left
            return left is not None
        return self._was_over

    @property
    def is_busy(self) -> bool:
        """Something is left to free or, as it seemed at the last call, to spill; or the disk has not recovered."""
        return bool(self.trash) or self._was_over or self.refused_s is not None

    def sweep(self, most: int) -> bool:
        """Free at most so many spill files of purged messages; return whether more are left."""
        with self._context.lock:
            if not self.trash:
                return False
            slots, rest = self.trash.pop().take(most)
            if rest:
                self.trash.append(rest)
            self.free(slots)
        return True

    def free(self, slots: Slots) -> None:
        """Free slots that no list has any more. Called with the lock held; lets go of it."""
        freeing = object()
        self.under_way.add(freeing)
        try:
            with Unlocked(self._context):
                self.area.free(slots)
        finally:
            self.under_way.discard(freeing)


def position(number: int, place: int) -> int:
    """Return what stands for a sequence in the spill store, for a chunk of delayed messages of this lane."""
    return (2 * DELAYED + number) << LANE_SHIFT | place
