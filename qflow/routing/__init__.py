"""Where what is published goes: queues bound to its topic, streams that take it. Queues and streams meet here."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from qflow.errors import InvalidArgument, NotFound
from qflow.message import (
    Headers,
    Message,
    Record,
    body_bytes,
    check_key,
    encode_headers,
    is_plain,
    offset_of,
    topic_prefix,
    with_prefix,
)
from qflow.named_tuples import NamedTuple
from qflow.queues.assembly import Insert
from qflow.queues.envelope import Envelope
from qflow.queues.fan_out import put_into_all
from qflow.queues.puts import Puts
from qflow.queues.queue import Queue, parts_of
from qflow.routing.outgoing import OutgoingMany, OutgoingOne, Part, Placed
from qflow.routing.results import InOneStream, PublishResult, result_in_partitions
from qflow.streams.partition import Partition
from qflow.streams.publishing import Lot, Sent, prefix_of
from qflow.streams.shortcut import Shortcut
from qflow.streams.topic_filter import CACHED_CHARACTERS, FilterTrie, check_filter, check_topic

if TYPE_CHECKING:
    from qflow.streams.stream_log import StreamLog

ROUTES_KEPT = 4096
"""Topics whose route is remembered;"""
QUEUES_KEPT = 2**17
"""and queues in these routes, of 8 bytes each. With one more, remembering starts anew."""


class Route(NamedTuple):
    """Where a topic leads, and what stands before a body in a queue."""

    queues: tuple[Puts, ...]
    """In the order of their numbers."""
    streams: tuple[StreamLog, ...]
    prefix: bytes
    fans_out: bool
    """The queues are several, and durable."""


class Routing:
    """Bindings of a broker. Changed by one thread at a time, read by any."""

    shortcut: Shortcut
    _routes: dict[str, Route]
    _kept: int
    """Queues in all of these."""

    def __init__(self) -> None:
        self._trie: FilterTrie[Queue] = FilterTrie()
        self._filters: dict[Queue, dict[str, None]] = {}  # the same by queue, in the order they were bound
        self.streams: FilterTrie[StreamLog] = FilterTrie()
        """Changed by who declares streams, who calls `forget` then."""
        self.forget()
        self._lock = threading.Lock()
        self.unrouted = 0

    def bind(self, queue: Queue, topic_filter: str) -> bool:
        """Add a binding; False if it is there."""
        changed = self._trie.add(check_filter(topic_filter), queue)
        self._filters.setdefault(queue, {})[topic_filter] = None
        self.forget()
        return changed

    def unbind(self, queue: Queue, topic_filter: str) -> bool:
        """Remove a binding. Raises NotFound: there is none."""
        if not self._trie.remove(check_filter(topic_filter), queue):
            raise NotFound(f"queue {queue.name!r} is not bound to {topic_filter!r}")
        del self._filters[queue][topic_filter]
        self.forget()
        return True

    def replace(self, queue: Queue, filters: list[str]) -> None:
        """Bind a queue with these filters and no others."""
        for topic_filter in self._filters.pop(queue, ()):
            self._trie.remove(topic_filter, queue)
        for topic_filter in filters:
            self._trie.add(topic_filter, queue)
        if filters:
            self._filters[queue] = dict.fromkeys(filters)
        self.forget()

    def forget(self) -> None:
        """Look topics up anew."""
        self._routes, self._kept = {}, 0
        self.shortcut = Shortcut(self._trie, self.streams)

    def filters_of(self, queue: Queue) -> list[str]:
        """Return a queue's filters, in the order they were bound."""
        return list(self._filters.get(queue, ()))

    def route(self, topic: str) -> Route:
        """Return where a topic leads. Cost: a lookup, where it was asked for before."""
        routes = self._routes
        known = routes.get(topic) if type(topic) is str else None
        if known is not None:
            return known
        found = (parts_of(queue).puts for queue in self._trie.match(check_topic(topic)))
        queues = tuple(sorted(found, key=lambda puts: puts.owner))
        fans_out = len(queues) > 1 and all(queue.context.log is not None for queue in queues)
        route = Route(queues, self.streams.match(topic), topic_prefix(topic), fans_out)
        if len(topic) <= CACHED_CHARACTERS:
            if len(routes) >= ROUTES_KEPT or self._kept + len(queues) > QUEUES_KEPT:
                routes.clear()
                self._kept = 0
            routes[topic] = route  # of the dictionary that was there before the match: a change has made another
            self._kept += len(queues)
        return route

    def place_of_all(self, topics: Collection[str]) -> Partition | None:
        """Return the partition that all of these topics lead to, and to nothing else; None if there is no such."""
        shortcut = self.shortcut  # before the tries are asked: a change has made another
        routes = list(map(self.route, topics))
        streams = routes[0].streams
        if len(streams) != 1 or len(streams[0].partitions) != 1:
            return None
        if any(route.streams != streams or route.queues for route in routes):
            return None
        shortcut.remember(topics, streams[0].partitions[0])
        return streams[0].partitions[0]

    def publish_quickly(self, topic: str, body: Any) -> PublishResult | None:
        """Publish to queues that are not durable and take it at once; else None. Cost: 0.5 µs a queue."""
        queues, streams, prefix, _ = self.route(topic)
        if not queues or streams or type(body) is not bytes:
            return None
        record = with_prefix(prefix, body)
        sequences = put_into_all(queues, record)
        return None if sequences is None else PublishResult({}, sequences)

    def outgoing(self, messages: Sequence[Any], headers: Headers | None) -> OutgoingOne | OutgoingMany:
        """Return what a publish of (topic, body) or (topic, body, key) puts where. Cost: 1 µs a message and lane."""
        fanned = self._fanned(messages)
        placed = (self._placed(*_checked(message), headers, bool(fanned)) for message in messages)
        out = OutgoingOne(fanned, next(placed)) if len(messages) == 1 else OutgoingMany(fanned, placed)
        if out.unrouted:
            self.count_unrouted(out.unrouted)
        return out

    def _fanned(self, messages: Sequence[Any]) -> tuple[Puts, ...]:
        """Return the queues that all of these messages fan out into, where nothing expires by itself; or none."""
        route = self.route(_parts(messages[0])[0])
        queues = route.queues
        if not route.fans_out or any(queue.settings.ttl_s is not None for queue in queues):
            return ()
        others = (self.route(_parts(message)[0]) for message in islice(messages, 1, None))
        return queues if all(other is route or other.queues == queues for other in others) else ()

    def inserts(self, topic: str, body: Any, headers: Headers | None, key: bytes | None = None) -> list[Insert]:
        """Return what a publish of one message puts where."""
        _, parts = self._placed(topic, body_bytes(body), key, headers, False)
        if not parts:
            self.count_unrouted()
        return [Insert(owner, number, [record]) for owner, number, record in parts]

    def _placed(self, topic: str, body: bytes, key: bytes | None, headers: Headers | None, fans_out: bool) -> Placed:
        """Return what each lane gets for a message; `fans_out`: the queues have it together, and it does not expire.

        Queues and streams that want the same bytes share them.
        """
        route = self.route(topic)
        bare = Envelope(0, route.prefix)
        records: dict[Envelope, Record] = {}
        if fans_out or route.streams:
            if headers is not None or key is not None:
                bare = Envelope(0, bytes(Message(b"", encode_headers(headers), topic=topic, key=key or b"")))
            records[bare] = bare.record(body)
        parts: list[Part] = []
        for queue in () if fans_out else route.queues:
            envelope = bare
            if headers is not None or key is not None or queue.settings.ttl_s is not None:
                envelope = queue.envelope(headers, None, 0, None, None, None, (topic, key))
            if envelope not in records:
                records[envelope] = envelope.record(body)
            parts.append((queue, envelope.number, records[envelope]))
        for stream in route.streams:
            parts.append((stream.partition_for(topic, key), 0, records[bare]))
        return records[bare] if fans_out else None, parts

    def lots(self, messages: list[Any], headers: Headers | None) -> Lots | None:
        """Return messages, (topic, body) or (topic, body, key), for streams alone; None if some of them go to queues.

        Cost: 0.1 µs a message where all go to one partition, 0.3 with a topic not seen before; else 1 µs.
        """
        lots = Lots()
        if headers is None and len(messages) > 1 and lots.add_all(messages, self):
            return lots
        unrouted = 0
        prefixes: dict[bytes | None, bytes] = {}
        for message in messages:
            topic, body, key = _parts(message)
            key = check_key(key)
            route = self.route(topic)
            if route.queues:
                return None
            if key not in prefixes:
                prefixes[key] = prefix_of(headers, key)
            lots.add(route.streams, topic, body_bytes(body), key, prefixes[key])
            unrouted += not route.streams
        if unrouted:
            self.count_unrouted(unrouted)
        return lots

    def count_unrouted(self, messages: int = 1) -> None:
        """Count messages that nobody wants."""
        with self._lock:
            self.unrouted += messages


class Lots:
    """Messages for streams alone, by partition, and where each of them is in there."""

    def __init__(self) -> None:
        self.lots: dict[Partition, Lot] = {}
        self._places: list[list[tuple[Partition, int]]] | Partition = []

    def add(self, streams: tuple[StreamLog, ...], topic: str, body: bytes, key: bytes | None, prefix: bytes) -> None:
        """Add a message. Cost: 0.8 µs a stream."""
        assert isinstance(self._places, list)
        record: Record = with_prefix(prefix, body) if prefix else body
        places: list[tuple[Partition, int]] = []
        for stream in streams:
            partition = stream.partition_for(topic, key)
            lot = self.lots.get(partition)
            if lot is None:
                lot = self.lots[partition] = Lot()
            lot.plain &= not prefix
            places.append((partition, len(lot.records)))
            lot.records.append(record)
            lot.topics.append(topic)
        self._places.append(places)

    def add_all(self, messages: list[Any], routing: Routing) -> bool:
        """Add messages, if they are pairs of a topic and bytes that all go to one partition; else nothing is done."""
        try:
            columns = list(zip(*messages, strict=True))
        except (TypeError, ValueError):  # of different lengths, or not even sequences
            return False
        if len(columns) != 2 or not is_plain(columns[1]):
            return False
        topics = columns[0]
        place = routing.shortcut.partition_for(topics)
        if place is None:
            try:
                place = routing.place_of_all(dict.fromkeys(topics))
            except TypeError:  # one is not even hashable
                return False
        if place is None:
            return False
        lot = self.lots[place] = Lot()
        lot.records, lot.topics = list(columns[1]), topics
        self._places = place
        return True

    def results(self, sent: Sent | None) -> Sequence[PublishResult]:
        """Return what became of each message, once it is confirmed."""
        places = self._places
        if sent is None:
            return [PublishResult({}, {}) for _ in places]  # type: ignore[union-attr]
        if isinstance(places, Partition):
            return InOneStream(places.name, offset_of(sent.puts[0].first), len(sent.puts[0].records))
        firsts = {put.lane: offset_of(put.first) for put in sent.puts}
        return [
            result_in_partitions(
                {partition.name: firsts[partition.lane] + index for partition, index in one},
                {},
                {partition.name: partition.number for partition, _ in one if len(partition.stream.partitions) > 1},
            )
            for one in places
        ]


def _parts(message: Any) -> tuple[Any, Any, Any]:
    """Return topic, body and key of a message as it is given to a publish."""
    if not isinstance(message, tuple | list) or not 2 <= len(message) <= 3:
        raise InvalidArgument(f"publish_many takes (topic, body) or (topic, body, key), not {message!r}")
    return (*message, None) if len(message) == 2 else (*message,)


def _checked(message: Any) -> tuple[str, bytes, bytes | None]:
    topic, body, key = _parts(message)
    return topic, body_bytes(body), check_key(key)
