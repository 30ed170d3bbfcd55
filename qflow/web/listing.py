"""Queues in the order and number that somebody wants to see."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from qflow.errors import InvalidArgument
from qflow.web.arguments import Arguments
from qflow.web.figures import Look
from qflow.web.rights import Rights

AT_ONCE = 100
SORTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "name": lambda facts: facts["name"],
    "messages": lambda facts: facts["messages"],
    "waiting": lambda facts: facts["lag_messages"],
    "unacked": lambda facts: facts["acquired_messages"],
    "oldest": lambda facts: facts["oldest_unacked_s"],
    "memory": lambda facts: facts["resident_bytes"],
    "in": lambda facts: facts["rates"]["put_10s"],
    "out": lambda facts: facts["rates"]["delivered_10s"],
    "acked": lambda facts: facts["rates"]["acked_10s"],
    "consumers": lambda facts: facts["consumers_total"],
    "blocked": lambda facts: facts["blocked_putters"],
}


@attrs.frozen
class Wanted:
    """Which queues, in which order, and which hundred of them."""

    text: str = ""
    """In their names, in upper or lower case."""
    sort: str = "name"
    descending: bool = False
    page: int = 1

    @classmethod
    def of(cls, given: Arguments) -> Wanted:
        """Raises InvalidArgument: there is no such order."""
        sort = given.optional_text("sort") or "name"
        if sort not in SORTS:
            raise InvalidArgument(f"sort is one of {', '.join(SORTS)}, not {sort!r}")
        return cls(given.optional_text("text") or "", sort, given.flag("descending"), max(1, given.number("page") or 1))


def listed(look: Look, rights: Rights, wanted: Wanted) -> tuple[list[Mapping[str, Any]], int]:
    """Return the queues of a page, and how many there are on all pages."""
    part = wanted.text.casefold()
    found = [facts for name, facts in look.queues.items() if part in name.casefold() and rights.sees(name)]
    found.sort(key=SORTS["name"])
    if wanted.sort != "name" or wanted.descending:
        found.sort(key=SORTS[wanted.sort], reverse=wanted.descending)
    start = (wanted.page - 1) * AT_ONCE
    return found[start : start + AT_ONCE], len(found)


def furthest_behind(subscriptions: Sequence[Any]) -> Sequence[Any]:
    """Return subscriptions, facts of them or their statistics; where they are many, those that are furthest behind."""
    if len(subscriptions) <= AT_ONCE:
        return subscriptions

    def lag(one: Any) -> int:
        behind: int = one["lag_messages"] if isinstance(one, Mapping) else one.lag_messages
        return behind

    return heapq.nlargest(AT_ONCE, subscriptions, key=lag)


def consumers(queues: Mapping[str, Mapping[str, Any]], rights: Rights) -> list[dict[str, Any]]:
    """Return who is there to take messages of queues, and who holds some."""
    rows = []
    for name, facts in sorted(queues.items()):
        if not rights.sees(name):
            continue
        held = {(one["consumer"], one["pid"]): one for one in facts["holders"]}
        for one in facts["consumers"]:
            holder = held.pop((one["name"], one["pid"]), None)
            rows.append({"queue": name, **one, **_holding(holder)})
        for (consumer, pid), holder in held.items():
            rows.append({"queue": name, "name": consumer, "pid": pid, "kind": "", "since_s": None, **_holding(holder)})
    return rows


def _holding(holder: Mapping[str, Any] | None) -> dict[str, Any]:
    if holder is None:
        return {"holds": 0, "oldest_s": None}
    return {"holds": holder["messages"], "oldest_s": holder["oldest_s"]}
