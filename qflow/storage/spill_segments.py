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

Nothing is synced. Locks: `_writing` is held by the one who appends or compacts, and only that; `_lock` covers the index
and is never held during a file operation. A segment that is being read is pinned and not filled again meanwhile.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from itertools import accumulate, repeat
from threading import Lock, RLock
from typing import NamedTuple

from qflow.errors import CorruptionError, StorageError
from qflow.message import OVERHEAD_BYTES, Record, charge
from qflow.storage import blocks
from qflow.storage.blocks import SINGLE_BYTES, SINGLE_HEAD_BYTES, SINGLE_ROOM, BlockKey, Singles
from qflow.storage.files import EXHAUSTED, NO_FAULT_OF_THE_FILE, OVERWRITE, Files, storage_error, write_all
from qflow.storage.segment_index import Move, Placed, SegmentIndex
from qflow.storage.segments import Maps, Reading, Segment, identity_of
from qflow.storage.spill import SPILL_LANE, SPILL_TABLE, AreaDirectory, Slots, SpillCounters, directory_name

MAX_KEPT_BYTES = 2**30
"""Free segments an area keeps to be filled again."""
BLOCK_BYTES = 256 * 1024
"""No block is larger, unless it holds a single message."""
WRITE_BYTES = 256 * 1024
"""Encoded and written at once."""
MANY_PIECES = 512
"""No more are written with one call; the system takes 1,024."""
MAX_KEPT = 8192
"""And so many of them, for each takes half a kilobyte of memory."""

_END = bytes(4)
"""Written after the last block, so that who looks at the file does not take older blocks for new ones."""
_NOT_OURS = frozenset({errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.ENOTDIR})


class SpillSegments:
    """A `SpillStore` that appends messages to files of one size under `<spool>/spill/`.

    Args:
        segment_bytes: size of a file.
        max_mapped: segments of all areas that are mapped for reading at once, each takes a descriptor; 0 maps none and
            reads them with `pread`.
    """

    def __init__(self, files: Files, spool: str, *, segment_bytes: int, max_mapped: int = 0) -> None:
        self._files = files
        self._spool = spool
        self._segment_bytes = segment_bytes
        self._maps = Maps(files, max_mapped)

    def area(self, name: str, owner: int, incarnation: int) -> SegmentsArea:
        """Return the area of a queue; see `SpillStore.area`."""
        directory = AreaDirectory(self._files, self._spool, directory_name(name, owner, incarnation))
        return SegmentsArea(self._files, directory, owner, self._segment_bytes, self._maps)

    def close(self) -> None:
        """Unmap everything."""
        self._maps.clear()


class _Found(NamedTuple):
    """So many messages of a block, or why they cannot be had."""

    count: int  # type: ignore[assignment]
    records: list[Record] | None
    reason: str = ""


class _WriteCall:
    """What one `write` has done so far: enough to make it count, or to undo it."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        """Of the next message."""
        self.segment: Segment | None = None
        """Where the next block goes, if there is room."""
        self.fd = -1
        self.used = self.position = 0
        """How far the segment is filled, and how far it is written."""
        self.pending: list[bytes] = []
        self.blocks: list[Placed] = []
        self.ends: dict[Segment, int] = {}
        self.reused: list[Segment] = []
        self.created: list[Segment] = []
        self.installed = False

    @property
    def room(self) -> int:
        return self.segment.size - self.used if self.segment else 0

    @property
    def full(self) -> bool:
        """So much is pending that it is to be written."""
        return self.used - self.position >= WRITE_BYTES or len(self.pending) >= MANY_PIECES

    def add(self, slot: int, span: int, pieces: list[bytes]) -> None:
        """Put a block behind what is pending."""
        segment = self.segment
        assert segment is not None
        self.blocks.append((segment, slot, span, self.used))
        self.used += sum(map(len, pieces))
        assert self.used <= segment.size, "a block is larger than was allowed for"
        self.ends[segment] = self.used
        self.pending += pieces


class SegmentsArea:
    """A `SpillArea` of segments."""

    chunk_bytes = WRITE_BYTES

    def __init__(self, files: Files, directory: AreaDirectory, owner: int, segment_bytes: int, maps: Maps) -> None:
        self.path = directory.path
        self._files = files
        self._directory = directory
        self._owner = owner
        self._segment_bytes = segment_bytes
        self._max_kept = max(1, min(MAX_KEPT, MAX_KEPT_BYTES // segment_bytes))
        self._maps = maps
        self._singles = Singles(SPILL_TABLE, owner, SPILL_LANE)
        self._writing = RLock()  # a write that is interrupted may free, and freeing may compact
        self._compacting = False
        # Below: under the lock.
        self._lock = Lock()
        self.tail: Segment | None = None
        self._index = SegmentIndex(segment_bytes)
        self._kept: deque[Segment] = deque()
        self._dropped: list[Segment] = []
        self._next_slot = self._next_number = 0
        self._patience = 0
        """Bytes that may be wasted beyond the bound, after a compaction failed."""
        self._created = self._overwritten = self._read = self._unlinked = self._unlink_failures = 0
        self._given_up = 0

    @property
    def head(self) -> Segment | None:
        """The segment with the lowest slot."""
        return self._index.head

    # Writing -----------------------------------------------------------------------------------------------------

    def write(self, first: int, records: list[Record]) -> Slots:
        """Write records; see `SpillArea.write`. 1 KiB costs about 0.5 µs a message in runs of 64 KiB and more."""
        with self._writing:
            self._directory.must_exist()
            call, tail = self._begin(len(records))
            slots = Slots([range(call.slot, call.slot + len(records))])
            try:
                try:
                    if tail is not None:
                        self._continue(call, tail)
                    self._write_blocks(call, first, records)
                finally:
                    self._close(call)
                self._directory.must_exist()
                self._install(call)
            except BaseException as error:
                if call.installed:
                    self.free(slots)
                else:
                    self._undo(call, error)
                if isinstance(error, OSError):
                    raise storage_error(error, "write a spill segment", self._directory.prefix) from error
                raise
            return slots

    def _begin(self, count: int) -> tuple[_WriteCall, Segment | None]:
        """Reserve slots, whose numbers are not used again whatever happens; return them with the tail."""
        with self._lock:
            call = _WriteCall(self._next_slot)
            self._next_slot += count
            if self.tail is not None and not self.tail.live and not self.tail.pins:
                self._index.take_out(self.tail)
            return call, self.tail

    def _continue(self, call: _WriteCall, tail: Segment) -> None:
        """Append to the tail, unless its file is gone or replaced."""
        call.segment = tail
        if self._open(call):
            call.used = call.position = tail.used
        else:
            call.segment = None

    def _open(self, call: _WriteCall) -> bool:
        """Open the call's segment for writing; False if its file is not there any more."""
        assert call.segment is not None
        try:
            call.fd = self._files.open(call.segment.path, OVERWRITE, 0)
        except OSError as error:
            if error.errno in _NOT_OURS:
                return False
            raise
        status = self._files.status(call.fd)
        if identity_of(status) == call.segment.identity and status.st_size >= call.segment.size:
            return True
        self._close(call)
        return False

    def _close(self, call: _WriteCall) -> None:
        fd, call.fd = call.fd, -1
        if fd >= 0:
            self._files.close(fd)

    def _write_blocks(self, call: _WriteCall, first: int, records: list[Record]) -> None:
        ends = list(accumulate(map(len, records)))
        start, count = 0, len(records)
        while start < count:
            stop = blocks.reach(ends, start, min(BLOCK_BYTES, call.room))
            if stop == start:
                alone = len(records[start]) + SINGLE_ROOM
                if alone > self._segment_bytes:
                    self._write_alone(call, start, first, records[start], alone)
                    start += 1
                    continue
                if alone > call.room:
                    self._next_segment(call)
                    continue
                stop = start + 1
            key = BlockKey(SPILL_TABLE, self._owner, SPILL_LANE, first + start)
            call.add(call.slot + start, stop - start, blocks.pieces(key, records[start:stop]))
            if call.full:
                self._flush(call)
            start = stop
        self._flush(call)

    def _write_alone(self, call: _WriteCall, start: int, first: int, record: Record, size: int) -> None:
        """Write a message that no segment can hold to a file of its own, and go on where the call was."""
        self._flush(call)
        place = call.segment, call.fd, call.used, call.position
        call.fd = -1
        try:
            self._create(call, size)
            call.used = call.position = 0
            key = BlockKey(SPILL_TABLE, self._owner, SPILL_LANE, first + start)
            call.add(call.slot + start, 1, blocks.pieces(key, [record]))
            self._flush(call)
        finally:
            try:
                self._close(call)
            finally:
                call.segment, call.fd, call.used, call.position = place

    def _flush(self, call: _WriteCall) -> None:
        pieces, size = call.pending, call.used - call.position
        if not pieces:
            return
        if call.room >= len(_END):
            pieces.append(_END)
            size += len(_END)
        written = self._files.pwritev(call.fd, pieces, call.position)
        if written < size:
            position = call.position
            for piece in pieces:
                done = min(max(written, 0), len(piece))
                write_all(self._files, call.fd, memoryview(piece)[done:], position + done)
                written -= len(piece)
                position += len(piece)
        call.pending, call.position = [], call.used

    def _next_segment(self, call: _WriteCall) -> None:
        """Go on in a segment that is kept, or in a new one."""
        self._flush(call)
        self._close(call)
        call.segment = None
        if not self._reuse(call):
            self._create(call, self._segment_bytes)
        call.used = call.position = 0

    def _reuse(self, call: _WriteCall) -> bool:
        """Take a segment that was kept; False if there is none."""
        while True:
            with self._lock:
                if not self._kept:
                    return False
                call.segment = self._kept.pop()
                call.reused.append(call.segment)
            if self._open(call):
                call.segment.retired = False
                return True
            self._maps.drop(call.reused.pop())
            with self._lock:
                self._given_up += 1

    def _create(self, call: _WriteCall, size: int) -> None:
        """Make a file; a number that is taken by something else is given up."""
        while call.fd < 0:
            with self._lock:
                number = self._next_number
                self._next_number += 1
            try:
                call.fd = self._directory.create(number)
            except FileExistsError:
                with self._lock:
                    self._given_up += 1
        call.segment = Segment(self, number, size)
        call.created.append(call.segment)
        self._files.ftruncate(call.fd, size)
        status = self._files.status(call.fd)
        call.segment.identity = identity_of(status)

    def _undo(self, call: _WriteCall, error: BaseException) -> None:
        """Keep again what was kept, remove what was made; what was appended to the tail does not count."""
        dropped = call.created
        with self._lock:
            suspect = call.segment if isinstance(error, OSError) and error.errno not in NO_FAULT_OF_THE_FILE else None
            if suspect is not None and suspect is self.tail:  # a bad file must not fail every later write
                self.tail = None
                if not suspect.live and not suspect.pins:
                    self._index.take_out(suspect)
                    dropped.append(suspect)
            elif suspect in call.reused:
                call.reused.remove(suspect)
                dropped.append(suspect)
            self._kept += call.reused
            dropped += self._take_dropped()
        for segment in dropped:
            self._unlink(segment)

    def _install(self, call: _WriteCall) -> None:
        """Make readable what was written."""
        with self._lock:
            before = self.tail
            self._index.install(call.blocks, call.ends)
            self.tail, call.installed = call.segment, True
            self._created += len(call.created)
            self._overwritten += len(call.reused)
            if before is not None and before is not self.tail and not before.live:
                self._retire(before)
            dropped = self._take_dropped()
        for segment in dropped:
            self._unlink(segment)

    def _retire(self, segment: Segment) -> None:
        """Keep a segment that holds nothing, as soon as nobody reads it. Under the lock."""
        self._index.take_out(segment)
        segment.retired = True
        if not segment.pins:
            if segment.size != self._segment_bytes:
                self._dropped.append(segment)
                return
            self._kept.append(segment)
            if len(self._kept) > self._max_kept:
                self._dropped.append(self._kept.popleft())

    def _take_dropped(self) -> list[Segment]:
        """Return the segments that are not kept; the caller unlinks them. Under the lock."""
        if not self._dropped:
            return []
        dropped, self._dropped = self._dropped, []
        return dropped

    # Reading -----------------------------------------------------------------------------------------------------

    def read(
        self, first: int, slots: Slots, max_bytes: int, largest: int
    ) -> tuple[list[Record | None], list[tuple[int, str]]]:
        """Read messages from the first slot on; see `SpillArea.read`. Cost, 1 KiB: 0.5 µs a message."""
        records: list[Record | None] = []
        problems: list[tuple[int, str]] = []
        room = max_bytes
        with Reading(self._files, self._maps) as reading:
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
        segment: Segment | None = None
        where = self._directory.prefix
        try:
            with self._lock:
                if self._directory.removed:
                    return _Found(stop - slot, None, f"{where}: removed with its queue")
                found_in, block = self._index.find(slot)
                first, start, end = found_in.firsts[block], found_in.starts[block], found_in.end_of(block)
                span = found_in.span_of(block)
                stop = max(slot + 1, min(stop, first + span))
                if most is not None and stop - slot == span and end - start - span * SINGLE_ROOM > most:
                    return _Found(0, None)  # else the block would be read again by the next call
                self._read += 1
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
            if error.errno in EXHAUSTED:
                raise
            return _Found(stop - slot, None, f"{where}: {error.strerror}")
        finally:
            if segment is not None:
                self._unpin(segment)

    def _unpin(self, segment: Segment) -> None:
        with self._lock:
            segment.pins -= 1
            if not segment.retired or segment.pins or self._directory.removed:
                return
            self._retire(segment)
            dropped = self._take_dropped()
        for other in dropped:
            self._unlink(other)

    # Freeing -----------------------------------------------------------------------------------------------------

    def free(self, slots: Slots) -> None:
        """Give back slots; see `SpillArea.free`. Cost: 3 µs a block, and now and then a compaction."""
        with self._lock:
            if self._directory.removed:
                return
            for piece in slots.ranges():
                slot = piece.start
                while slot < piece.stop:
                    segment, slot = self._index.free(slot, piece.stop)
                    if not segment.live and segment is not self.tail:
                        self._retire(segment)
            dropped = self._take_dropped()
            sparse = not self._compacting and self._index.is_sparse(self._patience)
        for segment in dropped:
            self._unlink(segment)
        if sparse:
            self._compact()

    def _unlink(self, segment: Segment) -> None:
        """Remove the file of a segment that nothing leads to."""
        self._maps.drop(segment)
        done = failed = 0
        try:
            self._files.unlink(segment.path)
            done = 1
        except FileNotFoundError:
            pass
        except OSError:
            failed = 1
        with self._lock:
            self._unlinked += done
            self._unlink_failures += failed

    def remove(self) -> None:
        """Set the directory aside for a `Wiper`; see `SpillArea.remove`. Cost: one rename."""
        failed = False
        try:
            self._directory.remove()
        except OSError:
            failed = True
        with self._lock:
            dropped = {*self._index.segments(), *self._kept, *filter(None, (self.tail,))}
            self._index.clear()
            self._kept.clear()
            self.tail = None
            self._unlink_failures += failed
        for segment in dropped:
            self._maps.drop(segment)

    # Compaction --------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Move what is left in the sparsest segments into one file. Never raises OSError."""
        pinned: list[Segment] = []
        with self._writing:
            try:
                with self._lock:
                    if self._compacting or not self._index.is_sparse(self._patience):
                        return
                    self._compacting = True
                    self._patience += self._segment_bytes  # if it fails, it is not tried with each message freed
                    for segment in self._index.sparsest(self.tail):
                        pinned.append(segment)
                        segment.pins += 1
                if pinned:
                    self._move(pinned)
            finally:
                self._compacting = False
                for segment in pinned:
                    self._unpin(segment)

    def _move(self, chosen: list[Segment]) -> None:
        places = sorted((first, segment, block) for segment in chosen for block, first in enumerate(segment.firsts))
        call = _WriteCall(0)
        try:
            try:
                self._create(call, sum(segment.used + 4 * segment.live for segment in chosen))
                with Reading(self._files, self._maps) as reading:
                    moved = [
                        move for _, segment, block in places if (move := self._copy(call, reading, segment, block))
                    ]
                self._flush(call)
            finally:
                self._close(call)
            self._directory.must_exist()
            self._lead_over(call, chosen, moved)
        except BaseException as error:
            if not call.installed:
                self._undo(call, error)
            if not isinstance(error, OSError | StorageError | CorruptionError):
                raise

    def _copy(self, call: _WriteCall, reading: Reading, segment: Segment, block: int) -> Move | None:
        """Write a block again without what is freed, if anything is left of it."""
        with self._lock:
            if not segment.live:  # it went meanwhile
                return None
            wanted = self._index.wanted(segment, block)
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
            if not isinstance(error, OSError) or error.errno not in EXHAUSTED:
                segment.damaged = True  # whoever reads it gets to know
            raise
        offsets = [found.offsets[place] for place in left]
        dense = offsets[-1] == len(offsets) - 1
        records = [found.records[place] for place in left]
        call.add(first, offsets[-1] + 1, blocks.pieces(found.header.key, records, None if dense else offsets))
        if call.full:
            self._flush(call)
        return Move(segment, block, wanted)

    def _lead_over(self, call: _WriteCall, chosen: list[Segment], moved: list[Move]) -> None:
        target = call.segment
        assert target is not None
        with self._lock:
            if self._directory.removed:
                return
            self._index.lead_over(chosen, target, call.blocks, moved, call.used)
            call.installed = True
            self._created += 1
            for segment in chosen:
                segment.retired = True  # they are pinned; whoever takes the last pin off keeps them
            if not target.live:
                self._retire(target)
            self._patience = 0
            dropped = self._take_dropped()
        for segment in dropped:
            self._unlink(segment)

    # Looking -----------------------------------------------------------------------------------------------------

    def problems(self, slots: list[int]) -> list[str]:
        """Compare files, slots in use and slots known; see `SpillArea.problems`. Cost: O(messages)."""
        if self._directory.removed:
            return []
        with self._lock:
            known = Counter(self._index.slots())
            used = {segment.number for segment in self._index.segments() if segment.live}
            spare = {segment.number for segment in self._kept}
            if self.tail is not None and not self.tail.live:
                spare.add(self.tail.number)
            wrong_sums = self._index.problems()
            excused = self._given_up + self._unlink_failures
        prefix = self._directory.prefix
        found = [
            f"slot {slot} of {prefix} is in use {times} times" for slot, times in Counter(slots).items() if times > 1
        ]
        found += [f"slot {slot} of {prefix} is in use and free" for slot in sorted(set(slots) - known.keys())]
        found += [f"slot {slot} of {prefix} belongs to no message" for slot in sorted(known.keys() - set(slots))]
        found += [f"slot {slot} of {prefix} is held {times} times" for slot, times in known.items() if times > 1]
        found += [f"{prefix}: {problem}" for problem in wrong_sums]
        return found + self._directory.problems(used, spare, excused)

    def counters(self) -> SpillCounters:
        """Return what was done so far."""
        with self._lock:
            return SpillCounters(
                created=self._created,
                overwritten=self._overwritten,
                read=self._read,
                unlinked=self._unlinked,
                unlink_failures=self._unlink_failures,
                kept=len(self._kept),
            )
