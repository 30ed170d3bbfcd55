"""Messages become visible in a straight line: what is not logged, and what its own thread has confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from qflow.memory.gate import Gate
from qflow.memory.line import Alarm
from qflow.memory.run_list import OWN_RUN
from qflow.memory.waiting import collecting, in_place, shelter, straight
from qflow.message import DELAYED, OVERHEAD_BYTES, Record
from qflow.queues.lanes import NOWHERE
from qflow.queues.putting import Reserved
from qflow.storage.log.batch import Put
from qflow.storage.log.lane import Turn


@straight
def put_at_once(
    queue: Reserved,
    records: Sequence[Record],
    size: int,
    number: int = 0,
    plain: bool = True,
    in_loop: bool = False,
    expires_ms: int = 0,
) -> int | None:
    """Put messages of `size` bytes, not logged, where that takes no waiting and no work on the disk; return the first.

    None where it would, or where somebody has to be asked: nothing was done then.

    Args:
        plain: they are bodies and nothing else.
        in_loop: the caller is a task, and wakes others that wait in a get; a thread leaves that to the long way.
        expires_ms: when all of them expire; 0 = never, or at several times.
    """
    messages = len(records)
    charged = size + OVERHEAD_BYTES * messages
    context, gate, lanes = queue.context, queue.gate, queue.lanes
    if number >= DELAYED or context.log is not None:
        return None
    arrived, rings = gate.arrived, False
    try:
        with context.lock:  # a straight line; see `waiting`
            used = gate.used + charged
            is_limited = used > (gate.ceiling if plain else gate.passing)
            if is_limited and (used > gate.limited or gate.places < messages):
                return None
            if collecting or (messages == 1 and charged > gate.largest):
                return None
            bell, waits = arrived.bell, arrived.fresh or arrived.order
            runs = lanes.lists[number]
            tail = runs.tail
            if (waits and bell is None and not in_loop) or (tail and messages >= OWN_RUN):  # that is a run of its own
                return None
            if is_limited:
                gate.places -= messages
            if number:
                lanes.arrivals += 1
                if lanes.front_number < number and lanes.looked is not NOWHERE:
                    lanes.front = runs if lanes.front is lanes.looked else NOWHERE
                    lanes.looked, lanes.front_number = runs, number
            first = runs.next
            gate.used = used
            runs.next = first + messages
            tail += records
            gate.changed[gate.place] = True
            if expires_ms:  # as `note_expiry`
                run = runs.open
                if run.timed_end != first or expires_ms < run.timed_ms:
                    run.timed_from = first
                run.timed_end = first + messages
                run.timed_ms = expires_ms
            if waits:
                rings = bell is None or not bell.rang
                arrived.rung += messages
        if rings:
            _ring(queue, bell)
    except BaseException:
        if rings:
            call = in_place if in_loop else shelter
            try:
                call(partial(wake_counted, queue))
            finally:  # see `attend`
                call(partial(wake_counted, queue))
        raise
    return first


@straight
def show_alone(queue: Reserved, put: Put, turn: Turn, first: int) -> bool:
    """Make messages visible while their put has the turn; False where the writer has to do it. See `log.direct`.

    Called by the put's own thread.
    """
    records, charged, size = put.records, put.charged, put.size
    messages = len(records)
    context, gate, lanes, admission = queue.context, queue.gate, queue.lanes, queue.admission
    arrived, rings = gate.arrived, False
    try:
        with context.lock:  # a straight line; see `waiting`
            bell, waits = arrived.bell, arrived.fresh or arrived.order
            runs = lanes.runs
            if turn.request is not put or gate.passing < 0 or runs.next != first or (waits and bell is None):
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
            gate.changed[gate.place] = True
            is_short = gate.used + charged > gate.account.borrowed
            if waits:
                rings = bell is None or not bell.rang
                arrived.rung += messages
        if rings:
            _ring(queue, bell)
    except BaseException:
        if rings:
            try:
                shelter(partial(wake_counted, queue))
            finally:  # see `attend`
                shelter(partial(wake_counted, queue))
        raise
    if is_short:
        shelter(partial(_borrow_ahead, gate, context.lock, charged))
    return True


def _ring(queue: Reserved, bell: Alarm | None) -> None:
    """Wake who waits first: a thread, or else by a task."""
    if bell is None:
        in_place(partial(wake_counted, queue))
    else:
        bell()


def wake_counted(queue: Reserved) -> None:
    """Have those woken whom a straight line has only counted."""
    with queue.context.lock:
        queue.gate.arrived.notify(0)


def _borrow_ahead(gate: Gate, lock: object, charged: int) -> None:
    with lock:  # type: ignore[attr-defined]
        gate.borrow_ahead(charged)
