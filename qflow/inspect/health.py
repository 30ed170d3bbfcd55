"""What of a log tells how a spool is: read without reading what waits."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from typing import Any

import attrs

from qflow.config import spool_path
from qflow.errors import CorruptionError
from qflow.inspect.child import in_child
from qflow.inspect.log_check import check_log
from qflow.inspect.logs import opened_log
from qflow.inspect.peeking import unsettled
from qflow.message import Headers, Message, decode_headers
from qflow.storage import last_commit
from qflow.storage.environment import Environment
from qflow.storage.files import Files
from qflow.storage.inbox import stages
from qflow.storage.lock import owner_pid
from qflow.storage.log.recovery import QueueRecord, Recovery

QUEUES_LOOKED_AT, LETTERS_LOOKED_AT, LETTERS_BYTES = 20, 500, 4 * 2**20
"""The dead letters that are read for their reasons: of the fullest queues, the first, until they are so many bytes."""
REASONS = ("dead_letter_nack_reason", "dead_letter_exception", "dead_letter_reason")
"""Headers that say why, the most precise first."""
_LONGEST_REASON = 200


@attrs.frozen(kw_only=True)
class LettersFacts:
    """The dead letters in one queue."""

    queue: str
    messages: int
    reasons: tuple[tuple[str, int], ...]
    """(why, how many) of those that were looked at, the most frequent first."""
    looked_at: int


@attrs.frozen(kw_only=True)
class Health:
    """How the log of a spool is."""

    clean: bool
    """It was closed, or somebody has it open."""
    problems: list[str]
    is_read: bool
    """All of the log was read, and `problems` are of all of it; else of its rows."""
    letters: list[LettersFacts]
    """Of the queues that others name as `dead_letter`, the fullest first."""
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


def read_health(path: str | os.PathLike[str], read_bytes: int = 0) -> Health:
    """Return how a spool is, as far as rows and some dead letters tell.

    Args:
        read_bytes: a log of which no more is in use is read as a whole, as `examine` does.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: reads a row for each lane, and some hundred dead letters.
    """
    spool = spool_path(path)
    return in_child(spool, lambda: _read_health(spool, read_bytes))


def _read_health(spool: str, read_bytes: int) -> Health:
    is_owned = owner_pid(spool) is not None
    with opened_log(spool) as (env, found):
        is_read = env.used_bytes() <= read_bytes
        return Health(
            clean=found.clean or is_owned,
            problems=list(check_log(env, found, Counter())) if is_read else found.problems,
            is_read=is_read,
            letters=_letters(env, found),
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


def _letters(env: Environment, found: Recovery) -> list[LettersFacts]:
    queues = [record for record in found.queues if not record.deleted]
    named = {record.settings.get("dead_letter") for record in queues}
    counted = [
        (sum(row.messages for row in record.rows.values()), record)
        for record in queues
        if record.name in named and record.rows is not None
    ]
    counted.sort(key=lambda one: (-one[0], one[1].name))
    return [
        _of_queue(env, record, messages, is_looked_at=number < QUEUES_LOOKED_AT and messages > 0)
        for number, (messages, record) in enumerate(counted)
    ]


def _of_queue(env: Environment, record: QueueRecord, messages: int, *, is_looked_at: bool) -> LettersFacts:
    reasons: Counter[str] = Counter()
    if is_looked_at:
        try:
            with env.reading() as txn:
                left_bytes = LETTERS_BYTES
                for _, message in islice(unsettled(txn, record), LETTERS_LOOKED_AT):
                    reasons[_reason(message)] += 1
                    left_bytes -= len(message)
                    if left_bytes <= 0:
                        break
        except CorruptionError:
            pass  # `check` tells of it
    return LettersFacts(
        queue=record.name, messages=messages, reasons=tuple(reasons.most_common(10)), looked_at=reasons.total()
    )


def _reason(message: Any) -> str:
    return reason_of(decode_headers(message.header_bytes) if isinstance(message, Message) else {}) or "not said"


def reason_of(headers: Headers) -> str:
    """Return why a letter is dead, as far as its headers say; cut, and empty where they do not."""
    return str(next((headers[name] for name in REASONS if headers.get(name)), ""))[:_LONGEST_REASON]
