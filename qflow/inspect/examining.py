"""Everything that is wrong with a spool, found by reading all of its log."""

from __future__ import annotations

import os
from collections import Counter

from qflow.config import spool_path
from qflow.inspect.child import in_child
from qflow.inspect.facts import Examination
from qflow.inspect.log_check import check_every_page, check_log
from qflow.inspect.logs import opened_log
from qflow.storage import last_commit
from qflow.storage.files import Files
from qflow.storage.inbox import stages
from qflow.storage.lock import owner_pid
from qflow.storage.log.overlay import count_unapplied


def check_spool(path: str | os.PathLike[str]) -> list[str]:
    """Return the problems that `examine` finds, one text each."""
    return examine(path).problems


def examine(path: str | os.PathLike[str]) -> Examination:
    """Read every block of the log and compare it with rows, index and cursors.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: reads the whole log once, in short transactions.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _examine(spool))


def _examine(spool: str) -> Examination:
    lost: Counter[str] = Counter()
    files = Files()
    with opened_log(spool, readahead=True) as (env, found):
        found_problems = list(check_log(env, found, lost))
        if not found_problems and owner_pid(spool) is None:  # an owner meets those pages itself, and goes on meanwhile
            found_problems += check_every_page(env)
        journal_records = count_unapplied(env, files)
        unusable = last_commit.why_unusable(env.path, files)
    found_problems += [unusable] if unusable is not None else []
    found_problems += [
        f"batch {batch.batch} of query {batch.query} was set aside in {stages.set_aside(spool, batch)}: "
        f"{stages.why_refused(files, spool, batch)}"
        for batch in stages.list_refused(files, spool)
    ]
    return Examination(problems=found_problems, lost=dict(+lost), journal_records=journal_records)
