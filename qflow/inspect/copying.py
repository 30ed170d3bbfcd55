"""Copies a spool, with or without a live owner."""

from __future__ import annotations

import os

from qflow.config import spool_path
from qflow.inspect.child import in_child
from qflow.inspect.logs import opened_log
from qflow.stats import SnapshotReport
from qflow.storage.files import Files
from qflow.storage.log.snapshots import make_snapshot, remove_snapshot


def copy_spool(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> SnapshotReport:
    """Copy the log of a spool to a new one; see `Broker.snapshot`. A commit under way is in the copy or not.

    The copy of a spool that was closed cleanly is clean, too, with exact counts of deliveries.

    Raises:
        NotFound: there is no spool at `path`. Else as `Broker.snapshot` and `qflow.open`, before anything is made.
    """
    spool = spool_path(path)

    def copy() -> SnapshotReport:
        with opened_log(spool) as (env, _):
            return make_snapshot(env, spool, to, Files())

    return in_child(spool, copy)


def remove_copy(report: SnapshotReport, *, existed: bool) -> None:
    """Remove what `copy_spool` made.

    Args:
        existed: the directory was there before, and stays.

    Raises:
        SpoolInUse: somebody has opened it. StorageError: it could not be removed.
    """
    remove_snapshot(report.path, Files(), existed=existed)
