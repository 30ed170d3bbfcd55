"""The journal: one file of fixed size before the log, in which a small batch is confirmed by one write and one sync.

A commit of LMDB waits for the disk twice and writes some 20 KiB for one small message. So the writer keeps its
transaction open, notes in the journal what a batch changed in it (`changes`), and commits many batches at once, later.
What is in the journal and not committed is a promise to the log: whoever opens the log next carries it over first.

    4096 bytes   header: what `_HEADER` says, and its checksum
    records      each begins at a multiple of 8: what `_RECORD` says, and its changes

Its mark is drawn when it is made, and again by each owner before the first record: so the journal that an earlier owner
left, put back beside a log that was written on, is known. The header names the mark that the log has meanwhile, too.

Records are numbered through the life of a log, which knows the number of the last one that it holds. Each commit begins
the file anew, so what lies behind the last record is of before: its number is lower than the one that is due there. A
record is on the disk before the next is written. So one that is due and cannot be read is the last, of which nothing
was confirmed, unless a later one follows: then it is damaged, and what follows it is lost.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from xxhash import xxh3_64_intdigest

from qflow.errors import CorruptionError, FormatTooNew
from qflow.identity import bytes_of, uuid_of
from qflow.named_tuples import NamedTuple
from qflow.storage.files import FILE_MODE, Files, read_from, storage_error, write_all
from qflow.storage.log.keys import meta_key
from qflow.storage.log.sealing import seal, unseal, unseal_as

JOURNAL = "journal"
"""Its name in the spool."""
STAGED = ".new"
"""What it is called behind that while it is made."""
FORMAT = 4
OLDEST_FORMAT = 1
"""In which there are no notes; in format 2 no changes of many owners, in format 3 no notes of several messages.

They are read, and replaced by another one."""
HEADER_BYTES = 4096
STATE_KEY = meta_key("journal")
"""Where the log says what `JournalState` does."""
_HEADER = struct.Struct("<8sI16sQ8s")
"""Magic, format, uuid of the log, size of the file, its mark."""
_BEFORE = struct.Struct("<8s")
"""Behind that, in the same sector, with a checksum of both: the mark that the log has until it has this one."""
_HEAD_BYTES = _HEADER.size + 4 + _BEFORE.size + 4
_MAGIC = b"qflowjnl"
_RECORD = struct.Struct("<4sIQQ")
"""Magic, bytes of the changes, number, checksum of number and changes with the uuid."""
_RECORD_MAGIC = b"\xf5jr\n"
_LENGTHS = struct.Struct("<IQ")
"""Of that, behind the magic: the bytes of the changes, and the number."""
_NUMBERED = struct.Struct("<QI")
CLEARED = bytes(_RECORD.size)
_STATE = struct.Struct("<Q8s")
_NO_MARK = bytes(8)
_CHUNK = 2**20
"""The file is written in so few pieces, for after each write a thread that computes has the interpreter for 5 ms."""
MOST_BYTES = 2**30
"""A header that says more is none of ours."""
_SEARCHED = 16
"""Records are searched for with so many times the bytes of a journal: those that are there do not overlap."""
_TRIES = 10
"""So often is a header read that cannot be understood: its owner may be writing it."""
REMEDY = (
    "put the right file back, or restore a snapshot, or move this one away: then what was confirmed in the last second "
    "before the end and is not in the log is lost. Nothing was changed"
)
"""What can be done about a journal that cannot be used."""
NOT_NEEDED = "the log was closed, and needs none of what it holds: move it away. Nothing was changed"
"""The same, where nothing can be lost."""
_REMOVED = "was removed or replaced: let no cleaner work inside a spool"
TO_WRITE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = TO_WRITE | os.O_CREAT | os.O_EXCL


class JournalState(NamedTuple):
    """What a log says of its journal."""

    applied: int
    """The number of the last record that the log holds."""
    mark: bytes
    """What tells the file that may hold more from those of before; zeros if there is none."""

    @property
    def in_use(self) -> bool:
        """There is one."""
        return self.mark != _NO_MARK

    @classmethod
    def without(cls, applied: int) -> JournalState:
        """Return what is said where there is none."""
        return cls(applied, _NO_MARK)


NO_JOURNAL = JournalState.without(0)


def read_state(txn: Any, path: str) -> JournalState:
    """Return what the log at `path` says of its journal. Raises CorruptionError: that cannot be read."""
    value = txn.get(STATE_KEY)
    if value is None:
        return NO_JOURNAL
    return JournalState(*unseal_as(_STATE, value, f"{path}: what the log says of its journal"))


def encode_state(state: JournalState) -> bytes:
    """Return what a log holds under `STATE_KEY`."""
    return seal(_STATE.pack(*state))


def path_of(log: str) -> str:
    """Return where the journal of a log lies: beside it."""
    return os.path.join(os.path.dirname(log), JOURNAL)


class Head(NamedTuple):
    """What the header of a journal says beside whose it is."""

    size: int
    mark: bytes
    """See `JournalState`."""
    format: int = FORMAT
    before: bytes = _NO_MARK
    """The mark that the log has until it is committed with this one; zeros if it had none."""

    def is_of(self, state: JournalState) -> bool:
        """Tell whether it is the journal that a log speaks of."""
        return self.mark == state.mark or (state.in_use and self.before == state.mark)


class Record(NamedTuple):
    """A record as it is written."""

    data: bytes
    position: int
    number: int
    end: int
    """Where the next one begins."""


class Journal:
    """The journal of a log that is open for its owner. One thread at a time."""

    def __init__(self, path: str, fd: int, head: Head, uuid: str, files: Files, following: int) -> None:
        """Raises OSError."""
        self.path = path
        self._fd = fd
        self._alone_fd = files.open(path, TO_WRITE, 0)
        """For who has the turn; see `direct`. The system tells of an error of a sync once for each opening of a file:
        a thread that syncs still must not hear what the writer has to."""
        self._size, self.mark = head.size, head.mark
        self.is_renewed = False
        """Its mark is one of this owner."""
        self._uuid, self._seed = uuid, seed_of(uuid)
        self._files = files
        self.position = HEADER_BYTES
        """Where the next record begins."""
        self.following = following
        """The number of the next record."""
        self.inside = False
        """A thread that does not have the turn any more may still write a record to its place; see `direct`."""

    @classmethod
    def create(cls, path: str, size: int, uuid: str, files: Files, following: int, before: bytes = _NO_MARK) -> Journal:
        """Make the file, all of it written once, so that a later write changes no more than what is in it.

        Args:
            before: the mark that the log has.

        Raises:
            DiskFull, StorageError: there is no room for it, or the disk failed.
        Cost: writes `size` bytes; two syncs.
        """
        staged, head = path + STAGED, Head(size, os.urandom(8), before=before)
        try:
            if files.exists(staged):
                files.unlink(staged)
            fd = files.open(staged, _CREATE, FILE_MODE)
            try:
                position = write_all(files, fd, _header(uuid, head), 0)
                while position < size:
                    position = write_all(files, fd, bytes(min(_CHUNK, size - position)), position)
                files.sync_file(staged)
                files.cache_by_pages(fd)
                files.rename(staged, path)
                files.sync_directory(os.path.dirname(path))
                made = cls(path, fd, head, uuid, files, following)
                made.is_renewed = True
                return made
            except BaseException:
                files.close(fd)
                if files.exists(staged):
                    files.unlink(staged)
                raise
        except OSError as error:
            raise storage_error(error, "make a journal", path) from error

    def renew(self, before: bytes) -> None:
        """Give it a mark of this owner, on the disk; the log holds all its records.

        Args:
            before: the mark that the log has until it is committed next.

        Raises:
            OSError: nobody knows which of them it has.
        Cost: a sync.
        """
        head = Head(self._size, os.urandom(8), before=before)
        write_all(self._files, self._fd, _header(self._uuid, head)[:_HEAD_BYTES], 0)
        self._files.sync_data(self._fd)
        self.mark, self.is_renewed = head.mark, True

    def fits(self, size: int) -> bool:
        """Tell whether there is room for a record with changes of so many bytes."""
        return self.position + _RECORD.size + size <= self._size

    def write(self, changes: bytes) -> None:
        """Write a record, of which nobody is told before `sync`."""
        record = self.record(changes)
        self.write_record(record)
        self.position, self.following = record.end, record.number + 1

    def record(self, changes: bytes) -> Record:
        """Return the record that would be written next."""
        number, position = self.following, self.position
        head = _RECORD.pack(_RECORD_MAGIC, len(changes), number, _checksum(self._seed, number, changes))
        return Record(head + changes, position, number, end_of(position, changes))

    def write_record(self, record: Record) -> None:
        """Write a record where it belongs; done twice it is done once."""
        self._write(self._fd, record)

    def write_alone(self, record: Record) -> None:
        """`write_record` by who has the turn. Between a look whether it has that and this, `inside` is set."""
        self._write(self._alone_fd, record)

    def _write(self, fd: int, record: Record) -> None:
        data, position = record.data, record.position
        written = self._files.pwrite(fd, data, position)
        if written < len(data):
            write_all(self._files, fd, memoryview(data)[written:], position + written)

    def sync(self) -> None:
        """Have on the disk what was written. If that raises, nobody knows whether it is there."""
        self._files.sync_data(self._fd)

    def sync_alone(self) -> None:
        """`sync` by who has the turn."""
        self._files.sync_data(self._alone_fd)

    def begin_anew(self) -> None:
        """The log holds all records: write the next at the beginning; none while one may still come late."""
        self.position = self._size if self.inside else HEADER_BYTES

    def clear(self) -> None:
        """Have it hold no record that anybody could take for one to be carried over. The log holds all of them."""
        if not self.is_renewed and self._files.pread(self._fd, len(CLEARED), HEADER_BYTES) == CLEARED:
            return  # as an earlier owner left it
        write_all(self._files, self._fd, CLEARED, HEADER_BYTES)
        self._files.sync_data(self._fd)
        self.position = HEADER_BYTES

    def records(self, applied: int) -> list[bytes]:
        """Return the changes of the records that the log does not hold.

        Raises:
            CorruptionError: they are not what was written. StorageError: they cannot be read.
        """
        with reading(self.path):
            data = read_from(self._files, self._fd, 0, self.position)
        found = [changes for _, number, changes in records_in(data, self._seed) if number > applied]
        written = self.following - 1 - applied
        if len(found) != written:
            raise CorruptionError(
                f"{self.path} was changed from outside: it holds {len(found)} of {written} records that are not in the "
                "log yet; let nothing write inside a spool"
            )
        return found

    def lack(self) -> str:
        """Return why what is open is not what an opening will find at the path, as a whole; empty if it is."""
        try:
            there, ours = self._files.lstat(self.path), self._files.status(self._fd)
        except FileNotFoundError:
            return _REMOVED
        except OSError as error:
            return f"cannot be looked at, and is done without: {error.strerror}; mend that, and open the spool again"
        if not os.path.samestat(there, ours):
            return _REMOVED
        return "was cut short: let nothing write inside a spool" if ours.st_size < self._size else ""

    def close(self) -> None:
        """Close the file. What a thread may still write goes nowhere, and its descriptor is not used for another."""
        try:
            if self.inside:
                self.divert()
            else:
                self._files.close(self._alone_fd)
        finally:
            self._files.close(self._fd)

    def divert(self) -> None:
        """Have go nowhere what a thread may still write that had the turn."""
        self._files.divert(self._alone_fd)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Tell of errors of the system as those of reading a journal."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, "read the journal", path) from error


def read_head(files: Files, fd: int, uuid: str, path: str, *, clean: bool) -> Head:
    """Return what the header of a journal says, after checking that it is this log's.

    Args:
        clean: the log was closed.

    Raises:
        CorruptionError: it is another log's, or damaged. FormatTooNew: a newer version made it.
    """
    remedy = NOT_NEEDED if clean else REMEDY
    size_of_first = _HEADER.size + 4
    first, before = b"", None
    for _ in range(_TRIES):
        data = files.pread(fd, _HEAD_BYTES, 0)
        try:
            first = unseal(data[:size_of_first], "its header")
        except CorruptionError:
            first = b""
            continue
        before = _before(first, data[size_of_first:])
        if before is not None:
            break
    try:
        magic, version, owner, size, mark = _HEADER.unpack(first)
    except struct.error:
        raise CorruptionError(f"{path} is damaged: its header is not what was written; {remedy}") from None
    if version > FORMAT:
        raise FormatTooNew(f"{path} has format {version}, this qflow reads up to {FORMAT}: open it with a newer qflow")
    if magic != _MAGIC or version < OLDEST_FORMAT or not HEADER_BYTES < size <= MOST_BYTES or mark == _NO_MARK:
        raise CorruptionError(f"{path} is not a journal of qflow; {remedy}")
    if owner != bytes_of(uuid):
        raise CorruptionError(f"{path} belongs to the log {uuid_of(owner)}, not to {uuid}; {remedy}")
    return Head(size, mark, version, before or _NO_MARK)


def _before(first: bytes, rest: bytes) -> bytes | None:
    """Return the mark before that stands behind the rest of a header; None if it is of another one, or damaged."""
    if not any(rest):
        return _NO_MARK  # an earlier version wrote none
    try:
        return unseal(rest, "the mark before", first)
    except CorruptionError:
        return None


def records_in(data: bytes, seed: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (position, number, changes) of the records from the first on, as long as one follows the other."""
    position = HEADER_BYTES
    while (found := _record(data, position, seed)) is not None:
        yield position, *found
        position = end_of(position, found[1])


def end_of(at: int, changes: bytes) -> int:
    """Return where the next record begins, behind one at a position."""
    end = at + _RECORD.size + len(changes)
    return end + -end % 8


def is_up_to(files: Files, fd: int, applied: int, seed: int, *, clean: bool) -> bool:
    """Tell whether the first record is one that the log holds, or was cleared when that was closed."""
    head = files.pread(fd, _RECORD.size, HEADER_BYTES)
    if head == CLEARED or len(head) < _RECORD.size:
        return clean and head == CLEARED
    magic, length, number, _ = _RECORD.unpack(head)
    if magic != _RECORD_MAGIC or number > applied or length > MOST_BYTES:
        return False
    return _record(files.pread(fd, _RECORD.size + length, HEADER_BYTES), 0, seed) is not None


def search(data: bytes, position: int, seed: int, above: int) -> tuple[int, bool]:
    """Return the highest number of a record from some place on, if it is above one, else 0; and whether all was seen.

    Messages may be full of what looks like records: so many bytes are checked as `_SEARCHED` says, and no more.
    """
    highest, left = 0, _SEARCHED * len(data)
    while (position := data.find(_RECORD_MAGIC, position)) >= 0:
        size, number = _LENGTHS.unpack(data[position + 4 : position + 16].ljust(_LENGTHS.size, b"\0"))
        end = position + _RECORD.size + size
        if number > above and position % 8 == 0 and end <= len(data):
            left -= end - position
            if left < 0:
                return highest, False
            if _record(data, position, seed) is not None:
                highest, position = max(highest, number), end
                continue
        position += 1
    return highest, True


def _record(data: bytes, position: int, seed: int) -> tuple[int, bytes] | None:
    """Return the number and the changes of a record; None if there is none."""
    start = position + _RECORD.size
    if len(data) < start:
        return None
    magic, length, number, checksum = _RECORD.unpack_from(data, position)
    changes = memoryview(data)[start : start + length]
    if magic != _RECORD_MAGIC or len(changes) != length or _checksum(seed, number, changes) != checksum:
        return None
    return number, bytes(changes)


def _header(uuid: str, head: Head) -> bytes:
    first = _HEADER.pack(_MAGIC, head.format, bytes_of(uuid), head.size, head.mark)
    bare = seal(first) + seal(_BEFORE.pack(head.before), first)
    return bare + bytes(HEADER_BYTES - len(bare))


def seed_of(uuid: str) -> int:
    return xxh3_64_intdigest(bytes_of(uuid))


def _checksum(seed: int, number: int, changes: bytes | memoryview) -> int:
    return xxh3_64_intdigest(changes, xxh3_64_intdigest(_NUMBERED.pack(number, len(changes)), seed))
