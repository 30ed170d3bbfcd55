"""Brings a finished stage into the log: hands it to the spool's owner, and waits until that has adopted it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from typing import Any

from qflow.errors import StorageError
from qflow.storage.files import Files, storage_error
from qflow.storage.inbox import batches as sink_batches
from qflow.storage.inbox import stages
from qflow.storage.inbox.batches import Adopted
from qflow.storage.inbox.stages import Batch, Manifest

_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
"""Seconds between two looks at what the owner has done: at first, and after a while."""
_AGAIN_S = 0.5
"""Seconds before a spool without an owner is opened again, if the batch could not be adopted."""
LONGEST_S = 3600.0
"""What may be asked of the owner at a door."""


class Handing(ABC):
    """One attempt at one batch, on the host of the spool. The attempt may be repeated, also by another process."""

    def __init__(self, spool: str, manifest: Manifest, timeout_s: float, staged: Batch | None = None) -> None:
        """`staged`: the name that its stage has so far, if it is another one than the manifest's."""
        self._spool = spool
        self._staged = manifest.batch if staged is None else staged
        self._manifest = manifest
        self._batch = manifest.batch
        self._timeout_s = timeout_s
        self._files = Files()
        self._problem: str | None = None
        """Why it could not be adopted just now."""

    def run(self) -> None:
        """Return when the batch is in the log, by this attempt or an earlier one.

        Raises:
            StorageError: it does not follow the log's last batch of its query; it could not be handed in, was refused,
                or was not adopted in time.
            DiskFull, CorruptionError, NotFound: as `qflow.open`.
        Cost: four syncs, and the commit.
        """
        self._rename()
        if self.check().batch >= self._batch.batch:
            self._sweep()
            return
        try:
            self._hand_in()
        except OSError as error:
            raise storage_error(error, "hand a batch in", stages.handed_in(self._spool, self._batch)) from error
        self._sweep()
        self._wait()
        self.check()  # an earlier attempt may have been adopted

    def check(self) -> Adopted:
        """See that the batch would not be refused for its number or its plan; return what is adopted. Cost: 10 µs.

        Raises:
            StorageError: it does not follow the log's last batch of its query.
        """
        known = self._adopted()
        if self._manifest.every:
            sink_batches.check_follows(known, *self._batch, self._manifest.plan, self._spool)
        return known

    def _rename(self) -> None:
        token = self._manifest.token
        directory = stages.staged(self._spool, self._staged, token)
        if self._staged != self._batch and self._files.exists(directory):
            try:
                self._files.rename(directory, stages.staged(self._spool, self._batch, token))
            except OSError as error:
                raise storage_error(error, "write a batch", directory) from error

    def _hand_in(self) -> None:
        try:
            stages.hand_in(self._files, self._spool, self._manifest)
        except FileNotFoundError as error:
            if self._is_gone():  # else this attempt has handed it in before, and did not hear of that
                raise StorageError(
                    f"batch {self._batch.batch} of query {self._batch.query} cannot be handed in to the spool at "
                    f"{self._spool}: what was staged of it is gone ({error.filename}). A later attempt at it has "
                    "begun, or it was removed from outside: run one query with a checkpoint at a time, and let no "
                    "cleaner work inside a spool"
                ) from error

    def _sweep(self) -> None:
        """Remove what earlier attempts have left, as far as that can be done: the batch is stored all the same."""
        with suppress(OSError):
            stages.remove_staged(self._files, self._spool, self._batch.query, up_to=self._batch.batch)

    def _adopted(self) -> Adopted:
        with self._reading() as txn:
            return sink_batches.adopted(txn, *self._batch, self._manifest.targets)

    def _wait(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        pause_s = _PAUSE_S
        before: Adopted | None = None
        while (adopted := self._adopted()).batch < self._batch.batch:
            reason = stages.why_refused(self._files, self._spool, self._batch)
            if reason is not None:
                raise StorageError(
                    f"the spool at {self._spool} did not take batch {self._batch.batch} of query {self._batch.query}: "
                    f"{reason}. Nothing more of it is stored; it was set aside in "
                    f"{stages.set_aside(self._spool, self._batch)}"
                )
            if adopted != before:  # a part of it was adopted: there is progress
                before, deadline = adopted, time.monotonic() + self._timeout_s
            is_done = self._adopt_here()
            over_s = time.monotonic() - deadline
            if over_s > 0:
                self._check_in_vain(adopted, is_last=over_s > self._timeout_s)
            if not is_done:
                time.sleep(pause_s if self._problem is None else _AGAIN_S)
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _check_in_vain(self, adopted: Adopted, *, is_last: bool) -> None:
        """Raise that it took too long.

        A batch that goes alone is taken back first. If a process is adopting it just now, this returns, unless
        `is_last`: most probably the batch is stored or put back in a moment.
        """
        is_begun = adopted.partial is not None and adopted.partial.batch == self._batch.batch
        if self._manifest.once and not is_begun and self._withdraw():
            raise StorageError(f"{self._in_vain()}. It was taken back, and nothing of it is stored")
        if self._is_gone():
            raise StorageError(
                f"{self._in_vain()}. It is not in the inbox any more: let no cleaner work inside a spool, and write it "
                "again"
            )
        if not self._manifest.once:
            raise StorageError(
                f"{self._in_vain()}. It waits in the inbox, and is adopted when that can be done; this query may be "
                "started again at any time"
            )
        if is_last:
            state = "was begun" if is_begun else "is being adopted"
            raise StorageError(
                f"{self._in_vain()}. It {state} and cannot be taken back: it is stored when that can be done, so do "
                "not write it again"
            )

    def _is_gone(self) -> bool:
        """Tell whether the batch was removed after it was handed in: it is neither in the inbox nor in the log."""
        places = (stages.handed_in(self._spool, self._batch), stages.being_adopted(self._spool, self._batch))
        return (
            not any(map(self._files.exists, places * 2))  # twice: it may be renamed from one to the other meanwhile
            and stages.why_refused(self._files, self._spool, self._batch) is None
            and self._adopted().batch < self._batch.batch
        )

    def _withdraw(self) -> bool:
        try:
            return stages.withdraw(self._files, self._spool, self._batch, self._manifest.token)
        except OSError as error:
            raise storage_error(error, "take a batch back", stages.handed_in(self._spool, self._batch)) from error

    @abstractmethod
    def _reading(self) -> AbstractContextManager[Any]:
        """Give a read transaction of the log, which has the manifest's uuid."""

    @abstractmethod
    def _adopt_here(self) -> bool:
        """Adopt what waits, if that is for this process to do; False if it is not, or failed."""

    @abstractmethod
    def _in_vain(self) -> str:
        """Return a sentence that says who did not adopt it, and why, without a full stop."""


def discard_staged(spool: str, tokens: Collection[str]) -> int:
    """Remove the stages of these tokens that are not handed in; return how many. Raises StorageError."""
    count = 0
    directory = stages.inbox(spool)
    try:
        for directory, _ in stages.list_staged(Files(), spool):
            if directory.rpartition(".")[2] in tokens:
                stages.remove_tree(Files(), directory)
                count += 1
    except OSError as error:
        raise storage_error(error, "remove what was written of a batch", directory) from error
    return count
