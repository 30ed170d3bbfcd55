"""Where what is published goes: queues bound to its topic, streams that take it. Queues and streams meet here."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

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
from qflow.queues.envelope import Envelope
from qflow.queues.fan_out import FanOut, put_into_all
from qflow.queues.puts import Puts
from qflow.queues.queue import Queue, parts_of
from qflow.queues.together import Insert, Receipt
from qflow.streams.partition import Partition
from qflow.streams.producers import Claim
from qflow.streams.publishing import Lot, Sent, prefix_of
from qflow.streams.shortcut import Shortcut
from qflow.streams.topic_filter import CACHED_CHARACTERS, FilterTrie, check_filter, check_topic

if TYPE_CHECKING:
    from qflow.streams.stream_log import StreamLog

ROUTES_KEPT = 4096
"""Topics whose route is remembered; with one more, remembering starts anew."""
_TTL_S = attrgetter("context.settings.ttl_s")


class _Places(NamedTuple):
    """The pair that a `PublishResult` is."""

    offsets: dict[str, int]
    sequences: dict[str, int | None]


class PublishResult(_Places):
    """Where a published message went: a pair.

    offsets: by stream; of one with several partitions, in the partition that `partitions` tells.
    sequences: by queue; None where its overflow policy dropped it, or made it a dead letter.
    """

    partitions: Mapping[str, int] = MappingProxyType({})
    """By stream, where it has several."""
    duplicate: bool = False
    """Its producer had published it before: nothing was stored."""

    def __repr__(self) -> str:
        shown = f"{type(self).__name__}(offsets={self.offsets!r}, sequences={self.sequences!r}"
        if self.partitions:
            shown += f", partitions={dict(self.partitions)!r}"
        return shown + (", duplicate=True)" if self.duplicate else ")")


def duplicate_result() -> PublishResult:
    """Return what is told of a message that was published before."""
    result = PublishResult({}, {})
    result.duplicate = True
    return result


def result_in_partitions(
    offsets: dict[str, int], sequences: dict[str, int | None], partitions: dict[str, int]
) -> PublishResult:
    """Return where a message went, and in which partitions."""
    result = PublishResult(offsets, sequences)
    if partitions:
        result.partitions = partitions
    return result


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
        """Remove a binding.

        Raises:
            NotFound: there is none.
        """
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
        self._routes = {}
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
        queues = tuple(sorted((parts_of(queue).puts for queue in self._trie.match(check_topic(topic))), key=_number))
        fans_out = len(queues) > 1 and all(queue.context.log is not None for queue in queues)
        route = Route(queues, self.streams.match(topic), topic_prefix(topic), fans_out)
        if len(topic) <= CACHED_CHARACTERS:
            if len(routes) >= ROUTES_KEPT:
                routes.clear()
            routes[topic] = route  # of the dictionary that was there before the match: a change has made another
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
        """Publish to queues that are not durable and take it at once; else None. Cost: 0.4 µs a queue."""
        queues, streams, prefix, _ = self.route(topic)
        if not queues or streams or type(body) is not bytes:
            return None
        record = with_prefix(prefix, body)
        sequences = put_into_all(queues, record)
        return None if sequences is None else PublishResult({}, sequences)

    def outgoing(self, messages: list[Any], headers: Headers | None) -> Outgoing:
        """Return what a publish of (topic, body) or (topic, body, key) puts where."""
        given = [(topic, body_bytes(body), check_key(key)) for topic, body, key in map(_parts, messages)]
        route = self.route(given[0][0])
        queues = route.queues
        together = route.fans_out and all(self.route(topic).queues == queues for topic, _, _ in given)
        if together and list(map(_TTL_S, queues)).count(None) == len(queues):
            return self._fanned_out(given, headers, queues)
        return Outgoing(None, [self.inserts(topic, body, headers, key) for topic, body, key in given])

    def _fanned_out(self, given: list[Any], headers: Headers | None, queues: tuple[Puts, ...]) -> Outgoing:
        """Return what a publish puts where, all of it into the same queues, in which nothing expires by itself."""
        all_records: list[Record] = []
        groups: list[list[Insert]] = []
        for topic, body, key in given:
            envelope = Envelope(0, self.route(topic).prefix)
            if headers is not None or key is not None:
                envelope = queues[0].envelope(headers, None, 0, None, None, None, (topic, key))
            records = {envelope: [envelope.record(body)]}
            all_records += records[envelope]
            groups.append(self._into_streams(topic, body, headers, key, records))
        return Outgoing(FanOut(queues, all_records), groups)

    def inserts(self, topic: str, body: Any, headers: Headers | None, key: bytes | None = None) -> list[Insert]:
        """Return what a publish puts where. Queues and streams that want the same bytes share them."""
        queues, streams, prefix, _ = self.route(topic)
        body = body_bytes(body)
        if not queues and not streams:
            self.count_unrouted()
        records: dict[Envelope, list[Record]] = {}
        inserts: list[Insert] = []
        bare = Envelope(0, prefix)
        for queue in queues:
            envelope = bare
            if headers is not None or key is not None or queue.settings.ttl_s is not None:
                envelope = queue.envelope(headers, None, 0, None, None, None, (topic, key))
            if envelope not in records:
                records[envelope] = [envelope.record(body)]
            inserts.append(Insert(queue, envelope.number, records[envelope]))
        return inserts + self._into_streams(topic, body, headers, key, records)

    def _into_streams(
        self,
        topic: str,
        body: bytes,
        headers: Headers | None,
        key: bytes | None,
        records: dict[Envelope, list[Record]],
    ) -> list[Insert]:
        """Return what a publish puts into streams; `records` are those there are."""
        route = self.route(topic)
        inserts: list[Insert] = []
        for stream in route.streams:
            envelope = Envelope(0, route.prefix)
            if headers is not None or key is not None:
                envelope = Envelope(0, bytes(Message(b"", encode_headers(headers), topic=topic, key=key or b"")))
            if envelope not in records:
                records[envelope] = [envelope.record(body)]
            partition: Any = stream.partition_for(topic, key)
            inserts.append(Insert(partition, 0, records[envelope]))
        return inserts

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


class Outgoing:
    """What a publish puts where, and what became of it."""

    def __init__(self, fan: FanOut | None, groups: list[list[Insert]]) -> None:
        """`groups`: of each message, what does not fan out."""
        self.puts = [] if fan is None else [fan]
        self._groups = groups

    @property
    def inserts(self) -> list[Insert]:
        return [insert for group in self._groups for insert in group]

    def results(self, receipts: Sequence[Receipt]) -> list[PublishResult]:
        """Return where each message went, given the receipts of all inserts, once it is confirmed."""
        left = iter(receipts)
        fan = self.puts[0] if self.puts else None
        return [
            result_of(list(islice(left, len(group))), {} if fan is None else fan.sequences(index))
            for index, group in enumerate(self._groups)
        ]


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
            return PublishResults(places.name, offset_of(sent.puts[0].first), len(sent.puts[0].records))
        firsts = {put.lane: offset_of(put.first) for put in sent.puts}
        return [
            result_in_partitions(
                {partition.name: firsts[partition.lane] + index for partition, index in one},
                {},
                {partition.name: partition.number for partition, _ in one if len(partition.stream.partitions) > 1},
            )
            for one in places
        ]


class Claimed:
    """A producer's claim, as `Together` takes what goes into its unit."""

    depth = None

    def __init__(self, claim: Claim) -> None:
        self.queue = self._claim = claim
        self.writes = (claim.write,)
        self.committed, self.refused = claim.committed, claim.refused

    def give_up(self) -> None:
        """Nothing: who publishes has the claim, and may try again with it."""

    @property
    def unit(self) -> Any:
        return self._claim.unit

    @unit.setter
    def unit(self, unit: Any) -> None:
        self._claim.unit = unit

    def settles(self) -> list[Any]:
        """Nothing leaves a queue."""
        return []


class PublishResults(Sequence[PublishResult]):
    """Where many messages went, all of them into one stream; each result is made on access."""

    __slots__ = ("_name", "_offsets")

    def __init__(self, name: str, first: int, count: int) -> None:
        self._name = name
        self._offsets = range(first, first + count)

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> PublishResult: ...
    @overload
    def __getitem__(self, index: slice) -> list[PublishResult]: ...
    def __getitem__(self, index: int | slice) -> PublishResult | list[PublishResult]:
        if isinstance(index, slice):
            return [PublishResult({self._name: offset}, {}) for offset in self._offsets[index]]
        return PublishResult({self._name: self._offsets[index]}, {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def _parts(message: Any) -> tuple[Any, Any, Any]:
    """Return topic, body and key of a message as it is given to a publish."""
    if not isinstance(message, tuple | list) or not 2 <= len(message) <= 3:
        raise InvalidArgument(f"publish_many takes (topic, body) or (topic, body, key), not {message!r}")
    return (*message, None) if len(message) == 2 else (*message,)


def _number(queue: Puts) -> int:
    return queue.owner


def result_of(receipts: list[Receipt], sequences: dict[str, int | None] | None = None) -> PublishResult:
    """Return what a publish returns, given where its messages went; `sequences`: those that are known."""
    offsets: dict[str, int] = {}
    sequences = {} if sequences is None else sequences
    partitions: dict[str, int] = {}
    for receipt in receipts:
        owner: Any = receipt.insert.queue
        if isinstance(owner, Partition):
            assert receipt.first is not None
            offsets[owner.name] = offset_of(receipt.first)
            if len(owner.stream.partitions) > 1:
                partitions[owner.name] = owner.number
        else:
            sequences[owner.name] = receipt.first
    return result_in_partitions(offsets, sequences, partitions)
