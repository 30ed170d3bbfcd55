"""A stream: partitions of the log under a name, what it takes, how long it keeps it, and queries of what it keeps."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from itertools import islice

from xxhash import xxh3_64_intdigest

from qflow.config import StreamSettings, parse_count, parse_moment
from qflow.errors import (
    BrokerClosed,
    CorruptionError,
    DiskFull,
    ForkedProcess,
    InvalidArgument,
    QflowError,
    StreamDeleted,
    again,
)
from qflow.memory.waiting import shelter, sheltered
from qflow.message import LANE_SHIFT
from qflow.stats import StreamStats
from qflow.storage.log.rows import Row, Settled, read_row
from qflow.storage.log.transaction_log import Lane, TransactionLog, Unit
from qflow.storage.streams import partitions, retention
from qflow.storage.streams.partitions import Found, Hole, Piece
from qflow.storage.topics.index import TopicIndex
from qflow.storage.topics.records import delete_index
from qflow.streams.cursor import Cursor
from qflow.streams.deliveries import StreamMessage
from qflow.streams.interest import Interest
from qflow.streams.partition import Partition, offset_of
from qflow.streams.room import Room
from qflow.streams.topic_filter import FilterTrie

_logger = logging.getLogger("qflow")

QUERY_BYTES = 256 * 1024
"""Read at once by a query."""
QUIET_S = 10.0
"""How long an end waits for what has reserved room and not joined a batch yet."""
NEWEST_AT_ONCE = 1024
"""A query of the newest messages looks at so many first, then at twice as many, and so on."""

MOST = 2**60
"""A query counts so far."""

Bound = int | datetime | None


class Stream:
    """Made by `Broker.declare_stream`. Thread-safe."""

    def __init__(
        self,
        name: str,
        settings: StreamSettings,
        *,
        owner: int,
        rows: dict[int, Row],
        log: TransactionLog,
        room: Room,
        max_transaction_bytes: int,
        report: Callable[[str, int], None],
        clock: Callable[[], float] = time.time,
        held: Callable[[int], Mapping[int, int]] | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.owner = owner
        self.partitions = [
            Partition(self, number, owner, rows[number], room, max_transaction_bytes)
            for number in range(settings.partitions)
        ]
        self.readers: FilterTrie[Cursor] = FilterTrie()
        """Cursors that somebody has open, by their filter."""
        self.cursors: dict[str, Cursor] = {}
        """The durable ones, open or not, by name."""
        self.pinned: dict[str, int] = {}
        """Numbers of durable cursors that cannot be served, by name: nobody knows what they are still to get."""
        self.ended: type[QflowError] | None = None
        self._log = log
        self._report = report
        self._clock = clock
        self._held = held  # from which offset on readers outside have retention keep everything, by partition
        self._dropped = self._damaged = 0
        self._retaining = threading.Lock()
        self._dropping: tuple[Unit, int] | None = None
        """What retention has asked the log for, and how many messages that drops."""
        self._reported: set[int] = set()
        self._index = TopicIndex(owner)
        self._index_problems: set[str] = set()
        self._index_is_loaded = self._index_is_broken = False
        self._forgotten_to: dict[int, int] = {}
        with log.read() as txn:
            for partition in self.partitions:
                lane = partition.lane
                lane.time_ms = partitions.last_time(txn, owner, lane.lane, lane.row)

    @property
    def lanes(self) -> list[Lane]:
        """How the log knows its partitions."""
        return [partition.lane for partition in self.partitions]

    def partition_for(self, topic: str, key: bytes | None) -> Partition:
        """Return where a message goes: by its key, or by its topic if it has none. Cost: 0.3 µs."""
        found = self.partitions
        if len(found) == 1:
            return found[0]
        return found[xxh3_64_intdigest(topic.encode() if key is None else key) % len(found)]

    def check_open(self) -> None:
        if self.ended is BrokerClosed:
            raise BrokerClosed(f"the broker of stream {self.name!r} is closed: open the spool again")
        if self.ended is ForkedProcess:
            raise ForkedProcess(f"stream {self.name!r} belongs to the parent process: open a spool of your own")
        if self.ended is not None:
            raise StreamDeleted(f"stream {self.name!r} was deleted: declare it again")

    def interest(self, topic_filter: str) -> Interest:
        """Return a filter, ready to be used on this stream."""
        return Interest(topic_filter, self.owner, self._index_is_damaged)

    def _index_is_damaged(self, problem: str) -> None:
        """Report damage of the index once: it costs time, not messages."""
        if problem not in self._index_problems:
            self._index_problems.add(problem)
            self._report(f"stream {self.name!r}: {problem}", 0)

    # Reading ---------------------------------------------------------------------------------------------------------

    def read(
        self, number: int, position: int, end: int, most_bytes: int, wanted: Interest | None, most: int = 2**62
    ) -> Found:
        """Read on in a partition, in a short transaction; what retention took, or is damaged, is a hole."""
        with self._log.read() as txn:
            floor = read_row(txn, self.owner, number).floor
            if position < floor:
                border = min(floor, max(end, position))
                return Found([], Hole(position, border, "retention took them"), border, 0)
            found = partitions.read(txn, self.owner, number, position, end, most_bytes, wanted, most)
        hole = found.hole
        if hole is not None and hole.start not in self._reported:
            self._reported.add(hole.start)
            self._damaged += hole.end - hole.start
            self._report(f"stream {self.name!r}: {hole.problem}", 1)
        return found

    @sheltered
    def sequence_at(self, number: int, bound: Bound, *, default: int) -> int:
        """Return the sequence in a partition that an offset or a moment stands for."""
        partition = self.partitions[number]
        if bound is None:
            return default
        if isinstance(bound, datetime):
            time_ms = int(parse_moment(bound, "a bound") * 1000)
            with self._log.read() as txn:
                row = read_row(txn, self.owner, number)
                return partitions.find_time(txn, self.owner, number, row, partition.next, time_ms)
        offset = parse_count(bound, "an offset", least=0)
        return (number << LANE_SHIFT) + min(offset, (1 << LANE_SHIFT) - 1)

    def query(
        self,
        topic_filter: str = "#",
        *,
        partition: int | None = None,
        start: Bound = None,
        end: Bound = None,
        skip: int = 0,
        limit: int | None = None,
        newest: int | None = None,
    ) -> Iterator[StreamMessage]:
        """Yield retained messages that a filter matches, without subscribing: as of now, in order.

        Messages of several partitions come in the order of their times. What retention takes meanwhile, or what is
        damaged, is left out.

        Args:
            topic_filter: as in MQTT.
            partition: of this one only.
            start, end: offsets, or datetimes with a time zone; `end` is not included.
            skip, limit: of what matches, leave out so many, and stop after so many; 2^60 at most.
            newest: only so many, the last ones; 2^60 at most.

        Raises:
            InvalidArgument: a filter, bound or number makes no sense. StreamDeleted, BrokerClosed.
        Cost: as a replay; blocks without a match are not read.
        """
        self.check_open()
        _parse_number(skip, "skip", 0)
        last = None if limit is None else skip + _parse_number(limit, "limit", 0)
        if newest is not None:
            _parse_number(newest, "newest", 1)
        numbers = range(len(self.partitions)) if partition is None else [self.check_number(partition)]
        interest = self.interest(topic_filter)
        bounds = []
        for number in numbers:
            low = self.sequence_at(number, start, default=self.partitions[number].floor)
            high = self.sequence_at(number, end, default=self.partitions[number].next)
            bounds.append((number, max(low, self.partitions[number].floor), min(high, self.partitions[number].next)))
        if newest is None:
            found = self._merged(interest, bounds, MOST if last is None else max(1, last))
        else:
            found = self._newest(interest, bounds, newest)
        return islice(found, skip, last)

    def last(self, topic_filter: str = "#") -> dict[str, StreamMessage]:
        """Return the newest retained message of each topic that a filter matches.

        Cost: for one topic, a read backwards until it is found; for a filter with wildcards, a replay.
        """
        interest = self.interest(topic_filter)
        if not set(topic_filter.split("/")) & {"+", "#"}:
            return {message.topic: message for message in self.query(topic_filter, newest=1)}
        return {message.topic: message for message in self.query(interest.filter)}

    def check_number(self, partition: int) -> int:
        """Return the number of a partition, if there is one."""
        if parse_count(partition, "partition", least=0) >= len(self.partitions):
            raise InvalidArgument(
                f"stream {self.name!r} has partitions 0 to {len(self.partitions) - 1}, not {partition}"
            )
        return partition

    def _merged(self, interest: Interest, bounds: list[tuple[int, int, int]], most: int) -> Iterator[StreamMessage]:
        lines = [self._messages(interest, *bound, most) for bound in bounds]
        return lines[0] if len(lines) == 1 else heapq.merge(*lines, key=lambda message: message.time_ms)

    def _messages(
        self, interest: Interest, number: int, position: int, end: int, most: int = MOST
    ) -> Iterator[StreamMessage]:
        """Yield messages of a partition; `most` is how many of them anybody wants."""
        while position < end:
            self.check_open()
            found = shelter(partial(self.read, number, position, end, QUERY_BYTES, interest, most))
            for piece in found.pieces:
                yield from self._of_piece(piece)
            position = found.position

    def _of_piece(self, piece: Piece) -> Iterator[StreamMessage]:
        for sequence, record, topic, time_ms in zip(*piece[2:], strict=True):
            yield StreamMessage(self.name, sequence, record, topic, time_ms)

    def _newest(self, interest: Interest, bounds: list[tuple[int, int, int]], count: int) -> Iterator[StreamMessage]:
        lines = [self._newest_of(interest, *bound, count) for bound in bounds]
        merged = heapq.merge(*lines, key=lambda message: message.time_ms)
        return iter(deque(merged, maxlen=count))

    def _newest_of(self, interest: Interest, number: int, low: int, high: int, count: int) -> deque[StreamMessage]:
        """Return the newest messages of a partition: from further and further back, each stretch read once."""
        found: deque[StreamMessage] = deque()
        width = max(NEWEST_AT_ONCE, count)
        while high > low and len(found) < count:
            start = max(low, high - width)
            stretch = deque(self._messages(interest, number, start, high), maxlen=count - len(found))
            found.extendleft(reversed(stretch))
            high, width = start, 2 * width
        return found

    # Retention -------------------------------------------------------------------------------------------------------

    @sheltered
    def retain(self) -> bool:
        """Raise floors as far as the settings say, by a bounded part; return whether there is more to do at once."""
        settings = self.settings
        if self.ended is not None or not (settings.has_limit or settings.retain_until_consumed):
            return False
        with self._retaining:  # two who drop the same messages would count them twice
            return self._retain()

    def held_back(self) -> AbstractContextManager[object]:
        """Nothing is dropped meanwhile: for who looks where messages begin, and then holds them back himself."""
        return self._retaining

    def _retain(self) -> bool:
        self._count_dropped()  # of a call that was interrupted: it may still be on its way
        more = False
        settles: list[tuple[Lane, list[Settled]]] = []
        messages = 0
        held = self._held(self.owner) if self._held is not None else {}
        for partition in self.partitions:
            found = self._surplus(partition, held.get(partition.number))
            if found is not None and found.floor > partition.floor:
                part = Settled(partition.floor, found.floor, found.messages, found.bytes)
                settles.append((partition.lane, [part]))
                messages += found.messages
                more |= found.more
        if settles:
            unit = Unit(settles=settles)  # what fails is forgotten, not tried again: the next call looks anew
            self._dropping = unit, messages
            self._log.wait(self._log.join(unit))
            self._count_dropped()
            if unit.error is not None:
                raise again(unit.error)
        return more

    def _count_dropped(self) -> None:
        """Count what was dropped last, if it is committed."""
        if self._dropping is None:
            return
        unit, messages = self._dropping
        if unit.joined and not unit.done:
            self._log.drain()
        self._dropping = None
        if unit.done and unit.error is None:
            self._dropped += messages

    def _surplus(self, partition: Partition, held: int | None) -> retention.Retained | None:
        """Return what of a partition goes, None if nothing does; nothing from offset `held` on, if that is given."""
        settings = self.settings
        ceiling = partition.next
        if held is not None:
            ceiling = min(ceiling, (partition.number << LANE_SHIFT) + held)
        if settings.retain_until_consumed:
            if self.pinned:
                return None
            cursors = list(self.cursors.values())
            if not (cursors or settings.has_limit or held is not None):
                return None  # nobody has had anything
            ceiling = min([ceiling, *(self._committed(cursor, partition.number) for cursor in cursors)])
        messages, size = settings.retention_messages, settings.retention_bytes
        if len(self.partitions) > 1:
            messages = None if messages is None else self._share(partition, messages, "messages")
            size = None if size is None else self._share(partition, size, "bytes")
        before_ms = None
        if settings.retention_s is not None:
            before_ms = int((self._clock() - settings.retention_s) * 1000)
        with self._log.read() as txn:
            row = read_row(txn, self.owner, partition.number)
        if row.floor >= ceiling:
            return None
        limits = retention.Limits(
            ceiling, messages, size, before_ms, settings.retain_until_consumed and not settings.has_limit
        )
        with self._log.read(buffers=True) as txn:
            return retention.surplus(txn, self.owner, partition.number, row, limits)

    def _share(self, partition: Partition, most: int, what: str) -> int:
        """Return how much of a limit for all partitions this one may have: in proportion to what each holds."""
        total = sum(getattr(one.lane.row, what) for one in self.partitions)
        mine: int = getattr(partition.lane.row, what)
        return mine if total <= most else most * mine // total

    def _committed(self, cursor: Cursor, number: int) -> int:
        lane = cursor.parts[number].lane
        assert lane is not None
        return lane.row.floor

    # The index -------------------------------------------------------------------------------------------------------

    def index(self, least: int | None = None) -> bool:
        """Index closed blocks, a bounded part; return whether there is more to do at once. By one thread at a time.

        Where the disk is full it is done later: the index saves time, and holds no messages.

        Args:
            least: so many must wait; None = a whole segment.
        """
        if self.ended is not None:
            return False
        if self._index_is_broken:
            return self._remove_index()
        try:
            if not self._index_is_loaded:
                with self._log.read() as txn:
                    self._index.load(txn)
                self._index_is_loaded = True
            return any([self._index_partition(partition, least) for partition in self.partitions])  # noqa: C419
        except CorruptionError as error:
            self._index_is_damaged(str(error))
            self._index_is_broken = True
            return True

    def _index_partition(self, partition: Partition, least: int | None) -> bool:
        number, index = partition.number, self._index
        with self._log.read() as txn:
            row = read_row(txn, self.owner, number)
            segment = index.plan(txn, number, row, *(() if least is None else (least,)))
        if segment is not None:
            for problem in segment.problems:
                self._index_is_damaged(problem)
            planned, wrote = segment, []
            write = [lambda txn: wrote.append(index.write(txn, planned))]
            unit = Unit(writes=write, size=segment.value_bytes, values=segment.values)
            self._log.wait(self._log.join(unit))
            if isinstance(unit.error, DiskFull):
                segment = None  # later: what is forgotten below the floor gives room back
            elif unit.error is not None:
                raise again(unit.error)
            elif wrote[-1]:
                index.written(segment)
        if row.floor <= self._forgotten_to.get(number, number << LANE_SHIFT):
            return segment is not None
        removed: list[int] = []
        self._log.commit(self._log.write(lambda txn: removed.append(index.forget_below(txn, number, row.floor))))
        if not removed[-1]:
            self._forgotten_to[number] = row.floor
        return segment is not None or removed[-1] > 0

    def _remove_index(self) -> bool:
        """Remove a damaged index, a part each time; then it is made anew."""
        left: list[bool] = []
        self._log.commit(self._log.write(lambda txn: left.append(delete_index(txn, self.owner))))
        if not left[-1]:
            self._index_is_broken = self._index_is_loaded = False
        return True

    # Looking ---------------------------------------------------------------------------------------------------------

    @sheltered
    def stats(self) -> StreamStats:
        """Return a snapshot of the stream. Cost: O(partitions x subscriptions)."""
        rows = [partition.lane.row for partition in self.partitions]
        cursors = {id(cursor): cursor for _, cursor in self.readers} | {
            id(cursor): cursor for cursor in list(self.cursors.values())
        }
        return StreamStats(
            name=self.name,
            topics=self.settings.topics,
            partitions=len(rows),
            messages=sum(row.messages for row in rows),
            bytes=sum(row.bytes for row in rows),
            first_offsets=[offset_of(row.floor) for row in rows],
            next_offsets=[offset_of(partition.next) for partition in self.partitions],
            published_total=sum(partition.published for partition in self.partitions),
            dropped_total=self._dropped,
            damaged_total=self._damaged,
            subscriptions=[cursor.stats() for cursor in cursors.values()],
        )

    def problems(self) -> list[str]:
        """Compare rows with blocks; return what does not agree, in words. Cost: O(blocks)."""
        found: list[str] = []
        for partition in self.partitions:
            row = partition.lane.row
            messages = size = 0
            position, end = row.floor, min(row.next, partition.next)
            while position < end:
                read = self.read(partition.number, position, end, 2**24, None)
                if read.hole is not None:
                    found.append(f"stream {self.name!r}: {read.hole.problem}")
                messages += sum(len(piece.records) for piece in read.pieces)
                size += sum(piece.size for piece in read.pieces)
                position = read.position
            same = partition.lane.row is row
            if same and not found and (messages, size) != (row.messages, row.bytes):
                found.append(
                    f"stream {self.name!r}, partition {partition.number}: the row says {row.messages} messages, "
                    f"{row.bytes} bytes; blocks hold {messages}, {size}"
                )
        return found

    def end(self, error: type[QflowError]) -> None:
        """Serve nobody any more; wake who waits."""
        if self.ended is None:
            self.ended = error
        for _, cursor in list(self.readers):
            cursor.end(error)
        for cursor in list(self.cursors.values()):
            cursor.end(error)

    def settle_down(self) -> None:
        """After `end`: return when who was about to publish has joined a batch, or was refused, and all are done."""
        deadline = time.monotonic() + QUIET_S
        while any(partition.joining for partition in self.partitions) and time.monotonic() < deadline:
            self._log.drain()
            threading.Event().wait(0.001)
        self._log.drain()

    def __repr__(self) -> str:
        return f"<Stream {self.name!r}, {len(self.partitions)} partitions>"


def _parse_number(value: int, what: str, least: int) -> int:
    if parse_count(value, what, least=least) > MOST:
        raise InvalidArgument(f"{what} must be at most 2^60, got {value}")
    return value
