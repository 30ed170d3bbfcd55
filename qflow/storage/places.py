"""The directory of a spool: which paths may be one, and what lies there before anything of it is touched."""

from __future__ import annotations

import os

from qflow.errors import CorruptionError, InvalidArgument
from qflow.storage.files import Files, check_filesystem, make_place, storage_error
from qflow.storage.inbox.stages import INBOX
from qflow.storage.lock import LOCK_NAME, SpoolLock, acquire_lock
from qflow.storage.log import journal
from qflow.storage.log.directory import LOG, STAGED
from qflow.storage.log.shared_reading import OLD
from qflow.storage.spill.store import SPILL, WIPING
from qflow.storage.streams.groups import CURSORS

_JOURNAL = frozenset({journal.JOURNAL, journal.JOURNAL + journal.STAGED})
_OF_A_LOG = _JOURNAL | {SPILL, WIPING, INBOX, CURSORS, "stats.json", "stats.json.new", "door"}
"""What is made in a spool that has a log, and by nobody else."""
_LOGS = frozenset({LOG, OLD})
_LOCAL = "amqp"
"""Where a local server and its clients find each other; made before there is a log. See `amqp.local`."""
_OURS = _OF_A_LOG | _LOGS | {LOCK_NAME, STAGED, _LOCAL, "lost+found"}


def take_place(path: str, files: Files, *, unsafe_filesystem: bool = False) -> SpoolLock:
    """Make the directory of a spool if need be, and lock it, before anything in it is touched.

    Raises:
        InvalidArgument: something else lies there. CorruptionError: it was a spool, and has no log any more.
        SpoolInUse: another process owns it. StorageError: it cannot be made, or its file system is not reliable.
    """
    check_filesystem(path, unsafe_filesystem)
    try:
        if not os.path.isdir(path):
            if os.path.islink(path) and not os.path.exists(path):
                raise InvalidArgument(
                    f"{path} is a link to {os.readlink(path)!r}, where nothing is: make that directory, remove the "
                    "link, or open another path"
                )
            if os.path.lexists(path):
                raise InvalidArgument(f"{path} is not a directory: move it away, or open another path")
            make_place(files, path, "the spool")
        names = _names(path, files)
        foreign = sorted(names - _OURS)
        if foreign and not _LOGS & names:
            raise InvalidArgument(
                f"{path} is not a spool and not empty (it holds {foreign[0]!r}): open an empty or a new directory"
            )
        files.overwrite_in_place(path)
        lock = acquire_lock(path)
        try:
            check_log(path, _names(path, files))
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise storage_error(error, "make the spool", path) from error
    return lock


def _names(path: str, files: Files) -> set[str]:
    return set(files.list(os.path.join(path, "")))  # which may be a link, as only what is in it may not


def check_log(path: str, names: set[str]) -> None:
    """Refuse a spool with these names in it whose log is gone: it would begin anew. Raises CorruptionError."""
    left = sorted(names & _OF_A_LOG)
    if left and not _LOGS & names:
        raise CorruptionError(
            f"{path} was a spool (it holds {left[0]!r}), and its log is gone: restore it from a snapshot, or move "
            f"{path} away. It was left as it is"
        )
