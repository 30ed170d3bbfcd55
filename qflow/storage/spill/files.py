"""The spill store of one file per message (`spill="files"`).

An area is a directory; a slot is a file in it, named by its number in hexadecimal, that holds one block of one message.
Rules:

- A file that was freed is kept, up to a bound, and overwritten by a later message: 6 µs against 15 to 25 µs for a
  fresh one, and more after many deletes. The last one freed is the first one used, while its pages are still in memory.
- A number is never used for a second *fresh* file, and a fresh file must not exist yet. So what somebody else planted
  is never written to and never removed; its number is given up.
- Nothing is synced, locked or checked beforehand. A directory that vanished is noticed when a file in it cannot be
  created, and made again; that is also how it is made in the first place.
- The area's lock covers the pool of kept files and the counters, never a file operation.

Cost, 1 KiB messages, files kept: write and read together 1.17 times a plain loop of open, write, close and open, read,
close.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from itertools import chain, count
from threading import Lock

from qflow.errors import CorruptionError
from qflow.message import OVERHEAD_BYTES, Record
from qflow.storage.blocks import SINGLE_BYTES, SINGLE_HEAD_BYTES
from qflow.storage.files import (
    NO_FAULT_OF_THE_FILE,
    OVERWRITE,
    READ,
    READ_OWN,
    UNHARMED,
    Files,
    storage_error,
    write_all,
)
from qflow.storage.lock import Place
from qflow.storage.spill.shedding import Shedding
from qflow.storage.spill.singles import Singles
from qflow.storage.spill.slots import Ranges, Slots
from qflow.storage.spill.store import SPILL_LANE, SPILL_TABLE, AreaDirectory, SpillCounters, directory_name

MAX_KEPT = 32_768
"""Freed files an area keeps for overwriting."""
MAX_KEPT_BYTES = 256 * 2**20
"""What they may hold together, judged by the mean size written; fewer are kept when messages are large."""

_LEAST_JOINED = 256
"""So many ranges of kept files are not joined yet: each takes 110 bytes."""
_COLUMN_ROOM = 16  # optional columns of a block of one
_BLOCK_BYTES = 4096  # of the disk, which a file takes at least
_LEAST_SHED = 100  # files; the mean says little of those that are kept, and each look is followed by another try
_LARGE = 64 * 1024  # from here on a copy of the body costs more than two more system calls

_NOT_OURS = frozenset({errno.EEXIST, errno.ELOOP, errno.ENXIO, errno.ESPIPE, errno.EISDIR, errno.ENODEV, errno.ENOTDIR})
"""What opening or writing a slot's file says when something else stands in its place."""


class SpillFiles:
    """A `SpillStore` that keeps each message in a file of its own under `<spool>/spill/`."""

    def __init__(self, files: Files, spool: str | Place, max_kept: int = MAX_KEPT) -> None:
        self._files = files
        self._spool = Place.of(spool)
        self._max_kept = max_kept
        self._shedding = Shedding()

    def area(self, name: str, owner: int, incarnation: int) -> FilesArea:
        """Return the area of a queue; see `SpillStore.area`."""
        directory = AreaDirectory(self._files, self._spool, directory_name(name, owner, incarnation))
        area = FilesArea(self._files, directory, owner, self._max_kept, self._shedding)
        self._shedding.add(area)
        return area

    def close(self) -> None:
        """Do nothing: no descriptor is held between calls."""


class _WriteCall:
    """What one `write` took and did so far: enough to say where the records are, or to undo it."""

    __slots__ = ("created", "failed", "fresh", "kept", "longest", "moved")

    def __init__(self, kept: list[range], fresh: range, longest: int) -> None:
        self.kept = kept
        self.fresh = fresh
        self.created: list[int] = []
        self.moved: dict[int, int] = {}  # slot given up: the one used for it
        self.failed = -1
        self.longest = longest  # bytes; no kept file and none of this call is longer

    def slots(self) -> Slots:
        planned = chain(self.kept, (self.fresh,))
        if not self.moved:
            return Slots(planned)
        used = (self.moved.get(slot, slot) for slot in chain.from_iterable(planned))
        return Slots(range(slot, slot + 1) for slot in used)


class FilesArea:
    """A `SpillArea` of one file per message."""

    chunk_bytes = 64 * 1024
    chunk_messages = 64

    def __init__(self, files: Files, directory: AreaDirectory, owner: int, max_kept: int, shedding: Shedding) -> None:
        self._files = files
        self._shedding = shedding
        self._directory = directory
        self._path = directory.path
        self._blocks = Singles(SPILL_TABLE, owner, SPILL_LANE)
        self._max_kept = max_kept
        # Below: under the lock.
        self._lock = Lock()
        self._next = 0
        self._longest = 0
        self._kept: list[range] = []
        self._kept_count = 0
        self._joined_at = _LEAST_JOINED
        """With so many ranges, those that are adjacent are joined: files are freed in any order."""
        self._created = self._overwritten = self._read = self._unlinked = self._unlink_failures = 0
        self._written = self._written_bytes = 0
        self._given_up = 0

    def write(self, first: int, records: list[Record]) -> Slots:
        """Write records; see `SpillArea.write`. 1 KiB costs 6 µs a message on kept files, 15 to 25 on fresh ones."""
        self._directory.must_exist()
        try:
            return self._shedding.written(self, records, lambda: self._write(first, records))
        except OSError as error:
            raise storage_error(error, "write a spill file", self._directory.prefix) from error

    def _write(self, first: int, records: list[Record]) -> Slots:
        """`write`; raises OSError."""
        call = self._take(len(records))
        try:
            split = len(records) - len(call.fresh)
            self._overwrite(call, first, records[:split] if call.fresh else records)
            self._create(call, first + split, records[split:])
        except BaseException as error:
            self._undo(call, records, error)
            raise
        self._count_written(call, sum(map(len, records)))
        return call.slots()

    def _take(self, wanted: int) -> _WriteCall:
        """Take as many kept slots as there are, then fresh numbers."""
        kept: list[range] = []
        with self._lock:
            while wanted and self._kept:
                piece = self._kept.pop()
                if len(piece) > wanted:
                    self._kept.append(piece[wanted:])
                    piece = piece[:wanted]
                kept.append(piece)
                wanted -= len(piece)
                self._kept_count -= len(piece)
            fresh = range(self._next, self._next + wanted)
            self._next += wanted
            return _WriteCall(kept, fresh, self._longest)

    def _overwrite(self, call: _WriteCall, first: int, records: list[Record]) -> None:
        files, prefix, encode = self._files, self._directory.prefix, self._blocks.encode
        os_open, lseek, pwrite, close = files.open, files.lseek, files.pwrite, files.close
        longest = call.longest
        large = max(map(len, records), default=0) >= _LARGE
        for sequence, slot, record in zip(count(first), chain.from_iterable(call.kept), records):
            try:
                fd = os_open(f"{prefix}{slot:x}", OVERWRITE, 0)
                try:
                    if large:
                        end = self._write_sized(fd, sequence, record)
                    else:
                        block = encode(sequence, record)
                        end = len(block)
                        if (written := pwrite(fd, block, 0)) != end:
                            write_all(files, fd, block[written:], written)
                    if end != longest:  # else the old file was not longer
                        if end > longest:
                            call.longest = longest = end
                        elif lseek(fd, 0, os.SEEK_END) > end:  # 0.2 µs, where fstat is 0.7 and O_TRUNC 4
                            files.ftruncate(fd, end)
                finally:
                    close(fd)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    created = self._create_at(call, slot, sequence, record)
                elif error.errno in _NOT_OURS:
                    self._give_up_slot()
                    created = False
                else:
                    call.failed = slot
                    raise
                if not created:
                    call.moved[slot] = self._create_elsewhere(call, sequence, record)

    def _create(self, call: _WriteCall, first: int, records: list[Record]) -> None:
        for sequence, slot, record in zip(count(first), call.fresh, records):
            if not self._create_at(call, slot, sequence, record):
                call.moved[slot] = self._create_elsewhere(call, sequence, record)

    def _create_elsewhere(self, call: _WriteCall, sequence: int, record: Record) -> int:
        """Write a record to the next fresh number that is free."""
        while True:
            with self._lock:
                slot = self._next
                self._next += 1
            if self._create_at(call, slot, sequence, record):
                return slot

    def _create_at(self, call: _WriteCall, slot: int, sequence: int, record: Record) -> bool:
        """Write a record to a new file; False if something else stands there."""
        try:
            fd = self._directory.create(slot)
        except FileExistsError:
            self._give_up_slot()
            return False
        call.created.append(slot)
        try:
            call.longest = max(call.longest, self._write_sized(fd, sequence, record))
        finally:
            self._files.close(fd)
        return True

    def _give_up_slot(self) -> None:
        with self._lock:
            self._given_up += 1

    def _write_sized(self, fd: int, sequence: int, record: Record) -> int:
        """Write a message, a large one without a second copy of it; return the size of the block."""
        if type(record) is not bytes or len(record) < _LARGE:
            return write_all(self._files, fd, self._blocks.encode(sequence, record), 0)
        position = 0
        head, tail = self._blocks.frame(sequence, record)
        for piece in (head, record, tail):
            position = write_all(self._files, fd, piece, position)
        return position

    def _undo(self, call: _WriteCall, records: list[Record], error: BaseException) -> None:
        """Leave nothing of a failed call behind: kept files are kept again, fresh ones unlinked."""
        drop = isinstance(error, OSError) and error.errno not in NO_FAULT_OF_THE_FILE
        lost = call.moved.keys() | ({call.failed} if drop else set())  # a bad file must not fail every later write
        created = set(call.created)
        pool = call.kept
        if lost or created:
            slots = (slot for slot in chain.from_iterable(call.kept) if slot not in lost and slot not in created)
            pool = list(Slots(range(slot, slot + 1) for slot in slots).ranges())
        with self._lock:
            # How far the failed write got is not known: allow for the longest there was to write.
            self._longest = max(self._longest, max(map(len, records)) + SINGLE_BYTES + _COLUMN_ROOM)
            for piece in reversed(pool):
                self._keep(piece)
        if drop and call.failed >= 0:
            created.add(call.failed)
        self._unlink(created)

    def _keep(self, piece: range) -> None:
        """Put slots on top of the pool, joined with those there if adjacent; the lock is held. Cost: 1.4 µs."""
        self._kept_count += len(piece)
        if self._kept:
            top = self._kept[-1]
            if top.stop == piece.start:
                piece = range(self._kept.pop().start, piece.stop)
            elif piece.stop == top.start:
                piece = range(piece.start, self._kept.pop().stop)
        self._kept.append(piece)
        if len(self._kept) >= self._joined_at:
            self._kept = Ranges(self._kept).ranges
            self._joined_at = max(_LEAST_JOINED, 2 * len(self._kept))
        self._shedding.note_kept()

    def _count_written(self, call: _WriteCall, message_bytes: int) -> None:
        messages = sum(map(len, call.kept)) + len(call.fresh)
        with self._lock:
            self._longest = max(self._longest, call.longest)
            self._created += len(call.created)
            self._overwritten += messages - len(call.created)
            self._written += messages
            self._written_bytes += message_bytes + messages * SINGLE_BYTES

    def read(
        self, first: int, slots: Slots, max_bytes: int, largest: int
    ) -> tuple[list[Record | None], list[tuple[int, str]]]:
        """Read messages from the first slot on; see `SpillArea.read`. Cost, 1 KiB: 5 µs a message."""
        while True:
            prefix = self._directory.prefix
            records, problems = self._read_in(prefix, first, slots, max_bytes, largest)
            if not problems or not self._directory.has_left(prefix):
                break
        with self._lock:
            self._read += len(records)
        return records, problems

    def _read_in(
        self, prefix: str, first: int, slots: Slots, max_bytes: int, largest: int
    ) -> tuple[list[Record | None], list[tuple[int, str]]]:
        files, decode = self._files, self._blocks.decode
        os_open, os_read, close = files.open, files.read, files.close
        size = largest + SINGLE_BYTES + _COLUMN_ROOM + 1  # one byte more than there can be shows a longer file
        records: list[Record | None] = []
        append = records.append
        problems: list[tuple[int, str]] = []
        room, surely_enough = max_bytes, largest + OVERHEAD_BYTES
        large = size > _LARGE
        for sequence, slot in enumerate(slots, first):
            path = f"{prefix}{slot:x}"
            if room < surely_enough and records and not self._fits(path, room):
                break
            try:
                try:
                    fd = os_open(path, READ_OWN, 0)
                except PermissionError:
                    fd = os_open(path, READ, 0)
                try:
                    if large:
                        record = self._read_sized(fd, sequence, size, path)
                    else:
                        record = decode(os_read(fd, size), sequence, path)
                finally:
                    close(fd)
            except OSError as error:
                if error.errno in UNHARMED:
                    if records:
                        break
                    raise storage_error(error, "read a spill file", path) from error
                append(None)
                problems.append((sequence, f"{path}: {error.strerror}"))
            except CorruptionError as error:
                append(None)
                problems.append((sequence, str(error)))
            else:
                append(record)
                room -= len(record) + OVERHEAD_BYTES
        return records, problems

    def _fits(self, path: str, room: int) -> bool:
        """Tell whether a message may be read into `room`, judged by its file's size."""
        if room < OVERHEAD_BYTES:
            return False
        try:
            size = self._files.lstat(path).st_size
        except OSError:
            return True  # a None takes no room, and reading tells what is wrong
        return size - SINGLE_BYTES + OVERHEAD_BYTES <= room

    def _read_sized(self, fd: int, sequence: int, too_large: int, path: str) -> Record:
        """Read a file that may be large: with buffers of its own size, and without a second copy of the body."""
        size = self._files.lseek(fd, 0, os.SEEK_END)
        self._files.lseek(fd, 0, os.SEEK_SET)
        if size >= too_large:
            raise CorruptionError(f"{path}: {size} bytes, expected less than {too_large}")
        if size < _LARGE:
            return self._blocks.decode(self._files.read(fd, size + 1), sequence, path)
        head = self._read_exactly(fd, SINGLE_HEAD_BYTES)
        body = self._read_exactly(fd, size - SINGLE_BYTES)
        tail = self._read_exactly(fd, SINGLE_BYTES - SINGLE_HEAD_BYTES + 1)
        return self._blocks.unframe(head, body, tail, sequence, path)

    def _read_exactly(self, fd: int, size: int) -> bytes:
        """Read so many bytes, or to the end; one system call reads 2 GiB at most."""
        data = self._files.read(fd, size)
        while len(data) < size and (more := self._files.read(fd, size - len(data))):
            data += more
        return data

    def free(self, slots: Slots) -> None:
        """Keep files for overwriting, unlink the rest; see `SpillArea.free`. 10 µs a file unlinked."""
        if self._directory.removed:
            return
        with self._lock:
            bound = min(self._max_kept, MAX_KEPT_BYTES // self._mean())
            keep, drop = slots.take(bound - self._kept_count)
            for piece in keep.ranges():
                self._keep(piece)
        self._unlink(drop)

    def _mean(self) -> int:
        """Return how large a file is, about. Under the lock."""
        return max(1, self._written_bytes // max(1, self._written))

    def shed(self, wanted: int) -> int:
        """Unlink kept files; see `Sheds`."""
        drop: list[range] = []
        count = 0
        with self._lock:
            size = max(_BLOCK_BYTES, self._mean())
            most = max(_LEAST_SHED, -(-wanted // size))
            for piece in self._kept:
                if count >= most:
                    break
                drop.append(piece[: most - count])
                count += len(drop[-1])
            if drop:
                left = self._kept[len(drop) - 1][len(drop[-1]) :]
                self._kept[: len(drop)] = [left] if left else []
                self._kept_count -= count
        self._unlink(chain.from_iterable(drop))
        return count * size

    def _unlink(self, slots: Iterable[int]) -> None:
        unlinked = failures = 0
        for slot in slots:
            try:
                self._directory.unlink(slot)
                unlinked += 1
            except FileNotFoundError:
                pass
            except OSError:
                failures += 1
        with self._lock:
            self._unlinked += unlinked
            self._unlink_failures += failures

    def remove(self) -> None:
        """Set the directory aside for a `Wiper`; see `SpillArea.remove`. Cost: one rename."""
        with self._lock:
            self._kept, self._kept_count = [], 0
        try:
            self._directory.remove()
        except OSError:
            with self._lock:
                self._unlink_failures += 1

    def problems(self, used: Ranges) -> list[str]:
        """Compare files, slots in use and slots kept; see `SpillArea.problems`. Cost: O(files)."""
        if self._directory.removed:
            return []
        with self._lock:
            kept = self._kept.copy()
            excused = self._given_up + self._unlink_failures
        found = [f"{self._path(slot)} is in use more than once" for slot in chain.from_iterable(used.twice)]
        return found + self._directory.problems(used, Ranges(kept), excused)

    def counters(self) -> SpillCounters:
        """Return what was done so far."""
        with self._lock:
            return SpillCounters(
                created=self._created,
                overwritten=self._overwritten,
                read=self._read,
                unlinked=self._unlinked,
                unlink_failures=self._unlink_failures,
                kept=self._kept_count,
            )
