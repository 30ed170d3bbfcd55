"""Operations on what a connection holds: settle it, hold it longer, give it back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from qflow.aio.delivery import AsyncDelivery
from qflow.config import parse_span
from qflow.delivery import Raised, parse_return
from qflow.errors import AlreadySettled
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.grants import Grant
from qflow.remote.server.session import Session, by_name


def _asked(session: Session, head: dict[str, Any]) -> tuple[int, Grant, list[int] | None]:
    """Return the number of the grant, the grant, and which positions of it; None for all that is left."""
    number = arguments.number(head, "grant", 1)
    grant = session.grants.get(number)
    return number, grant, arguments.places(head, len(grant.batch))


async def _each(grant: Grant, places: list[int], settle: Callable[[AsyncDelivery], Awaitable[None]]) -> None:
    """Settle one after the other. Raises AlreadySettled: the last of those that were; the others are done."""
    problem: AlreadySettled | None = None
    for place in places:
        try:
            await settle(grant.batch[place])
        except AlreadySettled as error:
            problem = error
    if problem is not None:
        raise problem


async def ack(session: Session, head: dict[str, Any], columns: Columns) -> None:
    number, grant, places = _asked(session, head)
    wait = arguments.flag(head, "wait")
    try:
        if places is None:
            await grant.batch.ack(wait)
        else:
            await _each(grant, places, AsyncDelivery.ack)
            if wait:
                await grant.settled()
    finally:
        session.grants.drop(number)


async def nack(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    number, grant, places = _asked(session, head)
    reason = head.get("reason")
    if isinstance(reason, str) and arguments.flag(head, "raised"):
        reason = Raised(reason)
    how = parse_return(arguments.flag(head, "requeue", True), head.get("delay_s", 0), reason)
    try:
        if places is None:
            await grant.batch.nack(*how)
        else:
            await _each(grant, places, lambda delivery: delivery.nack(*how))
    finally:
        session.grants.drop(number)


async def extend(session: Session, head: dict[str, Any], columns: Columns) -> None:
    number, grant, _ = _asked(session, head)
    seconds = parse_span(head.get("seconds"), "seconds")
    try:
        await grant.batch.extend(seconds)  # a lease is of a batch
    finally:
        session.grants.drop(number)


async def give_back(session: Session, head: dict[str, Any], columns: Columns) -> None:
    number, grant, _ = _asked(session, head)
    first = arguments.number(head, "from") if "from" in head else 0
    grant.give_up(first)
    session.grants.drop(number, given_up=not first)


OPERATIONS = by_name(ack, nack, extend, give_back)
