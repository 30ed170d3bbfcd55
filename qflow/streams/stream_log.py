"""The working part of a stream: partitions of the log, cursors that read them, retention, and the index of topics."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, cast

from xxhash import xxh3_64_intdigest

from qflow.config import StreamSettings, parse_count
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
from qflow.importing import importing
from qflow.memory.waiting import StraightLock, sheltered
from qflow.message import LANE_SHIFT, offset_of
from qflow.rates import Meter
from qflow.storage.log.rows import Row, read_row
from qflow.storage.log.transaction_log import Lane, Unit
from qflow.storage.topics.index import TopicIndex
from qflow.storage.topics.records import delete_index
from qflow.streams.cursor import Cursor
from qflow.streams.deliveries import StreamMessage
from qflow.streams.feeds import Feeds
from qflow.streams.history import MOST, Bound, History
from qflow.streams.partition import Partition
from qflow.streams.retention import Retention
from qflow.streams.room import QUIET_S
from qflow.streams.shared import Shared
from qflow.streams.stream import Stream

if TYPE_CHECKING:
    from qflow.stats import StreamStats


class Indexing:
    """See the module. Its lock comes before any other, and is held while the log commits."""

    def __init__(self, history: History, shared: Shared) -> None:
        self._home = history.home
        self._owner = history.owner
        self._partitions = history.partitions
        self._report = history.report_index
        self._log = shared.log
        self._lock = threading.Lock()
        self._index = TopicIndex(history.owner)
        self._is_checked = self._is_broken = False
        self._forgotten_to: dict[int, int] = {}

    @sheltered
    def index(self, least: int | None = None) -> bool:
        """Index closed blocks, a bounded part; return whether there is more to do at once.

        On a full disk it is done later: the index saves time, and holds no messages.

        Args:
            least: blocks that must wait to be indexed; None = a whole segment.
        """
        if self._home.ended is not None:
            return False
        with self._lock:
            return self._step(least)

    def _step(self, least: int | None) -> bool:
        if self._is_broken:
            return self._remove()
        try:
            if not self._is_checked:
                with self._log.read() as txn:
                    self._index.check(txn)
                self._is_checked = True
            return any([self._index_partition(partition, least) for partition in self._partitions])  # noqa: C419
        except CorruptionError as error:
            self._report(str(error))
            self._is_broken = True
            return True

    def _index_partition(self, partition: Partition, least: int | None) -> bool:
        number, index = partition.number, self._index
        with self._log.read() as txn:
            row = read_row(txn, self._owner, number)
            segment = index.plan(txn, number, row, *(() if least is None else (least,)))
        if segment is not None:
            for problem in segment.problems:
                self._report(problem)
            unit = Unit(writes=[partial(index.write, segment=segment)], size=segment.value_bytes, values=segment.values)
            self._log.wait(self._log.join(unit))
            if isinstance(unit.error, DiskFull):
                segment = None  # later: removing what is below the floor gives room back
            elif unit.error is not None:
                raise again(unit.error)
        if row.floor <= self._forgotten_to.get(number, number << LANE_SHIFT):
            return segment is not None
        removed: list[int] = []
        self._log.commit(self._log.write(lambda txn: removed.append(index.forget_below(txn, number, row.floor))))
        if not removed[-1]:
            self._forgotten_to[number] = row.floor
        return segment is not None or removed[-1] > 0

    def _remove(self) -> bool:
        """Remove a part of a damaged index; once all is removed, it is built anew."""
        left: list[bool] = []
        self._log.commit(self._log.write(lambda txn: left.append(delete_index(txn, self._owner))))
        if not left[-1]:
            self._is_broken = self._is_checked = False
        return True


class StreamLog(Stream):
    """What `Broker.declare_stream` returns as a `Stream`. Thread-safe."""

    def __init__(self, name: str, settings: StreamSettings, owner: int, rows: dict[int, Row], shared: Shared) -> None:
        self.name = name
        self.settings = settings
        self.owner = owner
        self.readers = Feeds()
        """Of the open cursors."""
        self.cursors: dict[str, Cursor] = {}
        """Durable cursors, open or not, by name."""
        self.pinned: dict[str, int] = {}
        """Numbers of durable cursors that cannot be served, by name: their positions are not known."""
        self.ended: type[QflowError] | None = None
        self.history = History(self, owner, rows, shared)
        self.partitions = self.history.partitions
        self.retention = Retention(self.history, shared, self._consumed)
        self._indexing = Indexing(self.history, shared)
        self._log = shared.log
        self._uuid = shared.uuid
        self._monotonic = shared.monotonic
        self._meter = Meter(shared.monotonic())
        self._meter_lock = StraightLock()

    def _spool_uuid(self) -> str:
        return self._uuid

    @property
    def lanes(self) -> list[Lane]:
        """The lanes of its partitions in the log."""
        return [partition.lane for partition in self.partitions]

    def partition_for(self, topic: str, key: bytes | None) -> Partition:
        """Return the partition of a message: by its key, or by its topic if it has none. Cost: 0.3 µs."""
        found = self.partitions
        if len(found) == 1:
            return found[0]
        return found[xxh3_64_intdigest(topic.encode() if key is None else key) % len(found)]

    def check_open(self) -> None:
        if self.ended is BrokerClosed:
            raise BrokerClosed(f"the broker of stream {self.name!r} is closed: open the spool again")
        if self.ended is ForkedProcess:
            raise ForkedProcess(
                f"stream {self.name!r} belongs to the parent process: use it from here by qflow.connect"
            )
        if self.ended is not None:
            raise StreamDeleted(f"stream {self.name!r} was deleted: declare it again")

    # Queries ---------------------------------------------------------------------------------------------------------

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
        self.check_open()
        history = self.history
        _parse_number(skip, "skip", 0)
        last = None if limit is None else skip + _parse_number(limit, "limit", 0)
        if newest is not None:
            _parse_number(newest, "newest", 1)
        numbers = range(len(self.partitions)) if partition is None else [history.check_number(partition)]
        interest = history.interest(topic_filter)
        bounds = []
        for number in numbers:
            one = self.partitions[number]
            low = history.sequence_at(number, start, default=one.floor)
            high = history.sequence_at(number, end, default=one.next)
            bounds.append((number, max(low, one.floor), min(high, one.next)))
        if newest is None:
            found = history.messages(interest, bounds, MOST if last is None else max(1, last))
        else:
            found = history.newest(interest, bounds, newest)
        return islice(found, skip, last)

    def last(self, topic_filter: str = "#") -> dict[str, StreamMessage]:
        interest = self.history.interest(topic_filter)
        if not set(topic_filter.split("/")) & {"+", "#"}:
            return {message.topic: message for message in self.query(topic_filter, newest=1)}
        return {message.topic: message for message in self.query(interest.filter)}

    # Upkeep ----------------------------------------------------------------------------------------------------------

    def retain(self) -> bool:
        """Apply retention, a bounded part; see `Retention`."""
        return self.retention.retain()

    def _consumed(self, number: int) -> list[int] | None:
        """Return the position of each durable cursor in a partition; None if one of them is not known."""
        return None if self.pinned else [cursor.lanes[number].row.floor for cursor in list(self.cursors.values())]

    def index(self, least: int | None = None) -> bool:
        """Index closed blocks, a bounded part; see `Indexing`."""
        return self._indexing.index(least)

    @property
    def _published(self) -> int:
        return sum([partition.published for partition in self.partitions])

    def note_published(self, now_s: float, before_s: float) -> None:
        """Note for its rates what was published so far; the last time that was done was `before_s`. Cost: 3 µs."""
        with self._meter_lock:
            self._meter.note(now_s, (self._published, 0, 0, 0), before_s)

    @sheltered
    def stats(self) -> StreamStats:
        with importing:
            from qflow.stats import Rates, StreamStats

        rows = [partition.lane.row for partition in self.partitions]
        cursors = {id(cursor): cursor for cursor in self.open_cursors()} | {
            id(cursor): cursor for cursor in list(self.cursors.values())
        }
        with self._meter_lock:
            published = self._published
            rates = Rates(**self._meter.rates(self._monotonic(), (published, 0, 0, 0)))
        return StreamStats(
            name=self.name,
            topics=self.settings.topics,
            partitions=len(rows),
            messages=sum(row.messages for row in rows),
            bytes=sum(row.bytes for row in rows),
            first_offsets=[offset_of(row.floor) for row in rows],
            next_offsets=[offset_of(partition.next) for partition in self.partitions],
            published_total=published,
            dropped_total=self.retention.dropped,
            damaged_total=self.history.damaged,
            subscriptions=[cursor.stats() for cursor in cursors.values()],
            rates=rates,
        )

    def open_cursors(self) -> list[Cursor]:
        """Return the open cursors."""
        return cast(list[Cursor], self.readers.cursors())

    def end(self, error: type[QflowError]) -> None:
        """End the stream, its cursors and its live tails; waiting gets raise the error."""
        if self.ended is None:
            self.ended = error
        for partition in self.partitions:
            partition.room.drop(partition.tail)
        for cursor in self.open_cursors():
            cursor.end(error)
        for cursor in list(self.cursors.values()):
            cursor.end(error)

    def settle_down(self) -> None:
        """After `end`: return when all publishes under way have joined a batch or were refused, and are done."""
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
