"""The LMDB environment under the log: the only room that knows LMDB.

Creation: everything is made and synced in `log.new/`, then renamed to `log/`, then the parent is synced; a crash leaves
either no log or a whole one. A `log/` that cannot be opened is never deleted. What copies a log, and how a copy takes
its place, is in `snapshots`.

Facts this rests on (py-lmdb 3): two engines in one wheel with formats that exclude each other, so the engine is named
and asserted; only the default mode (no `writemap`, `map_async`, `sync=False`, `metasync=False`) keeps what it promised
through a power cut; a full disk shows up as an I/O error at commit, after which nobody knows, so room is made before.

Where the disk is full, the map ends where the file does (`confine`): LMDB then uses free pages of the file, and raises
MapFull, before anything is written, where those do not suffice. That is exact where any estimate would be a guess.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lmdb

from qflow.descriptors import close_on_exec, is_standard, occupy_standard
from qflow.errors import BrokerFailed, CorruptionError, DiskFull, QflowError, StorageError
from qflow.storage import forks
from qflow.storage.encoding import Sections
from qflow.storage.files import CREATE, FILE_MODE, FULL, OVERWRITE, Files, open_anew, remedy_in, storage_error
from qflow.storage.joining import Value, join
from qflow.storage.last_commit import LastCommit, look
from qflow.storage.lock import Place, holders_in_words
from qflow.storage.log.directory import DATA, LAST, LOCK, make_reader_table, put_in_place, staging
from qflow.storage.log.parts import PAGES_ANYWAY
from qflow.storage.pacing import write_paced

ENGINE = 0
"""LMDB 0.9.x, data format 1."""
MAP_BYTES = 2**40
LEAST_MAP_BYTES = 2**24
READERS = 4096
"""Read transactions at once, of all processes together; each slot is 64 bytes of `lock.mdb`."""
RESERVE_BYTES = 512 * 1024
"""Kept free in the file, at the least, for transactions that only settle."""
MARKING_BYTES = 32
"""And so much for each message: settled out of order, every other one of them takes a mark."""
LEAST_BYTES = 128 * 1024
"""Those leave so much of it where the map has no end: enough to go on with in parts."""
STEP_BYTES = 4 * 2**20
"""The file grows by so much at a time, where the disk has it."""
_PAGES_TOUCHED = 64
"""Copied for any transaction: a path of the tree for each place written, and the list of free pages."""
_VALUES_A_PAGE = 4
"""Small ones, side by side, on pages that were split."""

MapFull = lmdb.MapFullError
LmdbError = lmdb.Error
BROKEN = lmdb.Error, SystemError, IndexError
"""What a transaction may raise besides errors of ours; see `log_error`."""
DAMAGE = (
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.CursorFullError,
    lmdb.PageFullError,
    lmdb.BadTxnError,
    lmdb.BadValsizeError,
    lmdb.IncompatibleError,
    SystemError,
    IndexError,
)
"""What comes of pages that are not what LMDB wrote; they have no checksum, so it may say nothing, or crash.

SystemError: its binding finds an error where it looks for none. IndexError: a key of ours is too short.
"""


def log_error(error: BaseException, path: str, what: str) -> QflowError:
    """Return the error to raise for one of LMDB: of an earlier commit, of the bytes, of the disk, or of the system.

    Args:
        what: the attempt, as it reads after "could not be": "read".
    """
    text = str(error).rstrip(".") or type(error).__name__
    if isinstance(error, lmdb.PanicError):
        return BrokerFailed(f"a write to the log {path} failed earlier; close the broker and open the spool again")
    if isinstance(error, DAMAGE) or os.strerror(errno.EFAULT) in text:  # a page's number leads out of the map
        return CorruptionError(
            f"pages of the log {path} are damaged, it could not be {what}: {text}; what lies on other pages can be "
            "read (`qflow show` gives single messages), and a snapshot from before brings the rest back"
        )
    if isinstance(error, lmdb.ReadersFullError):
        return StorageError(
            f"the log {path} could not be {what}: {READERS} reads are under way in "
            f"{holders_in_words(os.path.join(path, LOCK))}: end some of them"
        )
    for number in (*FULL, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EACCES):
        if os.strerror(number) in text:
            return storage_error(OSError(number, text), f"have the log {what}", path)
    return StorageError(f"the log {path} could not be {what}: {text}{remedy_in(text)}")


@contextmanager
def log_errors(path: str, what: str) -> Iterator[None]:
    """Raise an error of LMDB as one of ours; see `log_error`."""
    try:
        yield
    except BROKEN as error:
        raise log_error(error, path, what) from error


class CannotGrow(DiskFull):
    """The disk has no room for the file to grow; perhaps there is enough in it."""


def _open(path: str, *, read_only: bool = False, readahead: bool = False) -> lmdb.Environment:
    size = MAP_BYTES
    while True:
        try:
            env = lmdb.open(
                os.fsencode(path),
                map_size=size,
                max_dbs=0,
                mode=0o700,
                create=False,
                readonly=read_only,
                readahead=readahead,
                max_readers=READERS,
                max_spare_txns=0 if read_only else 1,  # a spare one keeps its slot: many readers are idle for long
                lib_version=ENGINE,
            )
            break
        except (lmdb.MemoryError, lmdb.InvalidParameterError) as error:  # an address-space limit
            if size <= LEAST_MAP_BYTES:
                raise StorageError(
                    f"the log at {path} could not be mapped: {error}; raise the address-space limit"
                ) from error
            size //= 2
        except lmdb.Error as error:
            if "Cannot allocate memory" in str(error) and size > LEAST_MAP_BYTES:
                size //= 2
                continue
            if "already open in this process" in str(error):
                raise forks.open_already(path, os.stat(os.path.join(path, DATA))) from error
            if isinstance(error, DAMAGE):
                raise CorruptionError(
                    f"the log at {path} could not be opened: {str(error).rstrip('.')}: restore it from a snapshot, or "
                    "move it away. It was left as it is"
                ) from error
            raise log_error(error, path, "opened") from error
    close_on_exec(os.path.join(path, DATA))
    if env.lib_version()[0] != ENGINE:
        env.close()
        raise StorageError(f"the log at {path} was opened by LMDB {env.lib_version()}, expected {ENGINE}.x")
    return env


class Environment:
    """The log's store of keys and values. One write transaction at a time, by the writer."""

    def __init__(self, path: str, files: Files, *, read_only: bool = False, readahead: bool = False) -> None:
        """Open a log; `readahead` is for whoever reads much of it: 10 times the speed where it is not in memory.

        Its owner always does: nothing of it is in memory when it is opened, see `open_anew`.
        """
        directory, self._name = os.path.split(path)
        self.place = Place(directory)
        """Of the spool."""
        self._files = files
        self._data_fd = -1
        self._last: LastCommit | None
        self.problems: list[str]
        """What was found wrong with it when it was opened, in words."""
        self._allocated = 0  # so much of the file has its space on the disk, as far as is known
        self.seen: Callable[[Any], Any] = lambda txn: txn
        """What a transaction that reads is given out as, see `overlay`; None: another one is needed."""
        self.messages = 0
        """How many there are to be settled; for whoever commits to tell."""
        self.confined = False
        """The map ends where the file does: MapFull says that the disk is full."""
        while True:
            occupy_standard()
            with ExitStack() as undo:
                self._open(path, undo, read_only=read_only, readahead=readahead or not read_only)
                if not any(is_standard(os.path.join(path, name)) for name in (DATA, LOCK, LAST)):
                    forks.note(self)
                    undo.pop_all()
                    return  # else a file of another thread had it until a moment ago

    def _open(self, path: str, undo: ExitStack, *, read_only: bool, readahead: bool) -> None:
        """Open the files of a log; `undo` closes them."""
        if not read_only:
            self._data_fd = open_anew(self._files, os.path.join(path, DATA))
            undo.callback(os.close, self._data_fd)
            self._allocated = self._files.allocated(self._data_fd)
            self._last = LastCommit(path, self._data_fd, self._files)
            undo.callback(self._last.close)
            self.problems = self._last.put_right()
            forks.check_not_open(path, os.fstat(self._data_fd))
            make_reader_table(path, self._files, READERS)
        else:
            self._last, self.problems = None, look(path, self._files)
        self._env = _open(path, read_only=read_only, readahead=readahead)
        undo.callback(self._env.close)
        self._map_bytes: int = self._env.info()["map_size"]
        self._env.reader_check()
        self._page_bytes: int = self._env.stat()["psize"]
        self._check_length()

    @property
    def path(self) -> str:
        return os.path.join(self.place.path, self._name)

    def join(self, sections: Sections) -> Value:
        return join(self._files, self.path, sections)

    def _check_length(self) -> None:
        """Refuse a file that was cut short: reading a map beyond its end would kill the process."""
        self.file = self.status()
        size, needed = self.file.st_size, (self._env.info()["last_pgno"] + 1) * self._page_bytes
        if size < needed:
            text = f"{os.path.join(self.path, DATA)} has {size} bytes, its log needs {needed}: it was cut short"
            raise CorruptionError(f"{text}: restore it from a snapshot")

    @classmethod
    def create(cls, spool: str, files: Files, first: dict[bytes, bytes]) -> None:
        """Make an empty log with the pairs of `first` in it; either it is there, whole and synced, or it is not."""
        put_pairs(staging(spool, files), first)
        put_in_place(spool, files)

    def begin(self, *, write: bool = False, buffers: bool = False) -> Any:
        """Begin a transaction; reads are of one moment and must be short, for they pin pages."""
        try:
            return self._env.begin(write=write, buffers=True) if buffers else self._env.begin(write=write)
        except lmdb.MapResizedError:  # another process, the owner, needed more than is mapped here
            try:
                self._env.set_mapsize(0)  # as large as it says
            except (lmdb.Error, OSError) as error:
                raise StorageError(
                    f"the log at {self.path} has grown, and could not be mapped as a whole: {error}; raise the "
                    "address-space limit"
                ) from error
        except lmdb.ReadersFullError as error:
            if not self._env.reader_check():
                raise log_error(error, self.path, "read") from error
        return self.begin(write=write, buffers=buffers)

    @contextmanager
    def reading(self, *, buffers: bool = False) -> Iterator[Any]:
        """Give a transaction that reads one moment, and ends with the context.

        Raises:
            BrokerFailed: a write failed earlier. CorruptionError: pages are not what was written. StorageError.
        """
        with log_errors(self.path, "read"):
            while True:
                txn = self.begin(buffers=buffers)
                try:
                    if (seen := self.seen(txn)) is not None:
                        yield seen
                        return
                finally:
                    txn.abort()

    def catch_up(self) -> None:
        """See the last commit that is on the disk: for an owner, before anything is read.

        Reads follow a number in the lock file, which is made anew only where no other process has it open. An owner
        that is killed in the last step of a commit leaves it one behind, and what that commit confirmed unseen; to be
        written over. The first transaction that writes, this one, puts the number right.
        """
        with log_errors(self.path, "opened"):
            self._env.begin(write=True).abort()

    def commit(self, txn: Any) -> None:
        """Commit and sync."""
        txn.commit()

    def keep_last(self) -> None:
        """Keep a copy of what was committed last, to be compared at the next opening. Between two transactions."""
        if self._last is not None:
            self._last.keep(self._page_bytes)

    def last_transaction(self) -> int:
        """Return the number of the last commit."""
        return int(self._env.info()["last_txnid"])

    def make_room(self, value_bytes: int, values: int, *, settles_only: bool, step_bytes: int = STEP_BYTES) -> None:
        """Make sure that a transaction writing so much finds the disk it needs.

        Raises:
            CannotGrow: it would not; nothing was begun. Transactions that only settle may use a reserve. See `confine`.
        Cost: one system call for each `step_bytes` the file grows.
        """
        last_page: int = self._env.info()["last_pgno"]
        needed = (last_page + 1) * self._page_bytes + self._touched(value_bytes, values)
        wanted = needed + (LEAST_BYTES if settles_only else self._reserve())
        if wanted > self._allocated:
            for size in (wanted + step_bytes, wanted):
                try:
                    self._allocate(size)
                    break
                except OSError as error:
                    if size == wanted:
                        full = storage_error(error, "make room in the log for a transaction", self.path)
                        raise (CannotGrow(str(full)) if isinstance(full, DiskFull) else full) from error
        self.confined = False  # a map that still ends too early is grown when that is found

    def _allocate(self, size: int) -> None:
        """Have space on the disk for so much of the file. Raises OSError."""
        self._files.allocate_rest(self._data_fd, size, self._allocated)
        self._allocated = size

    def _touched(self, value_bytes: int, values: int) -> int:
        pages = 2 * values
        if pages > _PAGES_TOUCHED:  # no more than there are, and what comes: of many values, those side by side share
            tree = self._env.stat()
            pages = min(pages, tree["branch_pages"] + tree["leaf_pages"] + values // _VALUES_A_PAGE)
        return (_PAGES_TOUCHED + pages) * self._page_bytes + value_bytes

    def _reserve(self) -> int:
        return max(RESERVE_BYTES, MARKING_BYTES * self.messages)

    def confine(self, value_bytes: int, values: int, *, settles_only: bool) -> int:
        """Have the next transaction use what is free in the file, and nothing beyond: the disk is full.

        One that only settles may use all of it, any other leaves the reserve. Nobody reads meanwhile.

        Returns:
            how many pages are free, those included that readers or the last commit pin; 0 if the reserve would be hurt.
        """
        if not self._allocated:  # there were holes when it was opened, and nobody has asked for more since
            try:
                self._allocate(self.size_bytes())
            except OSError as error:
                raise storage_error(error, "use the log where the disk is full", self.path) from error
        page = self._page_bytes
        free = (self._allocated - self.used_bytes()) // page
        end = self._allocated
        if not settles_only:
            reserve = self._reserve()
            if free * page < 2 * (value_bytes + (PAGES_ANYWAY + 2 * values) * page) + reserve:
                return 0
            end -= reserve
        end = max(end, (self._env.info()["last_pgno"] + 1) * page)
        if self._env.info()["map_size"] != end:
            self._env.set_mapsize(end)
        self.confined = True
        return max(free, 1)

    @property
    def ends_early(self) -> bool:
        """The map ends with the file, or did so once, and was not made longer since."""
        return bool(self._env.info()["map_size"] < self._map_bytes)

    def grow_map(self) -> None:
        """Double the map, or end its confinement, with no transaction open: the slow path of an address-space limit."""
        if self._env.info()["map_size"] >= self._map_bytes:
            self._map_bytes *= 2
        self._env.set_mapsize(self._map_bytes)

    def status(self) -> os.stat_result:
        """Return what the system knows of the file."""
        return os.stat(os.path.join(self.path, DATA) if self._data_fd < 0 else self._data_fd)

    def size_bytes(self) -> int:
        """Return the length of the file."""
        return self.status().st_size

    def used_bytes(self) -> int:
        """Return as many bytes of the file as hold something; what pages of old it keeps for reuse does not count."""
        tree = self._env.stat()
        return self._page_bytes * (2 + tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"])

    def readers(self) -> str:
        """Return the reads that are under way, of all processes, as LMDB tells them: process, thread, transaction."""
        return str(self._env.readers())

    def forget_dead_readers(self) -> int:
        """Give back the pages that killed processes pin, which had begun to read; return how many processes."""
        return int(self._env.reader_check())

    def copy_to(self, directory: str | None) -> None:
        """Write what is committed at this moment into an empty directory, without free pages; the end is not synced.

        Without a directory it is only read: every page, those too that say which are free, and that nothing else reads.

        Commits and reads go on; their pages are pinned. Other threads run, but an interrupt of this one comes after it.

        Raises:
            DiskFull, StorageError: the copy could not be written; a part of it may be there.
            CorruptionError: pages of this log are damaged; as above.
        """
        data, flags = (os.devnull, OVERWRITE) if directory is None else (os.path.join(directory, DATA), CREATE)
        try:
            fd = self._files.open(data, flags, FILE_MODE)
            try:
                copy = partial(self._env.copyfd, compact=True)
                copy(fd) if directory is None else write_paced(self._files, fd, copy)
            finally:
                self._files.close(fd)
            if directory is not None:
                make_reader_table(directory, self._files, READERS)
        except OSError as error:
            raise storage_error(error, "write a copy of the log", data) from error
        except (*DAMAGE, lmdb.Error) as error:
            ours = log_error(error, self.path, "copied")
            is_of_copy = directory is not None and not isinstance(ours, BrokerFailed | CorruptionError)
            raise full_or_failed(error, data) if is_of_copy else ours from error

    def exchange(self, other: Environment) -> None:
        """Go on with what another environment has open, and it with what this one had; no transaction is open."""
        mine = self._env, self._data_fd, self._last, self._allocated, self._map_bytes, self.file
        theirs = other._env, other._data_fd, other._last, other._allocated, other._map_bytes, other.file
        self._env, self._data_fd, self._last, self._allocated, self._map_bytes, self.file = theirs
        other._env, other._data_fd, other._last, other._allocated, other._map_bytes, other.file = mine
        self.confined = other.confined = False
        other.messages = self.messages  # no call in here: an interrupt finds all or nothing

    def close(self) -> None:
        forks.forget(self)
        self._env.close()
        if self._last is not None:
            self._last.close()
        if self._data_fd >= 0:
            os.close(self._data_fd)
            self._data_fd = -1


def put_pairs(directory: str, pairs: dict[bytes, bytes]) -> None:
    """Write some pairs into a log that nobody uses yet, or begin it with them."""
    make_reader_table(directory, Files(), READERS)
    env = _open(directory)
    try:
        with env.begin(write=True) as txn:
            for key, value in pairs.items():
                txn.put(key, value)
        env.sync(True)
    except lmdb.Error as error:
        raise full_or_failed(error, directory) from error
    finally:
        env.close()


def full_or_failed(error: Exception, path: str) -> StorageError:
    if any(os.strerror(number) in str(error) for number in (*FULL, errno.EIO)):
        return DiskFull(f"there is no room for a new log at {path}: free some space and try again ({error})")
    return StorageError(f"a new log at {path} could not be written: {error}{remedy_in(str(error))}")
