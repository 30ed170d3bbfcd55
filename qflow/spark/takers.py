"""Who takes what is published to a topic, by the records of a log: what a sink asks before it writes anything."""

from __future__ import annotations

from qflow.errors import MessageTooLarge, NotFound
from qflow.message import topic_prefix
from qflow.storage.recovery import BINDINGS, Recovery
from qflow.streams.topic_filter import FilterTrie, check_topic

_EXPIRY_BYTES = 8
"""What a queue with a lifetime stores with each message."""


class Takers:
    """The streams of a spool, and the durable queues that are bound."""

    def __init__(self, found: Recovery, spool: str, stream: str | None = None) -> None:
        """`stream`: one that must be among those who take a topic.

        Raises:
            NotFound: there is no such stream.
        """
        self._spool = spool
        self._stream = stream
        self._trie: FilterTrie[tuple[str, str, int]] = FilterTrie()
        names = []
        for record in found.streams:
            if not record.deleted:
                names.append(record.name)
                for topic_filter in record.settings["topics"]:
                    self._trie.add(topic_filter, ("stream", record.name, record.settings["max_message_bytes"]))
        for record in found.queues:
            if not record.deleted:
                for topic_filter in record.settings.get(BINDINGS, ()):
                    most = record.settings["max_message_bytes"] - (_EXPIRY_BYTES if record.settings.get("ttl_s") else 0)
                    self._trie.add(topic_filter, ("queue", record.name, most))
        self._names = ", ".join(map(repr, sorted(names))) or "none"
        if stream is not None and stream not in names:
            raise NotFound(f"there is no stream {stream!r} in {spool}; there are: {self._names}")

    def room(self, topic: str) -> int:
        """Return how large a message of this topic may be, beside what a queue stores with it. Cost: 2 µs.

        Raises:
            NotFound: nobody takes it, or the stream that was named does not. InvalidArgument: it is no topic.
        """
        takers = self._trie.match(check_topic(topic))
        if self._stream is not None and not any(taker[:2] == ("stream", self._stream) for taker in takers):
            raise NotFound(
                f"stream {self._stream!r} of {self._spool} does not take topic {topic!r}: have it take that with "
                "alter_stream(topics=...), or leave option 'stream' out"
            )
        if not takers:
            raise NotFound(
                f"no stream of {self._spool} takes topic {topic!r}, and no durable queue is bound to it; there are the "
                f"streams {self._names}. Declare one with topics that match it, before the rows are written"
            )
        prefix = len(topic_prefix(topic))  # in a queue each message has its topic with it
        return min(most - (prefix if kind == "queue" else 0) for kind, _, most in takers)


def too_large(topic: str, size: int, most: int) -> MessageTooLarge:
    """Return the error for a message that is larger than those who take it admit."""
    return MessageTooLarge(
        f"a row for topic {topic!r} makes a message of {size:,} bytes, more than the max_message_bytes={most:,} of who "
        "takes it (less its topic, where that is a queue): split it, or raise that with alter_stream or alter_queue"
    )
