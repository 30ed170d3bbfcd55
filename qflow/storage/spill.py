"""Where messages go that do not fit in memory: the contract of a spill store, the slots it hands out, and its wipe.

A spill store is a cache, never the truth. It is not synced, is the same for durable and transient messages, and is
wiped when the spool is opened. A store has one *area* per queue; an area writes records and returns their *slots*,
which the queue keeps with the run and gives back to read and to free them.

On disk, an area is a directory `<spool>/spill/<name>.<owner>-<incarnation>` of files named by a hexadecimal number.
Wiping renames such directories into `<spool>/wiping/<the same>~<number>`, each in one step whatever it holds, and a
`Wiper` unlinks their files later. The names alone tell what is ours, there is no marker file: the fixed-width numbers
are not met by chance, and what else lies in a directory of ours is put back. After a crash at any point, doing it again
goes on.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from itertools import chain, count
from typing import NamedTuple, Protocol

from qflow.errors import StorageError
from qflow.message import Record
from qflow.storage.files import CREATE, FILE_MODE, Files, storage_error

SPILL_TABLE = 0xFF
"""The table byte of a spilled block's key; the log's tables never use it."""
SPILL_LANE = 0
"""Sequences are unique in an area, so a spilled block's key needs no lane."""

SPILL, WIPING = "spill", "wiping"
_NAME_BYTES = 100
_DIRECTORY = re.compile(r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})*\.[0-9a-f]{8}-[0-9a-f]{16}")
_SET_ASIDE = re.compile(rf"({_DIRECTORY.pattern})~[0-9a-f]+")
FILE = re.compile(r"0|[1-9a-f][0-9a-f]{0,15}")

_COMPACT_AT = 64


class Slots:
    """Slot numbers of a run, in the order of its messages; an immutable value, kept as ranges.

    Appending is cheap because values share one list of ranges that only grows: a value is a window on that list plus
    its own last range, and the value that ends where the list ends may append to it. (Any number of threads may read a
    value at once; extending the same value from two threads at once needs a lock above.)

    Cost: `len` O(1); `a + b` O(ranges of b), amortised; `take(n)` O(ranges taken).
    Memory: a range is about 110 bytes; slots written one after the other are one range.
    """

    __slots__ = ("_count", "_last", "_ranges", "_skip", "_start", "_stop")

    def __init__(self, ranges: Iterable[range] = ()) -> None:
        """Hold these ranges (step 1); adjacent ones are joined, empty ones left out."""
        self._ranges: list[range] = []
        self._start = self._skip = 0
        self._last = range(0)
        for piece in ranges:
            if not piece:
                continue
            if self._last and self._last.stop == piece.start:
                self._last = range(self._last.start, piece.stop)
                continue
            if self._last:
                self._ranges.append(self._last)
            self._last = piece
        self._stop = len(self._ranges)
        self._count = sum(map(len, self._ranges)) + len(self._last)

    @classmethod
    def _window(cls, ranges: list[range], start: int, stop: int, skip: int, last: range, count: int) -> Slots:
        """Make the value of `ranges[start:stop]` without the first `skip` slots, then `last`."""
        made = cls.__new__(cls)
        made._ranges, made._start, made._stop = ranges, start, stop
        made._skip, made._last, made._count = skip, last, count
        return made

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and list(self.ranges()) == list(other.ranges())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Slots([{', '.join(f'{piece.start}:{piece.stop}' for piece in self.ranges())}])"

    def ranges(self) -> Iterator[range]:
        """Yield the ranges, none of them empty, no two that follow each other adjacent."""
        skip = self._skip
        for index in range(self._start, self._stop):
            yield self._ranges[index][skip:]
            skip = 0
        if self._last:
            yield self._last[skip:]

    def __add__(self, other: Slots) -> Slots:
        if not other:
            return self
        if not self:
            return other
        ranges, start, stop, last = self._ranges, self._start, self._stop, self._last
        if stop != len(ranges) or (start > _COMPACT_AT and start > stop // 2):
            ranges, start, stop = ranges[start:stop], 0, stop - start
        for piece in other.ranges():
            if last.stop == piece.start:
                last = range(last.start, piece.stop)
            else:
                ranges.append(last)
                stop += 1
                last = piece
        return self._window(ranges, start, stop, self._skip, last, self._count + other._count)

    def take(self, count: int) -> tuple[Slots, Slots]:
        """Split into the first `count` slots and the rest; neither this value nor the split ones change later."""
        if count <= 0:
            return Slots(), self
        if count >= self._count:
            return self, Slots()
        taken: list[range] = []
        wanted, index, skip = count, self._start, self._skip
        while True:
            whole = self._ranges[index] if index < self._stop else self._last
            if len(whole) - skip > wanted:
                break
            taken.append(whole[skip:])
            wanted -= len(whole) - skip
            index, skip = index + 1, 0
        taken.append(whole[skip : skip + wanted])
        rest = self._window(self._ranges, index, self._stop, skip + wanted, self._last, self._count - count)
        return Slots(taken), rest


class SpillCounters(NamedTuple):
    """What an area has done since it was made, in files."""

    created: int
    overwritten: int
    """Taken into use again."""
    read: int
    """Reads: one a message that has a file of its own, one a block of a segment."""
    unlinked: int
    unlink_failures: int
    kept: int
    """Freed and kept for overwriting at this moment."""


class SpillArea(Protocol):
    """The spilled messages of one queue.

    Rules:
    - Any method may be called from several threads at once; none needs a lock above, and none should be called under
      one, for all but `counters` touch the disk.
    - The caller owns the slots it was given. It frees each exactly once, and reads none after it was freed. Slots that
      were never freed go with `remove`, or with the wipe at the next start.
    - Only `write` and `read` raise, and only `StorageError`; freeing and removing count their failures instead.
    """

    chunk_bytes: int
    """How much is best written at once."""

    def write(self, first: int, records: list[Record]) -> Slots:
        """Write records; record `i` has sequence `first + i`. All or nothing.

        Returns:
            One slot a record, in the order of the records.

        Raises:
            DiskFull: ENOSPC or EDQUOT. Nothing is left behind, and the records are still the caller's.
            StorageError: another error of the file system, or the area was removed; likewise.
        """
        ...

    def read(
        self, first: int, slots: Slots, max_bytes: int, largest: int
    ) -> tuple[list[Record | None], list[tuple[int, str]]]:
        """Read messages from the first slot on.

        Args:
            first: sequence of the message in the first slot.
            slots: at least one; not freed by this.
            max_bytes: stops before the sum of `len(record) + OVERHEAD_BYTES` would exceed this, yet after one at least;
                not before half of this is reached, if there are more.
            largest: no message in these slots is larger, in bytes.

        Returns:
            A record for each of the leading slots that were read, None where it is damaged, truncated, longer, another
            message, missing or unreadable; and for each None its sequence and what is wrong. A None counts no bytes.

        Raises:
            StorageError: this process cannot open files at the moment (EMFILE, ENFILE, ENOMEM) and nothing was read.
                The messages are unharmed: try again later.
        """
        ...

    def free(self, slots: Slots) -> None:
        """Give back slots whose messages are settled or in memory again. Never raises OSError."""
        ...

    def remove(self) -> None:
        """Free everything, now that the queue is deleted; the area is of no use afterwards. Never raises OSError."""
        ...

    def problems(self, slots: list[int]) -> list[str]:
        """Compare the slots in use with what is on disk, both ways, and say in words what does not agree.

        For checks, while nothing else is done with the area: slots on their way to or from the queue would show.
        """
        ...

    def counters(self) -> SpillCounters:
        """Return what was done so far. Cost: O(1)."""
        ...


class SpillStore(Protocol):
    """Makes areas. The spool is locked and its old spill files are wiped (`wipe_spill`) before one is made."""

    def area(self, name: str, owner: int, incarnation: int) -> SpillArea:
        """Return the area of a queue.

        Args:
            name: of the queue, any text; only for the eyes of people.
            owner: the queue's number, below 2**32; stands in each block.
            incarnation: number that is another one each time a queue of that number or name is made, below 2**64.

        Cost: no disk; an area is created on disk with its first write.
        """
        ...

    def close(self) -> None:
        """Give up descriptors and maps. What is on disk is left to the wipe at the next start."""
        ...


def directory_name(name: str, owner: int, incarnation: int) -> str:
    """Return the name of an area's directory.

    The queue's name is percent-escaped and cut, for people; that no two areas share a directory rests on the numbers.
    """
    escaped = ""
    for byte in name.encode("utf-8", "surrogatepass"):
        char = chr(byte)
        piece = char if char.isascii() and (char.isalnum() or char in "_-") else f"%{byte:02X}"
        if len(escaped) + len(piece) > _NAME_BYTES:
            break
        escaped += piece
    return f"{escaped}.{owner:08x}-{incarnation:016x}"


class AreaDirectory:
    """An area's directory: made with its first file, made again if it vanished, set aside when the queue is deleted."""

    def __init__(self, files: Files, spool: str, name: str) -> None:
        self._files = files
        self._spool = spool
        self._name = name
        self.prefix = os.path.join(spool, SPILL, name) + os.sep
        """A file's path is this and its number in hexadecimal. (Faster here than a name and `dir_fd`.)"""
        self.removed = False

    def path(self, number: int) -> str:
        """Name a file."""
        return f"{self.prefix}{number:x}"

    def create(self, number: int) -> int:
        """Return the descriptor of a new file. Raises OSError; FileExistsError if something else stands there."""
        path = self.path(number)
        try:
            return self._files.open(path, CREATE, FILE_MODE)
        except FileNotFoundError:
            self.must_exist()
            for directory in (os.path.join(self._spool, SPILL), self.prefix[:-1]):
                with suppress(FileExistsError):
                    self._files.make_directory(directory)
            return self._files.open(path, CREATE, FILE_MODE)

    def must_exist(self) -> None:
        """Raise StorageError once the area was removed."""
        if self.removed:
            raise StorageError(f"the spill directory {self.prefix} was removed with its queue")

    def remove(self) -> None:
        """Set the directory aside for a `Wiper`, if it was ever made. Raises OSError. Cost: one rename."""
        self.removed = True
        if self._files.exists(self.prefix[:-1]):
            with suppress(FileExistsError):
                self._files.make_directory(os.path.join(self._spool, WIPING))
            set_aside(self._files, self._spool, self._name)

    def numbers(self) -> set[int]:
        """Return the numbers of the files that are there."""
        try:
            return {int(name, 16) for name in self._files.list(self.prefix[:-1]) if FILE.fullmatch(name)}
        except OSError:
            return set()

    def problems(self, used: Set[int], spare: Set[int], excused: int) -> list[str]:
        """Compare the files that are there with those that hold messages, and those that are kept without one.

        Args:
            excused: so many files nobody knows of are no problem.
        """
        there = self.numbers()
        found = [f"{self.path(number)} is in use and free" for number in sorted(spare & used)]
        found += [f"{self.path(number)} is missing" for number in sorted(used - there)]
        nobodys = there - spare - used
        if len(nobodys) > excused:
            found.append(f"{len(nobodys)} spill files belong to no message, such as {self.path(min(nobodys))}")
        return found


def wipe_spill(files: Files, spool: str) -> list[str]:
    """Set aside whatever spilled before this start, and return the names of the directories; a `Wiper` does the rest.

    Makes `spill` and `wiping` where they are missing. Entries of `spill` that are not directories of ours stay.

    Raises:
        StorageError: `spill` or `wiping` is a link, a file, or another user's, or cannot be read and written.

    Cost: a rename for each directory, whatever it holds.
    """
    spill = os.path.join(spool, SPILL)
    try:
        for directory in (spill, os.path.join(spool, WIPING)):
            _check_own_directory(files, directory)
        found = [
            name
            for name in files.list(spill)
            if _DIRECTORY.fullmatch(name) and stat.S_ISDIR(files.lstat(os.path.join(spill, name)).st_mode)
        ]
        for name in found:
            set_aside(files, spool, name)
    except OSError as error:
        raise storage_error(error, "set aside old spill files", spill) from error
    return found


def _check_own_directory(files: Files, path: str) -> None:
    try:
        status = files.lstat(path)
    except FileNotFoundError:
        files.make_directory(path)
        return
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise StorageError(f"{path} is {kind}: move it away, and qflow makes a directory there")
    if status.st_uid != os.geteuid():
        raise StorageError(f"{path} belongs to user {status.st_uid}: run as that user, or give the spool to this one")
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        raise StorageError(f"{path} cannot be read and written by its owner: chmod u+rwx it")


def set_aside(files: Files, spool: str, name: str) -> None:
    """Rename a directory from `spill` into `wiping`, under a name not taken there. Raises OSError. Cost: one rename."""
    for number in count():
        target = os.path.join(spool, WIPING, f"{name}~{number:x}")
        if not files.exists(target):
            files.rename(os.path.join(spool, SPILL, name), target)
            return


class Wiper:
    """Unlinks what was set aside, a few files at a time: many deletes at once slow every other file operation down.

    For one thread at a time. Never raises OSError: what cannot be removed is counted and met again in the
    next round or at the next start.
    """

    def __init__(self, files: Files, spool: str) -> None:
        self.unlinked = 0
        self.failures = 0
        self._files = files
        self._spill = os.path.join(spool, SPILL)
        self._wiping = os.path.join(spool, WIPING)
        self._round: Iterator[None] | None = None

    def step(self, max_files: int) -> bool:
        """Remove at most so many files and return whether more may be left; after False, a call begins a new round.

        Cost: 10 µs a file; with nothing to do, the listing of one directory.
        """
        if self._round is None:
            self._round = self._remove_all()
        for _ in range(max_files):
            if next(self._round, self) is self:
                self._round = None
                return False
        return True

    def _remove_all(self) -> Iterator[None]:
        """Remove each directory that was set aside; yields after each operation."""
        try:
            names = self._files.list(self._wiping)
        except OSError:
            self.failures += 1
            return
        for name in names:
            ours = _SET_ASIDE.fullmatch(name)
            if ours:
                yield from self._remove_directory(os.path.join(self._wiping, name), os.path.join(self._spill, ours[1]))

    def _remove_directory(self, directory: str, original: str) -> Iterator[None]:
        """Remove a directory's files, and put back what is not ours; again, as long as a scan misses some."""
        while True:
            unlinked = self.unlinked
            try:
                for entry in self._files.scan(directory):
                    self._remove_entry(entry, original)
                    yield
                self._files.remove_directory(directory)
                yield
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or self.unlinked == unlinked:
                    self.failures += 1
                    return

    def _remove_entry(self, entry: os.DirEntry[str], original: str) -> None:
        try:
            if FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                self._files.unlink(entry.path)
                self.unlinked += 1
            else:
                self._put_back(entry.path, original, entry.name)
        except OSError:
            self.failures += 1

    def _put_back(self, path: str, original: str, name: str) -> None:
        with suppress(FileExistsError):
            self._files.make_directory(original)
        target = os.path.join(original, name)
        if self._files.exists(target):  # never replace anything: it stays where it is
            self.failures += 1
            return
        self._files.rename(path, target)
