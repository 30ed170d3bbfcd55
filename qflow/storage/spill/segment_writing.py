"""Writing to the segments of an area: one call, which in the end makes readable what it wrote, or undoes it."""

from __future__ import annotations

import errno
from itertools import accumulate

from qflow.message import Record
from qflow.storage import encoding
from qflow.storage.blocks import SINGLE_ROOM, BlockKey
from qflow.storage.files import NO_FAULT_OF_THE_FILE, write_all
from qflow.storage.spill.segment import Segment, identity_of
from qflow.storage.spill.segment_index import Placed
from qflow.storage.spill.segment_pool import SegmentPool
from qflow.storage.spill.store import SPILL_LANE, SPILL_TABLE

BLOCK_BYTES = 256 * 1024
"""No block is larger, unless it holds a single message."""
WRITE_BYTES = 256 * 1024
"""Encoded and written at once."""
MANY_PIECES = 512
"""No more are written with one call; the system takes 1,024."""

_END = bytes(4)
"""Written after the last block, so that who looks at the file does not take older blocks for new ones."""
_NOT_OURS = frozenset({errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.ENOTDIR})


class WriteCall:
    """What one call has done so far: enough to make it count, or to undo it. Of the thread that writes."""

    def __init__(self, pool: SegmentPool, owner: int, slot: int) -> None:
        self._pool = pool
        self._files = pool.files
        self._owner = owner
        self.slot = slot
        """Of the next message."""
        self.segment: Segment | None = None
        """Where the next block goes, if there is room."""
        self._fd = -1
        self.used = self._position = 0
        """How far the segment is filled, and how far it is written."""
        self._pending: list[bytes] = []
        self.blocks: list[Placed] = []
        self._ends: dict[Segment, int] = {}
        self._reused: list[Segment] = []
        self.created: list[Segment] = []
        self.installed = False

    @property
    def _room(self) -> int:
        return self.segment.size - self.used if self.segment else 0

    def add(self, slot: int, span: int, pieces: list[bytes]) -> None:
        """Write a block behind the others, now or with those that follow."""
        segment = self.segment
        assert segment is not None
        self.blocks.append((segment, slot, span, self.used))
        self.used += sum(map(len, pieces))
        assert self.used <= segment.size, "a block is larger than was allowed for"
        self._ends[segment] = self.used
        self._pending += pieces
        if self.used - self._position >= WRITE_BYTES or len(self._pending) >= MANY_PIECES:
            self.flush()

    def go_on(self, tail: Segment) -> None:
        """Append to the tail, unless its file is gone or replaced."""
        self.segment = tail
        if self._open(tail):
            self.used = self._position = tail.used
        else:
            self.segment = None

    def _open(self, segment: Segment) -> bool:
        """Open a segment for writing; False if its file is not there any more."""
        try:
            self._fd = self._pool.directory.open(segment.number)
        except OSError as error:
            if error.errno in _NOT_OURS:
                return False
            raise
        status = self._files.status(self._fd)
        if identity_of(status) == segment.identity and status.st_size >= segment.size:
            return True
        self.close()
        return False

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def write(self, first: int, records: list[Record]) -> None:
        """Write records, the first of which has sequence `first`."""
        ends = list(accumulate(map(len, records)))
        start, count = 0, len(records)
        while start < count:
            stop = encoding.reach(ends, start, min(BLOCK_BYTES, self._room))
            if stop == start:
                alone = len(records[start]) + SINGLE_ROOM
                if alone > self._pool.segment_bytes:
                    self._write_alone(start, first, records[start], alone)
                    start += 1
                    continue
                if alone > self._room:
                    self._next_segment()
                    continue
                stop = start + 1
            key = BlockKey(SPILL_TABLE, self._owner, SPILL_LANE, first + start)
            self.add(self.slot + start, stop - start, encoding.pieces(key, records[start:stop]))
            start = stop
        self.flush()

    def _write_alone(self, start: int, first: int, record: Record, size: int) -> None:
        """Write a message that no segment can hold to a file of its own, and go on where the call was."""
        self.flush()
        place = self.segment, self._fd, self.used, self._position
        self._fd = -1
        try:
            self.create(size)
            key = BlockKey(SPILL_TABLE, self._owner, SPILL_LANE, first + start)
            self.add(self.slot + start, 1, encoding.pieces(key, [record]))
            self.flush()
        finally:
            try:
                self.close()
            finally:
                self.segment, self._fd, self.used, self._position = place

    def flush(self) -> None:
        """Write what is pending."""
        pieces, size = self._pending, self.used - self._position
        if not pieces:
            return
        if self._room >= len(_END):
            pieces.append(_END)
            size += len(_END)
        written = self._files.pwritev(self._fd, pieces, self._position)
        if written < size:
            position = self._position
            for piece in pieces:
                done = min(max(written, 0), len(piece))
                write_all(self._files, self._fd, memoryview(piece)[done:], position + done)
                written -= len(piece)
                position += len(piece)
        self._pending, self._position = [], self.used

    def _next_segment(self) -> None:
        self.flush()
        self.close()
        self.segment = None
        if not self._reuse():
            self.create(self._pool.segment_bytes)

    def _reuse(self) -> bool:
        """Take a segment that was kept; False if there is none."""
        pool = self._pool
        while True:
            with pool.lock:
                if not pool.kept:
                    return False
                self.segment = pool.kept.pop()
                self._reused.append(self.segment)
            if self._open(self.segment):
                self.segment.retired = False
                self.used = self._position = 0
                return True
            pool.maps.drop(self._reused.pop())
            pool.give_up()

    def create(self, size: int) -> None:
        """Go on in a file of this size that is made for it."""
        pool = self._pool
        while self._fd < 0:  # a number that something else has is given up
            number = pool.new_number()
            try:
                self._fd = pool.directory.create(number)
            except FileExistsError:
                pool.give_up()
        self.segment = Segment(pool, number, size)
        self.created.append(self.segment)
        self._files.ftruncate(self._fd, size)
        self.segment.identity = identity_of(self._files.status(self._fd))
        self.used = self._position = 0

    # The end ------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Make readable what was written."""
        pool = self._pool
        with pool.lock:
            before = pool.tail
            pool.index.install(self.blocks, self._ends)
            pool.tail, self.installed = self.segment, True
            pool.created += len(self.created)
            pool.overwritten += len(self._reused)
            if before is not None and before is not pool.tail and not before.live:
                pool.retire(before)
            dropped = pool.take_dropped()
        for segment in dropped:
            pool.unlink(segment)

    def undo(self, error: BaseException) -> None:
        """Keep again what was kept, remove what was made; what was appended to the tail does not count."""
        pool = self._pool
        dropped = self.created
        with pool.lock:
            suspect = self.segment if isinstance(error, OSError) and error.errno not in NO_FAULT_OF_THE_FILE else None
            if suspect is not None and suspect is pool.tail:  # a bad file must not fail every later write
                pool.tail = None
                if not suspect.live and not suspect.pins:
                    pool.index.take_out(suspect)
                    dropped.append(suspect)
            elif suspect in self._reused:
                self._reused.remove(suspect)
                dropped.append(suspect)
            if self._reused:
                pool.keep(self._reused)
            dropped += pool.take_dropped()
        for segment in dropped:
            pool.unlink(segment)
