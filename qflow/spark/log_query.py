"""What a streaming query does at one of its logs: where it begins, how far it may go, what it has a group hold."""

from __future__ import annotations

from collections.abc import Mapping

from qflow.arrow.losses import check_floor, miss_stream
from qflow.arrow.states import SpoolState, StreamState
from qflow.errors import StorageError
from qflow.spark.offsets import LogPosition, Progress
from qflow.spark.options import ReadOptions
from qflow.spark.places.place import Lease, Place
from qflow.spark.ranges import Ranges, Seen, selected, starts_of


class LogQuery:
    """See the module. One process of Spark has it; a copy of it has no lease."""

    def __init__(self, place: Place, uuid: str, options: ReadOptions) -> None:
        self.place = place
        self._uuid = uuid
        self._options = options
        self._lease: Lease | None = None

    def initial(self, seen: Seen) -> LogPosition:
        """Return where a query without a checkpoint begins."""
        options = self._options
        streams = selected(seen, options)
        starts = starts_of(seen, streams, options)
        for stream in streams:
            for number, start in starts[stream.name].items():
                first, _ = stream.bounds(number)
                starts[stream.name][number] = check_floor(
                    stream.name, number, start, first, fail=options.fail_on_data_loss
                )
        begun = {one.name: Progress(one.owner, starts[one.name], began=starts[one.name]) for one in streams}
        return self.place.with_eras(self._uuid, begun)

    def until(self, seen: Seen, begin: LogPosition, target: LogPosition | None) -> dict[str, Progress]:
        """Return where a batch ends that takes all there is; no further than `target`."""
        self._check_known(seen.state, begin)
        end = self._left(seen.state, begin)
        for stream in selected(seen, self._options, all_named=self._options.fail_on_data_loss):
            known = begin.streams.get(stream.name)
            if known is not None and known.number != stream.owner:
                known = None  # it was deleted and declared again
            bounds = {number: stream.bounds(number) for number in stream.numbers}
            ends = {number: high for number, (_, high) in bounds.items()}
            if target is not None:
                its_end = target.streams.get(stream.name)
                if its_end is None or its_end.number != stream.owner:
                    continue  # it appeared after the end of the query was fixed
                ends = {number: min(high, its_end.offsets.get(number, 0)) for number, high in ends.items()}
            offsets = {} if known is None else known.offsets
            began = {number: low for number, (low, _) in bounds.items() if number not in offsets}
            if known is not None and known.began == offsets:  # Spark keeps only the end of a first batch
                began |= offsets
            end[stream.name] = Progress(
                stream.owner, offsets | _not_below(ends, began | offsets), began if began or known is None else None
            )
        return end

    def _left(self, state: SpoolState, begin: LogPosition) -> dict[str, Progress]:
        """Return how far the query is in streams that it reads no more, as long as they are there: it may take them
        again."""
        return {
            name: known._replace(began=None)
            for name, known in begin.streams.items()
            if not self._options.selects(name) and name in state.streams and state.streams[name].owner == known.number
        }

    def _check_known(self, state: SpoolState, begin: LogPosition) -> None:
        """Check the streams that were read so far: they must exist, and be the same."""
        for name, known in begin.streams.items():
            stream = state.streams.get(name)
            if stream is not None and stream.owner == known.number:
                self._check_log(stream, known)
            elif self._options.selects(name):
                miss_stream(name, fail=self._options.fail_on_data_loss)

    def _check_log(self, stream: StreamState, known: Progress) -> None:
        """Check that these offsets of a stream belong to this log."""
        where = self.place.where
        remedy = "Bring the newer one back, or begin anew with another checkpoint directory"
        for number, offset in known.offsets.items():
            end = stream.bounds(number)[1] if number < len(stream.rows) else 0
            if offset > end:
                raise StorageError(
                    f"stream {stream.name!r}, partition {number}: the checkpoint of this query knows offsets up to "
                    f"{offset}, and the spool at {where} ends at {end}: it was replaced by an older copy of it. "
                    f"{remedy}"
                )
        apart = self.place.other_era(known)
        if apart is not None:
            raise StorageError(
                f"stream {stream.name!r}, partition {apart}: what this query has read up to offset "
                f"{known.offsets[apart]} is not what the spool at {where} holds there: it was replaced by an "
                f"older copy of it, into which more was published since. {remedy}"
            )

    def acknowledge(self, group: str, done: LogPosition, end: LogPosition | None = None) -> bool:
        """Record for a group what is done, and where the batch up to `end` begins in streams that are new in it.

        Returns:
            Whether the group did not hold one of those before.
        """
        if self._lease is None:
            self._lease = self.place.lease(self._uuid, group)
        offsets = {one.number: self._read_of(name, one.offsets) for name, one in done.streams.items()}
        starts = {
            one.number: self._read_of(name, start_of(done, name, one))
            for name, one in ({} if end is None else end.streams).items()
        }
        before = self._lease.committed()
        self._lease.acknowledge({number: held for number, held in (offsets | starts).items() if held})
        return any(
            before.get(number) != held
            for number, held in starts.items()
            if held.keys() - offsets.get(number, {}).keys()
        )

    def _read_of(self, name: str, offsets: dict[int, int]) -> dict[int, int]:
        """Return the offsets of the partitions of a stream that are still read."""
        return {number: offset for number, offset in offsets.items() if self._options.selects(name, number)}

    def ranges(self, seen: Seen, begin: LogPosition, end: LogPosition) -> Ranges:
        """Return what a batch reads."""
        fail = self._options.fail_on_data_loss
        ranges = []
        for name, one in sorted(end.streams.items()):
            stream = seen.state.streams.get(name)
            if stream is None or stream.owner != one.number:
                if start_of(begin, name, one) != one.offsets:
                    miss_stream(name, fail=fail)
                continue
            starts = start_of(begin, name, one)
            self._check_log(stream, one)
            for number, stop in sorted(one.offsets.items()):
                low = starts.get(number, 0)
                first, _ = stream.bounds(number)
                low = check_floor(name, number, low, first, fail=fail, end=stop)
                ranges.append((stream, number, low, stop))
        return ranges

    def close(self) -> None:
        """Give the lease back."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


def _not_below(ends: dict[int, int], starts: dict[int, int]) -> dict[int, int]:
    return {number: max(end, starts.get(number, 0)) for number, end in ends.items()}


def start_of(begin: LogPosition, name: str, end: Progress) -> dict[int, int]:
    """Return where a batch begins in a stream. A first batch that is repeated has another `begin`: what its end says of
    that counts."""
    known = begin.streams.get(name)
    is_known = known is not None and known.number == end.number
    return (known.offsets if known is not None and is_known else {}) | (end.began or {})


def ends_of(seen: Seen, options: ReadOptions) -> LogPosition:
    """Return the end of the streams now."""
    streams = selected(seen, options, all_named=False)
    return LogPosition(
        seen.uuid,
        {
            stream.name: Progress(stream.owner, {number: stream.bounds(number)[1] for number in stream.numbers})
            for stream in streams
        },
    )


def waiting(begin: LogPosition, end: Mapping[str, Progress]) -> dict[tuple[str, int], int]:
    """Return the number of messages between two positions, by stream and partition."""
    starts = {name: start_of(begin, name, one) for name, one in end.items()}
    return {
        (name, number): offset - starts[name].get(number, 0)
        for name, one in end.items()
        for number, offset in one.offsets.items()
    }
