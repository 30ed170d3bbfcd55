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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from qflow.arrow.ranges import Span
from qflow.arrow.schema import Column
from qflow.errors import InvalidArgument, QflowError, StorageError
from qflow.loggers import get_logger
from qflow.spark.batch import RangeReader
from qflow.spark.log_query import LogQuery, ends_of, start_of, waiting
from qflow.spark.offsets import LogPosition, Position, Progress
from qflow.spark.options import ReadOptions
from qflow.spark.places.parse import check_hosts
from qflow.spark.ranges import Seen, cut, look_at
from qflow.spark.spools import other_log
from qflow.spark.words import Away, plainly

_logger = get_logger("qflow.spark")

Ends = dict[str, dict[str, Progress]]
"""By the uuid of the log and the name of the stream."""


class StreamingReader(RangeReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one streaming query. It lives in one process of Spark; `read` is called on copies in workers."""

    def __init__(self, options: ReadOptions, columns: tuple[Column, ...]) -> None:
        super().__init__(options, columns)
        self._target: Position | None = None
        self._queries: dict[str, LogQuery] = {}
        """By the uuid of the log."""
        self._triggered_s = -math.inf
        """When the last batch began that had enough messages, or could not wait longer."""

    # The logs --------------------------------------------------------------------------------------------------------

    def _look(self, known: Position | None, *, skip_away: bool = True) -> list[Seen]:
        """Look at all logs; they must be those that the query knows, and may be more.

        Args:
            skip_away: one that is away is left out, if failOnDataLoss is false.
        """
        options = self._options
        seen = look_at(options.places, skip_away=skip_away and not options.fail_on_data_loss)
        there = {one.uuid: one for one in seen}
        logs = {} if known is None else known.logs
        missing = sorted(logs.keys() - there.keys())
        if len(missing) > len(options.places) - len(seen):
            if len(options.places) == len(logs) == 1:
                raise other_log(options.path, missing[0], seen[0].uuid)
            raise StorageError(
                f"this query has read from log {missing[0]}, and none of {options.path} holds it: the spool of one of "
                "them was replaced, or one is not named any more. Bring it back, or begin anew with another checkpoint "
                "directory"
            )
        for one in seen:
            if one.uuid not in self._queries:
                self._queries[one.uuid] = LogQuery(one.place, one.uuid, options)
        return seen

    def _query(self, uuid: str, known: Position) -> LogQuery | None:
        """Return the query of a log; None for one that is away."""
        if uuid not in self._queries:
            self._look(known)
        return self._queries.get(uuid)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Go on without a log whose broker goes away after it was looked at, if failOnDataLoss is false."""
        try:
            yield
        except Away as error:
            if self._options.fail_on_data_loss:
                raise
            _logger.warning("%s; it goes on without it for now, for failOnDataLoss is false", error)

    # Where to begin, and how far to go -------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a checkpoint begins; also called for one that repeats its first batch."""
        with plainly():
            return self._initial().to_json()

    def _initial(self) -> Position:
        return Position.of([self._queries[seen.uuid].initial(seen) for seen in self._look(None, skip_away=False)])

    def latestOffset(self, start: dict[str, Any] | None = None, limit: Any = None) -> dict[str, Any]:
        """Return the end of the next batch; `start` if there is nothing. All messages before `start` are done."""
        with plainly():
            begin = self._initial() if start is None else Position.from_json(start)
            self._acknowledge(begin)
            if self._waits(begin, limit):
                return begin.to_json() if start is None else start
            end = self._held(begin, limit)
            if start is not None and _offsets(begin) == _offsets(end):
                return start
            return end.to_json()

    def _held(self, begin: Position, limit: Any) -> Position:
        """Return the end of the next batch, whose streams the group holds."""
        while True:
            end = self._next(begin, limit)
            is_new, away = self._acknowledge(begin, end)
            left = [log for uuid, log in end.logs.items() if uuid not in away]
            if away and not left:
                raise self._all_left()
            if not is_new:  # else they are held from here on: retention may have been faster
                return _beside(begin, left)

    def _waits(self, begin: Position, limit: Any) -> bool:
        """Tell whether a batch waits for more messages: there are too few, and it has time left."""
        options = self._options
        if options.min_offsets_per_trigger is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return False
        now = time.monotonic()
        if now - self._triggered_s < options.max_trigger_delay_s:
            end = self._next(begin, ReadAllAvailable())
            there = sum(sum(waiting(begin.in_log(uuid), log.streams).values()) for uuid, log in end.logs.items())
            if there < options.min_offsets_per_trigger:
                return True
        self._triggered_s = now
        return False

    def _next(self, begin: Position, limit: Any) -> Position:
        """Return the end of the next batch. What is known of a log that is away stays as it is."""
        seen = self._look(begin)
        if self._target is not None:  # one that was away when the end of the query was fixed is left as it is
            seen = [one for one in seen if one.uuid in self._target.logs]
        self._check_query(begin)
        ends: Ends = {}
        for one in seen:
            target = None if self._target is None else self._target.in_log(one.uuid)
            with self._going_on():
                ends[one.uuid] = self._queries[one.uuid].until(one, begin.in_log(one.uuid), target)
        if not isinstance(limit, ReadAllAvailable):
            self._limit(begin, ends)
        reached = []
        for uuid, streams in ends.items():
            with self._going_on():
                reached.append(self._queries[uuid].place.with_eras(uuid, streams))
        if not reached:
            raise self._all_left()
        return _beside(begin, reached)

    def _all_left(self) -> Away:
        """Return the error in place of an empty batch, which would end a query that takes what there is."""
        return Away(f"the brokers of {self._options.path} went away while a batch was planned: start one again")

    def _check_query(self, known: Position) -> None:
        """Check that the checkpoint belongs to a query with a stream that this one reads."""
        names = known.names()
        if names and not any(map(self._options.selects, names)):
            raise InvalidArgument(
                f"the checkpoint is one of a query that reads {', '.join(map(repr, sorted(names)))}, and this "
                "one reads nothing of that: give it a checkpoint directory of its own"
            )

    def _limit(self, begin: Position, ends: Ends) -> None:
        """Reduce a batch to its limits, each partition in proportion to what waits there."""
        options = self._options
        waits = {
            (uuid, *which): count
            for uuid, end in ends.items()
            for which, count in waiting(begin.in_log(uuid), end).items()
        }
        total = sum(waits.values())
        lows = {
            (uuid, name, number): start_of(begin.in_log(uuid), name, ends[uuid][name]).get(number, 0)
            for uuid, name, number in waits
        }
        if options.max_offsets_per_trigger is not None and total > options.max_offsets_per_trigger:
            shares = _shares(list(waits.values()), options.max_offsets_per_trigger)
            for (uuid, name, number), share in zip(waits, shares, strict=True):
                ends[uuid][name].offsets[number] = lows[uuid, name, number] + share
        if options.max_bytes_per_trigger is not None:
            for uuid in list(ends):
                end = ends.pop(uuid)
                asked = {
                    (name, number): (
                        Span(name, end[name].number, number, lows[which, name, number], end[name].offsets[number]),
                        -(-options.max_bytes_per_trigger * count // total),
                    )
                    for (which, name, number), count in waits.items()
                    if which == uuid and count
                }
                with self._going_on():
                    found = self._queries[uuid].place.offsets_after(uuid, list(asked.values())) if asked else []
                    for (name, number), most in zip(asked, found, strict=True):
                        end[name].offsets[number] = most
                    ends[uuid] = end

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
        """Return the end of the streams now, for the progress that Spark shows; None where it cannot be told."""
        try:
            return self._ends().to_json()
        except QflowError as error:  # a figure that is shown ends no query
            _logger.warning("the end of the streams cannot be shown: %s", error)
            return None

    def _ends(self) -> Position:
        return Position.of([ends_of(seen, self._options) for seen in self._look(None)])

    def _acknowledge(self, done: Position, end: Position | None = None) -> tuple[bool, set[str]]:
        """Record for the group what is done, and where the batch up to `end` begins in streams that are new in it.

        Returns:
            Whether the group did not hold one of those before; the logs whose brokers went away.
        """
        group = self._options.group
        is_new, away = False, set[str]()
        for uuid in () if group is None else done.logs if end is None else end.logs:
            away.add(uuid)
            query = self._query(uuid, done)
            if query is not None and group is not None:
                with self._going_on():
                    its_end = None if end is None else end.logs[uuid]
                    is_new |= query.acknowledge(group, done.in_log(uuid), its_end)
                    away.remove(uuid)
        return is_new, away

    # A batch ---------------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Cut a batch into tasks."""
        with plainly():
            return self._plan(Position.from_json(start), Position.from_json(end))

    def _plan(self, begin: Position, end: Position) -> list[InputPartition]:
        options = self._options
        check_hosts(options.places, same=options.same_on_every_host)
        self._check_query(end)  # for a batch that is repeated this is called before `latestOffset`
        self._acknowledge(begin, end)
        gone = sorted(begin.logs.keys() - end.logs.keys())
        if gone:
            raise other_log(options.path, gone[0], min(end.logs, default="none"))
        seen = {one.uuid: one for one in self._look(end)}
        planned = []
        for uuid in sorted(end.logs):
            is_read = any(waiting(begin.in_log(uuid), end.logs[uuid].streams).values())
            if uuid in seen:
                with nullcontext() if is_read else self._going_on():
                    ranges = self._queries[uuid].ranges(seen[uuid], begin.in_log(uuid), end.logs[uuid])
                    planned.append((seen[uuid].place, uuid, ranges))
            elif is_read:
                raise Away(f"a batch that is repeated reads from log {uuid}, and its broker is away: start it again")
        return list(cut(planned, options))

    def close(self) -> None:
        """Give leases back."""
        for query in self._queries.values():
            query.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_queries": {}}


def _kept(known: LogPosition) -> LogPosition:
    """Return where a query stays in a log that is away."""
    return LogPosition(
        known.uuid,
        {name: one if one.began == one.offsets else one._replace(began=None) for name, one in known.streams.items()},
    )


def _beside(begin: Position, reached: Iterable[LogPosition]) -> Position:
    """Return a position with these of logs that were seen; the others, which are away, stay where they were."""
    there = {log.uuid: log for log in reached}
    return Position.of([*(_kept(log) for uuid, log in begin.logs.items() if uuid not in there), *there.values()])


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
    left = most - sum(shares)
    for index, (count, share) in enumerate(zip(waiting, shares, strict=True)):
        one_more = left > 0 and share < count
        shares[index] += one_more
        left -= one_more
    return shares


def _offsets(position: Position) -> dict[str, dict[str, tuple[int, dict[int, int]]]]:
    return {
        uuid: {name: (at.number, at.offsets) for name, at in log.streams.items()} for uuid, log in position.logs.items()
    }
