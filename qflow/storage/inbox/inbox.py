"""The inbox of a spool, as its owner sees it: stages that were handed in from outside. See `stages` for what they are.

Whether a batch is in the log already is told by the log alone (`batches`); what lies here is adopted, or removed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from qflow.errors import CorruptionError
from qflow.named_tuples import NamedTuple
from qflow.storage.files import Files, make_directories, storage_error
from qflow.storage.inbox import stages
from qflow.storage.inbox.stage_files import Piece, read_pieces
from qflow.storage.inbox.stages import Batch, Manifest
from qflow.storage.lock import Place

STALE_S = 24 * 3600
"""A stage that nobody has written to for so long, and that was not handed in, is removed."""


class Waiting(NamedTuple):
    """A stage that was handed in."""

    batch: Batch
    taken: bool
    """Somebody had begun to adopt it."""


class Inbox:
    """See the module. For one thread at a time."""

    def __init__(self, files: Files, spool: str | Place) -> None:
        self._files = files
        self._spool = Place.of(spool)
        self._looked_in = ""
        self._seen: frozenset[str] = frozenset()
        self.lively = False
        """Something has come or gone between the last two looks: more is to be expected soon."""

    def waiting(self) -> list[Waiting]:
        """Return what was handed in, batches of a query in their order. Cost: the listing of two directories.

        Raises:
            StorageError: it could not be read.
        """
        self._looked_in = self._spool.path
        directory = stages.inbox(self._spool.path)
        try:
            names = stages.list_or_none(self._files, directory)
            staged = stages.list_staged(self._files, self._spool.path) if stages.STAGING in names else []
        except OSError as error:
            raise storage_error(error, "look into the inbox", directory) from error
        seen = frozenset([*names, *(path for path, _ in staged)])
        self.lively, self._seen = seen != self._seen, seen
        found = [Waiting(*parsed) for parsed in map(stages.parse_name, names) if parsed is not None]
        return sorted(found, key=lambda one: (one.batch, not one.taken))

    def has_moved(self) -> bool:
        """Tell whether the spool has, since the last look: what is missing of a stage may be where it lies now."""
        return self._spool.has_left(self._looked_in)

    def take(self, waiting: Waiting) -> Manifest | None:
        """Begin to adopt a stage; None: it was withdrawn.

        Raises:
            CorruptionError: its manifest is damaged, or speaks of another batch.
            StorageError: it could not be read.
        """
        batch = waiting.batch
        directory = stages.being_adopted(self._spool.path, batch)
        try:
            if not waiting.taken:
                try:
                    self._files.rename(stages.handed_in(self._spool.path, batch), directory)
                except FileNotFoundError:
                    return None
            manifest = stages.read_manifest(self._files, directory)
        except OSError as error:
            raise storage_error(error, "take a batch from the inbox", directory) from error
        if manifest.batch != batch:
            raise CorruptionError(f"{directory} holds batch {manifest.batch.name}: let nothing rename inside a spool")
        return manifest

    def pieces(self, manifest: Manifest) -> Iterator[Piece]:
        """Yield the blocks of a stage. Raises CorruptionError: they are others. StorageError: they cannot be read."""
        directory = stages.being_adopted(self._spool.path, manifest.batch)
        try:
            yield from read_pieces(self._files, directory, manifest.files)
        except OSError as error:
            raise storage_error(error, "read a batch in the inbox", directory) from error

    def put_back(self, batch: Batch) -> None:
        """Leave a stage that was taken for later; until then it may be withdrawn."""
        with suppress(OSError):  # then it stays taken
            self._files.rename(stages.being_adopted(self._spool.path, batch), stages.handed_in(self._spool.path, batch))

    def remove(self, waiting: Waiting) -> None:
        """Remove a stage whose batch is in the log. Raises StorageError: it could not be removed."""
        batch = waiting.batch
        place = stages.being_adopted if waiting.taken else stages.handed_in
        self._remove(place(self._spool.path, batch))

    def _remove(self, directory: str) -> None:
        try:
            stages.remove_tree(self._files, directory)
        except OSError as error:
            raise storage_error(error, "remove a batch from the inbox", directory) from error

    def refuse(self, waiting: Waiting, reason: str) -> str:
        """Set a stage aside, taken by now or not, for whoever handed it in to be told; return where it is.

        Raises:
            StorageError: it could not be moved.
        """
        batch = waiting.batch
        directory, aside = stages.being_adopted(self._spool.path, batch), stages.set_aside(self._spool.path, batch)
        if not self._files.exists(directory):
            directory = stages.handed_in(self._spool.path, batch)
        with suppress(OSError):  # a full disk: then nobody is told why
            if stages.is_directory(self._files, directory):
                self._files.write_replacing(os.path.join(directory, stages.REASON), reason.encode())
        self._remove(aside)
        try:
            make_directories(self._files, os.path.dirname(aside))
            self._files.rename(directory, aside)
            self._files.sync_directory(stages.inbox(self._spool.path))
        except OSError as error:
            raise storage_error(error, "set a batch aside", directory) from error
        return aside

    def sweep(self, now_s: float) -> None:
        """Remove stages that somebody began to write long ago, and did not hand in."""
        for directory, _ in stages.list_staged(self._files, self._spool.path):
            with suppress(OSError):
                paths = [directory, *(os.path.join(directory, name) for name in self._files.list(directory))]
                if max(self._files.lstat(path).st_mtime for path in paths) + STALE_S <= now_s:
                    stages.remove_tree(self._files, directory)
