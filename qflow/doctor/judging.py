"""Findings from a look, worst first; and a look at a spool from outside."""

from __future__ import annotations

import os

from qflow.doctor.finding import Finding
from qflow.doctor.gathering import gathered
from qflow.doctor.look import Look
from qflow.doctor.looking import look_at
from qflow.doctor.queues import judge_queues, judge_streams
from qflow.doctor.spools import judge_spool

KINDS = (
    "newer-format",
    "older-format",
    "removed",
    "log-failed",
    "obstacle",
    "damage",
    "lost-messages",
    "disk-full",
    "held-too-long",
    "blocked-producers",
    "no-consumer",
    "paused",
    "coming-back",
    "dead-letters",
    "maintenance",
    "refused-batches",
    "last-commit-unusable",
    "silent-owner",
    "pinned-pages",
    "slow-syncs",
    "slow-consumers",
    "stream-behind",
    "memory-full",
    "log-mostly-dead",
    "not-closed",
    "no-door",
)
"""Kinds of findings, those that come first among others as bad."""
_RANK = {kind: rank for rank, kind in enumerate(KINDS)}


def examine(path: str | os.PathLike[str]) -> list[Finding]:
    """Look at a spool, whoever owns it, and return what is wrong with it, worst first.

    Of a log with more than 64 MiB in use the blocks are not read: `qflow.inspect.examine` does that.

    Raises:
        NotFound: there is no spool. StorageError: it cannot be read, or this process has it open: call it in another.
    Cost: 100 µs a queue, and half a second for 64 MiB.
    """
    return judge(look_at(path))


def judge(look: Look) -> list[Finding]:
    """Return what is wrong with what there is to see, worst first; of many that are alike the worst, see `gathered`."""
    return gathered(judge_each(look), look.path)


def judge_each(look: Look) -> list[Finding]:
    """Return what is wrong with what there is to see, worst first, each by itself."""
    found = [*judge_spool(look), *judge_queues(look), *judge_streams(look)]
    return sorted(found, key=lambda finding: (-finding.severity, _RANK[finding.kind]))
