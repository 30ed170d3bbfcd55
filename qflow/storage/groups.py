"""How far groups of readers outside the broker have come: a directory each in `cursors/`, beside the log.

    cursors/<group>/lock            held while somebody reads as the group: its lease, which ends with the process
    cursors/<group>/offsets.json    where it has come to, now and some time ago

Readers have the log open for reading only, so what they acknowledge is kept here. Who owns the spool reads it, and has
retention keep what a group has not acknowledged, and what it acknowledged less than a grace time ago: the checkpoint
that says a batch is done may not be on the disk yet. A group that nobody has read as for its expiry time holds nothing.

The file is replaced as a whole, synced before that: a crash leaves the one of before, which holds more.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from xxhash import xxh3_64_hexdigest

from qflow.errors import CorruptionError, GroupInUse, SpoolInUse
from qflow.storage.files import FILE_MODE, Files, SpoolLock, acquire_lock, owner_pid, storage_error, write_all

_logger = logging.getLogger("qflow")

CURSORS = "cursors"
_FILE = "offsets.json"
_REPLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
GRACE_S = 120.0
"""A checkpoint is on the disk by then: Linux writes what is not synced after 30 s, and its journal every 5."""
EXPIRY_S = 7 * 86_400.0
_KEPT = 32
"""Moments within the grace time that are remembered, at most."""
_SEEN_EVERY_S = 60.0
_LONGEST_NAME = 200

Offsets = dict[int, dict[int, int]]
"""By number of the stream and partition."""


def _directory(spool: str, group: str) -> str:
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
        self._directory = _directory(spool, name)
        self._lock: SpoolLock | None = None
        try:
            for directory in (os.path.join(spool, CURSORS), self._directory):
                if not files.exists(directory):
                    _make(files, directory)
            self._lock = acquire_lock(self._directory)
            try:
                state = _read(self._directory)
            except CorruptionError:
                self.close()
                raise
        except SpoolInUse as error:
            pid = owner_pid(self._directory)
            raise GroupInUse(
                f"group {name!r} of the spool {spool} is in use by "
                + (f"process {pid}" if pid else "another process")
                + ": stop the query that reads as this group, or give this one another group"
            ) from error
        except OSError as error:
            raise storage_error(error, "keep the offsets of a group", self._directory) from error
        if state is None or state["uuid"] != uuid:
            state = {"uuid": uuid, "history": []}
        self._history: list[list[Any]] = state["history"]
        self._written_s = 0.0

    def committed(self) -> Offsets:
        """Return where the group has come to; streams it has never read are missing."""
        return _offsets(self._history[-1][1]) if self._history else {}

    def acknowledge(self, offsets: Mapping[int, Mapping[int, int]]) -> None:
        """Keep that everything below these offsets is done. Costs two syncs where they are new, else nothing.

        A stream that is new to the group counts as being there all the time: nothing above was done before.
        """
        now = self._clock()
        named = {
            str(owner): {str(number): offset for number, offset in parts.items()} for owner, parts in offsets.items()
        }
        if not self._history or self._history[-1][1] != named:
            for _, known in self._history:  # else a moment close to the one before would be thinned out with them
                for owner_name, parts in named.items():
                    known.setdefault(owner_name, parts)
            self._history.append([now, named])
            self._history = _thinned(self._history, now - self._grace_s, self._grace_s / _KEPT)
        elif now - self._written_s < _SEEN_EVERY_S:
            return
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

    def _replace(self, data: bytes) -> None:
        files, path = self._files, os.path.join(self._directory, _FILE)
        try:
            fd = files.open(path + ".new", _REPLACE, FILE_MODE)
            try:
                write_all(files, fd, data, 0)
            finally:
                files.close(fd)
            files.sync_file(path + ".new")
            files.rename(path + ".new", path)
            files.sync_directory(self._directory)
        except OSError as error:
            raise storage_error(error, "keep the offsets of a group", path) from error

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


def _thinned(history: list[list[Any]], settled_s: float, apart_s: float) -> list[list[Any]]:
    """Leave out moments that nobody will ask for: all but the last one before the grace time, and those too close."""
    first = max((index for index, (moment, _) in enumerate(history) if moment <= settled_s), default=0)
    kept = history[first : first + 1]
    for entry in history[first + 1 : -1]:
        if entry[0] - kept[-1][0] >= apart_s:
            kept.append(entry)
    return kept + history[max(first + 1, len(history) - 1) :]


def _read(directory: str) -> dict[str, Any] | None:
    """Return what is kept of a group, None if nothing is.

    Raises:
        CorruptionError: it cannot be read.
    """
    path = os.path.join(directory, _FILE)
    try:
        with open(path, "rb") as file:
            state: dict[str, Any] = json.load(file)
        [_offsets(offsets) for _, offsets in state["history"]]
        state["uuid"], state.get("seen_s"), state.get("grace_s")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(
            f"{path} is damaged ({error}), and retention keeps everything for its group: remove {directory} if the "
            "group is not needed any more"
        ) from error
    return state


def _offsets(named: dict[str, dict[str, int]]) -> Offsets:
    return {int(owner): {int(number): offset for number, offset in parts.items()} for owner, parts in named.items()}


def committed_of(spool: str, group: str, uuid: str) -> Offsets:
    """Return where a group has come to, without taking its lease; nothing for one that is not known."""
    state = _read(_directory(spool, group))
    if state is None or state["uuid"] != uuid or not state["history"]:
        return {}
    return _offsets(state["history"][-1][1])


class Held:
    """What groups outside have retention keep; made by the owner of a spool."""

    def __init__(self, spool: str, uuid: str, clock: Callable[[], float] = time.time) -> None:
        self._path = os.path.join(spool, CURSORS)
        self._uuid = uuid
        self._clock = clock
        self._reported: set[str] = set()

    def __call__(self, owner: int) -> dict[int, int]:
        """Return the offset in each partition of a stream from which on everything is kept; none where nobody asks.

        Cost: 10 µs where there are no groups, else a small file each.
        """
        try:
            names = os.listdir(self._path)
        except FileNotFoundError:
            return {}
        held: dict[int, int] = {}
        for name in names:
            for number, offset in self._of_group(os.path.join(self._path, name), owner).items():
                held[number] = min(offset, held.get(number, offset))
        return held

    def _of_group(self, directory: str, owner: int) -> dict[int, int]:
        try:
            state = _read(directory)
        except CorruptionError as error:
            if directory not in self._reported:
                self._reported.add(directory)
                _logger.error("%s", error)
            return dict.fromkeys(range(256), 0)
        now = self._clock()
        if state is None or state["uuid"] != self._uuid or not state["history"]:
            return {}
        if now - state["seen_s"] > state["expiry_s"]:
            return {}
        held: dict[int, int] = {}
        for moment, offsets in state["history"]:
            parts = _offsets(offsets).get(owner)
            if parts is not None and (moment <= now - state["grace_s"] or not held):
                held = parts
        return held
