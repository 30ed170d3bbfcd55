"""How what tasks put comes into a queue once there is room for it, in the loop."""

from __future__ import annotations

from functools import partial
from typing import Any

from qflow.aio.loops import Log
from qflow.memory.waiting import in_place
from qflow.message import Record, is_logged
from qflow.queues.puts import Puts


def put_if_room(puts: Puts, log: Log, records: list[Record], plain: bool, number: int) -> Any:
    """Put messages if there is room, also room that the queue must borrow first; None if there is none.

    Returns the put that is to be confirmed, or where nothing is, the first sequence.
    """
    if puts.settings.durable and not is_logged(records[0]):
        first = in_place(partial(puts.put_unlogged, records, number))
        if first is not None:
            return first
    put = puts.draft(records, plain, number)
    if not puts.enter_at_once(put) and not in_place(partial(_borrow_and_enter, puts, log, put)):
        return None
    return put if put.lane.is_logged else put.first


def _borrow_and_enter(puts: Puts, log: Log, put: Any) -> bool:
    if not puts.reserve_at_once(put):
        return False
    enter(puts, log, put)
    return True


def enter(puts: Puts, log: Log, put: Any) -> None:
    """Hand a put whose room is reserved to the log, or make it visible if it is not logged."""
    if not put.lane.is_logged:
        puts.publish_transient(put)
        return
    try:
        log.put(put, soon=False)
    except BaseException:
        if not put.joined:
            puts.refused(put)
        raise
