"""Copies of a log: one that becomes a spool of its own (a snapshot), one that takes its place (a compaction).

Both write what is committed at one moment, without the free pages between. The steps, each on the disk before the next:

    snapshot                                          compaction, by the writer, which commits nothing meanwhile
    1  make the directory and lock it                 1  copy to `log.new/`, with room for settling in it
    2  copy to `log.new/`, with a uuid of its own     2  rename `log` to `log.old`
    3  rename `log.new` to `log`: a spool             3  rename `log.new` to `log`
                                                      4  go on with it, remove `log.old`

What a crash leaves, and what becomes of it: a directory without a log is no spool, and another snapshot may be made
there. `log.old` without a `log` is renamed back at the next open: nothing was committed since. Beside a `log` that has
opened, `log.new` is removed, and so is `log.old` if it is the same log.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from qflow.config import spool_path
from qflow.errors import DiskFull, InDoubt, InvalidArgument, QflowError, StorageError
from qflow.identity import new_uuid
from qflow.loggers import get_logger
from qflow.storage.environment import CannotGrow, Environment, put_pairs
from qflow.storage.files import DIRECTORY, READ, Files, check_filesystem, make_place, storage_error
from qflow.storage.lock import LOCK_NAME, acquire_lock
from qflow.storage.log import carrying, recovery
from qflow.storage.log.directory import DATA, LOG, STAGED, check_log_directory, put_in_place, staging, sync_staged
from qflow.storage.log.journal import NO_JOURNAL, read_state
from qflow.storage.log.journal_reading import Found
from qflow.storage.log.overlay import Overlay
from qflow.storage.log.placing import check_in_place
from qflow.storage.log.recovery import Recovery
from qflow.storage.log.shared_reading import OLD

if TYPE_CHECKING:
    from qflow.stats import CompactionReport, SnapshotReport

_logger = get_logger("qflow")

_LEFT = frozenset({LOCK_NAME, STAGED, "lost+found"})
"""What a snapshot that a crash ended may have left; a new one goes on there."""


# Snapshots -----------------------------------------------------------------------------------------------------------


def make_snapshot(
    source: Environment, spool: str, path: str | os.PathLike[str], files: Files, *, unsafe_filesystem: bool = False
) -> SnapshotReport:
    """Copy a log into a directory that becomes a spool: all of it, or it is none.

    Args:
        source: the log; nobody closes it meanwhile.
        spool: where it lies.
        path: a directory that does not exist, or is empty.

    Raises:
        InvalidArgument: it is no path, inside the spool, or not empty.
        SpoolInUse: somebody makes a snapshot there, or has opened it.
        DiskFull, StorageError: it could not be written; what was begun there was removed.
    Cost: reads and writes what the log holds; three syncs.
    """
    with making(spool, path, files, "snapshot", unsafe_filesystem=unsafe_filesystem) as target:
        return _copy(source, target, files)


@contextmanager
def making(
    spool: str, path: str | os.PathLike[str], files: Files, what: str, *, unsafe_filesystem: bool
) -> Iterator[str]:
    """Make and lock a directory in which the context makes a log; if that fails, remove what was begun there.

    Raises: as `make_snapshot`.
    """
    target = _checked_target(spool, path, what)
    check_filesystem(target, unsafe_filesystem)
    existed = os.path.lexists(target)
    try:
        if existed:
            _check_empty(target, files)
        else:
            make_place(files, target, f"the directory of a {what}")
        files.overwrite_in_place(target)
        lock = acquire_lock(target)
    except OSError as error:
        raise storage_error(error, f"make the directory of a {what}", target) from error
    except StorageError:
        if not existed:
            _forget(target, files)
        raise
    try:
        _check_empty(target, files)  # nobody else writes there from here on
        try:
            yield target
        except BaseException:
            with suppress(OSError):
                _remove_begun(target, files)
            if not existed:
                _forget(target, files)
            raise
    except OSError as error:
        raise storage_error(error, f"make a {what}", target) from error
    finally:
        lock.release()


def remove_snapshot(target: str, files: Files, *, existed: bool) -> None:
    """Remove a snapshot that nobody has opened.

    Args:
        existed: its directory was there before, and stays.

    Raises:
        SpoolInUse: somebody has it open. StorageError: it could not be removed.
    """
    lock = acquire_lock(target)
    try:
        _remove_begun(target, files)
        if not existed:
            _forget(target, files)
    except OSError as error:
        raise storage_error(error, "remove a snapshot", target) from error
    finally:
        lock.release()


def _checked_target(spool: str, path: str | os.PathLike[str], what: str) -> str:
    target = spool_path(path, what)
    inside = os.path.realpath(spool)
    if os.path.commonpath([os.path.realpath(target), inside]) == inside:
        raise InvalidArgument(f"{target} is inside the spool {spool}: name a directory elsewhere")
    return target


def _check_empty(target: str, files: Files) -> None:
    if not stat.S_ISDIR(files.lstat(target).st_mode):
        raise InvalidArgument(f"{target} is not a directory: name a new or an empty one")
    names = files.list(target)
    if LOG in names or OLD in names:
        raise InvalidArgument(f"{target} is a spool already: name a new or an empty directory")
    foreign = sorted(set(names) - _LEFT)
    if foreign:
        raise InvalidArgument(f"{target} is not empty (it holds {foreign[0]!r}): name a new or an empty directory")


def _copy(source: Environment, target: str, files: Files) -> SnapshotReport:
    from qflow.stats import SnapshotReport

    staged = staging(target, files)
    more = Overlay(source, files).unapplied()
    source.copy_to(staged)
    problems = [] if more is None else _bring_up(staged, more, files)
    found = _read(staged, files)
    uuid = new_uuid()
    put_pairs(staged, recovery.copy_records(uuid, found.uuid))
    put_in_place(target, files)
    queues = [record for record in found.queues if not record.deleted]
    streams = [record for record in found.streams if not record.deleted]
    rows = [row for record in [*queues, *streams] for row in (record.rows or {}).values()]
    return SnapshotReport(
        path=target,
        uuid=uuid,
        origin=found.uuid,
        clean=found.clean,
        queues=len(queues),
        streams=len(streams),
        messages=sum(row.messages for row in rows),
        bytes=sum(row.bytes for row in rows),
        log_bytes=files.lstat(os.path.join(target, LOG, DATA)).st_size,
        problems=(*found.problems, *problems),
    )


def _bring_up(log: str, more: Found, files: Files) -> list[str]:
    """Have in a copy what the journal held beyond it; return what was wrong with that, in words."""
    env = Environment(log, files)
    try:
        with env.reading() as txn:
            if read_state(txn, log).applied != more.applied:
                return []  # the log was committed to before it was copied: it holds that
        carrying.apply(env, more, NO_JOURNAL, step_bytes=0)
        return more.problems
    finally:
        env.close()


def _read(log: str, files: Files) -> Recovery:
    env = Environment(log, files, read_only=True)
    try:
        return recovery.read_log(env)
    finally:
        env.close()


def _remove_begun(target: str, files: Files) -> None:
    """Remove what a snapshot has made of a log; its directory is locked, so nobody has opened it."""
    staged, path = os.path.join(target, STAGED), os.path.join(target, LOG)
    if files.exists(path):
        files.rename(path, staged)
    _remove(staged, files)


def _forget(target: str, files: Files) -> None:
    """Remove the directory of a snapshot, if nothing but the lock is in it."""
    with suppress(OSError):
        if files.list(target) == [LOCK_NAME]:
            files.unlink(os.path.join(target, LOCK_NAME))
        files.remove_directory(target)


def _remove(directory: str, files: Files) -> None:
    """Remove a directory of files, if it is there."""
    if files.exists(directory):
        for name in files.list(directory):
            files.unlink(os.path.join(directory, name))
        files.remove_directory(directory)


# Compactions ---------------------------------------------------------------------------------------------------------


def compact(
    env: Environment,
    spool: str,
    files: Files,
    uuid: str,
    still: AbstractContextManager[object],
    ending: ExitStack,
) -> CompactionReport:
    """Put a copy of a log in its place, and open it there.

    Args:
        env: the log; nobody writes to it, copies or closes it meanwhile.
        uuid: the log's own.
        still: a context in which nobody reads either.
        ending: closes descriptors when commits go on: with the last one of the log of before, all that the file holds
            is given back, which takes as long as the copy.

    Raises:
        InDoubt: the copy is in its place, and perhaps not after a power cut, and `env` is open on the log of before:
            nothing may be written to either.
        DiskFull, StorageError: nothing has changed.
    Cost: reads and writes what the log holds, of which there are two on the disk meanwhile; four syncs.
    """
    check_in_place(env)
    before = env.size_bytes()
    try:
        remove_leftovers(spool, files, uuid)
        staged = staging(spool, files)
        try:
            env.copy_to(staged)
            copy = Environment(staged, files)
            try:
                _make_reserve(copy)
                after = copy.size_bytes()
                sync_staged(spool, files)
                ending.callback(_close, files.open(os.path.join(env.path, DATA), READ, 0), spool, files)
                with still:
                    env.place.follow()  # copying takes long
                    spool = env.place.path
                    check_in_place(env, or_nothing=False)
                    directory = files.open(spool, DIRECTORY, 0)
                    ending.callback(_close, directory, spool, files)
                    _exchange(env, copy, spool, directory, files)
            finally:
                copy.close()  # or what was the log before
        except BaseException:
            with suppress(OSError):
                _remove(staged, files)
            raise
    except OSError as error:
        raise storage_error(error, "compact the log", spool) from error
    try:
        remove_leftovers(spool, files, uuid)
    except QflowError as error:
        _logger.warning("%s: the log of before is removed later: %s", spool, error)
    from qflow.stats import CompactionReport

    return CompactionReport(bytes_before=before, bytes_after=after)


def _make_reserve(copy: Environment) -> None:
    """Make room for settling in a copy, for the disk may be full when it is in its place. Raises DiskFull."""
    try:
        copy.make_room(0, 0, settles_only=False, step_bytes=0)
    except CannotGrow as error:
        raise DiskFull(f"there is no room for the compacted log beside the one of before: {error}") from error


def _close(descriptor: int, spool: str, files: Files) -> None:
    """Close the log of before, or the spool; the compaction is done, whether or not that works."""
    try:
        files.close(descriptor)
    except OSError as error:
        _logger.warning("%s: what a compaction had open could not be closed: %s", spool, error)


def _exchange(env: Environment, copy: Environment, spool: str, directory: int, files: Files) -> None:
    """Put the staged log in the place of the log, for good; or leave the log where it is.

    Args:
        directory: a descriptor of the spool: when the copy has its place, there may be none left for it.
    """
    path, staged, old = (os.path.join(spool, name) for name in (LOG, STAGED, OLD))
    try:
        files.rename(path, old)
        files.rename(staged, path)
        files.sync_opened(directory)
        env.exchange(copy)
    except BaseException as error:
        if files.exists(staged):
            if not files.exists(path):
                with suppress(OSError):  # then the next open does it, or the next compaction
                    files.rename(old, path)
        elif isinstance(error, OSError):
            raise InDoubt(
                f"the compacted log of {spool} is in its place, and perhaps not after a power cut ({error}); it holds "
                "the same: close the broker and open the spool again"
            ) from error
        raise


def bring_back(spool: str, files: Files) -> None:
    """Undo a compaction that a crash ended between its two renames."""
    path, old = os.path.join(spool, LOG), os.path.join(spool, OLD)
    if not files.exists(path) and check_log_directory(old):
        files.rename(old, path)
        files.sync_directory(spool)


def remove_leftovers(spool: str, files: Files, uuid: str) -> None:
    """Remove what compactions left beside a log that has opened.

    Raises:
        StorageError, CorruptionError: something there is not what a compaction leaves, or cannot be read or removed; it
            was left as it is, and the log is as good.
    """
    try:
        _remove_old(spool, files, uuid)
        if files.exists(os.path.join(spool, STAGED)):
            _remove(staging(spool, files), files)
    except OSError as error:
        raise storage_error(error, "remove what a compaction left", spool) from error


def _remove_old(spool: str, files: Files, uuid: str) -> None:
    """Remove `log.old/` if it is the same log, or what is left of it; nobody else's copy."""
    bring_back(spool, files)
    old = os.path.join(spool, OLD)
    if not files.exists(old):
        return
    if not stat.S_ISDIR(files.lstat(old).st_mode):
        raise StorageError(f"{old} is in the way of compactions: move it away")
    if files.exists(os.path.join(old, DATA)) and _read(old, files).uuid != uuid:
        raise StorageError(f"{old} is another log, and was left as it is: move it away, compactions need its place")
    _remove(old, files)
