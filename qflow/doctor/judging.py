"""Findings from a look, worst first, and a look at a spool from outside.

Findings that come in thousands, as where all readers of a stream are down, are the worst ones and one for all the rest.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable

import attrs

from qflow.doctor.finding import Finding
from qflow.doctor.look import Look
from qflow.doctor.looking import look_at
from qflow.doctor.queues import judge_queues, judge_streams
from qflow.doctor.spools import judge_spool
from qflow.doctor.words import quoted
from qflow.names import command

MOST = 10
"""Findings of a kind, as bad, that are told of one by one; for subscriptions those of a stream."""
NAMED = 3
NAMED_IN_FACTS = 100
_WORST = {
    "lost-messages": "lost",
    "held-too-long": "oldest_s",
    "blocked-producers": "longest_s",
    "no-consumer": "waiting",
    "paused": "messages",
    "coming-back": "redelivered_60s",
    "dead-letters": "messages",
    "pinned-pages": "commits",
    "slow-consumers": "waiting",
    "stream-behind": "lag_messages",
}
"""Which of its facts says how bad one is among others of its kind."""
_THINGS = {
    "lost-messages": "queues or streams",
    "held-too-long": "consumers",
    "maintenance": "jobs",
    "pinned-pages": "processes",
}
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


def gathered(found: Iterable[Finding], path: str) -> list[Finding]:
    """Return findings with the worst ten of those that are alike, and behind them one for all others of these.

    Args:
        found: in order; those of a kind that are as bad stand together, and so do they afterwards.
        path: the spool's.
    """
    groups: defaultdict[tuple[int, str, str | None], list[Finding]] = defaultdict(list)
    for one in found:
        groups[one.severity, one.kind, one.queue if "subscription" in one.facts else None].append(one)
    told: list[Finding] = []
    for alike in groups.values():
        if len(alike) > MOST:
            worst = sorted(alike, key=_badness, reverse=True)
            told += [*worst[:MOST], _others(worst[MOST:], path)]
        else:
            told += alike
    return told


def _badness(finding: Finding) -> float:
    return float(finding.facts.get(_WORST.get(finding.kind, ""), 0))


def _others(others: list[Finding], path: str) -> Finding:
    """Return the finding that tells of some that are alike."""
    first = others[0]
    stream, shown = None, ""
    if "subscription" in first.facts:
        stream, shown = first.queue, f"; {command('streams', path)} shows all"
        things, names = f"subscriptions of stream {quoted(stream or '')}", [one.facts["subscription"] for one in others]
    elif first.queue is not None:
        things, names = _THINGS.get(first.kind, "queues"), [one.queue for one in others]
        shown = f"; {command('ls --sort messages', path)} shows all"
    else:
        things, names = _THINGS[first.kind], [str(one.facts.get("what") or one.facts.get("pid")) for one in others]
    names = list(dict.fromkeys(names))
    some = ", ".join(map(quoted, names[:NAMED]))
    return Finding(
        severity=first.severity,
        kind=first.kind,
        sentence=f"so it is with {len(others):,} more {things}: {some}{' and others' if len(names) > NAMED else ''}",
        remedy=f"as for those before, which are the worst{shown}",
        queue=stream,
        facts={"count": len(others), "names": names[:NAMED_IN_FACTS]},
    )


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
    """Return what is wrong with what there is to see, worst first, each by itself.

    Where `stats.json` has other things than figures, as whoever may write there may write anything, it is passed over.
    """
    try:
        found = [*judge_spool(look), *judge_queues(look), *judge_streams(look)]
    except (AttributeError, KeyError, TypeError, ValueError):
        if look.is_told or look.stats is None:
            raise
        return judge_each(attrs.evolve(look, stats=None))
    return sorted(found, key=lambda finding: (-finding.severity, _RANK[finding.kind]))
