"""Damage that a command came upon, told in one line when it ends. If messages are lost, the exit code is 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qflow.cli import facts
from qflow.cli.exits import Exit
from qflow.cli.standard import complain
from qflow.names import command

if TYPE_CHECKING:
    from qflow.broker import Broker

_SHOWN = 3
"""Ranges that are spelled out."""


class Damage:
    """Damage found in one run of a command, which may open a spool more than once."""

    def __init__(self) -> None:
        self._spool: Path | None = None
        self._lost: Counter[str] = Counter()
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        self._problems: list[str] = []
        self._is_journal_damaged = False

    @property
    def lost(self) -> bool:
        """Some messages cannot be read, or commits are gone from the journal."""
        return bool(self._ranges) or self._is_journal_damaged

    def note(self, spool: Path, broker: Broker) -> None:
        """Add what a broker has found since it was opened. Cost: its `stats`, if it found something."""
        problems = broker.recovery.problems
        if not problems:
            return
        self._spool = spool
        self._problems += problems
        self._is_journal_damaged |= bool(broker.recovery.journal_problems)
        for name, queue in broker.stats().queues.items():
            lost = queue.lost_total + queue.quarantined_total
            if lost or queue.lost_ranges:
                self._lost[name] += lost
                self._ranges.setdefault(name, []).extend(queue.lost_ranges)

    def tell(self) -> None:
        """Print a line on stderr, if there was damage."""
        if self._spool is None:
            return
        what = f"{self._problems[0]}{more_than_one(len(self._problems))}"
        if self._ranges:
            what = "; ".join(self._of_queue(name) for name in self._ranges)
        complain(f"qflow: {facts.readable(str(self._spool))} is damaged: {' '.join(what.split())}")

    def _of_queue(self, name: str) -> str:
        ranges = self._ranges[name]
        count = self._lost[name]  # counted when the damaged range was read to its end
        most = count or sum(last - first + 1 for first, last in ranges)
        number = f"{'' if count else 'up to '}{facts.counted(most, 'message')}"
        where = f", of sequences {ranges_in_words(ranges)}" if ranges else ""
        return f"{number} of queue {facts.readable(name)} {'is' if most == 1 else 'are'} lost{where}"


def of_command() -> Damage:
    """Return the damage of the running command."""
    return click.get_current_context().find_root().ensure_object(Damage)


def tell_of_examination(spool: Path, problems: Sequence[str], lost: Mapping[str, int] | None = None) -> Exit:
    """Print one line on stderr about the problems of a whole spool, if there are any; return the exit code."""
    if not problems:
        return Exit.FINE
    which = ", ".join(f"{count:,} of {facts.readable(name)}" for name, count in (lost or {}).items())
    what = f"messages that cannot be read: {which}" if lost else problems[0] + more_than_one(len(problems))
    path, more = facts.readable(str(spool)), command("check", str(spool))
    complain(f"qflow: {path} is damaged: {' '.join(what.split())}; {more} tells more")
    return Exit.DIFFERS


def more_than_one(count: int) -> str:
    """Return the words behind the first of so many problems."""
    return f", and {count - 1:,} more" if count > 1 else ""


def ranges_in_words(ranges: Iterable[tuple[int, int]]) -> str:
    """Return (first, last) ranges as words, such as `0 to 94, 190, 300 to 394 and 7 more ranges`."""
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in ranges]
    if len(texts) > _SHOWN + 1:
        return f"{', '.join(texts[:_SHOWN])} and {len(texts) - _SHOWN:,} more ranges"
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
