"""The one room that touches the file system: `Files`, and the check of the file system of a spool.

Everything that spill, lock, staging and statistics do to files goes through a `Files`, so a test can hand in a subclass
whose next operation fails (ENOSPC, EIO, EMFILE, EROFS…). Rules:

- Methods raise plain `OSError`; the caller, who knows what it was doing, makes a sentence of it with `storage_error`.
- The first group is what a spill file needs per message. They are the functions of `os` themselves, so a caller may
  keep them in locals and pay nothing for the seam; a faulty subclass overrides them by name.
- Directories are made 0700, files 0600, and a symbolic link is never followed in the last part of a path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator

from qflow.descriptors import EXHAUSTED, REMEDIES
from qflow.errors import NO_MORE_THREADS, DiskFull, PermissionDenied, StorageError

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Open a file that must not exist yet."""
OVERWRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Open a file that exists, without truncating it; O_NONBLOCK so that a planted FIFO is an error and not a wait."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
READ_OWN = READ | os.O_NOATIME
"""Read a file of ours without a note of it in the inode: 0.9 µs of 4.7 for 1 KiB. Who does not own it gets EPERM."""

UNNAMED = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
"""Open a file without a name, in the directory that is given: it is gone when nobody has it open, or mapped."""

UNHARMED = EXHAUSTED | {errno.EACCES, errno.EPERM}
"""What opening a file to read it says when nothing is wrong with what it holds: it can be read another time."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""There is no room."""
NO_FAULT_OF_THE_FILE = EXHAUSTED | {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Another file would fail to be written with these, too."""

_STAT_BLOCK = 512  # bytes, whatever the file system has
_ALLOCATED_AT_ONCE = 4 * 2**20
_GET_FLAGS, _SET_FLAGS, _NOCOW = 0x80086601, 0x40086602, 0x00800000  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NOCOW_FL
_POPULATE_READ = 22  # MADV_POPULATE_READ, which `mmap` does not name

_NETWORK = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"}
    | {"nfs4", "ocfs2", "orangefs", "smb3", "smbfs", "virtiofs"}
)
_KINDS: dict[int, type[StorageError]] = {
    **dict.fromkeys(FULL, DiskFull),
    errno.EACCES: PermissionDenied,
    errno.EPERM: PermissionDenied,
}
_REMEDIES = {
    errno.ENOSPC: "free some space on that file system (`df -h` and `df -i` show what is short) and try again",
    errno.EDQUOT: "free some space or raise the disk quota of this user, and try again",
    errno.EFBIG: "no file may be larger: raise `ulimit -f`, or `LimitFSIZE=` of the unit of systemd, and start anew",
    **REMEDIES,
    errno.EROFS: "the file system is read-only (often after a disk error): look at `dmesg` and mount it for writing",
    errno.EIO: "the disk reported an error: look at `dmesg`, and move the spool to a healthy disk",
    errno.EACCES: "give this user read and write access to it",
    errno.EPERM: "give this user read and write access to it",
    errno.EFAULT: "it was cut short, or the disk failed: let nothing write inside a spool, and look at `dmesg`",
    errno.ENOENT: "it was removed from outside: let no cleaner work inside a spool",
    errno.ELOOP: "a symbolic link stands in its place: remove the link",
    errno.ENOTDIR: "a file stands where a directory should be: move it away",
    errno.EXDEV: "overlayfs moves no directory that came with an image: copy the spool to a volume, and use it there",
    errno.EBUSY: "a file system that is mounted there, or below it, cannot be moved: mount one for all of the spool",
    errno.EEXIST: "something else stands in its place: move it away",
}


def storage_error(error: OSError, what: str, path: str | os.PathLike[str]) -> StorageError:
    """Return the `StorageError` for a failed operation: `DiskFull`, `PermissionDenied`, or one of no kind.

    Args:
        error: what the operating system said.
        what: the attempt, as it reads after "cannot": "write a spill file".
        path: the file or directory it was about.
    """
    kind = _KINDS.get(error.errno or 0, StorageError)
    remedy = _REMEDIES.get(error.errno or 0, "look at that path and the system's log, then try again")
    return kind(f"cannot {what} ({os.fspath(path)}): {error.strerror or error}; {remedy}")


def remedy_in(text: str) -> str:
    """Return what to do where LMDB lacks memory, or a thread, which it says in words only; else nothing."""
    if os.strerror(errno.EAGAIN) in text:
        return f"; {NO_MORE_THREADS}"
    return f"; {REMEDIES[errno.ENOMEM]}" if os.strerror(errno.ENOMEM) in text else ""


class Files:
    """The file operations of the engine; subclass it to make one fail. Cost: that of the system call."""

    # Per message: the functions of `os` themselves.
    open: Callable[[str, int, int], int] = staticmethod(os.open)
    close: Callable[[int], None] = staticmethod(os.close)
    read: Callable[[int, int], bytes] = staticmethod(os.read)
    pwrite: Callable[[int, bytes, int], int] = staticmethod(os.pwrite)
    preadv: Callable[[int, list[memoryview], int], int] = staticmethod(os.preadv)
    pread: Callable[[int, int, int], bytes] = staticmethod(os.pread)
    pwritev: Callable[[int, list[bytes], int], int] = staticmethod(os.pwritev)
    lseek: Callable[[int, int, int], int] = staticmethod(os.lseek)
    ftruncate: Callable[[int, int], None] = staticmethod(os.ftruncate)
    unlink: Callable[[str], None] = staticmethod(os.unlink)
    sync_data: Callable[[int], None] = staticmethod(os.fdatasync)

    def lstat(self, path: str) -> os.stat_result:
        """Return the status of a path; a link is not followed."""
        return os.lstat(path)

    def exists(self, path: str) -> bool:
        """Tell whether anything, a dangling link included, is at this path."""
        return os.path.lexists(path)

    def make_directory(self, path: str) -> None:
        """Create a directory, mode 0700; its parent must exist."""
        os.mkdir(path, DIRECTORY_MODE)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def rename(self, old: str, new: str) -> None:
        """Rename a file or directory; an existing file or empty directory at `new` is replaced."""
        os.rename(old, new)

    def list(self, path: str) -> list[str]:
        """Return the names in a directory; a link to one is an error. Cost: O(names)."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def scan(self, path: str) -> Iterator[os.DirEntry[str]]:
        """Yield the entries of a directory without holding them all; closing the iterator closes the directory."""
        with os.scandir(path) as entries:
            yield from entries

    def divert(self, fd: int) -> None:
        """Have what is written to an open file from now on go nowhere."""
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(nowhere, fd, inheritable=False)
        os.close(nowhere)

    def allocate(self, fd: int, size: int, start: int = 0) -> None:
        """Reserve disk space for the bytes of an open file from `start` up to `size`, growing it if it is shorter."""
        os.posix_fallocate(fd, start, size - start)

    def allocate_rest(self, fd: int, size: int, start: int) -> None:
        """`allocate`, in pieces: XFS refuses one where less than it is free, though the file has all of it already."""
        for begin in range(start, size, _ALLOCATED_AT_ONCE):
            self.allocate(fd, min(size, begin + _ALLOCATED_AT_ONCE), begin)

    def allocated(self, fd: int) -> int:
        """Return the length of an open file if it has disk space for all of it; 0 if it has holes, as copies may."""
        status = self.status(fd)
        return status.st_size if space_of(status) >= status.st_size else 0

    def status(self, fd: int) -> os.stat_result:
        """Return the status of an open file."""
        return os.fstat(fd)

    def map(self, fd: int, size: int) -> mmap.mmap:
        """Map the first `size` bytes of an open file for reading; the file is at least that long."""
        return mmap.mmap(fd, size, access=mmap.ACCESS_READ)

    def bring_in(self, mapped: mmap.mmap, start: int, stop: int) -> None:
        """Have these bytes of a map in memory, or raise OSError where touching them would kill the process (SIGBUS).

        That is where the file was cut short, or the disk fails to read. Kernels before 5.14 cannot tell the second.
        Cost: 2 µs, and 0.05 µs a KiB.
        """
        start -= start % mmap.PAGESIZE
        try:
            mapped.madvise(_POPULATE_READ, start, stop - start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            if mapped.size() < stop:
                raise OSError(errno.EFAULT, "the file was cut short") from None

    def forget_cached(self, fd: int) -> None:
        """Have a file read from the disk anew, as far as nothing of it waits to be written or is mapped."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def cache_by_pages(self, fd: int) -> None:
        """Have a file that is on the disk in memory page by page, whatever the pieces that it was written in.

        Some kernels keep it in those pieces, and count a whole one for each small write. Advice: nothing if it fails.
        """
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)

    def overwrite_in_place(self, directory: str) -> None:
        """Have files that are made in a directory from now on, and below, overwritten in place; advice, for Btrfs.

        Else whatever is written there takes new blocks: on a full disk nothing can be settled, and who writes to a map
        of a file is killed (SIGBUS). Btrfs keeps no checksums of such files. Other file systems refuse the flag.
        """
        with contextlib.suppress(OSError):
            fd = os.open(directory, DIRECTORY)
            try:
                flags = int.from_bytes(fcntl.ioctl(fd, _GET_FLAGS, bytes(4)), sys.byteorder)
                fcntl.ioctl(fd, _SET_FLAGS, (flags | _NOCOW).to_bytes(4, sys.byteorder))
            finally:
                os.close(fd)

    def sync_file(self, path: str) -> None:
        """Force a file's content to the disk. One sync."""
        self._sync(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def sync_directory(self, path: str) -> None:
        """Force a directory's entries to the disk. One sync."""
        self._sync(path, DIRECTORY)

    def sync_opened(self, directory: int) -> None:
        """Force a directory's entries to the disk that is open: no descriptor is needed any more. One sync."""
        os.fsync(directory)

    def _sync(self, path: str, flags: int) -> None:
        fd = os.open(path, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write_replacing(self, path: str, data: bytes) -> None:
        """Replace a small file in one step: readers see the old or the new content. Nothing is synced."""
        staged = path + ".new"
        fd = create_anew(self, staged)
        try:
            try:
                write_all(self, fd, data, 0)
            finally:
                os.close(fd)
            self.rename(staged, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(staged)
            raise


def space_of(status: os.stat_result) -> int:
    """Return how many bytes of the disk a file takes."""
    return status.st_blocks * _STAT_BLOCK


def write_all(files: Files, fd: int, data: bytes | memoryview, position: int) -> int:
    """Write all of `data` at `position`, however often the system stops short; return the position after it."""
    rest = memoryview(data)
    while rest:
        written = files.pwrite(fd, rest, position)  # type: ignore[arg-type]
        position += written
        rest = rest[written:]
    return position


def create_anew(files: Files, path: str) -> int:
    """Open a file for writing in place of what a crash left there, or somebody planted; a link is not followed."""
    try:
        return files.open(path, CREATE, FILE_MODE)
    except FileExistsError:
        files.unlink(path)
        return files.open(path, CREATE, FILE_MODE)


def read_from(files: Files, fd: int, position: int, size: int) -> bytes:
    """Return so many bytes, or as many as there are; one system call reads 2 GiB at most."""
    data = files.pread(fd, size, position)
    while 0 < len(data) < size and (more := files.pread(fd, size - len(data), position + len(data))):
        data += more
    return data


def read_whole(files: Files, path: str) -> bytes:
    """Return what is in a small file; a link or a FIFO in its place is an error."""
    fd = files.open(path, READ, 0)
    try:
        return files.pread(fd, files.status(fd).st_size, 0)
    finally:
        files.close(fd)


def make_directories(files: Files, path: str) -> None:
    """Make a directory and those above it that are missing, each synced in its parent."""
    missing = [path]
    while not _is_directory(parent := os.path.dirname(missing[-1])):
        missing.append(parent)
    for one in reversed(missing):
        try:
            files.make_directory(one)
        except FileExistsError:
            continue
        files.sync_directory(os.path.dirname(one))


def _is_directory(path: str) -> bool:
    """Tell whether it is; raises OSError: nobody can tell, as its path is too long."""
    try:
        return stat.S_ISDIR(os.stat(path or os.curdir).st_mode)
    except FileNotFoundError:
        return False


def make_place(files: Files, path: str, what: str) -> None:
    """`make_directories` for something that somebody names, `what`: where there can be no directory, say so."""
    try:
        make_directories(files, path)
    except FileNotFoundError as error:
        parent = os.path.dirname(path)
        raise StorageError(
            f"cannot make {what} ({path}): no directory can be made in {parent}: name one on a disk"
        ) from error


def filesystem_type(path: str | os.PathLike[str], mounts: str = "/proc/self/mountinfo") -> str | None:
    """Return the type of the file system that holds `path`, which need not exist; None where mounts are not listed."""
    real = os.fsencode(os.path.realpath(path))
    try:
        with open(mounts, "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    best, found = b"", None
    for line in lines:
        # id parent device root MOUNT-POINT options… - TYPE source options
        fields, dash, rest = line.partition(b" - ")
        columns = fields.split(b" ")
        if not dash or len(columns) < 5:
            continue
        point = _unescape(columns[4])
        inside = real == point or real.startswith(point.rstrip(b"/") + b"/")
        if inside and len(point) >= len(best):  # of two mounts at one point the later one is on top
            best, found = point, rest.split(b" ")[0].decode()
    return found


def _unescape(point: bytes) -> bytes:
    """Undo the octal escapes of space, tab, newline and backslash."""
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), point) if b"\\" in point else point


def check_filesystem(path: str | os.PathLike[str], unsafe: bool = False, mounts: str = "/proc/self/mountinfo") -> None:
    """Refuse a spool on a network file system, where locks and mapped files cannot be relied on.

    Args:
        path: the spool; need not exist yet.
        unsafe: accept any file system.
        mounts: the list of mounts, in the format of /proc/self/mountinfo.

    Raises:
        StorageError: the file system is NFS, SMB, FUSE or the like.
    """
    kind = None if unsafe else filesystem_type(path, mounts)
    if kind is not None and (kind in _NETWORK or kind.startswith("fuse.")):
        raise StorageError(
            f"the spool {os.fspath(path)} is on a {kind} file system, where locks and mapped files are not reliable: "
            "use a local disk, or pass unsafe_filesystem=True if you know that it is safe"
        )


def open_anew(files: Files, path: str) -> int:
    """Return a descriptor of the file of a log, for its owner, and have the file read from the disk anew.

    A page whose write failed stays in memory as if it had been written, and later writes to it succeed without reaching
    the disk (ext4). So what is in memory is let go of before the file is mapped. What another process has mapped stays.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            files.forget_cached(fd)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise storage_error(error, "open the log", path) from error
    return fd
