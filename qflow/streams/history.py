"""The retained messages of a stream, read from the log by sequence: for cursors, queries and checks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from functools import partial

from qflow.config import parse_count, parse_moment
from qflow.errors import InvalidArgument
from qflow.memory.waiting import shelter, sheltered
from qflow.message import offset_of, sequence_of
from qflow.storage.log.rows import Row, read_row
from qflow.storage.streams import partitions
from qflow.storage.streams.partitions import Found, Hole
from qflow.streams.deliveries import StreamMessage, message_of
from qflow.streams.interest import Interest
from qflow.streams.partition import Home, Partition
from qflow.streams.shared import Shared

QUERY_BYTES = 256 * 1024
"""Read at once by a query."""
NEWEST_AT_ONCE = 1024
"""Messages that a query of the newest ones reads first; then twice as many, and so on."""

DROPPED = "retention took them"
"""Why a hole is there that is no damage."""
MOST = 2**60
"""The largest count a query takes."""

Bound = int | datetime | None


class History:
    """See the module. Thread-safe."""

    def __init__(self, home: Home, owner: int, rows: dict[int, Row], shared: Shared) -> None:
        self.home = home
        self.name = home.name
        self.owner = owner
        self.partitions = [Partition(home, number, owner, row, shared) for number, row in sorted(rows.items())]
        self.damaged = 0
        """Messages that were found damaged."""
        self._log = shared.log
        self._report = shared.report
        self._reported: set[int] = set()
        self._index_problems: set[str] = set()
        with shared.log.read() as txn:
            for partition in self.partitions:
                lane = partition.lane
                lane.time_ms = partitions.last_time(txn, owner, lane.lane, lane.row)

    def interest(self, topic_filter: str) -> Interest:
        """Return a reader's view of this stream through a filter."""
        return Interest(topic_filter, self.owner, self.report_index)

    def report_index(self, problem: str) -> None:
        """Report damage of the index once: it costs time, not messages."""
        if problem not in self._index_problems:
            self._index_problems.add(problem)
            self._report(f"stream {self.name!r}: {problem}", 0)

    def read(
        self, number: int, position: int, end: int, most_bytes: int, wanted: Interest | None, most: int = 2**62
    ) -> Found:
        """Read on in a partition, in a short transaction; messages dropped by retention, or damaged, are a hole."""
        with self._log.read(buffers=True) as txn:
            floor = read_row(txn, self.owner, number).floor
            if position < floor:
                border = min(floor, max(end, position))
                return Found([], Hole(position, border, DROPPED), border, 0)
            found = partitions.read(txn, partitions.Query(self.owner, number, position, end, most_bytes, wanted, most))
        hole = found.hole
        if hole is not None and hole.start not in self._reported:
            self._reported.add(hole.start)
            self.damaged += hole.end - hole.start
            self._report(f"stream {self.name!r}: {hole.problem}", 1)
        return found

    @sheltered
    def sequence_at(self, number: int, bound: Bound, *, default: int) -> int:
        """Return the sequence in a partition that an offset or a time stands for."""
        partition = self.partitions[number]
        if bound is None:
            return default
        if isinstance(bound, datetime):
            time_ms = int(parse_moment(bound, "a moment of a stream") * 1000)
            with self._log.read() as txn:
                row = read_row(txn, self.owner, number)
                return partitions.find_time(txn, self.owner, number, row, partition.next, time_ms)
        return sequence_of(number, parse_count(bound, "an offset", least=0))

    def position_for(self, number: int, to: int | datetime) -> int:
        """Return the sequence that an offset or a time stands for; refuse an offset past the end."""
        if to is None:
            raise InvalidArgument("a place in a stream is an offset, or a datetime with a time zone, got None")
        partition = self.partitions[self.check_number(number)]
        sequence = self.sequence_at(number, to, default=partition.next)
        if sequence > partition.next:
            raise InvalidArgument(
                f"offset {to} is past the end of stream {self.name!r}, partition {number}: the next message gets "
                f"{offset_of(partition.next)}"
            )
        return sequence

    def check_number(self, partition: int) -> int:
        """Return the number of a partition; refuse one that does not exist."""
        if parse_count(partition, "partition", least=0) >= len(self.partitions):
            raise InvalidArgument(
                f"stream {self.name!r} has partitions 0 to {len(self.partitions) - 1}, not {partition}"
            )
        return partition

    def messages(self, interest: Interest, bounds: list[tuple[int, int, int]], most: int) -> Iterator[StreamMessage]:
        """Yield matching messages within (partition, first sequence, end), in the order of their times."""
        lines = [self._messages_of(interest, *bound, most) for bound in bounds]
        return lines[0] if len(lines) == 1 else heapq.merge(*lines, key=lambda message: message.time_ms)

    def _messages_of(
        self, interest: Interest, number: int, position: int, end: int, most: int = MOST
    ) -> Iterator[StreamMessage]:
        """Yield messages of a partition; `most` bounds how many are read."""
        while position < end:
            self.home.check_open()
            found = shelter(partial(self.read, number, position, end, QUERY_BYTES, interest, most))
            for piece in found.pieces:
                for sequence, record, topic, time_ms in zip(*piece[2:], strict=True):
                    yield message_of(self.name, sequence, record, topic, time_ms)
            position = found.position

    def newest(self, interest: Interest, bounds: list[tuple[int, int, int]], count: int) -> Iterator[StreamMessage]:
        """Yield the newest `count` of what `messages` yields."""
        lines = [self._newest_of(interest, *bound, count) for bound in bounds]
        merged = heapq.merge(*lines, key=lambda message: message.time_ms)
        return iter(deque(merged, maxlen=count))

    def _newest_of(self, interest: Interest, number: int, low: int, high: int, count: int) -> deque[StreamMessage]:
        """Return the newest messages of a partition, reading ever larger ranges from the end backwards, each once."""
        found: deque[StreamMessage] = deque()
        width = max(NEWEST_AT_ONCE, count)
        while high > low and len(found) < count:
            start = max(low, high - width)
            stretch = deque(self._messages_of(interest, number, start, high), maxlen=count - len(found))
            found.extendleft(reversed(stretch))
            high, width = start, 2 * width
        return found

    def problems(self) -> list[str]:
        """Compare rows with blocks; return what does not agree, in words. Cost: O(blocks)."""
        return [problem for partition in self.partitions for problem in self._problems_of(partition)]

    def _problems_of(self, partition: Partition) -> Iterator[str]:
        """Yield what does not agree in a partition; what retention takes, or a commit adds, meanwhile does."""
        row = partition.lane.row
        position, end = row.floor, row.next  # not all of it may be visible yet; the log has it
        is_whole, is_shorter = True, False
        messages = size = 0
        while position < end:
            read = self.read(partition.number, position, end, 2**24, None)
            if read.hole is not None:
                is_whole = False
                if read.hole.problem == DROPPED:
                    is_shorter = True
                else:
                    yield f"stream {self.name!r}: {read.hole.problem}"
            messages += sum(len(piece.records) for piece in read.pieces)
            size += sum(piece.size for piece in read.pieces)
            position = read.position
        if is_whole and partition.lane.row is row and (messages, size) != (row.messages, row.bytes):
            yield (
                f"stream {self.name!r}, partition {partition.number}: the row says {row.messages} messages, "
                f"{row.bytes} bytes; blocks hold {messages}, {size}"
            )
        if is_shorter:
            self._log.drain()  # the row follows what the log was told
            if partition.lane.row is row:
                yield (
                    f"stream {self.name!r}, partition {partition.number}: the row says that it begins at {row.floor}, "
                    "and the log holds less"
                )
