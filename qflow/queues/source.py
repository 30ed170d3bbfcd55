"""Messages are taken from the lanes, and go back to their place there. Under the queue's lock."""

from __future__ import annotations

from qflow.delivery import Segment
from qflow.memory.group import Group, Key
from qflow.memory.run import Place, Run
from qflow.memory.run_list import RunList
from qflow.memory.schedule import Schedule
from qflow.message import DELAYED, OVERHEAD_BYTES, RETURNED
from qflow.queues.admission import Admission
from qflow.queues.lanes import Lanes

READ_FIRST_S = 0.03
"""After an opening gets wait so long together for delayed messages to be read, lest those that are due come late."""


class Source:
    """See the module."""

    def __init__(self, lanes: Lanes, admission: Admission) -> None:
        self._context = lanes.context
        self._gate = lanes.gate
        self._lanes = lanes
        self._admission = admission
        self._reads_first_until: float | None = None

    def take(self, most: int, segments: list[Segment]) -> tuple[int, RunList | int | None]:
        """Move what is in memory and comes first to `segments`, from one lane.

        Returns:
            how many; if none, what must be brought into memory first: a lane, or a schedule by its number.
        """
        lanes = self._lanes
        schedules = lanes.schedules
        for runs in lanes.ranked:
            if schedules:
                numbers = [number for number in (runs.number + DELAYED, runs.number + RETURNED) if number in schedules]
                for number in sorted(numbers, key=lanes.due_in_ms):
                    found = self._take_delayed(number, most, segments)
                    if found is not None:
                        return found
                scattered = schedules.get(runs.number)
                key = None if scattered is None else scattered.next_key()
                before = (0, runs.settle_head().first)
                if scattered is not None and key is not None and key < before:
                    taken = self.take_due(scattered, most, 0, segments, before)
                    return taken, None if taken else runs.number
            taken = runs.take(most, segments)
            if taken:
                return taken, None
            if runs.settle_head().place is not Place.RESIDENT:
                return 0, runs
        for runs in lanes.delayed_lists():
            if runs.settle_head().place is not Place.RESIDENT:
                return 0, runs
        return 0, None

    def _take_delayed(self, number: int, most: int, segments: list[Segment]) -> tuple[int, RunList | int | None] | None:
        """Do so from a schedule; None if nothing of it comes before what is not delayed."""
        lanes = self._lanes
        schedule, runs = lanes.schedules[number], lanes.lists.get(number)
        if runs is not None and (unread := runs.settle_head()).place is not Place.RESIDENT:
            return (0, runs) if self._reads_first(unread) else None
        now_ms = lanes.now_ms(number)
        taken = self.take_due(schedule, most, now_ms, segments)
        if taken:
            return taken, None
        due_ms = schedule.next_due_ms()
        return (0, number) if due_ms is not None and due_ms <= now_ms else None  # not a later moment: it is on the disk

    def _reads_first(self, unread: Run) -> bool:
        """Tell whether delayed messages of the log are read before anything else is taken.

        After a restart nobody knows which of them is due. What would take more than half of the capacity, or gets have
        waited for long enough, is read by maintenance, and nobody waits for that.
        """
        gate = self._gate
        if not self.waits_for_unread():
            return False
        is_room = 2 * gate.used < gate.account.capacity and gate.could_charge(unread.needs + OVERHEAD_BYTES)
        return unread.claim is not None or is_room

    def waits_for_unread(self) -> bool:
        """Tell whether gets still wait for what is to be read of delayed messages, where they need not."""
        now = self._context.monotonic()
        if self._reads_first_until is None:
            self._reads_first_until = now + READ_FIRST_S
        return now < self._reads_first_until

    def take_due(
        self, schedule: Schedule, most: int, now_ms: int, segments: list[Segment], before: Key | None = None
    ) -> int:
        """Move what is due and in memory to `segments`; return how many."""
        overhead = schedule.overhead_bytes
        taken = schedule.take(most, now_ms, segments, before)
        if taken:
            self._admission.rebalance(overhead - schedule.overhead_bytes, gained=False)
        return taken

    def take_expired(self, schedule: Schedule, now_ms: int, most: int, segments: list[Segment]) -> bool:
        """Move what has expired of a schedule, and is in memory, to `segments`; as `Shelves.take_expired`."""
        overhead = schedule.overhead_bytes
        more = schedule.shelves.take_expired(now_ms, most, segments)
        if segments:
            self._lanes.cover(schedule.overhead_bytes - overhead)
            self._admission.rebalance(gained=False)
        return more

    def take_scheduled(self, schedule: Schedule, group: Group, sequence: int) -> Segment:
        """Take one message of a schedule, in memory, out of its group."""
        overhead = schedule.overhead_bytes
        one = schedule.shelves.take_out(group, sequence)
        self._lanes.cover(schedule.overhead_bytes - overhead)
        self._admission.rebalance(gained=False)
        return one

    def give_back(self, segments: list[Segment], due_ms: int = 0, *, gained: bool = True, was_due: bool = True) -> None:
        """Put taken messages back in their place, or in a schedule until they are due; as `Admission.rebalance`.

        Args:
            was_due: as `Lanes.place`.
        """
        lanes, gate = self._lanes, self._gate
        before, are_scheduled = lanes.scheduled_bytes(), False
        for first, records, marks in segments:
            if lanes.place(first, records, marks, due_ms, was_due=was_due):
                are_scheduled = True
            else:
                lanes.list_of(first).give_back(first, records, marks)
        if are_scheduled:
            lanes.cover(lanes.scheduled_bytes() - before)  # once: it takes longer than to put one back
        lanes.renew_front()
        if gate.getters and gained:
            gate.arrived.notify(sum(len(records) for _, records, _ in segments))
        self._admission.rebalance(gained=gained)
