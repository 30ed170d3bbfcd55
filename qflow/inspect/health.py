"""What of a log tells how a spool is: read without reading what waits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import attrs

from qflow.config import spool_path
from qflow.errors import CorruptionError
from qflow.inspect.child import in_child
from qflow.inspect.log_check import check_log
from qflow.inspect.logs import opened_log
from qflow.inspect.pages import unsettled
from qflow.message import Headers, Message, decode_headers
from qflow.storage import last_commit
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.inbox import stages
from qflow.storage.lock import owner_pid
from qflow.storage.log.recovery import QueueRecord, Recovery

QUEUES_LOOKED_AT, LETTERS_LOOKED_AT, LETTERS_BYTES = 20, 500, 4 * 2**20
"""The dead letters that are read for their reasons: of the fullest queues, the first, until they are so many bytes."""
FIRSTS_LOOKED_AT = 200
"""The queues that nobody names, whose first message is read for whether it died by AMQP: the fullest."""
REASONS = (
    "dead_letter_nack_reason",
    "dead_letter_exception",
    "dead_letter_reason",
    "x-last-death-reason",
    "x-first-death-reason",
)
"""Headers that say why, the most precise first; those with an x are of AMQP."""
_BY_SERVER = "amqp:"
"""Queues of servers, and of other virtual hosts, begin with it."""
Legible = Callable[[Headers], Mapping[str, Any]]
_LONGEST_REASON = 200


@attrs.frozen(kw_only=True)
class LettersFacts:
    """The dead letters in one queue."""

    queue: str
    messages: int
    reasons: tuple[tuple[str, int], ...]
    """(why, how many) of those that were looked at, the most frequent first."""
    looked_at: int
    is_named: bool = True
    """By others, as their `dead_letter`; else its first message has died by AMQP."""


@attrs.frozen(kw_only=True)
class Health:
    """How the log of a spool is."""

    clean: bool
    """It was closed, or somebody has it open."""
    problems: list[str]
    is_read: bool
    """All of the log was read, and `problems` are of all of it; else of its rows."""
    letters: list[LettersFacts]
    """Of the queues that others name as `dead_letter`, the fullest first; then of those with letters of AMQP."""
    passing: list[str]
    """Queues whose messages expire into another one."""
    log_bytes: int
    log_used_bytes: int
    """As much of its file is in use; the rest is kept for reuse."""
    readers: list[tuple[int, int]]
    """(process, how many commits ago it began) of reads that are under way."""
    refused_batches: int
    last_commit: str | None = None
    """Why the copy of the last commit cannot be read, if so."""


def owner_of(path: str | os.PathLike[str]) -> int | None:
    """Return the process that owns a spool; None if nobody does, 0 if it is not known which one."""
    return owner_pid(spool_path(path))


def read_health(path: str | os.PathLike[str], read_bytes: int = 0, legible: Legible = dict) -> Health:
    """Return how a spool is, as far as rows and some dead letters tell.

    Args:
        read_bytes: a log of which no more is in use is read as a whole, as `examine` does.
        legible: returns headers with those that clients gave, for messages of AMQP.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: reads a row for each lane, and some hundred dead letters.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _read_health(spool, read_bytes, legible))


def _read_health(spool: str, read_bytes: int, legible: Legible) -> Health:
    is_owned = owner_pid(spool) is not None
    with opened_log(spool) as (env, found):
        is_read = env.used_bytes() <= read_bytes
        return Health(
            clean=found.clean or is_owned,
            problems=list(check_log(env, found, Counter())) if is_read else found.problems,
            is_read=is_read,
            letters=_letters(env, found, legible),
            passing=[record.name for record in found.queues if not record.deleted and _is_passing(record)],
            log_bytes=env.size_bytes(),
            log_used_bytes=env.used_bytes(),
            readers=_readers(env),
            refused_batches=len(stages.list_refused(Files(), spool)),
            last_commit=last_commit.why_unusable(env.path, Files()),
        )


def _readers(env: Environment) -> list[tuple[int, int]]:
    """Return (process, commits ago) from a table with a line for each: process, thread, transaction or a dash."""
    last = env.last_transaction()
    lines = [line.split() for line in env.readers().splitlines()]
    return [
        (int(line[0]), last - int(line[2]))
        for line in lines
        if len(line) == 3 and line[0].isdecimal() and line[2].isdecimal() and int(line[0]) != os.getpid()
    ]


def _is_passing(record: QueueRecord) -> bool:
    return record.settings.get("ttl_s") is not None and record.settings.get("dead_letter") is not None


def _letters(env: Environment, found: Recovery, legible: Legible) -> list[LettersFacts]:
    queues = [record for record in found.queues if not record.deleted]
    named = {record.settings.get("dead_letter") for record in queues} - {None}
    counted = [
        (sum(row.messages for row in record.rows.values()), record) for record in queues if record.rows is not None
    ]
    counted.sort(key=lambda one: (-one[0], one[1].name))
    ours = [one for one in counted if one[1].name in named]
    facts = [
        _of_queue(env, record, messages, legible, most=LETTERS_LOOKED_AT if number < QUEUES_LOOKED_AT else 0)
        for number, (messages, record) in enumerate(ours)
    ]
    if any(str(name).startswith(_BY_SERVER) for name in named):  # a client of AMQP has declared where letters go
        others = [one for one in counted if one[1].name not in named and one[0]][:FIRSTS_LOOKED_AT]
        facts += _of_amqp(env, others, legible)
    return facts


def _of_amqp(env: Environment, queues: list[tuple[int, QueueRecord]], legible: Legible) -> list[LettersFacts]:
    """Return those queues whose first message has died: where letters go is in exchanges and bindings there."""
    found: list[LettersFacts] = []
    for messages, record in queues:
        first = _of_queue(env, record, messages, legible, most=1)
        if first.reasons and first.reasons[0][0] != _NOT_SAID:
            most = LETTERS_LOOKED_AT if len(found) < QUEUES_LOOKED_AT else 1
            found.append(attrs.evolve(_of_queue(env, record, messages, legible, most=most), is_named=False))
    return found


def _of_queue(env: Environment, record: QueueRecord, messages: int, legible: Legible, *, most: int) -> LettersFacts:
    reasons: Counter[str] = Counter()
    if messages:
        try:
            with env.reading() as txn:
                left_bytes = LETTERS_BYTES
                for _, message in islice(unsettled(txn, record), most):
                    reasons[_reason(message, legible)] += 1
                    left_bytes -= len(message)
                    if left_bytes <= 0:
                        break
        except CorruptionError:
            pass  # `check` tells of it
    return LettersFacts(
        queue=record.name, messages=messages, reasons=tuple(reasons.most_common(10)), looked_at=reasons.total()
    )


_NOT_SAID = "not said"


def _reason(message: Any, legible: Legible) -> str:
    return reason_of(legible(decode_headers(message.header_bytes)) if isinstance(message, Message) else {}) or _NOT_SAID


def reason_of(headers: Mapping[str, Any]) -> str:
    """Return why a letter is dead, as far as its headers say; cut, and empty where they do not."""
    return str(next((headers[name] for name in REASONS if headers.get(name)), ""))[:_LONGEST_REASON]
