"""The same messages into several queues: without a commit where all take them at once, or in one commit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from qflow.memory.gate import ALWAYS
from qflow.memory.run_list import OWN_RUN
from qflow.memory.waiting import collecting, is_inside, shelter, straight
from qflow.message import OVERHEAD_BYTES, Message, Record, is_plain
from qflow.queues.puts import Puts
from qflow.queues.showing import wake_counted
from qflow.storage.log.calls import Calls
from qflow.storage.log.lane import Lane
from qflow.storage.log.spread import Spread


@straight
def put_into_all(queues: Sequence[Puts], record: Message) -> dict[str, int | None] | None:
    """Put a record that neither expires nor is delayed into queues that all take it at once, without a commit.

    Room is reserved in all, and then it is shown in all: each a straight line under the lock of one queue, so that an
    interrupt comes between two of them.

    Args:
        queues: in the order of their numbers.

    Returns:
        its sequence in each, by name; None if one of them does not take it at once, and nothing was done.

    Cost: 0.5 µs a queue; 15 µs more for the main thread where a task waits for it.
    """
    if len(queues) == 1:
        sequence = queues[0].put_at_once((record,), len(record))
        return None if sequence is None else {queues[0].name: sequence}
    if collecting or is_inside():  # what would be refused half-way is left to the long way
        return None
    charged, one = len(record) + OVERHEAD_BYTES, (record,)
    reserved, rings = 0, False
    firsts: dict[str, int | None] = {}
    returned: list[Puts] = []
    try:
        for queue in queues:
            gate = queue.gate
            with queue.context.lock:  # a straight line; see `waiting`
                used = gate.used + charged
                if used > gate.ceiling or charged > gate.largest:
                    break
                gate.used = used
                gate.incoming += charged
                gate.changed[gate.place] = True
                reserved += 1
        else:
            for queue in queues:
                gate, runs, name = queue.gate, queue.lanes.runs, queue.name
                with queue.context.lock:  # a straight line; see `waiting`
                    if gate.passing < 0:  # it was altered meanwhile, or others wait for room
                        break
                    firsts[name] = first = runs.next
                    runs.next = first + 1
                    tail = runs.tail
                    tail += one
                    gate.incoming -= charged
                    gate.changed[gate.place] = True
                    if gate.getters:
                        gate.arrived.rung += 1
                        rings = True
        if rings:
            _wake(queues)
        if reserved and len(firsts) < len(queues):
            shelter(partial(_end, queues, record, reserved, firsts, returned))
    except BaseException:
        try:
            shelter(partial(_end, queues, record, reserved, firsts, returned))
        finally:  # see `attend`
            shelter(partial(_end, queues, record, reserved, firsts, returned))
        raise
    return firsts or None


def _wake(queues: Sequence[Puts]) -> None:
    """Wake who waits first for what a straight line has shown: a thread, or else by another one."""
    for queue in queues:
        arrived = queue.gate.arrived
        bell = arrived.bell
        if arrived.rung and (bell is None or not bell.rang):
            bell() if bell is not None else shelter(partial(wake_counted, queue))


def _end(
    queues: Sequence[Puts], record: Message, reserved: int, firsts: dict[str, int | None], returned: list[Puts]
) -> None:
    """Show a record in the other queues as well, or give back what was reserved if that is not in all. Twice is fine.

    Args:
        reserved: in how many queues there is room for it.
        firsts: where it is shown, by name.
        returned: where the room was given back.
    """
    size = len(record)
    charged = size + OVERHEAD_BYTES
    if reserved < len(queues):
        for queue in queues[len(returned) : reserved]:
            with queue.context.lock:
                queue.gate.used -= charged
                queue.gate.incoming -= charged
                returned.append(queue)
                queue.admission.rebalance()
        return
    for queue in queues[len(firsts) :]:
        with queue.context.lock:
            first = queue.lanes.runs.next
            queue.admission.pending_messages += 1
            queue.admission.pending_bytes += size
            queue.gate.forget_places()
            queue.publish(first, [record], size, 0)
            firsts[queue.name] = first
    for queue in queues:
        wake_counted(queue)


class Fanned:
    """What becomes of messages in the queues they fan out into; for the log, the publisher of spreads.

    Each step under the lock of one queue. Cost: 1 µs a queue.
    """

    def publish_all(
        self, lanes: Sequence[Lane], firsts: Sequence[int], records: list[Record], puts: int, call: Calls
    ) -> None:
        """See `SpreadPublisher`. What `Puts.publish` does, in a straight line where nobody waits for it."""
        messages, size = len(records), sum(map(len, records))
        charged = size + OVERHEAD_BYTES * messages
        for lane, first in zip(lanes, firsts, strict=True):
            queue: Any = lane.publisher
            gate = queue.gate
            with queue.context.lock:
                runs = queue.lanes.runs
                if gate.passing >= 0 and not gate.getters and runs.next == first and messages < OWN_RUN:
                    admission = queue.admission
                    runs.tail += records
                    runs.next = first + messages
                    queue.lanes.message_bytes += size
                    gate.incoming -= charged
                    admission.pending -= puts
                    admission.pending_messages -= messages
                    admission.pending_bytes -= size
                    gate.changed[gate.place] = True
                    if gate.used + charged > gate.passing:
                        gate.borrow_ahead(charged)
                    continue
            call(queue.publish, first, records, size, puts)

    def refused(self, spread: Spread) -> None:
        """See `SpreadPublisher`."""
        while (done := spread.returned) < len(spread.lanes):
            queue: Any = spread.lanes[done].publisher
            with queue.context.lock:
                if spread.returned == done:
                    queue.admission.take_back(spread)
                    spread.refused = False  # in the next lane
                    spread.returned = done + 1


_fanned = Fanned()


class FanOut:
    """Messages for several durable queues, on their way: room is reserved in one after the other, and they go together.

    They neither expire nor are delayed. Cost: 0.5 µs a queue.
    """

    __slots__ = ("_largest", "_left", "others", "queues", "spread")

    def __init__(self, queues: Sequence[Puts], records: list[Record]) -> None:
        """Queues in the order of their numbers."""
        sizes = list(map(len, records))
        charged = sum(sizes) + OVERHEAD_BYTES * len(records)
        self.spread = Spread(records, sizes, is_plain(records), charged, _fanned)
        self.queues = queues
        self.others: dict[Puts, Any] = {}
        """The receipts of those that had no room at once, and went the long way; see `Together`."""
        self._left = iter(queues)
        self._largest = max(sizes) + OVERHEAD_BYTES
        if len(sizes) > 1 and self.spread.size > queues[0].context.shared.max_transaction_bytes:
            self._largest = ALWAYS  # the long way says what is wrong

    def reserve(self) -> Puts | None:
        """Reserve room in the queues that are left, up to the first that has none at once; return that one."""
        spread, largest = self.spread, self._largest
        messages, size, charged, lanes = len(spread.records), spread.size, spread.charged, spread.lanes
        for queue in self._left:
            gate, admission = queue.gate, queue.admission
            with queue.context.lock:
                used = gate.used + charged
                if largest <= gate.largest:
                    if used <= gate.passing:
                        gate.used = used
                        gate.incoming += charged
                        gate.changed[gate.place] = True
                        admission.pending += 1
                        admission.pending_messages += messages
                        admission.pending_bytes += size
                        lanes.append(queue.lane)
                        continue
                    if admission.reserve(1, messages, size, charged):
                        lanes.append(queue.lane)
                        continue
            return queue
        return None

    def check_not_deleted(self) -> None:
        """Refuse to go on if one of the queues was deleted since room in it was reserved, perhaps long ago."""
        for queue in self.queues:
            if queue.context.ended is not None:
                queue.context.check_not_deleted()

    def firsts(self) -> dict[str, int | None]:
        """Return the sequence of the first message in each queue, by name; None where they were turned away."""
        firsts, others = self.spread.firsts, self.others
        return {queue.name: others[queue].first if queue in others else firsts[queue.lane] for queue in self.queues}
