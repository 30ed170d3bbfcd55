"""Requests that publish, each made once, for threads and for tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from qflow.config import parse_timeout
from qflow.durations import Duration
from qflow.errors import InvalidArgument
from qflow.message import Headers, body_bytes, check_key, decode_headers, encode_headers
from qflow.remote.client.link import Request
from qflow.remote.wire.results import decode_results
from qflow.streams.topic_filter import check_topic


def publish_many(
    messages: Iterable[Any],
    *,
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


def publish(topic: str, body: Any, key: Any, **options: Any) -> Request:
    """Its reply is a result."""
    request = publish_many([(topic, body, key)], **options)
    assert request is not None
    return request._replace(read=lambda reply: decode_results(reply.result)[0])


def _parts(message: Any) -> tuple[str, bytes, bytes | None]:
    """Return topic, body and key of a message to publish."""
    if not isinstance(message, tuple) or len(message) not in (2, 3):
        raise InvalidArgument(f"a message to publish is (topic, body) or (topic, body, key), not {message!r:.100}")
    topic, body, *key = message
    check_topic(topic)
    return topic, body_bytes(body), check_key(key[0] if key else None)
