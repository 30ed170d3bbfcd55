"""Messages of blocks on their way to where their topics lead, as `publish` would have them go there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qflow.errors import NotFound
from qflow.message import Message, body_of, decode_headers, text_bytes
from qflow.queues.assembly import Insert, by_lane
from qflow.routing import Route, Routing
from qflow.storage.blocks import KINDS, Block
from qflow.storage.inbox.stage_files import Piece
from qflow.streams.partition import Partition
from qflow.streams.publishing import Lot
from qflow.streams.room import charge_for

if TYPE_CHECKING:
    from qflow.streams.stream_log import StreamLog


class Load:
    """Messages of blocks on their way to where their topics lead: as many as one transaction takes, or one message."""

    def __init__(self, routing: Routing, most_bytes: int, most_charged: int) -> None:
        """`most_bytes`: that any one lane is given; `most_charged`: for the messages of all lanes together."""
        self._routing = routing
        self._most_bytes = most_bytes
        self._most_charged = most_charged
        self.lots: dict[Partition, Lot] = {}
        self.inserts: list[Insert] = []
        """For queues."""
        self.messages = 0
        self._bytes = self._charged = 0
        self._streams: tuple[StreamLog, ...] = ()
        self._alike: set[str] = set()

    def add(self, block: Block, start: int = 0) -> int:
        """Add messages of a block, from the one at `start` on, as long as there is room; return where that ended.

        Raises:
            NotFound: nobody takes one of its topics. InvalidArgument: one of them is none.
        Cost: 0.05 µs a message where its topics lead to the same streams of one partition; else 3.
        """
        names = block.names
        routes = [] if names and self._alike.issuperset(names) else self._routes(names)
        topics = list(map(names.__getitem__, block.topics))
        plain = not block.header.columns & KINDS
        if not routes:
            stop = self._make_room(block, start, topics)
            for stream in self._streams:
                self._lot(stream.partitions[0], plain).add_all(block.records[start:stop], topics[start:stop])
            return stop
        for number in range(start, len(topics)):
            record, topic, route = block.records[number], topics[number], routes[block.topics[number]]
            header_bytes, key = (
                (record.header_bytes, record.key or None) if isinstance(record, Message) else (b"", None)
            )
            inserts: list[Insert] = []
            if route.queues:
                inserts = self._routing.inserts(topic, body_of(record), decode_headers(header_bytes), key)
                inserts = [insert for insert in inserts if not insert.queue.reserves_together]
            sizes = [len(record)] * len(route.streams) + [len(insert.records[0]) for insert in inserts]
            weight = sum(sizes) + text_bytes([topic]) * len(route.streams)
            if not self._count(1, max(sizes, default=0), charge_for(len(sizes), weight)):
                return number
            for stream in route.streams:
                lot = self._lot(stream.partition_for(topic, key), plain)
                lot.records.append(record)
                lot.topics.append(topic)
            self.inserts += inserts
        return len(topics)

    def _make_room(self, block: Block, start: int, topics: list[str]) -> int:
        """Count what of a block there is room for, where all of it goes to `_streams`; return where that ends."""
        records, copies = block.records, len(self._streams)
        size = block.header.payload_bytes
        charged = charge_for(len(records), size + text_bytes(topics))
        if not start and self._count(len(records), size, copies * charged):
            return len(records)
        for number in range(start, len(records)):
            size = len(records[number])
            if not self._count(1, size, copies * charge_for(1, size + text_bytes(topics[number : number + 1]))):
                return number
        return len(records)

    def _count(self, messages: int, size: int, charged: int) -> bool:
        """Count messages in, if there is room for them; a single one also where it is the first."""
        size, charged = self._bytes + size, self._charged + charged
        is_alone = messages == 1 and not self.messages
        if not is_alone and (size > self._most_bytes or charged > self._most_charged):
            return False
        self.messages += messages
        self._bytes, self._charged = size, charged
        return True

    def _routes(self, names: list[str]) -> list[Route]:
        """Return where topics lead; nothing where that is for each of them `_streams`, as it is for those `_alike`."""
        routes = list(map(self._routing.route, names))
        for name, route in zip(names, routes, strict=True):
            if not route.streams and not route.queues:
                raise NotFound(
                    f"no stream takes topic {name!r}, and no queue is bound to it: declare a stream with topics that "
                    "match it"
                )
        streams = routes[0].streams
        are_alike = all(route.streams == streams and not route.queues for route in routes)
        if not are_alike or any(len(stream.partitions) > 1 for stream in streams):
            return routes
        if streams != self._streams:
            self._streams, self._alike = streams, set()
        self._alike.update(names)
        return []

    def _lot(self, partition: Partition, plain: bool) -> Lot:
        lot = self.lots.get(partition)
        if lot is None:
            lot = self.lots[partition] = Lot()
        lot.plain &= plain
        return lot

    def puts(self) -> list[Any]:
        """Return a put for each partition, with nothing reserved yet. Raises MessageTooLarge: a message is."""
        return [partition.put_of(lot.records, lot.topics, lot.plain) for partition, lot in self.lots.items()]

    def check(self) -> None:
        """Raise what `puts`, and queues that are given `inserts`, would ever refuse."""
        self.puts()
        for lane in by_lane(self.inserts)[1]:
            lane.insert.queue.draft(lane.insert.records, False, lane.insert.number)


def loads(pieces: Iterator[Piece], done: int, routing: Routing, most_bytes: int, most_charged: int) -> Iterator[Load]:
    """Yield the messages of a stage, but for the first `done`, as loads of a transaction each; at least one of them.

    Raises as `Load.add`, and as `pieces`. Cost: a load in memory, and a block.
    """
    load = Load(routing, most_bytes, most_charged)
    for piece in pieces:
        count = piece.header.count
        if done >= count:
            done -= count
            continue
        block, start, done = piece.decode(), done, 0
        while (start := load.add(block, start)) < count:
            yield load
            load = Load(routing, most_bytes, most_charged)
    yield load
