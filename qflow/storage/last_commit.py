"""The last commit of a log, noted beside it, for LMDB may open the one before and say nothing.

The first two pages of `data.mdb` hold the roots of the last two commits, in turns, without a checksum, and LMDB
believes the page with the higher number: a flipped bit takes back what was confirmed. So the owner keeps a copy of both
in `last`, with a checksum, after each commit. A bit that differs is put right before the log is opened; anything else
is reported. The copy is not synced: after a power cut it may be of a commit before.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from qflow.errors import CorruptionError, PermissionDenied
from qflow.loggers import get_logger
from qflow.named_tuples import NamedTuple
from qflow.storage.files import FILE_MODE, FULL, READ, Files, storage_error
from qflow.storage.log.directory import DATA, LAST
from qflow.storage.log.sealing import seal, unseal

_logger = get_logger("qflow")

_AT = 16
"""Where the roots begin on their page."""
_ROOTS = struct.Struct("<24xI92x8xQ")
"""Bytes of a page, and the number of the commit; of `MDB_meta` in LMDB 0.9 with 64 bits."""
_KEEP = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 10
_UNNOTICED = "until then nobody would notice that the log ends with an earlier one"


class _Roots(NamedTuple):
    """What both pages say of a commit."""

    written: tuple[bytes, bytes]
    page_bytes: int
    numbers: tuple[int, int]

    @classmethod
    def read(cls, first: bytes, second: bytes) -> _Roots:
        (page_bytes, one), (_, two) = _ROOTS.unpack(first), _ROOTS.unpack(second)
        return cls((first, second), page_bytes, (one, two))


class LastCommit:
    """The copy of a log that is open for its owner. One thread at a time."""

    def __init__(self, log: str, data_fd: int, files: Files) -> None:
        """Open the copy, or begin one; where that cannot be, there is none until the next opening.

        What is wrong with one that is there is told; a disk without room for it is no more than that.
        """
        self._log = log
        self._data_fd = data_fd
        self._files = files
        self._fd = -1
        path = os.path.join(log, LAST)
        try:
            self._fd = files.open(path, _KEEP, FILE_MODE)
        except OSError as error:
            if error.errno not in FULL:
                why = storage_error(error, "use the copy of the last commit", path)
                _logger.warning("%s; %s", why, _UNNOTICED, spool=os.path.dirname(log), event="last_commit_unusable")

    def put_right(self) -> list[str]:
        """Put a bit of the roots right that has flipped since they were written; return what was found, in words.

        To be called before LMDB opens the log.

        Raises:
            StorageError: the disk does not take it, or cannot be read.
        """
        data = os.path.join(self._log, DATA)
        try:
            with _naming(self._log, LAST):
                last = None if self._fd < 0 else _read_copy(self._fd)
            if last is None:
                return []
            with _naming(self._log, DATA):
                now = _read_pages(self._data_fd, last.page_bytes)
            flipped, problem = _compare(last, now, self._log)
            for place in flipped:
                self._files.pwrite(self._data_fd, last.written[place], place * last.page_bytes + _AT)
            if flipped:
                self._files.sync_file(data)
                problem = f"{problem}; it was put right"
        except OSError as error:
            raise storage_error(error, "put a bit of the log right", data) from error
        return [problem] if problem else []

    def keep(self, page_bytes: int) -> None:
        """Copy the roots of commits that are on the disk. Cost: 10 µs. What cannot be written is left out."""
        if self._fd >= 0:
            with suppress(OSError):
                self._files.pwrite(self._fd, seal(b"".join(_read_pages(self._data_fd, page_bytes).written)), 0)

    def close(self) -> None:
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1


def look(log: str, files: Files) -> list[str]:
    """Compare the roots with the copy, as whoever only reads; return what is wrong, in words.

    The owner may commit meanwhile. A copy that may not be read is done without, as by an owner: see `why_unusable`.

    Raises:
        StorageError: one of them cannot be read.
    """
    try:
        with _opened(files, log, DATA) as data_fd, ExitStack() as opened:
            try:
                last_fd = opened.enter_context(_opened(files, log, LAST))
            except PermissionDenied:
                return []
            return _look(last_fd, data_fd, log)
    except FileNotFoundError:
        return []


def why_unusable(log: str, files: Files) -> str | None:
    """Return, in words, why whoever looks may not read the copy; None if that may be read, or there is none."""
    try:
        with _opened(files, log, LAST):
            return None
    except FileNotFoundError:
        return None
    except PermissionDenied as error:
        return f"{error}; {_UNNOTICED}"


def _look(last_fd: int, data_fd: int, log: str) -> list[str]:
    before: list[str] = []
    for _ in range(_TRIES):
        with _naming(log, LAST):
            last = _read_copy(last_fd)
        if last is None:
            return []
        with _naming(log, DATA):
            now = _read_pages(data_fd, last.page_bytes)
        flipped, problem = _compare(last, now, log)
        found = [f"{problem}; opening the spool puts it right" if flipped else problem] if problem else []
        if found == before:  # nothing is wrong, or the same as a moment ago: no commit was being written
            return found
        before = found
    return []


@contextmanager
def _naming(log: str, name: str) -> Iterator[None]:
    """Tell of an error of the system as one of reading a file of the log; that it is not there is left as it is."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, "read what was committed last", os.path.join(log, name)) from error


@contextmanager
def _opened(files: Files, log: str, name: str) -> Iterator[int]:
    with _naming(log, name):
        fd = files.open(os.path.join(log, name), READ, 0)
    try:
        yield fd
    finally:
        files.close(fd)


def _read_copy(fd: int) -> _Roots | None:
    """Return the copy, if there is one and it is whole."""
    try:
        both = unseal(os.pread(fd, 2 * _ROOTS.size + 4, 0), "the copy")
        return _Roots.read(both[: _ROOTS.size], both[_ROOTS.size :])
    except (CorruptionError, struct.error):  # none was written yet, or the power went while it was
        return None


def _read_pages(fd: int, page_bytes: int) -> _Roots:
    first, second = (os.pread(fd, _ROOTS.size, place * page_bytes + _AT) for place in (0, 1))
    return _Roots.read(first.ljust(_ROOTS.size, b"\0"), second.ljust(_ROOTS.size, b"\0"))


def _compare(last: _Roots, now: _Roots, log: str) -> tuple[list[int], str]:
    """Return the pages on which a bit has flipped, and what is wrong, in words; "" if all is well.

    A later commit changes more than a bit: its number, and where a tree begins.
    """
    if now.written == last.written:
        return [], ""
    data = os.path.join(log, DATA)
    pairs = [(int.from_bytes(one), int.from_bytes(two)) for one, two in zip(last.written, now.written, strict=True)]
    bits = [(one ^ two).bit_count() for one, two in pairs]
    if max(bits) == 1:
        return [place for place in (0, 1) if bits[place]], f"a bit of {data} had flipped, of what was committed last"
    number, newest = max(last.numbers), max(now.numbers)
    if newest > number and abs(now.numbers[0] - now.numbers[1]) == 1:
        return [], ""  # the copy is of a commit before
    if newest < number:
        return [], (
            f"{data} ends with commit {newest}, and commit {number} was confirmed: an older file was put in its "
            "place, or this one was copied while its owner wrote, or the disk has lost writes; what was confirmed in "
            "between is gone, a snapshot may have it"
        )
    if now.numbers == last.numbers and bits[now.numbers.index(newest)] == 0:
        return [], ""  # LMDB leaves the page of the commit before so where it cannot write one
    return [], f"the first pages of {data} are not as commit {number} left them: they are damaged, or of another log"
