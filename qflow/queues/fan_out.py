"""The same messages into several queues: without a commit where all take them at once, or in one commit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from qflow.memory.gate import ALWAYS
from qflow.memory.run_list import OWN_RUN
from qflow.memory.waiting import shelter
from qflow.message import OVERHEAD_BYTES, Message, Record, is_plain
from qflow.queues.puts import Puts
from qflow.storage.log.calls import Calls
from qflow.storage.log.lane import Lane
from qflow.storage.log.spread import Spread

MOST_AT_ONCE = 64
"""Queues that a message is put into at once: their locks are held together."""


def put_into_all(queues: Sequence[Puts], record: Message) -> dict[str, int | None] | None:
    """Put a record that neither expires nor is delayed into queues that all take it at once, without a commit.

    Args:
        queues: in the order of their numbers, which is that of their locks where more than one is held.

    Returns:
        its sequence in each, by name; None if one of them does not take it at once, and nothing was done.

    Cost: 0.4 µs a queue; of several, 15 µs more for the main thread.
    """
    if len(queues) == 1:
        sequence = queues[0].put_at_once((record,), len(record))
        if sequence is not None:
            return {queues[0].name: sequence}
    if len(queues) > MOST_AT_ONCE:
        return None
    sequences: dict[str, int | None] = {}
    return sequences if shelter(partial(_put_into, queues, 0, record, sequences)) else None


def _put_into(queues: Sequence[Puts], index: int, record: Message, sequences: dict[str, int | None]) -> bool:
    """Put a record into the queues from `index` on, or into none: each is locked while those behind it are asked."""
    if index == len(queues):
        return True
    queue = queues[index]
    gate, runs, cost = queue.gate, queue.lanes.runs, len(record) + OVERHEAD_BYTES
    with queue.context.lock:
        if gate.used + cost > gate.ceiling or cost > gate.largest:
            return False
        if not _put_into(queues, index + 1, record, sequences):
            return False
        sequences[queue.name] = sequence = runs.next
        gate.used += cost
        runs.next = sequence + 1
        runs.tail.append(record)
        if gate.getters:
            gate.arrived.notify()
        return True


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
