"""Brings a finished stage into the log of a spool on this host, from another process than its owner."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from typing import Any

from qflow.arrow.handover import Handing
from qflow.errors import QflowError, SpoolInUse
from qflow.opening import open as open_broker
from qflow.spark import spools
from qflow.storage.lock import owner_pid


class Handover(Handing):
    """Hands it to the spool's owner, or adopts it here if there is none."""

    def _reading(self) -> AbstractContextManager[Any]:
        return spools.reading(self._spool, self._manifest.uuid)

    def _adopt_here(self) -> bool:
        """Own the spool for a moment, and adopt what waits; False if another process owns it, or it failed."""
        if owner_pid(self._spool) is not None:
            return False
        self._problem = None
        spools.let_go(self._spool)  # LMDB opens a file once in a process
        try:
            with open_broker(self._spool, door=False) as broker:  # nobody is to be cut off in a moment
                broker.engine.adoption.run()
                found = broker.engine.adoption.stats()
        except SpoolInUse:
            return False
        except QflowError as error:
            self._problem = str(error)
            return False
        self._problem = found.problem
        return found.problem is None and not found.waiting

    def _in_vain(self) -> str:
        pid = owner_pid(self._spool)
        who = "nobody could" if pid is None else f"its owner, process {pid or 'unknown'}, did not"
        why = self._problem if pid is None else self._problem_of_owner()
        return (
            f"batch {self._batch.batch} of query {self._batch.query} was handed in to the spool at {self._spool}, and "
            f"{who} adopt it within {self._timeout_s:g} s{f' ({why})' if why else ''}"
        )

    def _problem_of_owner(self) -> str | None:
        """Return the reason the owner gives for a batch that waits."""
        try:
            with open(os.path.join(self._spool, "stats.json"), "rb") as file:
                problem = json.load(file)["inbox"]["problem"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return None if problem is None else str(problem)
