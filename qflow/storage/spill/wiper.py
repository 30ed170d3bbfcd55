"""The wipe of a spill store: what spilled before this start is set aside at once, and removed a few files at a time.

See `store` for the directories. The names alone tell what is ours; what else lies in a directory of ours is put back.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

from qflow.errors import PermissionDenied, StorageError
from qflow.storage.files import Files, storage_error
from qflow.storage.lock import Place
from qflow.storage.spill.store import FILE, SPILL, WIPING, set_aside

_DIRECTORY = r"(?:[A-Za-z0-9_-]|%[0-9A-F]{2})*\.[0-9a-f]{8}-[0-9a-f]{16}"
_SET_ASIDE = rf"({_DIRECTORY})~[0-9a-f]+"
"""Compiled when a name is met, and kept by `re`."""


def wipe_spill(files: Files, spool: str) -> list[str]:
    """Set aside whatever spilled before this start, and return the names of the directories; a `Wiper` does the rest.

    Makes `spill` and `wiping` where they are missing. Entries of `spill` that are not directories of ours stay.

    Raises:
        StorageError: `spill` or `wiping` is a link, a file, or another user's, or cannot be read and written.

    Cost: a rename for each directory, whatever it holds.
    """
    spill = os.path.join(spool, SPILL)
    try:
        for directory in (spill, os.path.join(spool, WIPING)):
            _check_own_directory(files, directory)
        found = [
            name
            for name in files.list(spill)
            if re.fullmatch(_DIRECTORY, name) and stat.S_ISDIR(files.lstat(os.path.join(spill, name)).st_mode)
        ]
        for name in found:
            set_aside(files, spool, name)
    except OSError as error:
        raise storage_error(error, "set aside old spill files", spill) from error
    return found


def check_directories(files: Files, spool: str) -> None:
    """Raise what `wipe_spill` would, whoever calls it, of what lies there; nothing is made."""
    for name in (SPILL, WIPING):
        path = os.path.join(spool, name)
        with suppress(FileNotFoundError):
            _check_directory(path, files.lstat(path))


def _check_own_directory(files: Files, path: str) -> None:
    try:
        status = files.lstat(path)
    except FileNotFoundError:
        files.make_directory(path)
        return
    _check_directory(path, status)
    if status.st_uid != os.geteuid():
        raise PermissionDenied(
            f"{path} belongs to user {status.st_uid}: run as that user, or give the spool to this one"
        )


def _check_directory(path: str, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        raise StorageError(f"{path} is {kind}: move it away, and qflow makes a directory there")
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        raise PermissionDenied(f"{path} cannot be read and written by its owner: chmod u+rwx it")


class Wiper:
    """Unlinks what was set aside, a few files at a time: many deletes at once slow every other file operation down.

    For one thread at a time. Never raises OSError: what cannot be removed is counted and met again in the
    next round or at the next start.
    """

    def __init__(self, files: Files, spool: str | Place) -> None:
        self.unlinked = 0
        self.failures = 0
        self._files = files
        self._spool = Place.of(spool)
        self._round: Iterator[None] | None = None

    def step(self, max_files: int) -> bool:
        """Remove at most so many files and return whether more may be left; after False, a call begins a new round.

        Cost: 10 µs a file; with nothing to do, the listing of one directory.
        """
        if self._round is None:
            self._round = self._remove_all()
        for _ in range(max_files):
            if next(self._round, self) is self:
                self._round = None
                return False
        return True

    def _remove_all(self) -> Iterator[None]:
        """Remove each directory that was set aside; yields after each operation."""
        spill, wiping = (os.path.join(self._spool.path, name) for name in (SPILL, WIPING))
        try:
            names = self._files.list(wiping)
        except OSError:
            self.failures += 1
            return
        for name in names:
            ours = re.fullmatch(_SET_ASIDE, name)
            if ours:
                yield from self._remove_directory(os.path.join(wiping, name), os.path.join(spill, ours[1]))

    def _remove_directory(self, directory: str, original: str) -> Iterator[None]:
        """Remove a directory's files, and put back what is not ours; again, as long as a scan misses some."""
        while True:
            unlinked = self.unlinked
            try:
                for entry in self._files.scan(directory):
                    self._remove_entry(entry, original)
                    yield
                self._files.remove_directory(directory)
                yield
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY or self.unlinked == unlinked:
                    self.failures += 1
                    return

    def _remove_entry(self, entry: os.DirEntry[str], original: str) -> None:
        try:
            if FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                self._files.unlink(entry.path)
                self.unlinked += 1
            else:
                self._put_back(entry.path, original, entry.name)
        except OSError:
            self.failures += 1

    def _put_back(self, path: str, original: str, name: str) -> None:
        with suppress(FileExistsError):
            self._files.make_directory(original)
        target = os.path.join(original, name)
        if self._files.exists(target):  # never replace anything: it stays where it is
            self.failures += 1
            return
        self._files.rename(path, target)
