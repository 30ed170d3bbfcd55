"""Operations on subscriptions of streams: opened, read, moved, closed."""

from __future__ import annotations

from functools import partial
from typing import Any

from qflow.aio.delivery import held_of
from qflow.aio.subscription import AsyncSubscription, Taker, abandon, acquire, is_leased, release, settled, show
from qflow.config import parse_count, parse_timeout
from qflow.errors import InvalidArgument
from qflow.options import SubscriptionOptions
from qflow.remote.server import arguments
from qflow.remote.server.arguments import Columns
from qflow.remote.server.grants import Grant
from qflow.remote.server.operations.streams import moment
from qflow.remote.server.records import MOST_MESSAGES, describe_batch
from qflow.remote.server.session import Reply, Session, by_name, of_calls


class _Lender:
    """See `grants.Lender`."""

    __slots__ = ("_subscription",)

    def __init__(self, subscription: AsyncSubscription) -> None:
        self._subscription = subscription

    def give_up(self, batch: Any) -> None:
        release(self._subscription, batch)

    def give_up_from(self, batch: Any, index: int) -> None:
        release(self._subscription, batch)

    async def settled(self) -> None:
        await settled(self._subscription)

    async def abandon(self, batch: Any) -> None:
        """Nothing: its subscription is closed, which does that."""


async def subscribe(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    options = dict(arguments.settings(head, "options", SubscriptionOptions.__annotations__))
    if "start" in options:
        options["start"] = moment(options["start"])
    opened = await session.broker.subscribe(arguments.text(head, "stream"), arguments.text(head, "filter"), **options)
    number = next(session.numbers)
    session.subscriptions[number] = opened
    stream = session.broker.stream(opened.stream)
    told = {"name": opened.name, "filter": opened.filter, "leased": is_leased(opened), "stream": opened.stream}
    return {"subscription": number, **told, "settings": stream.settings.to_dict()}


async def subscription_get(session: Session, head: dict[str, Any], columns: Columns) -> Reply:
    """Messages for a taker; those of a loop are acquired ahead, as many as it may."""
    subscription = _subscription(session, head)
    ahead = arguments.flag(head, "ahead")
    most = None if ahead else min(parse_count(head.get("most", 1), "max_messages"), MOST_MESSAGES)
    request, lender = head["request"], _Lender(subscription)
    gaps = partial(session.grants.add_gap, request)
    collect = partial(acquire, subscription, most, taker=_taker(session, head), gaps=gaps)
    batch = await session.acquire(collect, lender.give_up, parse_timeout(head.get("timeout_s")))
    if batch is None:
        return {"result": {"offsets": []}}, []
    try:
        told, answer = describe_batch(held_of(batch))
    except BaseException:
        lender.give_up(batch)
        raise
    if len(batch):
        told["grant"] = session.grants.add(Grant(batch, lender, request))
    return {"result": told}, answer


async def shown(session: Session, head: dict[str, Any], columns: Columns) -> Any:
    """A loop has returned so many of a grant, and the one before is settled."""
    number = arguments.number(head, "grant", 1)
    grant = session.grants.find(number)
    if grant is not None:
        await show(grant.batch, arguments.number(head, "count"), head.get("ack"))
        session.grants.drop(number)


async def loop_ends(session: Session, head: dict[str, Any], columns: Columns) -> None:
    number = arguments.number(head, "grant", 1)
    grant = session.grants.find(number)
    if grant is not None:
        grant.give_up()
        session.grants.drop(number, given_up=True)


async def subscription_close(session: Session, head: dict[str, Any], columns: Columns) -> None:
    closed = session.subscriptions.pop(arguments.number(head, "subscription"), None)
    if closed is not None:
        await closed.close()


def _subscription(session: Session, head: dict[str, Any]) -> AsyncSubscription:
    found = session.subscriptions.get(arguments.number(head, "subscription"))
    if found is None:
        raise InvalidArgument("the subscription is closed: subscribe again")
    return found  # type: ignore[no-any-return]


def _taker(session: Session, head: dict[str, Any]) -> Taker:
    loop = arguments.number(head, "loop") if "loop" in head else 0
    return f"{id(session)} {arguments.number(head, 'taker')}", loop


OPERATIONS = by_name(subscribe, subscription_get, shown, loop_ends, subscription_close) | of_calls(
    loop_begins=lambda session, head: abandon(_subscription(session, head), _taker(session, head)[0]),
    seek=lambda session, head: _subscription(session, head).seek(
        moment(head.get("to")), partition=head.get("partition")
    ),
    positions=lambda session, head: _subscription(session, head).positions,
    lag=lambda session, head: _subscription(session, head).lag,
    subscription_stats=lambda session, head: _subscription(session, head).stats(
        matching=arguments.flag(head, "matching")
    ),
)
