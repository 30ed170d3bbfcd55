"""What a sink on another host hands in, adopted beside the owner; and what it takes back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from qflow.arrow.handover import LONGEST_S, Handing, discard_staged
from qflow.errors import InvalidArgument
from qflow.flight.owner import Owner
from qflow.flight.words import Command
from qflow.flight.writing import TOKEN, check_file_name
from qflow.storage.inbox.batches import Target
from qflow.storage.inbox.stage_files import StageFile
from qflow.storage.inbox.stages import Batch, Manifest, check_batch


class _Handing(Handing):
    """One attempt at one batch, for a sink on another host."""

    def __init__(self, owner: Owner, manifest: Manifest, timeout_s: float, staged: Batch) -> None:
        super().__init__(owner.path, manifest, timeout_s, staged)
        self._owner = owner

    def _reading(self) -> AbstractContextManager[Any]:
        self._owner.check_staying()
        return self._owner.broker.engine.log.read()

    def _adopt_here(self) -> bool:
        adoption = self._owner.broker.engine.adoption
        adoption.look()
        found = adoption.stats()
        self._problem = found.problem
        return found.problem is None and not found.waiting

    def _in_vain(self) -> str:
        why = f" ({self._problem})" if self._problem else ""
        return (
            f"batch {self._batch.batch} of query {self._batch.query} was handed in to the spool at {self._spool}, and "
            f"its owner did not adopt it within {self._timeout_s:g} s{why}"
        )


def adopt(owner: Owner, asked: Command) -> dict[str, Any]:
    """Return when a batch is in the log, by this attempt or an earlier one; see `Handing.run`.

    Raises:
        InvalidArgument: the manifest makes no sense. StorageError: it could not be adopted, or is another log's.
    """
    said = asked.object("manifest")
    batch, token = check_batch(*said.row("batch", str, int)), said.text("token")
    staged = check_batch(*asked.row("staged", str, int)) if "staged" in asked else batch
    owner.check_uuid(said.text("uuid"))
    if not TOKEN.fullmatch(token):
        raise InvalidArgument(f"'token' of {said.what} must be 32 digits of hexadecimal, not {token!r:.100}")
    files = tuple(StageFile(*row) for row in said.rows("files", str, int, int, int, int))
    for file in files:
        check_file_name(file.name, said.what)
    manifest = Manifest(
        batch=batch,
        token=token,
        uuid=owner.uuid,
        once=said.flag("once", default=False),
        files=files,
        every=said.flag("every", default=False),
        plan=said.text("plan", ""),
        targets=tuple(Target(*row) for row in said.rows("targets", str, str)) if "targets" in said else (),
    )
    handing = _Handing(owner, manifest, asked.seconds("timeout_s", 60.0, most=LONGEST_S), staged)
    if asked.flag("check", default=False):
        handing.check()
    else:
        handing.run()
    return {}


def withdraw(owner: Owner, asked: Command) -> dict[str, Any]:
    """Remove the stages of some tokens that were not handed in; return how many. Raises StorageError."""
    return {"stages": discard_staged(owner.path, frozenset(asked.texts("tokens")))}
