"""Requests of queues and of the whole broker: each made once, for threads and for tasks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from importlib import import_module
from typing import Any

from qflow.config import (
    QueueSettings,
    check_name,
    check_names,
    parse_count,
    parse_moment,
    parse_sequences,
    parse_span,
    parse_timeout,
    spool_path,
)
from qflow.delivery import Raised, Return
from qflow.durations import Duration
from qflow.errors import InvalidArgument, QflowError
from qflow.identity import name_at
from qflow.message import Headers, bodies_bytes, body_bytes, check_key, decode_headers, encode_headers
from qflow.options import PutOptions, ScheduleOptions, check_options
from qflow.periodic import from_plain
from qflow.queues import dedupe
from qflow.remote.client import replies
from qflow.remote.client.link import Request
from qflow.remote.wire.frames import encode_head
from qflow.remote.wire.results import decode_results
from qflow.remote.wire.values import plain
from qflow.restoring import Item, Refused
from qflow.stats import BrokerStats, CompactionReport, QueueStats, RecoveryReport, RedriveReport, SnapshotReport
from qflow.streams.topic_filter import check_topic

_PUT = PutOptions.__annotations__.keys()
TIMED = _PUT | {"timeout_s"}
_ONCE = TIMED | {"dedupe_key"}

QUEUES, EVENTS, CHECK = (Request({"op": name}) for name in ("queues", "events", "check"))
RECOVERY = Request({"op": "recovery"}, read=replies.reporting(RecoveryReport))
STATS = Request({"op": "stats"}, read=replies.reporting(BrokerStats))
COMPACT = Request({"op": "compact"}, doubt="the compaction", read=replies.reporting(CompactionReport))
SCHEDULES = Request({"op": "schedules"}, read=lambda reply: [from_plain(one) for one in reply.result])


def name_of(kind: str, one: Any, uuid: str) -> str:
    """Return the name of a queue or stream of a spool, given itself or by name. Raises InvalidArgument: it is none."""
    return check_name(name_at(uuid, kind, one), kind)


def named(kind: str, one: Any, uuid: str) -> dict[str, Any]:
    """Return how a head names a queue, or a stream: whoever has it is told later that it was deleted.

    Raises:
        InvalidArgument: it is neither that nor a name; or of another spool.
    """
    name = name_of(kind, one, uuid)
    return {kind: one} if name is one else {kind: name, "known": True}


def hello(pid: int | None = None) -> Request:
    """Begin; with the process that calls, where its number means something to the owner."""
    head = {"op": "hello", "product": f"qflow {import_module('qflow').__version__}"}
    return Request(head if pid is None else {**head, "pid": pid})


# Queues ---------------------------------------------------------------------------------------------------------------


def declare_queues(names: Iterable[str], settings: Mapping[str, Any]) -> tuple[list[str], Request]:
    """Return checked names, and the request; its reply is the settings of each."""
    QueueSettings.from_call(dict(settings), "queue")
    checked = check_names(names)
    head = {"op": "declare_queues", "names": checked, "settings": plain(dict(settings))}
    return checked, Request(head, doubt="what was declared", read=replies.all_queue_settings)


def alter_queue(uuid: str, queue: Any, changes: Mapping[str, Any]) -> Request:
    QueueSettings.check_names(changes, "queue")
    head = {"op": "alter_queue", **named("queue", queue, uuid), "changes": plain(dict(changes))}
    return Request(head, doubt="the change", read=replies.queue_settings)


def queue(name: str) -> Request:
    return Request({"op": "queue", "queue": check_name(name)}, read=replies.queue_settings)


def delete_queue(uuid: str, queue: Any) -> Request:
    return Request({"op": "delete_queue", **named("queue", queue, uuid)}, doubt="the deletion")


def bind(uuid: str, queue: Any, topic_filter: str) -> Request:
    return Request({"op": "bind", **named("queue", queue, uuid), "filter": topic_filter}, doubt="the binding")


def unbind(uuid: str, queue: Any, topic_filter: str) -> Request:
    return Request({"op": "unbind", **named("queue", queue, uuid), "filter": topic_filter}, doubt="what was unbound")


def purge(name: str) -> Request:
    return Request({"op": "purge", "queue": name}, doubt="the purge")


def delete_message(name: str, sequence: int) -> Request:
    parse_count(sequence, "sequence", least=0)
    return Request({"op": "delete_message", "queue": name, "sequence": sequence}, doubt="the deletion of the message")


def delete_messages(name: str, sequences: Iterable[int]) -> Request:
    head = {"op": "delete_messages", "queue": name, "sequences": parse_sequences(sequences)}
    return Request(head, doubt="the deletion of the messages")


def redrive(name: str, to: str | None, limit: int | None, sequences: Iterable[int] | None) -> Request:
    head: dict[str, Any] = {"op": "redrive", "queue": name, "to": to, "limit": limit}
    if sequences is not None:  # by a name of its own: an owner that does not know them would move all
        head |= {"op": "redrive_chosen", "sequences": parse_sequences(sequences)}
    return Request(head, doubt="which dead letters moved", read=replies.reporting(RedriveReport))


def restore(items: Sequence[Item]) -> Request:
    """Its reply is how many have expired."""
    headers: list[bytes] = []
    for index, one in enumerate(items):
        try:
            headers.append(encode_headers(one.headers))
        except QflowError as error:
            raise Refused(index, error) from error
    facts = [[one.kind, one.name, one.partition, one.priority, one.expires_ms, one.due_ms, one.topic] for one in items]
    columns = [[one.body for one in items], headers, [one.key for one in items]]
    return Request({"op": "restore", "items": facts}, columns, "the messages", replies.restored)


def delete_session(client_id: str) -> Request:
    return Request({"op": "delete_session", "client": client_id}, doubt="the deletion of the session")


def pause(name: str, pauses: bool) -> Request:
    return Request({"op": "pause" if pauses else "resume", "queue": name}, doubt="whether it is paused")


def length(name: str) -> Request:
    return Request({"op": "length", "queue": name})


def queue_stats(name: str) -> Request:
    return Request({"op": "queue_stats", "queue": name}, read=replies.reporting(QueueStats))


def on_slow_consumer(name: str, after_s: Duration | None, policy: Any) -> Request:
    return Request({"op": "on_slow_consumer", "queue": name, "after_s": plain(after_s), "policy": plain(policy)})


def put(name: str, body: Any, options: Mapping[str, Any], known: Set[str] = _ONCE) -> Request:
    """Its reply is the sequence, or None where the message was dropped. `known`: which options there are."""
    if not options:
        head: Any = _head_of_put(name)
    else:
        head = {"op": "put", "queue": name, "single": True, **put_options(options, known)}
    return Request(head, ((body_bytes(body),),), "the message", replies.first, line=name)


@lru_cache(maxsize=100)
def _head_of_put(name: str, single: bool = True) -> bytes:
    return encode_head({"op": "put", "queue": name, "single": True} if single else {"op": "put", "queue": name})


def put_many(name: str, bodies: Iterable[Any], options: Mapping[str, Any]) -> Request | None:
    """Its reply is a range; None where there is nothing to put."""
    records = bodies_bytes(bodies)
    head = {"op": "put", "queue": name, **put_options(options, TIMED)} if options else _head_of_put(name, False)
    return Request(head, [records], "the messages", replies.placed, line=name) if records else None


def put_options(options: Mapping[str, Any], known: Set[str] = _PUT) -> dict[str, Any]:
    """Return the options of a put that were given, as JSON has them.

    Args:
        known: which there are.

    Raises:
        TypeError: there is no such option. InvalidArgument: one makes no sense.
    """
    check_options("put", options, known)
    given = {name: value for name, value in options.items() if value is not None}
    if "headers" in given:
        given["headers"] = decode_headers(encode_headers(given["headers"]))
    if "dedupe_key" in given:
        dedupe.check_key(given["dedupe_key"])
    if "not_before" in given:
        given["not_before"] = parse_moment(given["not_before"], "not_before")
    for name in given.keys() & {"ttl_s", "delay_s"}:
        given[name] = parse_span(given[name], name)
    for name, kind in (("priority", "an int"), ("durable", "True, False or None")):
        value = given.get(name)
        if value is not None and not isinstance(value, bool | int | float):
            raise InvalidArgument(f"{name} must be {kind}, got {value!r}")
    if "timeout_s" in given:
        timeout = parse_timeout(given.pop("timeout_s"))
        given |= {} if timeout is None else {"timeout_s": timeout}
    return given


def get(name: str, most: int, timeout_s: Duration | None, consumer: str | int) -> Request:
    """Its reply is a `replies.Granted`. `consumer` is who gets: a name, or the number that `consume` returned."""
    head: dict[str, Any] = {"op": "get", "queue": name, "most": parse_count(most, "max_messages")}
    head["consumer"] = consumer
    timeout = parse_timeout(timeout_s)
    if timeout is not None:
        head["timeout_s"] = timeout
    return Request(head, read=replies.granted, undo=not_granted)


def not_granted(result: Any) -> Request | None:
    """Deliveries that came with a result were handed to nobody."""
    return give_back(result["grant"]) if result.get("grant") else None


def consume(queue: str, name: str, at_once: int = 1) -> Request:
    """A consumer begins, of which so many callbacks run at once; its reply is a number."""
    return Request({"op": "consume", "queue": queue, "name": name, "at_once": at_once}, undo=consume_end)


def consume_end(number: int) -> Request:
    """It has ended."""
    return Request({"op": "consume_end", "consumer": number})


# What is held ---------------------------------------------------------------------------------------------------------

Places = list[list[int]] | None
"""Ranges of positions in a grant; None = all that is left."""


def ack(grant: int, places: Places, wait: bool) -> Request:
    head: dict[str, Any] = {"op": "ack", "grant": grant, "places": places}
    if not wait:
        return Request(head)
    return Request({**head, "wait": True}, doubt="what was settled")


def nack(grant: int, places: Places, how: Return) -> Request:
    head = {"op": "nack", "grant": grant, "places": places, **how._asdict(), "requeue": bool(how.requeue)}
    return Request({**head, "raised": True} if isinstance(how.reason, Raised) else head)


def extend(grant: int, places: Places, seconds: Duration) -> Request:
    return Request({"op": "extend", "grant": grant, "places": places, "seconds": seconds})


def give_back(grant: int, first: int = 0) -> Request:
    """What is left of a grant, from a place on, was never seen."""
    return Request({"op": "give_back", "grant": grant, "from": first})


def cancel(number: int) -> Request:
    """Have a request answered that waits; nobody waits for an answer of this."""
    return Request({"op": "cancel", "request": number})


# The whole broker -----------------------------------------------------------------------------------------------------


def figures(since: int) -> Request:
    """Its reply is the number of the look, and what changed since that one."""
    return Request({"op": "figures", "since": since}, read=replies.figures)


def snapshot(target: str, path: str | os.PathLike[str]) -> Request:
    """Raises InvalidArgument: it is no path; one on another host has to be a whole one."""
    whole = spool_path(path, "snapshot")
    if "://" in target and not os.path.isabs(path):
        raise InvalidArgument(f"a snapshot is made on the host of {target}: give the whole path there, not {path!r}")
    return Request({"op": "snapshot", "path": whole}, doubt="the snapshot", read=replies.reporting(SnapshotReport))


# Schedules ------------------------------------------------------------------------------------------------------------


def schedule(uuid: str, name: str, queue: Any, body: Any, options: Mapping[str, Any]) -> Request:
    """Its reply is a `Schedule`."""
    check_options("schedule", options, ScheduleOptions.__annotations__.keys())
    given = {option: plain(value) for option, value in options.items() if option != "headers" and value is not None}
    if (headers := options.get("headers")) is not None:
        given["headers"] = decode_headers(encode_headers(headers))
    head = {"op": "schedule", "name": check_name(name, "schedule"), **named("queue", queue, uuid), "options": given}
    return Request(head, ((body_bytes(body),),), "the schedule", lambda reply: from_plain(reply.result))


def cancel_schedule(name: str) -> Request:
    return Request({"op": "cancel_schedule", "name": name}, doubt="the schedule")


# Publishing -----------------------------------------------------------------------------------------------------------


def publish_many(
    messages: Iterable[Any],
    headers: Headers | None = None,
    producer: str | None = None,
    number: int | None = None,
    timeout_s: Duration | None = None,
) -> Request | None:
    """Its reply is a list of results; None where there is nothing to publish."""
    try:
        given = [_parts(one) for one in messages]
    except TypeError as error:
        raise InvalidArgument(f"publish_many takes pairs of (topic, body), not {messages!r:.100}") from error
    head: dict[str, Any] = {"op": "publish"}
    topics = [topic for topic, _, _ in given]
    is_one = len(set(topics)) == 1
    if is_one:
        head["topics"] = topics[0]
    keys = [key for _, _, key in given]
    if headers:
        head["headers"] = decode_headers(encode_headers(headers))
    if producer is not None or number is not None:
        head |= {"producer": producer, "number": number}
    timeout = parse_timeout(timeout_s)
    if timeout is not None:
        head["timeout_s"] = timeout
    columns: list[list[Any]] = [[body for _, body, _ in given]]
    has_keys = any(key is not None for key in keys)
    if has_keys or not is_one:
        columns.append(keys if has_keys else [])
    if not is_one:
        columns.append([topic.encode() for topic in topics])
    return Request(head, columns, "what was published", lambda reply: decode_results(reply.result)) if given else None


def publish(topic: str, body: Any, key: Any, *options: Any) -> Request:
    """Its reply is a result. `options`: as `publish_many` has them."""
    request = publish_many([(topic, body, key)], *options)
    assert request is not None
    return request._replace(read=lambda reply: decode_results(reply.result)[0])


def _parts(message: Any) -> tuple[str, bytes, bytes | None]:
    """Return topic, body and key of a message to publish."""
    if not isinstance(message, tuple) or len(message) not in (2, 3):
        raise InvalidArgument(f"a message to publish is (topic, body) or (topic, body, key), not {message!r:.100}")
    topic, body, *key = message
    check_topic(topic)
    return topic, body_bytes(body), check_key(key[0] if key else None)
