"""The newest messages of the stream, for all who are a little behind."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice, takewhile
from operator import attrgetter

from sortedcontainers import SortedDict

from qflow.mqtt.model.messages import Message
from qflow.mqtt.model.sessions import Subscribed

MOST_RECENT = 4096
MOST_RECENT_BYTES = 8 * 1024**2
MOST_TOPICS = 256
"""Of which messages are merged, and which are looked at for that. Are there more, all messages are gone through."""
_OFFSET = attrgetter("offset")


class Recent:
    """See the module. Without holes. In the loop alone.

    Thousands of sessions come back at once, as after a cut of the network: each looks at what it gets, not at all.
    """

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._of_topic: SortedDict[str, list[Message]] = SortedDict()
        self._size = 0

    def add(self, message: Message) -> None:
        """Add the next message of the stream; the oldest go."""
        messages = self._messages
        if messages and messages[-1].offset + 1 != message.offset:
            messages.clear()
            self._of_topic.clear()
            self._size = 0
        messages.append(message)
        of_topic = self._of_topic.get(message.topic)
        if of_topic is None:
            self._of_topic[message.topic] = [message]
        else:
            of_topic.append(message)
        self._size += message.size
        while len(messages) > MOST_RECENT or self._size > MOST_RECENT_BYTES:
            self._drop(messages.popleft())

    def _drop(self, oldest: Message) -> None:
        self._size -= oldest.size
        of_topic = self._of_topic[oldest.topic]
        if len(of_topic) == 1:
            del self._of_topic[oldest.topic]
        else:
            del of_topic[0]

    def has(self, offset: int) -> bool:
        """Tell whether all messages from an offset on are here."""
        return bool(self._messages) and offset >= self._messages[0].offset

    def since(self, offset: int, wanted: Collection[Subscribed] | None = None) -> Iterator[Message]:
        """Yield the messages from an offset on, in order, which `has` said are here.

        Args:
            wanted: subscriptions of which no message is left out that one of them matches; others may be.

        Cost: 0.2 µs a message; where some are wanted, 5 µs for each of them, and 0.5 µs for each topic that begins as
        one of them does up to its first wildcard.
        """
        topics = None if wanted is None else self._matching(wanted)
        found: Iterable[Message]
        if topics is None:
            found = islice(self._messages, offset - self._messages[0].offset, None)
        else:
            found = heapq.merge(*[self._of_topic_since(topic, offset) for topic in topics], key=_OFFSET)
        for message in found:
            try:
                yield message
            finally:
                message.forget_encodings()

    def _matching(self, wanted: Collection[Subscribed]) -> set[str] | None:
        """Return the topics that any of some subscriptions matches; None: those that may be are many.

        A session has thousands of filters, each of which may begin as thousands of topics do, and match none.
        """
        found: set[str] = set()
        looked = 0
        for one in wanted:
            for topic in self._candidates(one.filter):
                looked += 1
                if looked > MOST_TOPICS:
                    return None
                if one.matches(topic):
                    found.add(topic)
        return found

    def _candidates(self, topic_filter: str) -> Iterable[str]:
        """Return the topics that a filter may match."""
        beginning = topic_filter.partition("#")[0].partition("+")[0]
        if beginning == topic_filter:
            return [topic_filter] if topic_filter in self._of_topic else []
        beginning = beginning.removesuffix("/")  # a/# matches a
        return takewhile(lambda topic: topic.startswith(beginning), self._of_topic.irange(beginning))

    def _of_topic_since(self, topic: str, offset: int) -> Iterator[Message]:
        messages = self._of_topic[topic]
        return islice(messages, bisect_left(messages, offset, key=_OFFSET), None)
