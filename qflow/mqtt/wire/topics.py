"""Topics and topic filters as packets have them: what MQTT says of them, `$share` included, and this side's limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from qflow.errors import InvalidArgument
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.wire.fields import as_text, malformed, quote
from qflow.streams.topic_filter import check_filter, check_topic

SHARE = "$share/"
CACHED_TOPICS = 2048
CACHED_BYTES = 256
"""A longer topic is not cached: together they bound the cache to 1.5 MB."""


def checked_topic(text: str) -> str:
    """Return a topic, or raise `MqttError` 0x81 if it is none."""
    try:
        return check_topic(text)
    except InvalidArgument as error:
        raise malformed(str(error)) from error


@lru_cache(16)
def topic_reader(most_bytes: int, most_levels: int) -> Callable[[bytes], str]:
    """Return a function that decodes the topic of a publish; it raises `MqttError`, 0x90 above the limits.

    It remembers what it read, since publishers send the same few topics. Cost: 0.1 µs; the first time 1 to 2 µs.
    """

    def read(raw: bytes) -> str:
        topic = checked_topic(as_text(raw))
        if len(raw) > most_bytes or raw.count(b"/") >= most_levels:
            text = f"a topic has at most {most_bytes:,} bytes and {most_levels} levels; not so {quote.repr(topic)}"
            raise MqttError(ReasonCode.TOPIC_NAME_INVALID, text)
        return topic

    cached = lru_cache(CACHED_TOPICS)(read)
    return lambda raw: cached(raw) if len(raw) <= CACHED_BYTES else read(raw)


def checked_filter(text: str, most_bytes: int, most_levels: int) -> str:
    """Return a topic filter, perhaps with `$share/group/`. Raises MqttError: 0x81 if it is none, 0x8F above limits."""
    plain = text
    if text.startswith(SHARE):
        group, _, plain = text[len(SHARE) :].partition("/")
        if not group or not plain or "+" in group or "#" in group:
            raise malformed(f"{quote.repr(text)} is no shared subscription, which is $share/group/filter")
    try:
        check_filter(plain)
    except InvalidArgument as error:
        raise malformed(str(error)) from error
    if len(text.encode()) > most_bytes or text.count("/") >= most_levels:
        said = f"a filter has at most {most_bytes:,} bytes and {most_levels} levels; not so {quote.repr(text)}"
        raise MqttError(ReasonCode.TOPIC_FILTER_INVALID, said)
    return text


def split_shared(topic_filter: str) -> tuple[str, str]:
    """Return (group, filter) of a filter that a `Subscribe` or `Unsubscribe` brought; the group is "" if not shared."""
    if not topic_filter.startswith(SHARE):
        return "", topic_filter
    _, group, shared = topic_filter.split("/", 2)
    return group, shared
