"""Where messages go that do not fit in memory: the contract of a spill store, and the directory of an area.

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, count
from typing import Protocol, TypeVar

from qflow.errors import StorageError
from qflow.message import Record
from qflow.named_tuples import NamedTuple
from qflow.storage.files import CREATE, FILE_MODE, OVERWRITE, Files
from qflow.storage.lock import Place
from qflow.storage.spill.slots import Ranges, Slots

__all__ = [
    "FILE", "NO_COUNTERS", "SPILL", "SPILL_LANE", "SPILL_TABLE", "WIPING", "AreaDirectory", "Ranges", "Slots",
    "SpillArea", "SpillCounters", "SpillStore", "directory_name", "set_aside",
]  # fmt: skip

SPILL_TABLE = 0xFF
"""The table byte of a spilled block's key; the log's tables never use it."""
SPILL_LANE = 0
"""Sequences are unique in an area, so a spilled block's key needs no lane."""

SPILL, WIPING = "spill", "wiping"
T = TypeVar("T")
_NAME_BYTES = 100
FILE = re.compile(r"0|[1-9a-f][0-9a-f]{0,15}")


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


NO_COUNTERS = SpillCounters(0, 0, 0, 0, 0, 0)


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
    chunk_messages: int
    """How many messages are written at once at most: for so many somebody may have to wait."""

    def write(self, first: int, records: list[Record]) -> Slots:
        """Write records; record `i` has sequence `first + i`. All or nothing.

        Returns:
            One slot a record, in the order of the records.

        Raises:
            DiskFull: ENOSPC, EDQUOT or EFBIG. Nothing is left behind, and the records are still the caller's.
            StorageError: another error of the file system, or the area was removed; likewise.
        """

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
            StorageError: this process cannot open files at the moment (EMFILE, ENFILE, ENOMEM), or may not open this
                one (PermissionDenied), and nothing was read. The messages are unharmed: try again later.
        """

    def free(self, slots: Slots) -> None:
        """Give back slots whose messages are settled or in memory again. Never raises OSError."""

    def remove(self) -> None:
        """Free everything, now that the queue is deleted; the area is of no use afterwards. Never raises OSError."""

    def problems(self, used: Ranges) -> list[str]:
        """Compare the slots in use with what is on disk, both ways, and say in words what does not agree.

        What is on its way to the queue, or is freed meanwhile, shows: it does not when the caller asks again later.
        """

    def counters(self) -> SpillCounters:
        """Return what was done so far. Cost: O(1)."""


class SpillStore(Protocol):
    """Makes areas. The spool is locked and its old spill files are wiped (`wipe_spill`) before one is made."""

    def area(self, name: str, owner: int, incarnation: int) -> SpillArea:
        """Return the area of a queue.

        Args:
            name: of the queue, any text; only for the eyes of people.
            owner: the queue's number, below 2**32; stands in each block.
            incarnation: number that is another one each time a queue is made, or its spool opened, below 2**64.

        Cost: no disk; an area is created on disk with its first write.
        """

    def close(self) -> None:
        """Give up descriptors and maps. What is on disk is left to the wipe at the next start."""


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

    def __init__(self, files: Files, spool: Place, name: str) -> None:
        self._files = files
        self._spool = spool
        self._name = name
        self.removed = False

    @property
    def prefix(self) -> str:
        """A file's path is this and its number in hexadecimal. (Faster here than a name and `dir_fd`.)"""
        return f"{self._spool.path}/{SPILL}/{self._name}/"

    def follow(self) -> None:
        """Have files looked for where the spool lies now."""
        self._spool.follow()

    def has_left(self, prefix: str) -> bool:
        """Tell whether the spool has moved: what was not found behind a prefix may be behind that of now."""
        self.follow()
        return self.prefix != prefix

    def path(self, number: int) -> str:
        """Name a file."""
        return f"{self.prefix}{number:x}"

    def create(self, number: int) -> int:
        """Return the descriptor of a new file. Raises OSError; FileExistsError if something else stands there."""
        try:
            return self._files.open(self.path(number), CREATE, FILE_MODE)
        except FileNotFoundError:
            self.must_exist()
            self.follow()
            if not self._spool.is_here:  # nothing is made in what lies there now
                raise
            for directory in (os.path.join(self._spool.path, SPILL), self.prefix[:-1]):
                with suppress(FileExistsError):
                    self._files.make_directory(directory)
            return self._files.open(self.path(number), CREATE, FILE_MODE)

    def open(self, number: int) -> int:
        """Return the descriptor of a file that is there, to write over it. Raises OSError."""
        return self._found(number, lambda path: self._files.open(path, OVERWRITE, 0))

    def unlink(self, number: int) -> None:
        """Remove a file. Raises OSError."""
        self._found(number, self._files.unlink)

    def _found(self, number: int, use: Callable[[str], T]) -> T:
        prefix = self.prefix
        try:
            return use(f"{prefix}{number:x}")
        except FileNotFoundError:
            if not self.has_left(prefix):
                raise
            return use(self.path(number))

    def must_exist(self) -> None:
        """Raise StorageError once the area was removed."""
        if self.removed:
            raise StorageError(f"the spill directory {self.prefix} was removed with its queue")

    def remove(self) -> None:
        """Set the directory aside for a `Wiper`, if it was ever made. Raises OSError. Cost: one rename."""
        self.removed = True
        self.follow()
        if self._files.exists(self.prefix[:-1]):
            with suppress(FileExistsError):
                self._files.make_directory(os.path.join(self._spool.path, WIPING))
            set_aside(self._files, self._spool.path, self._name)

    def _numbers(self) -> Iterator[int]:
        with suppress(OSError):
            for entry in self._files.scan(self.prefix[:-1]):
                if FILE.fullmatch(entry.name):
                    yield int(entry.name, 16)

    def problems(self, used: Ranges, spare: Ranges, excused: int) -> list[str]:
        """Compare the files that are there with those that hold messages, and those that are kept without one.

        Args:
            excused: so many files nobody knows of are no problem.
        Cost: 1 µs a file.
        """
        self.follow()
        both = Ranges([*used.ranges, *spare.ranges])
        found = [f"{self.path(number)} is in use and free" for number in chain.from_iterable(both.twice)]
        there = 0
        nobodys: list[int] = []
        for number in self._numbers():
            if number in used:
                there += 1
            elif number not in spare:
                nobodys.append(number)
        if there < len(used):
            existing = Ranges.of(self._numbers())
            found += [f"{self.path(number)} is missing" for number in chain.from_iterable(used.without(existing))]
        if len(nobodys) > excused:
            found.append(f"{len(nobodys)} spill files belong to no message, such as {self.path(min(nobodys))}")
        return found


def set_aside(files: Files, spool: str, name: str) -> None:
    """Rename a directory from `spill` into `wiping`, under a name not taken there. Raises OSError. Cost: one rename.

    Where it comes with an image, overlayfs renames no directory: then its files are unlinked. Cost: 10 µs a file.
    """
    directory = os.path.join(spool, SPILL, name)
    for number in count():
        target = os.path.join(spool, WIPING, f"{name}~{number:x}")
        if not files.exists(target):
            try:
                files.rename(directory, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                _empty(files, directory)
            return


def _empty(files: Files, directory: str) -> None:
    """Unlink the files of ours in a directory, and remove it, if that is all; a scan may miss some meanwhile."""
    unlinked = True
    while unlinked:
        unlinked = False
        for entry in files.scan(directory):
            if FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                files.unlink(entry.path)
                unlinked = True
    with suppress(OSError):
        files.remove_directory(directory)
