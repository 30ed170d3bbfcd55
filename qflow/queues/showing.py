"""Messages that their own thread has confirmed become visible: a straight line, where nobody is to be told of them."""

from __future__ import annotations

from functools import partial

from qflow.memory.gate import Gate
from qflow.memory.waiting import shelter, straight
from qflow.queues.putting import Reserved
from qflow.storage.log.batch import Put
from qflow.storage.log.lane import Turn


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
