"""A great many deliveries are settled, or go back, in steps: between two of them the lock goes to who waits for it.

How long a put, or a get of somebody else, waits for such a call does not depend on how many they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from time import sleep
from typing import Any

from qflow.delivery import SEVERAL, Delivery, each_of
from qflow.errors import AlreadySettled, BrokerFailed, InvalidArgument, in_doubt
from qflow.memory.line import PAUSE_S
from qflow.memory.waiting import is_inside
from qflow.queues.apart import HeldOne
from qflow.queues.claims import Claims
from qflow.storage.log.transaction_log import Request

SETTLED_AT_ONCE = 2_000
"""Single deliveries: 2 to 10 µs each, for they lie anywhere in memory."""


def ack_many(claims: Claims, deliveries: Iterable[Delivery], wait: bool) -> None:
    """Settle single deliveries of any queues, those of this one together; see `Queue.ack_many`."""
    mine: list[Delivery] = []
    others: list[Delivery] = []
    for delivery in each_of(deliveries):
        if not isinstance(delivery, Delivery):
            raise InvalidArgument(f"{SEVERAL}, not {type(delivery).__name__}")
        holder = delivery.settler
        is_mine = holder is claims or getattr(holder, "settler", None) is claims
        (mine if is_mine else others).append(delivery)
    joined, problem = _settle_all(claims, mine)
    for delivery in others:
        try:
            delivery.ack()
        except AlreadySettled as error:
            problem = error
        except BrokerFailed as error:
            raise in_doubt(error) from error
    if wait and (others or not mine):
        joined = claims.join_settles()
    claims.finish(joined, wait)
    if problem is not None:
        raise problem


def _settle_all(claims: Claims, deliveries: list[Delivery]) -> tuple[Request | None, AlreadySettled | None]:
    """Ack deliveries; return what to wait for, and why one of them was left out."""
    joined: Request | None = None
    problem: AlreadySettled | None = None
    for start in range(0, len(deliveries), SETTLED_AT_ONCE):
        if start and not is_inside():
            claims.returns.outlast(joined)  # else what others put stands behind all of them
            sleep(PAUSE_S)
        try:
            joined, late = claims.settle_all(deliveries[start : start + SETTLED_AT_ONCE])
        except BrokerFailed as error:
            if start:
                raise in_doubt(error) from error
            raise
        problem = late or problem
    return joined, problem


def to_leave(holder: Any, held: list[HeldOne]) -> Iterator[list[HeldOne]]:
    """Yield what is to leave with one commit, a portion at a time: `begin_leaving` of the holder takes each.

    A batch goes with the deliveries of it that are there, too, however many: they are looked at together. So goes all
    that a stream delivered.
    """
    if len(held) <= SETTLED_AT_ONCE or not isinstance(holder, Claims):
        yield held
        return
    alone: list[HeldOne] = []
    batches: dict[Any, list[HeldOne]] = {one: [] for one in held if not isinstance(one, Delivery)}
    for one in held:
        batches.get(one.settler if isinstance(one, Delivery) else one, alone).append(one)
    parts = [alone[start : start + SETTLED_AT_ONCE] for start in range(0, len(alone), SETTLED_AT_ONCE)]
    some: list[HeldOne] = []
    for part in [*parts, *batches.values()]:
        if some and len(some) + len(part) > SETTLED_AT_ONCE:
            yield some
            sleep(PAUSE_S)
            some = []
        some += part
    yield some
