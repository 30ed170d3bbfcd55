"""What is done to a queue from outside: other settings, what time does to it, its end. By maintenance, and the broker.

Functions take the lock themselves where their description says nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

from qflow.config import QueueSettings, SlowConsumer, parse_policy, parse_span
from qflow.durations import Duration
from qflow.errors import BrokerClosed, InvalidArgument, QflowError
from qflow.memory.line import FOREVER, PAUSE_S
from qflow.memory.run import Place
from qflow.memory.waiting import sheltered
from qflow.queues.admission import wake_putter
from qflow.queues.lanes import TIMED
from qflow.queues.overflow import Decision, Depth, check_can_ever_fit, excess, when_full
from qflow.queues.parts import Parts

AT_ONCE_S = 0.05
"""How long what expired or is too much leaves, or what is held for too long is taken back, at once: in steps."""


@sheltered
def check_open(queue: Parts) -> None:
    """Raise BrokerClosed or QueueDeleted if that is what happened."""
    with queue.context.lock:
        queue.context.check_open()


def _wake_misfits(queue: Parts, settings: QueueSettings) -> None:
    """Have those in line look anew that could never fit any more, and would hold the others up. Under the lock."""
    for putter in queue.admission.line:
        try:
            check_can_ever_fit(queue.context.name, settings, *putter.size)
        except InvalidArgument:
            wake_putter(putter)


def altered(settings: QueueSettings, changes: dict[str, Any]) -> QueueSettings:
    """Return changed settings of a queue. Raises InvalidArgument: they cannot be changed so."""
    fixed = settings.fixed & changes.keys()
    if fixed:
        raise InvalidArgument(f"{min(fixed)} of a queue cannot be changed: declare another queue and move over")
    QueueSettings.check_names(changes, "queue")
    return settings.changed(**changes)


def alter(queue: Parts, settings: QueueSettings) -> None:
    """Apply other settings: a lower limit of a ring drops from the head. Callers spill what is too much for memory."""
    gate = queue.gate
    with queue.context.lock:
        queue.apply(settings)
        if settings.limit_bytes is not None:
            queue.lanes.message_bytes = queue.lanes.count_bytes(queue.held.overhead_bytes)
        before = gate.account.capacity
        gate.ledger.set_capacity(gate.account, settings.capacity_bytes)
        queue.restorer.refilling |= gate.account.capacity > before
        queue.admission.rebalance()
        queue.admission.admit_line()
        _wake_misfits(queue, settings)
        gate.room.notify_all()
        gate.arrived.notify_all()
    fit(queue)


@sheltered
def pause(queue: Parts, pauses: bool) -> None:
    """Have a queue deliver nothing, or deliver again."""
    with queue.context.lock:
        queue.context.check_open()
        queue.lanes.pause(pauses)
        if not pauses:
            queue.gate.arrived.notify_all()


@sheltered
def watch(queue: Parts, after_s: Duration | None, policy: SlowConsumer) -> None:
    """Watch for messages that are held for too long; see `Queue.on_slow_consumer`."""
    after_s = None if after_s is None else parse_span(after_s, "after_s")
    policy = parse_policy(SlowConsumer, policy, "policy")
    with queue.context.lock:
        queue.context.check_open()
        queue.leases.watch(after_s, policy)


def fit(queue: Parts) -> bool:
    """Do for a while what follows from an opening or an `alter`; return whether there may be more to do.

    Read what the log holds of delayed messages, drop what a ring has too much, restore what there is room for.
    """
    restorer = queue.restorer
    if _in_steps(queue, _bring_down):
        return True
    restorer.refilling = restorer.refilling and queue.context.ended is None and restorer.refill()
    return restorer.refilling


def _bring_down(queue: Parts) -> bool:
    """Read what the log holds of delayed messages, or drop what a ring has too much. Under the lock.

    Returns whether there may be more of that. What is to be dropped may have to be read before, in parts, and another
    thread may be at it.
    """
    if _read_some_delayed(queue):
        return True
    surplus = _surplus(queue)
    return any(surplus) and (queue.ring.drop(surplus) or _is_moving(queue))


def _is_moving(queue: Parts) -> bool:
    """Tell whether another thread is moving what comes next in a lane or a schedule. Under the lock."""
    lanes, is_moving = queue.lanes, queue.restorer.is_moving
    return any(map(is_moving, lanes.schedules)) or any(map(is_moving, (*lanes.ranked, *lanes.delayed_lists())))


def _read_some_delayed(queue: Parts) -> bool:
    """Read some of what the log holds of delayed messages; return whether any was read. Under the lock."""
    return any(
        runs.settle_head().place is not Place.RESIDENT and queue.restorer.restore_head(runs)
        for runs in queue.lanes.delayed_lists()
    )


@sheltered
def read_delayed(queue: Parts) -> bool:
    """Read some of what the log holds of delayed messages, which no get knows of, or wait for a thread that does.

    Returns False where there is none, or no room for it.
    """
    with queue.context.lock:
        if queue.context.ended is not None:
            return False
        if _read_some_delayed(queue):
            return True
        if not any(map(queue.restorer.is_moving, queue.lanes.delayed_lists())):
            return False
    sleep(PAUSE_S)
    return True


def tick(queue: Parts) -> bool:
    """What time does: expire, take back what is held for too long, tell of slow consumers. Once a second.

    Returns whether there is more of that than one call does.
    """
    queue.context.tick.now_s = queue.context.monotonic()
    if is_at_rest(queue):
        return False
    context, lanes, leases = queue.context, queue.lanes, queue.leases
    late = _in_steps(queue, _take_back_late)
    more = _in_steps(queue, _expire)
    with context.lock:
        if context.ended is not None:
            return False
        slow = queue.consumers.close_holding(leases.release_slow())
        queue.admission.look_at_mark()
        queue.admission.admit_line()
        queue.spiller.note_what_came_back()
        if queue.gate.getters and lanes.next_due_in_ms() <= 0:
            queue.gate.arrived.notify_all()
    for consumer in slow:
        consumer.stop()
    return more or late


def is_at_rest(queue: Parts) -> bool:
    """Tell whether `tick` would find nothing: none is held, expires, waits for its time or at a limit, or for the disk.

    Takes no lock: what is under way is found in the next round, as in `Watch`. Cost: 0.5 µs.
    """
    lanes, held = queue.lanes, queue.held
    return not (
        held.singles
        or held.batches
        or held.leaving
        or held.apart
        or queue.leases.coming
        or lanes.schedules
        or bool(lanes.closed & TIMED)
        or queue.context.settings.ttl_s is not None
        or queue.gate.at_limit
        or queue.admission.line
        or queue.spiller.has_spilled
        or queue.spiller.refused_s is not None
    )


def _in_steps(queue: Parts, step: Callable[[Parts], bool]) -> bool:
    """Take steps for a while; return whether there is more to do. The lock is let go of after each, for others."""
    ends = perf_counter() + AT_ONCE_S
    while True:
        with queue.context.lock:
            if queue.context.ended is not None or not step(queue):
                return False
        if perf_counter() >= ends:
            return True
        sleep(PAUSE_S)


def _take_back_late(queue: Parts) -> bool:
    """Take some of what is held for too long back; return whether there is more. Under the lock."""
    queue.leases.release_late()
    return queue.leases.are_late()


def _expire(queue: Parts) -> bool:
    """Let some of what has expired go; return whether there may be more. Under the lock."""
    if not queue.lanes.closed & TIMED and queue.context.settings.ttl_s is None:
        return False
    return _expire_heads(queue) or (not queue.expiry.is_under_way and queue.expiry.expire_behind())


def _expire_heads(queue: Parts) -> bool:
    """The same of what is first in its lane; by one thread at a time, so that dead letters stay in order."""
    expiry = queue.expiry
    if expiry.is_under_way:
        return False
    expiry.is_under_way = True
    try:
        return expiry.expire()
    finally:
        expiry.is_under_way = False


def expire(queue: Parts) -> int | None:
    """Let what has expired at the head of a lane go now, not at the next `tick`.

    Returns when the next message there expires, in milliseconds since the epoch; 0 if another thread is bringing what
    is first into memory, so that it is to be looked at again; None if none does, or if it is not in memory: `tick`
    looks for those.
    """
    while _in_steps(queue, _expire_heads):
        pass
    with queue.context.lock:
        if queue.context.ended is not None:
            return None
        if any(queue.restorer.is_moving(runs) for runs in queue.lanes.ranked):
            return 0
        return queue.lanes.next_expiry_ms()


def has_something_to_do(queue: Parts) -> bool:
    """Tell whether `tick`, `fit` or what follows them may do something though nothing of the queue changes."""
    context, gate, lanes, held = queue.context, queue.gate, queue.lanes, queue.held
    with context.lock:
        if context.ended is not None:
            return False
        return (
            bool(gate.at_limit or gate.slack or gate.over > 0 or gate.dropped)
            or (held.is_any() and held.is_watched)
            or any(rest in held for rest in queue.leases.coming)
            or ((lanes.closed & TIMED or context.settings.ttl_s is not None) and lanes.messages() > 0)
            or bool(gate.getters and lanes.next_due_in_ms() < FOREVER)
            or queue.spiller.is_busy
            or queue.restorer.refilling
            or any(lane.broken is None and (lane.removing or lane.hollow_due) for lane in lanes.logged.values())
            or lanes.has_unread()
            or any(_surplus(queue))
        )


def _surplus(queue: Parts) -> Depth:
    """Return what a ring has too much."""
    settings = queue.context.settings
    if when_full(settings) is not Decision.MAKE_ROOM:
        return Depth(0, 0)
    surplus = excess(settings, queue.admission.depth(), Depth(0, 0))
    return Depth(max(0, surplus.messages), max(0, surplus.bytes))


# Its end ---------------------------------------------------------------------------------------------------------


def refuse_calls(queue: Parts, reason: type[QflowError]) -> None:
    """End a queue: no new puts and gets, waiters are woken."""
    context = queue.context
    with context.lock:
        context.ended = context.ended or reason
        queue.consumers.end_all()
        if context.ended is BrokerClosed:
            queue.leases.give_up_unseen()
            queue.held.keep_all()
        queue.apply(context.settings)
        queue.admission.wake_putters()
        queue.gate.arrived.notify_all()


def settle_down(queue: Parts, drain: Callable[[], None], patience_s: float) -> None:
    """After `refuse_calls`: return when nothing is on its way; a put may have reserved and not joined yet.

    What is leaving with a commit that has not been put together finds that the queue has ended, and settles nothing.
    """
    context = queue.context
    deadline = context.monotonic() + patience_s
    while True:
        drain()
        with context.lock:
            leaves = any(leaving.unit is not None for leaving in queue.held.leaving)
            if not (queue.admission.pending or leaves) or context.monotonic() > deadline:
                return
        threading.Event().wait(0.01)


def let_go(queue: Parts) -> None:
    """Drop everything from memory: the broker is closed or the queue deleted."""
    with queue.context.lock:
        queue.exits.drop_all()
    queue.exits.let_go_of_dropped()
    queue.gate.ledger.close(queue.gate.account)
