"""The journal: one file of fixed size before the log, in which a small batch is confirmed by one write and one sync.

A commit of LMDB waits for the disk twice and writes some 20 KiB for one small message. So the writer keeps its
transaction open, notes in the journal what a batch changed in it (`changes`), and commits many batches at once, later.
What is in the journal and not committed is a promise to the log: whoever opens the log next carries it over first.

    4096 bytes   header: what `_HEADER` says, and its checksum
    records      each begins at a multiple of 8: what `_RECORD` says, and its changes

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
from typing import Any, NamedTuple
from uuid import UUID

from xxhash import xxh3_64_intdigest

from qflow.errors import CorruptionError
from qflow.storage.files import FILE_MODE, READ, Files, storage_error, write_all
from qflow.storage.log.keys import meta_key
from qflow.storage.log.sealing import seal, unseal

JOURNAL = "journal"
"""Its name in the spool."""
STAGED = ".new"
"""What it is called behind that while it is made."""
FORMAT = 1
HEADER_BYTES = 4096
STATE_KEY = meta_key("journal")
"""Where the log says what `JournalState` does."""
_HEADER = struct.Struct("<8sI16sQ")
"""Magic, format, uuid of the log, size of the file."""
_MAGIC = b"qflowjnl"
_RECORD = struct.Struct("<4sIQQ")
"""Magic, bytes of the changes, number, checksum of number and changes with the uuid."""
_RECORD_MAGIC = b"\xf5jr\n"
_NUMBERED = struct.Struct("<QI")
_CLEARED = bytes(_RECORD.size)
_NUMBER_BYTES = 8
_IN_USE, _NOT_IN_USE = b"\1", b"\0"
_CHUNK = 4096
"""The file is written page by page: a kernel that has it in larger pieces counts a whole one for each record."""
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = _OPEN | os.O_CREAT | os.O_EXCL


class JournalState(NamedTuple):
    """What a log says of its journal."""

    applied: int
    """The number of the last record that the log holds."""
    in_use: bool
    """There is one, which may hold more."""


NO_JOURNAL = JournalState(0, False)


def read_state(txn: Any, path: str) -> JournalState:
    """Return what the log at `path` says of its journal."""
    value = txn.get(STATE_KEY)
    if value is None:
        return NO_JOURNAL
    bare = unseal(value, f"{path}: what the log says of its journal")
    return JournalState(int.from_bytes(bare[:_NUMBER_BYTES], "little"), bare[_NUMBER_BYTES:] == _IN_USE)


def encode_state(state: JournalState) -> bytes:
    """Return what a log holds under `STATE_KEY`."""
    return seal(state.applied.to_bytes(_NUMBER_BYTES, "little") + (_IN_USE if state.in_use else _NOT_IN_USE))


class Found(NamedTuple):
    """What a journal holds that the log does not."""

    applied: int
    """The number of the last record that the log holds."""
    records: list[bytes]
    """The changes of each record, in order."""
    last: int
    """The number of the last record that was ever written, as far as it is known."""
    problems: list[str]


def path_of(log: str) -> str:
    """Return where the journal of a log lies: beside it."""
    return os.path.join(os.path.dirname(log), JOURNAL)


class Journal:
    """The journal of a log that is open for its owner. One thread at a time."""

    def __init__(self, path: str, fd: int, size: int, uuid: UUID, files: Files, following: int) -> None:
        self.path = path
        self._fd = fd
        self._size = size
        self._seed = _seed(uuid)
        self._files = files
        self._position = HEADER_BYTES
        self.following = following
        """The number of the next record."""

    @classmethod
    def create(cls, path: str, size: int, uuid: UUID, files: Files, following: int) -> Journal:
        """Make the file, all of it written once, so that a later write changes no more than what is in it.

        Raises:
            DiskFull, StorageError: there is no room for it, or the disk failed.
        Cost: writes `size` bytes; two syncs.
        """
        staged = path + STAGED
        try:
            if files.exists(staged):
                files.unlink(staged)
            fd = files.open(staged, _CREATE, FILE_MODE)
            try:
                position = write_all(files, fd, _header(uuid, size), 0)
                while position < size:
                    position = write_all(files, fd, bytes(min(_CHUNK, size - position)), position)
                files.sync_file(staged)
                files.rename(staged, path)
                files.sync_directory(os.path.dirname(path))
            except BaseException:
                files.close(fd)
                if files.exists(staged):
                    files.unlink(staged)
                raise
        except OSError as error:
            raise storage_error(error, "make a journal", path) from error
        return cls(path, fd, size, uuid, files, following)

    def fits(self, size: int) -> bool:
        """Tell whether there is room for a record with changes of so many bytes."""
        return self._position + _RECORD.size + size <= self._size

    def write(self, changes: bytes) -> None:
        """Write a record, of which nobody is told before `sync`."""
        number = self.following
        head = _RECORD.pack(_RECORD_MAGIC, len(changes), number, _checksum(self._seed, number, changes))
        write_all(self._files, self._fd, head + changes, self._position)
        self._position = _aligned(self._position + len(head) + len(changes))
        self.following = number + 1

    def sync(self) -> None:
        """Have on the disk what was written. If that raises, nobody knows whether it is there."""
        self._files.sync_data(self._fd)

    def begin_anew(self) -> None:
        """The log holds all records: write the next at the beginning."""
        self._position = HEADER_BYTES

    def clear(self) -> None:
        """Have it hold no record that anybody could take for one to be carried over. The log holds all of them."""
        write_all(self._files, self._fd, _CLEARED, HEADER_BYTES)
        self._files.sync_data(self._fd)
        self._position = HEADER_BYTES

    def records(self, applied: int) -> list[bytes]:
        """Return the changes of the records that the log does not hold.

        Raises:
            CorruptionError: they are not what was written. StorageError: they cannot be read.
        """
        with _reading(self.path):
            data = _read_whole(self._files, self._fd, self._position)
        found = [changes for _, number, changes in _records(data, self._seed) if number > applied]
        written = self.following - 1 - applied
        if len(found) != written:
            raise CorruptionError(
                f"{self.path} was changed from outside: it holds {len(found)} of {written} records that are not in the "
                "log yet; let nothing write inside a spool"
            )
        return found

    @property
    def in_place(self) -> bool:
        """What is open is what lies at the path."""
        try:
            return os.path.samestat(self._files.lstat(self.path), self._files.status(self._fd))
        except OSError:
            return False

    def close(self) -> None:
        self._files.close(self._fd)


class Opened(NamedTuple):
    """A journal as it was found when its log was opened."""

    fd: int
    size: int
    found: Found


def open_to_write(path: str, files: Files, uuid: UUID, applied: int, *, clean: bool) -> Opened | None:
    """Open a journal for its owner, and read what it holds that the log does not; None if there is none.

    Args:
        applied: the number of the last record that the log holds.
        clean: the log was closed.

    Raises:
        CorruptionError: it is another log's, or none of this format. StorageError: it cannot be read.
    """
    fd = _open(path, _OPEN, files)
    if fd is None:
        return None
    try:
        with _reading(path):
            files.forget_cached(fd)  # a page whose write failed stays in memory as if it had been written
            size = _check_header(files, fd, uuid, path)
            if clean and files.pread(fd, _RECORD.size, HEADER_BYTES) == _CLEARED:
                return Opened(fd, size, Found(applied, [], applied, []))
            return Opened(fd, size, _find(_read_whole(files, fd, size), size, _seed(uuid), applied, path))
    except BaseException:
        files.close(fd)
        raise


class Look(NamedTuple):
    """What somebody has found who only reads."""

    mark: object
    """It differs when the journal was written to, some milliseconds later or more."""
    found: Found


def look(path: str, files: Files, uuid: UUID, applied: int, seen: Look | None) -> Look | None:
    """Read what a journal holds that the log does not, as whoever only reads; None if that is nothing.

    What is returned is on the disk. The owner may write meanwhile: then it may be of two moments, unless the log was
    not committed to between.

    Args:
        seen: what the last call returned: it is returned again if nothing has changed.

    Raises:
        CorruptionError: it is another log's, or none of this format. StorageError: it cannot be read.
    Cost: four system calls where it holds nothing more, 5 µs where there is none; else reading it, some ms.
    """
    fd = _open(path, READ, files)
    if fd is None:
        return None
    try:
        with _reading(path):
            head = files.pread(fd, _RECORD.size, HEADER_BYTES)
            if head == _CLEARED or (len(head) == _RECORD.size and _is_behind(head, applied)):
                return None
            status = files.status(fd)
            mark = status.st_ino, status.st_mtime_ns, applied
            if seen is not None and seen.mark == mark:
                return seen
            files.sync_data(fd)  # what is seen is not taken back by a power cut
            size = _check_header(files, fd, uuid, path)
            return Look(mark, _find(_read_whole(files, fd, size), size, _seed(uuid), applied, path))
    finally:
        files.close(fd)


def _open(path: str, flags: int, files: Files) -> int | None:
    """Open the file of a journal; None if there is none."""
    try:
        return files.open(path, flags, 0)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, "open the journal", path) from error


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Tell of errors of the system as those of reading a journal."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, "read the journal", path) from error


def _is_behind(head: bytes, applied: int) -> bool:
    """Tell whether the first record is one that the log holds."""
    magic, _, number, _ = _RECORD.unpack(head)
    return bool(magic == _RECORD_MAGIC and number <= applied)


def _read_whole(files: Files, fd: int, size: int) -> bytes:
    """Return the first `size` bytes, or as many as there are."""
    data = files.pread(fd, size, 0)
    while 0 < len(data) < size and (more := files.pread(fd, size - len(data), len(data))):
        data += more
    return data


def _check_header(files: Files, fd: int, uuid: UUID, path: str) -> int:
    """Return the size that a journal was made with, after checking that it is this log's."""
    advice = "move it away, if nothing of it is wanted; the log was left as it is"
    head = files.pread(fd, _HEADER.size + 4, 0)
    try:
        magic, version, owner, size = _HEADER.unpack(unseal(head, f"{path}: the header of the journal"))
    except struct.error:
        raise CorruptionError(f"{path} is too short for a journal: {advice}") from None
    if magic != _MAGIC:
        raise CorruptionError(f"{path} is not a journal of qflow: {advice}")
    if version != FORMAT:
        raise CorruptionError(
            f"{path} has format {version}, this qflow reads {FORMAT}: open it with the one that made it"
        )
    if owner != uuid.bytes:
        raise CorruptionError(f"{path} belongs to the log {UUID(bytes=owner)}, not to {uuid}: {advice}")
    return int(size)


def _find(data: bytes, size: int, seed: int, applied: int, path: str) -> Found:
    """Return the records behind `applied`, up to the first that cannot be read."""
    problems: list[str] = []
    if len(data) < size:
        problems.append(f"{path} was cut short: {len(data)} of its {size} bytes are there")
    records: list[bytes] = []
    due, position = 0, HEADER_BYTES
    for at, number, changes in _records(data, seed):
        if due and number != due:
            break  # of before
        if number > applied + 1 and not due:
            problems.append(_fell_back(applied, number - 1) + "; what the journal holds was carried over")
        due, position = number + 1, _aligned(at + _RECORD.size + len(changes))
        if number > applied:
            records.append(changes)
    due = max(due, applied + 1)
    last = max((number for _, number, _ in _scan(data, position, seed)), default=0)
    if last >= due and data[HEADER_BYTES : HEADER_BYTES + _RECORD.size] == _CLEARED:
        problems.append(_fell_back(applied, last))
    elif last >= due:
        problems.append(
            f"{path}: record {due} of the journal is damaged: {last - due + 1} commits from there on are lost"
        )
    return Found(applied, records, max(last, due - 1), problems)


def _fell_back(applied: int, last: int) -> str:
    return (
        f"the log ends with record {applied} of its journal, and had held those up to {last}: it fell back, and "
        f"{last - applied} commits are lost"
    )


def _records(data: bytes, seed: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (position, number, changes) of the records from the first on, as long as one follows the other."""
    position = HEADER_BYTES
    while (found := _record(data, position, seed)) is not None:
        yield position, *found
        position = _aligned(position + _RECORD.size + len(found[1]))


def _scan(data: bytes, position: int, seed: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield every record that can be read from some place on."""
    while (position := data.find(_RECORD_MAGIC, position)) >= 0:
        found = _record(data, position, seed) if position % 8 == 0 else None
        if found is not None:
            yield position, *found
        position += 1


def _record(data: bytes, position: int, seed: int) -> tuple[int, bytes] | None:
    """Return the number and the changes of a record; None if there is none."""
    start = position + _RECORD.size
    if len(data) < start:
        return None
    magic, length, number, checksum = _RECORD.unpack_from(data, position)
    changes = data[start : start + length]
    if magic != _RECORD_MAGIC or len(changes) != length or _checksum(seed, number, changes) != checksum:
        return None
    return number, changes


def _header(uuid: UUID, size: int) -> bytes:
    bare = seal(_HEADER.pack(_MAGIC, FORMAT, uuid.bytes, size))
    return bare + bytes(HEADER_BYTES - len(bare))


def _seed(uuid: UUID) -> int:
    return xxh3_64_intdigest(uuid.bytes)


def _checksum(seed: int, number: int, changes: bytes) -> int:
    return xxh3_64_intdigest(changes, xxh3_64_intdigest(_NUMBERED.pack(number, len(changes)), seed))


def _aligned(position: int) -> int:
    return position + -position % 8
