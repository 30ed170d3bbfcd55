"""The spill store of fixed-size files that are appended to (`spill="segments"`).

An area is a directory of *segments*: files of one size, each filled from its start with blocks of many messages. A slot
is a number that only grows, one a message; `segment_index` tells where it is. (The idea is that of the
mmap-queue of Apache SkyWalking Satellite.) Rules:

- Only the *tail*, the segment written last, is appended to. When all its messages are freed it begins anew.
- A segment whose last message is freed, in whatever order, is kept and filled again; over a bound it is unlinked.
- Messages freed out of order are remembered, a bit each. When more than half of what the segments hold is freed, and
  four segments more, the few messages left in the sparsest ones move together into one file of their own.
- A message larger than a segment has a file of its own size, unlinked when it is freed.
- A segment's file is the one that was made: another file in its place is not read and not written.

Nothing is synced. Locks: `_writing` is held by the one who appends or compacts, and only that; the pool's covers the
index and is never held during a file operation. A segment that is being read is pinned and not filled again meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, chain, repeat
from threading import RLock

from qflow.errors import CorruptionError, StorageError
from qflow.message import OVERHEAD_BYTES, Record, charge
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks, encoding
from qflow.storage.blocks import SINGLE_BYTES, SINGLE_HEAD_BYTES, SINGLE_ROOM, BlockKey
from qflow.storage.files import UNHARMED, Files, storage_error
from qflow.storage.lock import Place
from qflow.storage.spill.segment import Maps, Reading, Segment
from qflow.storage.spill.segment_index import Move
from qflow.storage.spill.segment_pool import SegmentPool
from qflow.storage.spill.segment_writing import BLOCK_BYTES, WRITE_BYTES, WriteCall
from qflow.storage.spill.shedding import Shedding
from qflow.storage.spill.singles import Singles
from qflow.storage.spill.slots import Ranges, Slots
from qflow.storage.spill.store import SPILL_LANE, SPILL_TABLE, AreaDirectory, SpillCounters, directory_name

MAX_KEPT_BYTES = 2**30
"""Free segments an area keeps to be filled again."""
MAX_KEPT = 8192
"""And so many of them, for each takes half a kilobyte of memory."""


class SpillSegments:
    """A `SpillStore` that appends messages to files of one size under `<spool>/spill/`.

    Args:
        segment_bytes: size of a file.
        max_mapped: segments of all areas that are mapped for reading at once, each takes a descriptor; 0 maps none and
            reads them with `pread`.
    """

    def __init__(self, files: Files, spool: str | Place, *, segment_bytes: int, max_mapped: int = 0) -> None:
        self._files = files
        self._spool = Place.of(spool)
        self._segment_bytes = segment_bytes
        self._maps = Maps(files, max_mapped)
        self._shedding = Shedding()

    def area(self, name: str, owner: int, incarnation: int) -> SegmentsArea:
        """Return the area of a queue; see `SpillStore.area`."""
        directory = AreaDirectory(self._files, self._spool, directory_name(name, owner, incarnation))
        area = SegmentsArea(self._files, directory, owner, self._segment_bytes, self._maps, self._shedding)
        self._shedding.add(area)
        return area

    def close(self) -> None:
        """Unmap everything."""
        self._maps.clear()


class _Found(NamedTuple):
    """So many messages of a block, or why they cannot be had."""

    count: int  # type: ignore[assignment]
    records: list[Record] | None
    reason: str = ""


class SegmentsArea:
    """A `SpillArea` of segments."""

    chunk_bytes = WRITE_BYTES
    chunk_messages = 4096

    def __init__(
        self,
        files: Files,
        directory: AreaDirectory,
        owner: int,
        segment_bytes: int,
        maps: Maps,
        shedding: Shedding,
    ) -> None:
        self.path = directory.path
        self._files = files
        self._directory = directory
        self._owner = owner
        self._singles = Singles(SPILL_TABLE, owner, SPILL_LANE)
        self._writing = RLock()  # a write that is interrupted may free, and freeing may compact
        self._compacting = False
        self._patience = 0
        """Bytes that may be wasted beyond the bound, after a compaction failed. Under the pool's lock."""
        max_kept = max(1, min(MAX_KEPT, MAX_KEPT_BYTES // segment_bytes))
        self._pool = SegmentPool(files, directory, segment_bytes, max_kept, maps, shedding)
        self._lock = self._pool.lock

    # Writing -----------------------------------------------------------------------------------------------------

    def write(self, first: int, records: list[Record]) -> Slots:
        """Write records; see `SpillArea.write`. 1 KiB costs about 0.5 µs a message in runs of 64 KiB and more."""
        try:
            return self._pool.shedding.written(self, records, lambda: self._write(first, records))
        except OSError as error:
            raise storage_error(error, "write a spill segment", self._directory.prefix) from error

    def _write(self, first: int, records: list[Record]) -> Slots:
        """`write`; raises OSError."""
        with self._writing:
            self._directory.must_exist()
            call, tail = self._begin(len(records))
            slots = Slots([range(call.slot, call.slot + len(records))])
            try:
                try:
                    if tail is not None:
                        call.go_on(tail)
                    call.write(first, records)
                finally:
                    call.close()
                self._directory.must_exist()
                call.install()
            except BaseException as error:
                if call.installed:
                    self.free(slots)
                else:
                    call.undo(error)
                raise
            return slots

    def shed(self, wanted: int) -> int:
        """Unlink segments that hold nothing; see `Sheds`."""
        pool = self._pool
        size = pool.segment_bytes
        with self._lock:
            drop = [pool.kept.popleft() for _ in range(min(-(-wanted // size), len(pool.kept)))]
        for segment in drop:
            pool.unlink(segment)
        return len(drop) * size

    def _begin(self, count: int) -> tuple[WriteCall, Segment | None]:
        """Reserve slots, whose numbers are not used again whatever happens; return them with the tail."""
        pool = self._pool
        with self._lock:
            call = WriteCall(pool, self._owner, pool.next_slot)
            pool.next_slot += count
            if pool.tail is not None and not pool.tail.live and not pool.tail.pins:
                pool.index.take_out(pool.tail)
            return call, pool.tail

    # Reading -----------------------------------------------------------------------------------------------------

    def read(
        self, first: int, slots: Slots, max_bytes: int, largest: int
    ) -> tuple[list[Record | None], list[tuple[int, str]]]:
        """Read messages from the first slot on; see `SpillArea.read`. Cost, 1 KiB: 0.5 µs a message."""
        while True:
            prefix = self._directory.prefix
            records, problems = self._read(first, slots, max_bytes)
            if not problems or not self._directory.has_left(prefix):
                return records, problems

    def _read(self, first: int, slots: Slots, max_bytes: int) -> tuple[list[Record | None], list[tuple[int, str]]]:
        records: list[Record | None] = []
        problems: list[tuple[int, str]] = []
        room = max_bytes
        with Reading(self._files, self._pool.maps) as reading:
            for piece in slots.ranges():
                slot = piece.start
                while slot < piece.stop and (room >= OVERHEAD_BYTES or not records):
                    most = room if 2 * room < max_bytes else None
                    try:
                        found = self._read_block(reading, slot, piece.stop, first + len(records), most)
                    except OSError as error:  # no file can be opened now
                        if records:
                            return records, problems
                        raise storage_error(error, "read a spill segment", self._directory.prefix) from error
                    if found.records is None:
                        if not found.reason:
                            return records, problems
                        problems += ((first + len(records) + place, found.reason) for place in range(found.count))
                        records += repeat(None, found.count)
                    elif (cost := charge(found.records)) <= room:
                        records += found.records
                        room -= cost
                    else:
                        costs = accumulate(len(record) + OVERHEAD_BYTES for record in found.records)
                        fitting = bisect_right(list(costs), room)
                        records += found.records[: fitting if records else max(1, fitting)]
                        return records, problems
                    slot += found.count
        return records, problems

    def _read_block(self, reading: Reading, slot: int, stop: int, sequence: int, most: int | None) -> _Found:
        """Return the messages of [slot, stop) in the block of `slot`; none if they surely cost more than `most`."""
        pool = self._pool
        segment: Segment | None = None
        where = self._directory.prefix
        try:
            with self._lock:
                if self._directory.removed:
                    return _Found(stop - slot, None, f"{where}: removed with its queue")
                found_in, block = pool.index.find(slot)
                first, start, end = found_in.firsts[block], found_in.starts[block], found_in.end_of(block)
                span = found_in.span_of(block)
                stop = max(slot + 1, min(stop, first + span))
                if most is not None and stop - slot == span and end - start - span * SINGLE_ROOM > most:
                    return _Found(0, None)  # else the block would be read again by the next call
                pool.read += 1
                segment = found_in
                segment.pins += 1
            where = f"{segment.path}, byte {start}"
            if end - start > BLOCK_BYTES:  # one message, which is not copied again
                head, body, tail = reading.pieces(
                    segment, start, end, SINGLE_HEAD_BYTES, SINGLE_HEAD_BYTES - SINGLE_BYTES
                )
                return _Found(1, [self._singles.unframe(head, body, tail, sequence, where)])
            found = blocks.decode(
                reading.view(segment, start, end),
                BlockKey(SPILL_TABLE, self._owner, SPILL_LANE, sequence - (slot - first)),
                where=where,
            )
            low, high = bisect_left(found.offsets, slot - first), bisect_left(found.offsets, stop - first)
            if high - low < stop - slot:
                raise CorruptionError(f"{where}: not all messages are there")
            return _Found(stop - slot, found.records[low:high])
        except CorruptionError as error:
            return _Found(stop - slot, None, str(error))
        except OSError as error:
            if error.errno in UNHARMED:
                raise
            return _Found(stop - slot, None, f"{where}: {error.strerror}")
        finally:
            if segment is not None:
                pool.unpin(segment)

    # Freeing -----------------------------------------------------------------------------------------------------

    def free(self, slots: Slots) -> None:
        """Give back slots; see `SpillArea.free`. Cost: 3 µs a block, and now and then a compaction."""
        pool = self._pool
        with self._lock:
            if self._directory.removed:
                return
            for piece in slots.ranges():
                slot = piece.start
                while slot < piece.stop:
                    segment, slot = pool.index.free(slot, piece.stop)
                    if not segment.live and segment is not pool.tail:
                        pool.retire(segment)
            dropped = pool.take_dropped()
            sparse = not self._compacting and pool.index.is_sparse(self._patience)
        for segment in dropped:
            pool.unlink(segment)
        if sparse:
            self._compact()

    def remove(self) -> None:
        """Set the directory aside for a `Wiper`; see `SpillArea.remove`. Cost: one rename."""
        pool = self._pool
        failed = False
        try:
            self._directory.remove()
        except OSError:
            failed = True
        for segment in pool.clear():
            pool.maps.drop(segment)
        with self._lock:
            pool.unlink_failures += failed

    # Compaction --------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Move what is left in the sparsest segments into one file. Never raises OSError."""
        pool = self._pool
        pinned: list[Segment] = []
        with self._writing:
            try:
                with self._lock:
                    if self._compacting or not pool.index.is_sparse(self._patience):
                        return
                    self._compacting = True
                    self._patience += pool.segment_bytes  # if it fails, it is not tried with each message freed
                    for segment in pool.index.sparsest(pool.tail):
                        pinned.append(segment)
                        segment.pins += 1
                if pinned:
                    self._move(pinned)
            finally:
                self._compacting = False
                for segment in pinned:
                    pool.unpin(segment)

    def _move(self, chosen: list[Segment]) -> None:
        self._directory.follow()  # what is not found is taken to be damaged
        places = sorted((first, segment, block) for segment in chosen for block, first in enumerate(segment.firsts))
        call = WriteCall(self._pool, self._owner, 0)
        try:
            try:
                call.create(sum(segment.used + 4 * segment.live for segment in chosen))
                with Reading(self._files, self._pool.maps) as reading:
                    moved = [
                        move for _, segment, block in places if (move := self._copy(call, reading, segment, block))
                    ]
                call.flush()
            finally:
                call.close()
            self._directory.must_exist()
            self._lead_over(call, chosen, moved)
        except BaseException as error:
            if not call.installed:
                call.undo(error)
            if not isinstance(error, OSError | StorageError | CorruptionError):
                raise

    def _copy(self, call: WriteCall, reading: Reading, segment: Segment, block: int) -> Move | None:
        """Write a block again without what is freed, if anything is left of it."""
        with self._lock:
            if not segment.live:  # it went meanwhile
                return None
            wanted = self._pool.index.wanted(segment, block)
            first, start, end = segment.firsts[block], segment.starts[block], segment.end_of(block)
        if not wanted:
            return None
        try:
            view = reading.view(segment, start, end)
            found = blocks.decode(view, None, where=f"{segment.path}, byte {start}")
            left = [place for place, offset in enumerate(found.offsets) if wanted >> offset & 1]
            if found.header.key[:3] != (SPILL_TABLE, self._owner, SPILL_LANE) or len(left) != wanted.bit_count():
                raise CorruptionError(f"{segment.path}, byte {start}: not the block that was written")
        except (CorruptionError, OSError) as error:
            if not isinstance(error, OSError) or error.errno not in UNHARMED:
                segment.damaged = True  # whoever reads it gets to know
            raise
        offsets = [found.offsets[place] for place in left]
        dense = offsets[-1] == len(offsets) - 1
        records = [found.records[place] for place in left]
        call.add(first, offsets[-1] + 1, encoding.pieces(found.header.key, records, None if dense else offsets))
        return Move(segment, block, wanted)

    def _lead_over(self, call: WriteCall, chosen: list[Segment], moved: list[Move]) -> None:
        pool = self._pool
        target = call.segment
        assert target is not None
        with self._lock:
            if self._directory.removed:
                return
            pool.index.lead_over(chosen, target, call.blocks, moved, call.used)
            call.installed = True
            pool.created += 1
            for segment in chosen:
                segment.retired = True  # they are pinned; whoever takes the last pin off keeps them
            if not target.live:
                pool.retire(target)
            self._patience = 0
            dropped = pool.take_dropped()
        for segment in dropped:
            pool.unlink(segment)

    # Looking -----------------------------------------------------------------------------------------------------

    def problems(self, used: Ranges) -> list[str]:
        """Compare files, slots in use and slots known; see `SpillArea.problems`. Cost: O(blocks)."""
        pool = self._pool
        if self._directory.removed:
            return []
        with self._lock:
            slots = list(pool.index.ranges())
            filled = [segment.number for segment in pool.index.segments() if segment.live]
            spare = [segment.number for segment in pool.kept]
            if pool.tail is not None and not pool.tail.live:
                spare.append(pool.tail.number)
            wrong_sums = pool.index.problems()
            excused = pool.given_up + pool.unlink_failures
        prefix = self._directory.prefix
        known = Ranges(slots)
        found = [
            f"slot {slot} of {prefix} {what}"
            for ranges, what in (
                (used.twice, "is in use more than once"),
                (used.without(known), "is in use and free"),
                (known.without(used), "belongs to no message"),
                (known.twice, "is held more than once"),
            )
            for slot in chain.from_iterable(ranges)
        ]
        found += [f"{prefix}: {problem}" for problem in wrong_sums]
        return found + self._directory.problems(Ranges.of(filled), Ranges.of(spare), excused)

    def counters(self) -> SpillCounters:
        """Return what was done so far."""
        pool = self._pool
        with self._lock:
            return SpillCounters(
                created=pool.created,
                overwritten=pool.overwritten,
                read=pool.read,
                unlinked=pool.unlinked,
                unlink_failures=pool.unlink_failures,
                kept=len(pool.kept),
            )
