"""`spark.readStream.format("qflow")`: a stream as it grows, each message once.

The life of a batch: Spark asks for its end (`latestOffset`) and records that, has it cut into tasks (`partitions`) and
read (`read`), and records when the sink has stored it. After a crash Spark repeats batches that are not recorded as
done, with the same offsets; offsets are dense and never reused, so it reads the same messages. When Spark asks for more
from the end of a batch, that batch is done, and the group acknowledges it. (`commit` comes only with the next batch,
and `stop` never.)

Only messages synced in the log are read: readers of LMDB see no others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from qflow.errors import InvalidArgument, StorageError
from qflow.spark.offsets import Position, Progress, eras_of, other_era
from qflow.spark.options import ReadOptions
from qflow.spark.ranges import check_floor, committed, cut, miss_stream, offset_after, resolve, selected
from qflow.spark.reading import RangeReader
from qflow.spark.schema import Column
from qflow.spark.spools import SpoolState, StreamState, look, other_log, reading
from qflow.spark.words import plainly
from qflow.storage.files import Files
from qflow.storage.streams.groups import Group


class StreamingReader(RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query. It lives in one process of Spark; `read` is called on copies in workers."""

    def __init__(self, options: ReadOptions, columns: tuple[Column, ...]) -> None:
        super().__init__(options, columns)
        self._target: Position | None = None
        self._group: Group | None = None
        self._triggered_s = -math.inf
        """When the last batch began that had enough messages, or could not wait longer."""

    # Where to begin, and how far to go -------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a checkpoint begins; also called for one that repeats its first batch."""
        with plainly():
            return self._initial().to_json()

    def _initial(self) -> Position:
        options = self._options
        state = look(options.path)
        streams = selected(state, options)
        with reading(options.path, state.uuid) as txn:
            starts = resolve(txn, options.starting, "startingOffsets", streams, committed(options, state, streams))
        for stream in streams:
            for number, start in starts[stream.name].items():
                first, _ = stream.bounds(number)
                starts[stream.name][number] = check_floor(
                    stream.name, number, start, first, fail=options.fail_on_data_loss
                )
        begun = {one.name: Progress(one.owner, starts[one.name], began=starts[one.name]) for one in streams}
        return self._with_eras(state.uuid, begun)

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """Return the end of the next batch; `start` if there is nothing. All messages before `start` are done."""
        with plainly():
            begin = self._initial() if start is None else Position.from_json(start)
            self._acknowledge(begin)
            if self._waits(begin, limit):
                return begin.to_json() if start is None else start
            end = self._next(begin, limit)
            while self._acknowledge(begin, end):  # new streams are held from here on: retention may have been faster
                end = self._next(begin, limit)
            if start is not None and _same_place(begin, end):
                return start
            return end.to_json()

    def _waits(self, begin: Position, limit: Any) -> bool:
        """Tell whether a batch waits for more messages: there are too few, and it has time left."""
        options = self._options
        if options.min_offsets_per_trigger is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return False
        now = time.monotonic()
        if now - self._triggered_s < options.max_trigger_delay_s:
            end = self._next(begin, ReadAllAvailable())
            if sum(_waiting(begin, end.streams).values()) < options.min_offsets_per_trigger:
                return True
        self._triggered_s = now
        return False

    def _next(self, begin: Position, limit: Any) -> Position:
        state = look(self._options.path, begin.uuid)
        self._check_known(state, begin)
        end = self._left(state, begin)
        for stream in selected(state, self._options, all_named=self._options.fail_on_data_loss):
            known = begin.streams.get(stream.name)
            if known is not None and known.number != stream.owner:
                known = None  # it was deleted and declared again
            bounds = {number: stream.bounds(number) for number in stream.numbers}
            ends = {number: high for number, (_, high) in bounds.items()}
            if self._target is not None:
                target = self._target.streams.get(stream.name)
                if target is None or target.number != stream.owner:
                    continue  # it appeared after the end of the query was fixed
                ends = {number: min(high, target.offsets.get(number, 0)) for number, high in ends.items()}
            offsets = {} if known is None else known.offsets
            began = {number: low for number, (low, _) in bounds.items() if number not in offsets}
            if known is not None and known.began == offsets:  # Spark keeps only the end of a first batch
                began |= offsets
            end[stream.name] = Progress(
                stream.owner, offsets | _not_below(ends, began | offsets), began if began or known is None else None
            )
        if not isinstance(limit, ReadAllAvailable):
            self._limit(state, begin, end)
        return self._with_eras(state.uuid, end)

    def _left(self, state: SpoolState, begin: Position) -> dict[str, Progress]:
        """Return how far the query is in streams that it reads no more, as long as they are there: it may take them
        again."""
        return {
            name: known._replace(began=None)
            for name, known in begin.streams.items()
            if not self._options.selects(name) and name in state.streams and state.streams[name].owner == known.number
        }

    def _with_eras(self, uuid: str, streams: dict[str, Progress]) -> Position:
        """Return a position with eras, which tell a copy of the log that was written on."""
        with reading(self._options.path, uuid) as txn:
            return Position(
                uuid, {name: one._replace(eras=eras_of(txn, one.number, one.offsets)) for name, one in streams.items()}
            )

    def _check_known(self, state: SpoolState, begin: Position) -> None:
        """Check the streams that were read so far: they must exist, and be the same."""
        self._check_query(begin)
        for name, known in begin.streams.items():
            stream = state.streams.get(name)
            if stream is not None and stream.owner == known.number:
                self._check_log(stream, known)
            elif self._options.selects(name):
                miss_stream(name, fail=self._options.fail_on_data_loss)

    def _check_query(self, known: Position) -> None:
        """Check that the checkpoint belongs to a query with a stream that this one reads."""
        if known.streams and not any(map(self._options.selects, known.streams)):
            raise InvalidArgument(
                f"the checkpoint is one of a query that reads {', '.join(map(repr, sorted(known.streams)))}, and this "
                "one reads nothing of that: give it a checkpoint directory of its own"
            )

    def _check_log(self, stream: StreamState, known: Progress) -> None:
        """Check that these offsets of a stream belong to this log."""
        path = self._options.path
        remedy = "Bring the newer one back, or begin anew with another checkpoint directory"
        for number, offset in known.offsets.items():
            _, end = stream.bounds(number)
            if offset > end:
                raise StorageError(
                    f"stream {stream.name!r}, partition {number}: the checkpoint of this query knows offsets up to "
                    f"{offset}, and the spool at {path} ends at {end}: it was replaced by an older copy of it. {remedy}"
                )
        with reading(path) as txn:
            apart = other_era(txn, known.number, known.offsets, known.eras)
        if apart is not None:
            raise StorageError(
                f"stream {stream.name!r}, partition {apart}: what this query has read up to offset "
                f"{known.offsets[apart]} is not what the spool at {path} holds there: it was replaced by an "
                f"older copy of it, into which more was published since. {remedy}"
            )

    def _limit(self, state: SpoolState, begin: Position, end: dict[str, Progress]) -> None:
        """Reduce a batch to its limits, each partition in proportion to what waits there."""
        options = self._options
        starts = {name: _start_of(begin, name, one) for name, one in end.items()}
        waiting = _waiting(begin, end)
        total = sum(waiting.values())
        if options.max_offsets_per_trigger is not None and total > options.max_offsets_per_trigger:
            shares = _shares(list(waiting.values()), options.max_offsets_per_trigger)
            for (name, number), share in zip(waiting, shares, strict=True):
                end[name].offsets[number] = starts[name].get(number, 0) + share
        if options.max_bytes_per_trigger is not None:
            with reading(options.path, state.uuid) as txn:
                for (name, number), count in waiting.items():
                    if count:
                        share = -(-options.max_bytes_per_trigger * count // total)
                        low = starts[name].get(number, 0)
                        most = offset_after(txn, end[name].number, number, low, end[name].offsets[number], share)
                        end[name].offsets[number] = most

    def getDefaultReadLimit(self) -> Any:
        """Return the limit of a batch that Spark knows; the other limits are applied here."""
        if self._options.max_offsets_per_trigger is not None:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        if self._options.min_offsets_per_trigger is not None:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """End the query with the messages there are now."""
        with plainly():
            self._target = self._ends()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of the streams now, for the progress that Spark shows."""
        with plainly():
            return self._ends().to_json()

    def _ends(self) -> Position:
        state = look(self._options.path)
        streams = selected(state, self._options, all_named=False)
        return Position(
            state.uuid,
            {
                stream.name: Progress(stream.owner, {number: stream.bounds(number)[1] for number in stream.numbers})
                for stream in streams
            },
        )

    # The group -------------------------------------------------------------------------------------------------------

    def _acknowledge(self, done: Position, end: Position | None = None) -> bool:
        """Record for the group what is done, and where the batch up to `end` begins in streams that are new in it.

        Returns:
            Whether the group did not hold one of those before.
        """
        options = self._options
        if options.group is None:
            return False
        if self._group is None:
            look(options.path, done.uuid)  # raises for another log: its group's offsets must not be replaced
            self._group = Group(options.path, options.group, done.uuid, Files())
        offsets = {one.number: self._read_of(name, one.offsets) for name, one in done.streams.items()}
        starts = {
            one.number: self._read_of(name, _start_of(done, name, one))
            for name, one in ({} if end is None else end.streams).items()
        }
        before = self._group.committed()
        self._group.acknowledge({number: held for number, held in (offsets | starts).items() if held})
        return any(
            before.get(number) != held
            for number, held in starts.items()
            if held.keys() - offsets.get(number, {}).keys()
        )

    def _read_of(self, name: str, offsets: dict[int, int]) -> dict[int, int]:
        """Return the offsets of the partitions of a stream that are still read."""
        return {number: offset for number, offset in offsets.items() if self._options.selects(name, number)}

    # A batch ---------------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Cut a batch into tasks."""
        with plainly():
            return self._plan(Position.from_json(start), Position.from_json(end))

    def _plan(self, begin: Position, end: Position) -> list[InputPartition]:
        options = self._options
        self._check_query(end)  # for a batch that is repeated this is called before `latestOffset`
        self._acknowledge(begin, end)
        if begin.uuid != end.uuid:
            raise other_log(options.path, begin.uuid, end.uuid)
        state = look(options.path, end.uuid)
        ranges = []
        for name, one in sorted(end.streams.items()):
            stream = state.streams.get(name)
            if stream is None or stream.owner != one.number:
                if _start_of(begin, name, one) != one.offsets:
                    miss_stream(name, fail=options.fail_on_data_loss)
                continue
            starts = _start_of(begin, name, one)
            self._check_log(stream, one)
            for number, stop in sorted(one.offsets.items()):
                low = starts.get(number, 0)
                first, _ = stream.bounds(number)
                low = check_floor(name, number, low, first, fail=options.fail_on_data_loss, end=stop)
                ranges.append((stream, number, low, stop))
        with reading(options.path, state.uuid) as txn:
            return list(cut(txn, state.uuid, ranges, options))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None}


def _waiting(begin: Position, end: Mapping[str, Progress]) -> dict[tuple[str, int], int]:
    """Return the number of messages between two positions, by stream and partition."""
    starts = {name: _start_of(begin, name, one) for name, one in end.items()}
    return {
        (name, number): offset - starts[name].get(number, 0)
        for name, one in end.items()
        for number, offset in one.offsets.items()
    }


def _not_below(ends: dict[int, int], starts: dict[int, int]) -> dict[int, int]:
    return {number: max(end, starts.get(number, 0)) for number, end in ends.items()}


def _start_of(begin: Position, name: str, end: Progress) -> dict[int, int]:
    """Return where a batch begins in a stream. A first batch that is repeated has another `begin`: what its end says of
    that counts."""
    known = begin.streams.get(name)
    is_known = known is not None and known.number == end.number
    return (known.offsets if known is not None and is_known else {}) | (end.began or {})


def _shares(waiting: list[int], most: int) -> list[int]:
    """Return how many messages to take of each partition, given those that wait there and a smaller limit for all.

    Shares are in proportion and add up to the limit. But a partition with messages has at least one, or a small one
    beside a large one would wait for ever; so the sum exceeds a limit that is less than the number of partitions.
    """
    shares = [min(count, 1) for count in waiting]
    one_each = sum(shares)
    rest, total = most - one_each, sum(waiting) - one_each
    if rest <= 0:
        return shares
    shares = [share + rest * (count - share) // total for count, share in zip(waiting, shares, strict=True)]
    for index, (count, share) in enumerate(zip(waiting, shares, strict=True)):
        if sum(shares) == most:
            break
        shares[index] += share < count
    return shares


def _same_place(one: Position, other: Position) -> bool:
    return one.uuid == other.uuid and {name: (at.number, at.offsets) for name, at in one.streams.items()} == {
        name: (at.number, at.offsets) for name, at in other.streams.items()
    }
