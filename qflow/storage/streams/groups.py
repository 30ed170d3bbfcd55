"""How far groups of readers outside the broker have come: a directory each in `cursors/`, beside the log.

    cursors/<group>/lock            held while somebody reads as the group: its lease, which ends with the process
    cursors/<group>/offsets.json    where it has come to, now and some time ago
    cursors/<group>/token           the number of the last lease that its owner gave to a reader on another host

Readers have the log open for reading only, so what they acknowledge is kept here. Who owns the spool reads it, and has
retention keep what a group has not acknowledged, and what it acknowledged less than a grace time ago: the checkpoint
that says a batch is done may not be on the disk yet. A group that nobody has read as for its expiry time holds nothing;
one whose lease somebody has is read as.

The file is replaced as a whole, synced before that: a crash leaves the one of before, which holds more.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping

from xxhash import xxh3_64_hexdigest

from qflow.config import MAX_PARTITIONS
from qflow.errors import CorruptionError, GroupInUse, SpoolInUse, StorageError
from qflow.loggers import get_logger
from qflow.named_tuples import NamedTuple
from qflow.storage.files import READ, Files, create_anew, read_whole, storage_error, write_all
from qflow.storage.lock import Place, SpoolLock, acquire_lock, owner_pid, process_in_words

_logger = get_logger("qflow")

CURSORS = "cursors"
_FILE = "offsets.json"
_KEEP = "keep the offsets of a group"
_TOKEN = "token"
GRACE_S = 120.0
"""A checkpoint is on the disk by then: Linux writes what is not synced after 30 s, and its journal every 5."""
EXPIRY_S = 7 * 86_400.0
_KEPT = 32
"""Moments within the grace time that are remembered, at most."""
_SEEN_EVERY_S = 60.0
_LONGEST_NAME = 200

Offsets = dict[int, dict[int, int]]
"""By number of the stream and partition."""

_Moment = tuple[float, Offsets]


class _State(NamedTuple):
    """What is kept of a group."""

    uuid: str
    seen_s: float
    expiry_s: float
    grace_s: float
    history: list[_Moment]
    """Where it had come to, and when."""


def _directory(spool: str, group: str) -> str:
    from urllib.parse import quote  # here: few spools have groups of other processes

    name = quote(group, safe="")
    if len(name) > _LONGEST_NAME or name.startswith("."):
        name = name[:_LONGEST_NAME].lstrip(".") + "-" + xxh3_64_hexdigest(group.encode())
    return os.path.join(spool, CURSORS, name)


class Group:
    """A group, held by this process: its lease. Used by one thread at a time."""

    def __init__(
        self,
        spool: str,
        name: str,
        uuid: str,
        files: Files,
        *,
        expiry_s: float = EXPIRY_S,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take the lease.

        Args:
            uuid: of the log; what is known of a group of another log is forgotten.

        Raises:
            GroupInUse: another process has it. StorageError: the spool may not be written to.
        """
        self.name = name
        self._uuid = uuid
        self._files = files
        self._expiry_s, self._grace_s = expiry_s, grace_s
        self._clock = clock
        self._place = Place.of(_directory(spool, name))
        self._lock: SpoolLock | None = None
        try:
            for directory in (os.path.join(spool, CURSORS), self._directory):
                if not files.exists(directory):
                    _make(files, directory)
            self._lock = acquire_lock(self._directory, _KEEP)
            self._place = self._lock.place
            try:
                state = _read(self._directory)
            except BaseException:
                self.close()
                raise
        except SpoolInUse as error:
            pid = owner_pid(self._directory)
            raise GroupInUse(
                f"group {name!r} of the spool {spool} is in use by {process_in_words(pid or 0)}: "
                "stop the query that reads as this group, or give this one another group"
            ) from error
        except OSError as error:
            raise storage_error(error, _KEEP, self._directory) from error
        self._history = [] if state is None or state.uuid != uuid else state.history
        self._written_s = 0.0

    @property
    def _directory(self) -> str:
        """Where it lies now: the spool may be moved."""
        self._place.follow()
        return self._place.path

    def committed(self) -> Offsets:
        """Return where the group has come to; streams it has never read are missing."""
        return dict(self._history[-1][1]) if self._history else {}

    def acknowledge(self, offsets: Mapping[int, Mapping[int, int]]) -> None:
        """Keep that everything below these offsets is done. Costs two syncs where they are new, else nothing.

        A stream that is new to the group counts as being there all the time: nothing above was done before.
        """
        now = self._clock()
        done = {owner: dict(parts) for owner, parts in offsets.items()}
        if not self._history or self._history[-1][1] != done:
            for _, known in self._history:  # else a moment close to the one before would be thinned out with them
                for owner, parts in done.items():
                    known.setdefault(owner, parts)
            before = [(min(moment, now), known) for moment, known in self._history]  # the clock may have been set back
            self._history = _thinned([*before, (now, done)], now - self._grace_s, self._grace_s / _KEPT)
            self._write(now)
        else:
            self.keep_seen()

    def keep_seen(self) -> None:
        """Keep that the group is read as, for retention. Costs two syncs where that was not kept for a minute."""
        now = self._clock()
        if self._history and now - self._written_s >= _SEEN_EVERY_S:
            self._write(now)

    def _write(self, now: float) -> None:
        state = {
            "group": self.name,
            "uuid": self._uuid,
            "seen_s": now,
            "expiry_s": self._expiry_s,
            "grace_s": self._grace_s,
            "history": self._history,
        }
        self._replace(json.dumps(state, indent=1).encode())
        self._written_s = now

    def _replace(self, data: bytes, name: str = _FILE) -> None:
        files, path = self._files, os.path.join(self._directory, name)
        try:
            fd = create_anew(files, path + ".new")
            try:
                write_all(files, fd, data, 0)
            finally:
                files.close(fd)
            files.sync_file(path + ".new")
            files.rename(path + ".new", path)
            files.sync_directory(self._directory)
        except OSError as error:
            raise storage_error(error, _KEEP, path) from error

    def token(self) -> int:
        """Return the number of the last lease that was given to a reader on another host; 0: none was.

        Raises:
            CorruptionError: it is damaged. StorageError: it cannot be read.
        """
        path = os.path.join(self._directory, _TOKEN)
        try:
            return int(read_whole(self._files, path))
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise CorruptionError(
                f"{path} is damaged ({error}), and nobody knows whose lease of group {self.name!r} is the last: remove "
                f"{self._directory} if the group is not needed any more"
            ) from error
        except OSError as error:
            raise storage_error(error, "read the lease of a group", path) from error

    def give_token(self, token: int) -> None:
        """Keep the number of the last lease: who holds one before it is refused, also after a crash. Two syncs."""
        self._replace(str(token).encode(), _TOKEN)

    def close(self) -> None:
        """Give the lease back."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _make(files: Files, directory: str) -> None:
    try:
        files.make_directory(directory)
    except FileExistsError:
        return  # another group was faster
    files.sync_directory(os.path.dirname(directory))


def _thinned(history: list[_Moment], settled_s: float, apart_s: float) -> list[_Moment]:
    """Leave out moments that nobody will ask for: all but the last one before the grace time, and those too close."""
    first = max((index for index, (moment, _) in enumerate(history) if moment <= settled_s), default=0)
    kept = history[first : first + 1]
    for entry in history[first + 1 : -1]:
        if entry[0] - kept[-1][0] >= apart_s:
            kept.append(entry)
    return kept + history[max(first + 1, len(history) - 1) :]


def _read(directory: str) -> _State | None:
    """Return what is kept of a group, None if nothing is. Raises CorruptionError: it is damaged. OSError."""
    path = os.path.join(directory, _FILE)
    try:
        with open(path, "rb", opener=lambda path, _: Files.open(path, READ, 0)) as file:  # a FIFO is not waited for
            found = json.load(file)
        return _State(
            str(found["uuid"]),
            float(found["seen_s"]),
            float(found["expiry_s"]),
            float(found["grace_s"]),
            [(float(moment), _offsets(offsets)) for moment, offsets in found["history"]],
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptionError(
            f"{path} is damaged ({error!r}), and retention keeps everything for its group: remove {directory} if the "
            "group is not needed any more"
        ) from error


def _offsets(named: dict[str, dict[str, int]]) -> Offsets:
    return {
        int(owner): {int(number): int(offset) for number, offset in parts.items()} for owner, parts in named.items()
    }


def committed_of(spool: str, group: str, uuid: str) -> Offsets:
    """Return where a group has come to, without taking its lease; nothing for one that is not known."""
    state = _read(_directory(spool, group))
    if state is None or state.uuid != uuid or not state.history:
        return {}
    return state.history[-1][1]


class Held:
    """What groups outside have retention keep; made by the owner of a spool."""

    def __init__(self, spool: str | Place, uuid: str, clock: Callable[[], float] = time.time) -> None:
        self._spool = Place.of(spool)
        self._uuid = uuid
        self._clock = clock
        self._reported: set[str] = set()
        self._known: dict[str, tuple[tuple[int, int, int], _State | None]] = {}

    def __call__(self, owner: int) -> dict[int, int]:
        """Return the offset in each partition of a stream from which on everything is kept; none where nobody asks.

        What cannot be read holds everything, and is reported once.

        Cost: 15 µs where there are no groups, else 10 µs each, and to read the file of one that went on,
        or to look at the lock of one that was not seen for long.
        """
        while True:
            spool = self._spool.path
            held = self._held_in(os.path.join(spool, CURSORS), owner)
            if not self._spool.has_left(spool):
                return held

    def _held_in(self, path: str, owner: int) -> dict[int, int]:
        try:
            with os.scandir(path) as entries:
                directories = [entry.path for entry in entries if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            self._report(path, f"{error}: retention keeps everything until the groups can be read")
            return _everything()
        for gone in set(self._known).difference(directories):
            self._known.pop(gone, None)
        held: dict[int, int] = {}
        for directory in directories:
            for number, offset in self._of_group(directory, owner).items():
                held[number] = min(offset, held.get(number, offset))
        return held

    def _of_group(self, directory: str, owner: int) -> dict[int, int]:
        now = self._clock()
        try:
            state = self._state(directory)
            if state is None or state.uuid != self._uuid:
                return {}
            if now - state.seen_s > state.expiry_s and owner_pid(directory) is None:
                return {}  # nobody has read as it for its expiry time; whoever has its lock does so now
        except CorruptionError as error:
            self._report(directory, str(error))
            return _everything()
        except (OSError, StorageError) as error:
            self._report(directory, f"{error}: retention keeps everything until this group can be read")
            return _everything()
        held: dict[int, int] = {}
        for moment, offsets in state.history:
            if moment <= now - state.grace_s or not held:
                held = offsets.get(owner, {})  # nothing of a stream that the group has left
        return held

    def _state(self, directory: str) -> _State | None:
        """Return what `_read` does, which is called where the file is another one than the last time."""
        try:
            found = os.stat(os.path.join(directory, _FILE))
        except FileNotFoundError:
            return None
        stamp = found.st_mtime_ns, found.st_ino, found.st_size
        known = self._known.get(directory)
        if known is None or known[0] != stamp:
            known = self._known[directory] = stamp, _read(directory)
        return known[1]

    def _report(self, path: str, text: str) -> None:
        if path not in self._reported:
            self._reported.add(path)
            _logger.error("%s", text)


def _everything() -> dict[int, int]:
    return dict.fromkeys(range(MAX_PARTITIONS), 0)
