"""What there is to judge: plain values, from whoever knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from qflow.errors import QflowError


@attrs.frozen(kw_only=True)
class Letters:
    """The dead letters in one queue."""

    messages: int
    reasons: tuple[tuple[str, int], ...] = ()
    """(why, how many) of those that were looked at, the most frequent first."""
    looked_at: int = 0
    is_named: bool = True
    """By others, as their `dead_letter`; else they died by AMQP, and are letters where nobody consumes them."""


@attrs.frozen(kw_only=True)
class Look:
    """A spool at one moment. What is not known is left out, and not judged."""

    path: str
    stats: Mapping[str, Any] | None = None
    """The fields of `BrokerStats`, as `attrs.asdict` or `stats.json` have them: what a living owner says."""
    told_s_ago: float = 0.0
    """How old `stats` is."""
    is_told: bool = True
    """By the owner, when it was asked; False: it let nobody in, or did not answer, and `stats.json` was read."""
    owner_pid: int | None = None
    """None: nobody owns it; 0: a process that is not known."""
    is_stopped: bool = False
    """A signal or a debugger stopped the owner, which does not answer."""
    is_there: bool = True
    """What its owner has lies at the path; False: it was removed or replaced, and the owner goes on without."""
    clean: bool = True
    """It was closed, or somebody has it open."""
    problems: tuple[str, ...] = ()
    """What opening it would complain of; where it was read, what that found."""
    is_read: bool = False
    """All of its log was read, and not its rows alone."""
    is_standing: bool = False
    """A sync of its owner does not end: nothing of the log was read, which would wait for the same disk."""
    failure: QflowError | None = None
    """Why its log could not be read."""
    has_log: bool = True
    """False: there is none any more."""
    has_pages: bool = True
    """False: its file is none of LMDB, or was cut short, and nothing in it can be read."""
    obstacle: QflowError | None = None
    """What keeps anybody from opening it, beside its log; where nobody owns it."""
    letters: Mapping[str, Letters] = {}
    """The queues that others name as `dead_letter`, and those of AMQP whose first message is one."""
    passing: frozenset[str] = frozenset()
    """Queues whose messages expire into another one: nobody need consume them."""
    is_door_blocked: bool = False
    """Something else stands where its owner makes the socket through which it lets others in."""
    has_door: bool = True
    """There is such a socket; a dead owner may have left it."""
    log_bytes: int = 0
    """Length of the log's file."""
    log_used_bytes: int = 0
    """As much of it is in use."""
    readers: tuple[tuple[int, int], ...] = ()
    """(process, how many commits ago it began) of reads of the log that are under way."""
    disk_bytes: int = 0
    """Of the file system; 0: not known."""
    disk_free_bytes: int = 0
    disk_inodes: int = 0
    """Of the file system; 0: it makes them as it needs them, or it is not known."""
    disk_free_inodes: int = 0
    refused_batches: int = 0
    """Batches from outside that were set aside."""
    last_commit: str | None = None
    """Why the copy of the last commit beside the log cannot be read, if so."""
