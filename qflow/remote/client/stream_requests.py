"""Requests of streams and subscriptions: each made once, for threads and for tasks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from qflow.config import StreamSettings, check_name, parse_count, parse_timeout
from qflow.durations import Duration
from qflow.errors import InvalidArgument
from qflow.remote.client import stream_replies
from qflow.remote.client.link import Request
from qflow.remote.client.replies import reporting
from qflow.remote.client.requests import named, not_granted
from qflow.remote.wire.values import plain
from qflow.stats import StreamStats, SubscriptionStats

STREAMS = Request({"op": "streams"})


def declare_stream(name: str, settings: Mapping[str, Any]) -> Request:
    StreamSettings.from_call(dict(settings), "stream")
    head = {"op": "declare_stream", "stream": check_name(name, "stream"), "settings": plain(dict(settings))}
    return Request(head, doubt="what was declared", read=stream_replies.settings)


def alter_stream(uuid: str, stream: Any, changes: Mapping[str, Any]) -> Request:
    StreamSettings.check_names(changes, "stream")
    head = {"op": "alter_stream", **named("stream", stream, uuid), "changes": plain(dict(changes))}
    return Request(head, doubt="the change", read=stream_replies.settings)


def stream(uuid: str, one: Any) -> Request:
    return Request({"op": "stream", **named("stream", one, uuid)}, read=stream_replies.settings)


def delete_stream(uuid: str, stream: Any) -> Request:
    return Request({"op": "delete_stream", **named("stream", stream, uuid)}, doubt="the deletion")


def delete_subscription(uuid: str, stream: Any, name: str) -> Request:
    head = {"op": "delete_subscription", **named("stream", stream, uuid), "name": check_name(name, "subscription")}
    return Request(head, doubt="the deletion")


def stream_stats(name: str) -> Request:
    return Request({"op": "stream_stats", "stream": name}, read=reporting(StreamStats))


def query(name: str, topic_filter: str, options: Mapping[str, Any]) -> Request:
    """Its reply is a `stream_replies.Page`."""
    given = {key: moment(value) for key, value in options.items() if value is not None}
    head = {"op": "query", "stream": name, "filter": topic_filter, **given}
    return Request(head, read=stream_replies.page(name), undo=_left)


def query_next(name: str, number: int) -> Request:
    return Request({"op": "query_next", "query": number}, read=stream_replies.page(name), undo=_left)


def query_close(number: int) -> Request:
    return Request({"op": "query_close", "query": number})


def _left(page: dict[str, Any]) -> Request | None:
    """A page was handed to nobody: those that follow are not asked for."""
    return query_close(page["query"]) if page["query"] else None


def last(name: str, topic_filter: str) -> Request:
    return Request({"op": "last", "stream": name, "filter": topic_filter}, read=stream_replies.by_topic(name))


def moment(value: Any) -> Any:
    """Return an offset or a moment as a head has it. Raises InvalidArgument: a datetime has no time zone."""
    if not isinstance(value, datetime):
        return value
    if value.tzinfo is None:
        raise InvalidArgument(f"a moment needs a time zone, as in datetime.now(UTC); got {value!r}")
    return {"time": value.timestamp()}


# Subscriptions --------------------------------------------------------------------------------------------------------


def subscribe(uuid: str, stream: Any, topic_filter: str, options: Mapping[str, Any]) -> Request:
    """Its reply is a `stream_replies.Opened`."""
    given = {name: plain(moment(value)) for name, value in options.items()}
    head = {"op": "subscribe", **named("stream", stream, uuid), "filter": topic_filter, "options": given}
    return Request(head, doubt="the subscription", read=stream_replies.opened, undo=_not_opened)


def _not_opened(told: dict[str, Any]) -> Request:
    """A subscription was handed to nobody."""
    return subscription_close(told["subscription"])


def get(subscription: int, most: int, timeout_s: Duration | None, taker: int) -> Request:
    """Its reply is a `stream_replies.Granted`."""
    head = {
        "op": "subscription_get",
        "subscription": subscription,
        "most": parse_count(most, "max_messages"),
        "timeout_s": parse_timeout(timeout_s),
        "taker": taker,
    }
    return Request(head, read=stream_replies.granted, undo=not_granted)


def get_ahead(subscription: int, taker: int, loop: int) -> Request:
    """The same for a loop, which says by `shown` what of it was returned."""
    head = {"op": "subscription_get", "subscription": subscription, "ahead": True, "taker": taker, "loop": loop}
    return Request(head, read=stream_replies.granted, undo=not_granted)


def shown(grant: int, count: int, settled: int | None) -> Request:
    return Request({"op": "shown", "grant": grant, "count": count, "ack": settled})


def loop_begins(subscription: int, taker: int) -> Request:
    return Request({"op": "loop_begins", "subscription": subscription, "taker": taker})


def loop_ends(grant: int) -> Request:
    return Request({"op": "loop_ends", "grant": grant})


def seek(subscription: int, to: Any, partition: int | None) -> Request:
    head = {"op": "seek", "subscription": subscription, "to": moment(to), "partition": partition}
    return Request(head, doubt="the seek")


def positions(subscription: int) -> Request:
    return Request({"op": "positions", "subscription": subscription})


def lag(subscription: int) -> Request:
    return Request({"op": "lag", "subscription": subscription})


def subscription_stats(subscription: int, matching: bool) -> Request:
    head = {"op": "subscription_stats", "subscription": subscription, "matching": bool(matching)}
    return Request(head, read=reporting(SubscriptionStats))


def subscription_close(subscription: int) -> Request:
    return Request({"op": "subscription_close", "subscription": subscription})
