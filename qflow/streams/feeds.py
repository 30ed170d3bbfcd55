"""The open cursors of a stream by their filter, and where each filter found something lately.

All cursors that have one filter share its *feed*. So what a commit costs grows with the filters that match its topics,
which are few, and with the cursors that wait, which are woken: not with the subscriptions there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from qflow.memory.waiting import StraightLock
from qflow.streams.part import Hints
from qflow.streams.topic_filter import FilterTrie


class Waiting(Protocol):
    """A cursor, as the writer sees it."""

    def wake(self) -> None:
        """Look again."""


class Feed:
    """What the cursors with one filter have in common."""

    __slots__ = ("cursors", "hints", "waiting")

    def __init__(self, partitions: int) -> None:
        self.cursors: dict[Waiting, None] = {}
        """Those that are open. Under the lock of the feeds."""
        self.waiting: dict[Waiting, None] = {}
        """Those in which somebody waits, or is about to. Each puts itself in before it looks what there is."""
        self.hints = [Hints() for _ in range(partitions)]
        """Which commits the filter wants, by partition, each under the lock of that."""


class Feeds:
    """See the module. `match` is called by anybody at any time, as that of a trie."""

    def __init__(self) -> None:
        self._trie: FilterTrie[Feed] = FilterTrie()
        self._feeds: dict[str, Feed] = {}
        self._lock = StraightLock()
        """It comes after those of cursors."""

    def join(self, topic_filter: str, cursor: Waiting, partitions: int) -> Feed:
        """Have a cursor told of what its filter matches from now on."""
        with self._lock:
            feed = self._feeds.get(topic_filter)
            if feed is None:
                feed = self._feeds[topic_filter] = Feed(partitions)
                self._trie.add(topic_filter, feed)
            feed.cursors[cursor] = None
            return feed

    def leave(self, topic_filter: str, cursor: Waiting) -> None:
        """Tell a cursor of nothing any more; twice is fine."""
        with self._lock:
            feed = self._feeds.get(topic_filter)
            if feed is None or cursor not in feed.cursors:
                return
            del feed.cursors[cursor]
            feed.waiting.pop(cursor, None)
            if not feed.cursors:
                self._trie.remove(topic_filter, feed)
                del self._feeds[topic_filter]

    def match(self, topics: Iterable[str]) -> Iterable[Feed]:
        """Return the feeds that want one of these topics, each once."""
        trie = self._trie
        found: dict[Feed, None] = {}
        for topic in topics:
            found.update(dict.fromkeys(trie.match(topic)))
        return found

    def cursors(self) -> list[Waiting]:
        """Return those that are open."""
        return [cursor for feed in list(self._feeds.values()) for cursor in list(feed.cursors)]

    def __len__(self) -> int:
        """Return how many filters there are."""
        return len(self._feeds)
