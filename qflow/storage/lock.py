"""The ownership of a spool: the lock that its owner holds, who that is, and where its directory lies meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time

from qflow.descriptors import occupy_standard
from qflow.errors import SpoolInUse
from qflow.storage.files import FILE_MODE, FULL, READ, storage_error

LOCK_NAME = "lock"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""Open a spool, which may be reached by a symbolic link; nothing inside may."""
_PID_BYTES = 32
_PID_LINE = b"%-31d\n"
"""Earlier versions read so many bytes, as a number."""
_LOCK_TRIES = 10
_LOCK_PAUSE_S = 0.01


class Place:
    """Where a spool lies, which its owner may find elsewhere: somebody may move it while it is open."""

    def __init__(self, path: str, fd: int = -1) -> None:
        """`fd`: the directory, open; without it, it is taken not to move."""
        self.path = path
        self._fd = fd

    @classmethod
    def of(cls, spool: str | Place) -> Place:
        """Return the place of a spool that may move, or that of a path."""
        return spool if isinstance(spool, Place) else cls(os.path.abspath(spool))

    def forget(self) -> None:
        """Take it not to move from here on: the descriptor will be that of something else."""
        self._fd = -1

    @property
    def is_here(self) -> bool:
        """It lies at the path. Cost: 3 µs."""
        try:
            return self._fd < 0 or os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return False

    @property
    def is_removed(self) -> bool:
        """The directory has no name any more. Cost: 1 µs."""
        try:
            return self._fd >= 0 and not os.fstat(self._fd).st_nlink
        except OSError:  # a signal handler has closed it
            return False

    def follow(self) -> None:
        """Note where it lies now, unless it was removed, or the system does not tell. Thread-safe. Cost: 3 µs."""
        if self.is_here:
            return
        with contextlib.suppress(OSError):
            found = _path_of(self._fd)
            if os.path.samestat(os.stat(found), os.fstat(self._fd)):
                self.path = found

    def has_left(self, path: str) -> bool:
        """Tell whether it lies elsewhere than at a path, where somebody has just looked: another thread may follow."""
        self.follow()
        return self.path != path


def _path_of(fd: int) -> str:
    """Return where an open directory lies, as the system tells. Raises OSError."""
    return os.readlink(f"/proc/self/fd/{fd}")


class SpoolLock:
    """The ownership of a spool, held until `release` or the end of the process."""

    def __init__(self, spool: str, directory_fd: int, file_fd: int) -> None:
        self.place = Place(spool, directory_fd)
        self._fds = [directory_fd, file_fd]

    def release(self) -> None:
        """Give the spool up; a second call does nothing. Unlocks first: a forked child may share the descriptors."""
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close the descriptors: those of a forked child are copies, and the parent goes on owning the spool."""
        self.place.forget()
        fds, self._fds = self._fds, []
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def acquire_lock(spool_path: str | os.PathLike[str], what: str = "lock the spool") -> SpoolLock:
    """Become the owner of a spool, whose directory exists.

    Two locks are taken: one on the directory itself, which nobody can delete and make anew under the owner, and one on
    the file `lock` inside, which names the owner for people and for `owner_pid`.

    Args:
        what: the attempt, as it reads after "cannot".

    Raises:
        SpoolInUse: another process, or this one, owns it.
        StorageError: the directory or the lock file cannot be used.

    Cost: about ten system calls; up to 0.1 s when the spool is in use, since a passing `owner_pid` also locks briefly.
    """
    occupy_standard()
    spool = os.fspath(spool_path)
    descriptors: list[int] = []
    try:
        descriptors.append(os.open(spool, _DIRECTORY))
        _lock(descriptors[0], spool)
        descriptors.append(_locked_file(spool))
        _name_owner(descriptors[1])
    except BaseException as error:
        for fd in descriptors:
            os.close(fd)
        if isinstance(error, OSError):
            raise storage_error(error, what, os.path.join(spool, LOCK_NAME)) from error
        raise
    return SpoolLock(spool, *descriptors)


def _name_owner(fd: int) -> None:
    """Write into the lock file who has it; nobody, where the disk is full: that is no reason not to own the spool.

    What is there is written over, and not cut off before: somebody else would have its room at once.
    """
    line = _PID_LINE % os.getpid() + f"{_numbering()}\n".encode()
    try:
        os.ftruncate(fd, os.pwrite(fd, line, 0))
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.ftruncate(fd, 0)  # of an owner before


def check_lock_file(spool: str) -> None:
    """Raise what `acquire_lock` would of what stands in the place of the lock file; that of another user is one."""
    path = os.path.join(spool, LOCK_NAME)
    try:
        if os.statvfs(spool).f_flag & os.ST_RDONLY:  # also where there is no lock file yet
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        os.close(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM):
            raise storage_error(error, "lock the spool", path) from error


def _locked_file(spool: str) -> int:
    """Open and lock the lock file; begin again if it was replaced between the two."""
    path = os.path.join(spool, LOCK_NAME)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
        try:
            _lock(fd, spool)
            if _is_at(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, spool: str) -> None:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
    pid, is_known = _written(spool)
    owner = process_in_words(pid)
    if not is_known:
        owner += " of another container (pid namespace)"
    elif pid == os.getpid():
        owner = f"this process ({pid})"
    elif pid and pid == os.getppid():  # as that of a reloader, or a server's master, which loads the same program
        owner += ", which has started this one"
    raise SpoolInUse(
        f"the spool {spool} is in use by {owner}: use it from here with qflow.connect, close it there first, or open "
        "another directory"
    )


def _is_at(fd: int, path: str) -> bool:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _numbering() -> str:
    """Return the pid namespace of this process, empty where there is no telling: pids of another are others."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _written(spool: str) -> tuple[int, bool]:
    """Return the pid in the lock file, 0 if there is none, and whether it is not of another pid namespace."""
    try:
        fd = os.open(os.path.join(spool, LOCK_NAME), READ)
    except OSError:
        return 0, True
    try:
        text = os.read(fd, 128)
        pid, numbering = int(text[:_PID_BYTES]), text[_PID_BYTES:].decode().strip()
        own = _numbering()
        return pid, numbering in ("", own) or not own
    except (OSError, ValueError):
        return 0, True
    finally:
        os.close(fd)


def process_in_words(pid: int) -> str:
    """Name a process, which is 0 if it is not known."""
    return f"process {pid}" if pid else "another process"


def owner_pid(spool_path: str | os.PathLike[str]) -> int | None:
    """Return the pid of the process that owns a spool, None if nobody does, 0 if it is not known here.

    It is not known where the lock file does not tell it, and in another container: its pid there is another's here.

    Asks with shared locks that are given back at once and writes nothing; `acquire_lock` waits such a moment out.
    """
    spool = os.fspath(spool_path)
    for path, flags in ((spool, _DIRECTORY), (os.path.join(spool, LOCK_NAME), READ)):
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise storage_error(error, "look at the lock of the spool", path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, is_known = _written(spool)
            return pid if is_known else 0
        finally:
            os.close(fd)  # gives the shared lock back, too
    return None


def lock_holders(path: str) -> list[int]:
    """Return the processes that hold a POSIX lock on a file, as far as the system tells."""
    try:
        found = os.stat(path)
        with open("/proc/locks", "rb") as file:
            lines = file.read().decode().splitlines()
    except OSError:
        return []
    # number: POSIX ADVISORY WRITE pid major:minor:inode start end
    where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    columns = map(str.split, lines)
    pids = {int(one[4]) for one in columns if len(one) == 8 and one[1] == "POSIX" and one[5] == where}
    return sorted(pid for pid in pids if pid > 0)  # 0: in a container of its own


def holders_in_words(path: str) -> str:
    """Name the processes that hold a POSIX lock on a file, as far as the system tells."""
    pids = lock_holders(path)
    if not pids:
        return "other processes"
    return f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
