"""Findings that come in thousands, as where all readers of a stream are down: the worst, and one for all the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from qflow.doctor.finding import Finding
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
