"""Messages become visible in a straight line: what is not logged, and what its own thread has confirmed."""

from __future__ import annotations

from functools import partial

from qflow.memory.gate import Gate
from qflow.memory.waiting import collecting, shelter, straight
from qflow.message import DELAYED, OVERHEAD_BYTES, Record
from qflow.queues.lanes import NOWHERE
from qflow.queues.putting import Reserved
from qflow.storage.log.batch import Put
from qflow.storage.log.lane import Turn


@straight
def put_at_once(queue: Reserved, one: tuple[Record], number: int = 0, *, wakes: bool = True) -> int | None:
    """`Queue.put` of a message where that takes no commit, no waiting and no work on the disk; else None.

    A straight line, but where it `wakes` who waits in a get: else that is left to the long way.
    """
    cost = len(one[0]) + OVERHEAD_BYTES
    context, gate, lanes = queue.context, queue.gate, queue.lanes
    if number >= DELAYED or context.log is not None:
        return None
    with context.lock:
        used = gate.used + cost
        is_limited = used > gate.ceiling
        if is_limited and (used > gate.limited or not gate.places):
            return None
        if cost > gate.largest or collecting or (gate.getters and not wakes):
            return None
        runs = lanes.lists[number]
        gate.places -= is_limited
        if lanes.front_number < number and lanes.looked is not NOWHERE:
            lanes.front = runs if lanes.front is lanes.looked else NOWHERE
            lanes.looked, lanes.front_number = runs, number
        tail = runs.tail
        sequence = runs.next
        gate.used = used
        runs.next = sequence + 1
        tail += one
        if gate.getters:
            gate.arrived.notify()
        return sequence


@straight
def show_alone(queue: Reserved, put: Put, turn: Turn, first: int) -> bool:
    """Make messages visible while their put has the turn; False where the writer has to do it. See `log.direct`.

    Called by the put's own thread.
    """
    records, charged, size = put.records, put.charged, put.size
    messages = len(records)
    context, gate, lanes, admission = queue.context, queue.gate, queue.lanes, queue.admission
    with context.lock:  # a straight line; see `waiting`
        runs = lanes.runs
        if turn.request is not put or gate.getters or gate.passing < 0 or runs.next != first:
            return False
        tail = runs.tail
        runs.next = first + messages
        tail += records
        lanes.message_bytes += size
        gate.incoming -= charged
        admission.pending -= 1
        admission.pending_messages -= messages
        admission.pending_bytes -= size
        put.first, put.visible = first, True
        is_short = gate.used + charged > gate.account.borrowed
    if is_short:
        shelter(partial(_borrow_ahead, gate, context.lock, charged))
    return True


def _borrow_ahead(gate: Gate, lock: object, charged: int) -> None:
    with lock:  # type: ignore[attr-defined]
        gate.borrow_ahead(charged)
