"""What a journal holds that its log does not: for its owner, who opens the log, and for whoever only reads."""

from __future__ import annotations

import errno

from qflow.errors import CorruptionError, StorageError
from qflow.named_tuples import NamedTuple
from qflow.storage.files import READ, Files, read_from, storage_error
from qflow.storage.log.journal import (
    CLEARED,
    HEADER_BYTES,
    NOT_NEEDED,
    REMEDY,
    TO_WRITE,
    Head,
    JournalState,
    end_of,
    is_up_to,
    read_head,
    reading,
    records_in,
    search,
    seed_of,
)


class Found(NamedTuple):
    """What a journal holds that the log does not."""

    applied: int
    """The number of the last record that the log holds."""
    records: list[bytes]
    """The changes of each record, in order."""
    last: int
    """The number of the last record that was ever written, as far as it is known."""
    problems: list[str]
    refusal: str | None = None
    """Why it must not be used: it is another one than the log was written with."""


class Opened(NamedTuple):
    """A journal as it was found when its log was opened."""

    fd: int
    head: Head
    found: Found


def open_to_write(path: str, files: Files, uuid: str, state: JournalState, *, clean: bool) -> Opened | None:
    """Open a journal for its owner, and read what it holds that the log does not; None if there is none.

    Args:
        state: what the log says of it.
        clean: the log was closed.

    Raises:
        CorruptionError, FormatTooNew: it is another log's, one of before, or none. StorageError: it cannot be read.
    """
    fd = _open(path, TO_WRITE, files)
    if fd is None:
        return None
    try:
        with reading(path):
            files.forget_cached(fd)  # a page whose write failed stays in memory as if it had been written
            head, found = _examine(path, files, fd, uuid, state, clean)
            if found.refusal is not None:
                raise CorruptionError(found.refusal)
            return Opened(fd, head, found)
    except BaseException:
        files.close(fd)
        raise


class Look(NamedTuple):
    """What somebody has found who only reads."""

    mark: object
    """It differs when the journal was written to, some milliseconds later or more."""
    found: Found


def look(path: str, files: Files, uuid: str, state: JournalState, clean: bool, seen: Look | None) -> Look | None:
    """Read what a journal holds that the log does not, as whoever only reads; None if that is nothing.

    What is returned is on the disk, or the file system is read-only. The owner may write meanwhile: then it may be of
    two moments, unless the log was not committed to between.

    Args:
        state: what the log says of it.
        clean: the log was closed.
        seen: what the last call returned: it is returned again if nothing has changed.

    Raises:
        CorruptionError, FormatTooNew: it is another log's, or none. StorageError: it cannot be read.
    Cost: six system calls where it holds nothing more, 5 µs where there is none; else reading it, some ms, as also
        where nothing was written to it since a log was opened that had been closed.
    """
    fd = _open(path, READ, files)
    if fd is None:
        missing = state.in_use and not clean
        return Look(None, Found(state.applied, [], state.applied, [missing_text(path)])) if missing else None
    seed = seed_of(uuid)
    try:
        with reading(path):
            status = files.status(fd)
            mark = status.st_ino, status.st_mtime_ns, state, clean
            if seen is not None and seen.mark == mark:
                return seen
            is_same = read_head(files, fd, uuid, path, clean=clean).is_of(state)
            if is_same and is_up_to(files, fd, state.applied, seed, clean=clean):
                return None
            _sync(files, fd)  # what is seen is not taken back by a power cut
            return Look(mark, _examine(path, files, fd, uuid, state, clean)[1])
    finally:
        files.close(fd)


def _sync(files: Files, fd: int) -> None:
    try:
        files.sync_data(fd)
    except OSError as error:
        if error.errno != errno.EROFS:  # nothing is written any more: ext4 is so after an error
            raise


def missing_text(path: str) -> str:
    """Return what is said where the journal is gone that a log was written with."""
    return (
        f"{path} is missing: what was confirmed in the last second before the end, and was not in the log yet, is "
        "lost, if there was anything"
    )


def _open(path: str, flags: int, files: Files) -> int | None:
    """Open the file of a journal; None if there is none."""
    try:
        return files.open(path, flags, 0)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(f"{path} is a symbolic link: put the file itself in its place") from error
        raise storage_error(error, "open the journal", path) from error


def _examine(path: str, files: Files, fd: int, uuid: str, state: JournalState, clean: bool) -> tuple[Head, Found]:
    """Return what the header of a journal says, and what it holds that the log does not."""
    head = read_head(files, fd, uuid, path, clean=clean)
    applied, seed = state.applied, seed_of(uuid)
    nothing = Found(applied, [], applied, [])
    is_same = head.is_of(state)
    if clean and is_same and files.pread(fd, len(CLEARED), HEADER_BYTES) == CLEARED:
        return head, nothing
    data = read_from(files, fd, 0, head.size)
    if is_same:
        found = _find(data, head.size, seed, applied, path)
        if clean and found.records and not found.problems:
            found.problems.append(
                f"the log was closed with record {applied} of its journal, which goes on: the log is one of before, "
                "and commits may be lost; what the journal holds was carried over"
            )
        return head, found
    if (state.in_use and not clean) or search(data, HEADER_BYTES, seed, applied)[0]:
        refusal = f"{path} is another journal than its log was written with; {NOT_NEEDED if clean else REMEDY}"
        return head, nothing._replace(refusal=refusal)
    return head, nothing  # it was given up, or made as its owner was killed, before the log said so


def _find(data: bytes, size: int, seed: int, applied: int, path: str) -> Found:
    """Return the records behind `applied`, up to the first that cannot be read."""
    problems: list[str] = []
    if len(data) < size:
        problems.append(
            f"{path} was cut short: {len(data)} of its {size} bytes are there; commits that were in the rest are lost, "
            "if there were any"
        )
    records: list[bytes] = []
    due, position = 0, HEADER_BYTES
    for at, number, changes in records_in(data, seed):
        if due and number != due:
            break  # of before
        if number > applied + 1 and not due:
            problems.append(_fell_back(applied, number - 1) + "; what the journal holds was carried over")
        due, position = number + 1, end_of(at, changes)
        if number > applied:
            records.append(changes)
    due = max(due, applied + 1)
    last, is_whole = search(data, position, seed, due - 1)
    if last >= due and data[HEADER_BYTES : HEADER_BYTES + len(CLEARED)] == CLEARED:
        problems.append(_fell_back(applied, last))
    elif last >= due:
        problems.append(
            f"{path}: record {due} of the journal is damaged: {last - due + 1} commits from there on are lost"
        )
    if not is_whole:
        problems.append(
            f"{path} is full of what looks like its records, and was not searched to its end: it is not known whether "
            f"commits behind record {max(last, due - 1)} are lost"
        )
    return Found(applied, records, max(last, due - 1), problems)


def _fell_back(applied: int, had: int) -> str:
    lost = had - applied
    return (
        f"the log ends with record {applied} of its journal, and had held those up to {had}: it fell back, and "
        f"{lost} commit{'s are' if lost > 1 else ' is'} lost: an older log was put in its place, or both "
        "were copied while their owner wrote"
    )
