"""Bindings: which queues get what is published. Queues and topics meet here."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from qflow.errors import NotFound
from qflow.message import Headers, Record, body_bytes, topic_prefix, with_prefix
from qflow.queues.intake import Form, put_into_all
from qflow.queues.queue import Queue
from qflow.queues.together import Step
from qflow.streams.topic_filter import FilterTrie, check_filter, check_topic

ROUTES_KEPT = 4096


class PublishResult(NamedTuple):
    """Where a published message went."""

    offsets: dict[str, int]
    """By stream."""
    sequences: dict[str, int | None]
    """By queue; None where its overflow policy dropped it, or made it a dead letter."""


class _Route(NamedTuple):
    """Where a topic leads, and what stands before a body that goes there."""

    queues: tuple[Queue, ...]
    prefix: bytes


class Routing:
    """Bindings of a broker. Changed by one thread at a time, read by any."""

    def __init__(self) -> None:
        self._trie: FilterTrie[Queue] = FilterTrie()
        self._routes: dict[str, _Route] = {}
        self._lock = threading.Lock()
        self.unrouted = 0

    def bind(self, queue: Queue, topic_filter: str) -> bool:
        """Add a binding; False if it is there."""
        changed = self._trie.add(check_filter(topic_filter), queue)
        self._routes = {}
        return changed

    def unbind(self, queue: Queue, topic_filter: str) -> bool:
        """Remove a binding.

        Raises:
            NotFound: there is none.
        """
        if not self._trie.remove(check_filter(topic_filter), queue):
            raise NotFound(f"queue {queue.name!r} is not bound to {topic_filter!r}")
        self._routes = {}
        return True

    def replace(self, queue: Queue, filters: list[str]) -> None:
        """Bind a queue with these filters and no others."""
        for topic_filter in self.filters_of(queue):
            self._trie.remove(topic_filter, queue)
        for topic_filter in filters:
            self._trie.add(topic_filter, queue)
        self._routes = {}

    def filters_of(self, queue: Queue) -> list[str]:
        """Return a queue's filters, in the order they were bound."""
        return [topic_filter for topic_filter, bound in self._trie if bound is queue]

    def _route(self, topic: str) -> _Route:
        """Return where a topic leads. Cost: a lookup, where it was asked for before."""
        routes = self._routes
        known = routes.get(topic) if type(topic) is str else None
        if known is not None:
            return known
        queues = self._trie.match(check_topic(topic))
        route = _Route(queues, topic_prefix(topic))
        if len(routes) < ROUTES_KEPT:
            routes[topic] = route  # of the dictionary that was there before the match: a change has made another
        return route

    def publish_quickly(self, topic: str, body: Any) -> PublishResult | None:
        """Publish to queues that are not durable, one by one; None if that cannot be done. Cost: 0.3 µs a queue."""
        queues, prefix = self._route(topic)
        if not queues or type(body) is not bytes:
            return None
        record = with_prefix(prefix, body)
        sequences = put_into_all(queues, record)
        return None if sequences is None else PublishResult({}, sequences)

    def steps(self, topic: str, body: Any, headers: Headers | None) -> list[Step]:
        """Return what a publish puts where. Queues that want the same bytes share them."""
        queues, prefix = self._route(topic)
        body = body_bytes(body)
        if not queues:
            with self._lock:
                self.unrouted += 1
        records: dict[Form, Record] = {}
        steps: list[Step] = []
        bare = Form(0, prefix)
        for queue in queues:
            form = bare
            if headers is not None or queue.settings.ttl_s is not None:
                form = queue.form(headers, None, 0, None, None, None, topic)
            if form not in records:
                records[form] = form.record(body)
            steps.append(Step(queue, form.number, [records[form]]))
        return steps
