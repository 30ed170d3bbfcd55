"""Finds the streams and queues that take a topic, by the records of a log, before a sink writes anything."""

from __future__ import annotations

from qflow.config import APART_IN_STREAMS
from qflow.errors import MessageTooLarge, NotFound
from qflow.message import topic_prefix
from qflow.named_tuples import NamedTuple
from qflow.names import choices
from qflow.storage.log.recovery import BINDINGS, Recovery
from qflow.streams.topic_filter import FilterTrie, check_topic

_EXPIRY_BYTES = 8
"""Bytes that a queue with `ttl_s` stores with each message."""


class Taker(NamedTuple):
    """A stream, or a durable queue with a binding."""

    kind: str
    name: str
    owner: int
    most: int
    """The largest message, in bytes."""


class Takers:
    """The streams of a spool, and its durable queues with bindings."""

    def __init__(self, found: Recovery, spool: str, stream: str | None = None) -> None:
        """`stream`: name of one that must take every topic. Raises NotFound: there is no such stream."""
        self.found: set[Taker] = set()
        """The takers of all topics that were asked for."""
        self._spool = spool
        self._stream = stream
        self._streams: FilterTrie[Taker] = FilterTrie(apart=APART_IN_STREAMS)
        self._queues: FilterTrie[Taker] = FilterTrie()
        names = []
        for record in found.streams:
            if not record.deleted:
                names.append(record.name)
                for topic_filter in record.settings["topics"]:
                    most = record.settings["max_message_bytes"]
                    self._streams.add(topic_filter, Taker("stream", record.name, record.owner, most))
        for record in found.queues:
            if not record.deleted:
                for topic_filter in record.settings.get(BINDINGS, ()):
                    most = record.settings["max_message_bytes"] - (_EXPIRY_BYTES if record.settings.get("ttl_s") else 0)
                    self._queues.add(topic_filter, Taker("queue", record.name, record.owner, most))
        self._names = ", ".join(map(repr, sorted(names))) or "none"
        if stream is not None and stream not in names:
            raise NotFound(f"there is no stream {stream!r} in {spool}; {choices(stream, names)}")

    def room(self, topic: str) -> int:
        """Return the largest size of a message of this topic, without what a queue stores with it. Cost: 2 µs.

        Raises:
            NotFound: no stream or queue takes it, or the named stream does not. InvalidArgument: it is no valid topic.
        """
        check_topic(topic)
        takers = [*self._streams.match(topic), *self._queues.match(topic)]
        if self._stream is not None and ("stream", self._stream) not in {taker[:2] for taker in takers}:
            raise NotFound(
                f"stream {self._stream!r} of {self._spool} does not take topic {topic!r}: have it take that with "
                "alter_stream(topics=...), or leave option 'stream' out"
            )
        if not takers:
            raise NotFound(
                f"no stream of {self._spool} takes topic {topic!r}, and no durable queue is bound to it; there are the "
                f"streams {self._names}. Declare one with topics that match it, before the rows are written"
            )
        prefix = len(topic_prefix(topic))  # a queue stores the topic with each message
        self.found.update(takers)
        return min(taker.most - (prefix if taker.kind == "queue" else 0) for taker in takers)


def too_large(topic: str, size: int, most: int) -> MessageTooLarge:
    """Return the error for a message that is larger than its takers allow."""
    return MessageTooLarge(
        f"a row for topic {topic!r} makes a message of {size:,} bytes, more than the max_message_bytes={most:,} of who "
        "takes it (less its topic, where that is a queue): split it, or raise that with alter_stream or alter_queue"
    )
