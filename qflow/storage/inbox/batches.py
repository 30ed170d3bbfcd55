"""Which batches of outside queries are in the log: so that one that is handed in twice is taken once, for good.

    key                            value
    SINK_BATCHES  query, UTF-8     JSON: the highest batch that is in the log, how far the next one is, and when

A record is written in the transaction of the messages it speaks of. That of a query that hands in one batch and no more
goes when it is a week old; the others stay, for a query may be started again after any time.

A streaming query has every batch recorded, one without messages too: so a log that lacks some, because it was made anew
or replaced by an older copy, is noticed with the next one.

An application numbers what it writes by itself, and may write several data frames of one number, each to streams of its
own: so there is a record for each *target*, beside that of the stage. A target is a stream or a queue that was bound.

Every function works inside a transaction it is given.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from qflow.errors import CorruptionError, InvalidArgument, StorageError
from qflow.named_tuples import NamedTuple
from qflow.storage.log import table
from qflow.storage.log.sealing import seal, unseal
from qflow.storage.log.table import Forgotten

SINK_BATCHES = 14
ONCE_EXPIRY_S = 7 * 24 * 3600
"""The record of a query of one batch is forgotten after so long."""
LOOKED_AT_ONCE = 64
"""Records looked at by one `forget`, at most."""

_PREFIX = bytes((SINK_BATCHES,))


class Partial(NamedTuple):
    """A batch that is in the log as far as some message: it was too large for one transaction."""

    batch: int
    stage: str
    """The token of the stage its first messages came from."""
    messages: int
    """How many of them, from its beginning."""


class Adopted(NamedTuple):
    """What is in the log of one query."""

    batch: int = -1
    """All batches up to this one; -1: none."""
    partial: Partial | None = None
    """And so much of another one."""
    once: bool = False
    """It hands in one batch, and no other ever."""
    at_ms: int = 0
    """When this was written."""
    every: bool = False
    """It hands in every batch, also one without messages: see `check_follows`."""
    plan: str = ""
    """What its query says `batch` is of; empty: that is not known."""


class Target(NamedTuple):
    """Where a batch of an application goes."""

    record: str
    """The query under which its batches are known: `<application>@<what it is>`."""
    name: str
    """In errors."""


def read(txn: Any, query: str) -> Adopted:
    """Return what is in the log of a query. Cost: 5 µs, and a page from the disk. Raises CorruptionError."""
    value = txn.get(_PREFIX + query.encode())
    return Adopted() if value is None else _decode(value, query)


def adopted(txn: Any, query: str, number: int, targets: Collection[Target]) -> Adopted:
    """Return what is in the log of a query that is about to hand in a batch; that batch, if each of its targets has it.

    Cost: 5 µs for the query and twice that for each target, and pages from the disk.

    Raises:
        InvalidArgument: some of its targets have it, and others do not: it is two batches, or they were routed anew.
        CorruptionError: a record is damaged.
    """
    found = read(txn, query)
    if found.batch >= number or not targets:
        return found
    known = {target: _of_application(txn, target) >= number for target in targets}
    if not any(known.values()):
        return found
    if all(known.values()):
        return found._replace(batch=number)
    has, lacks = (min(target.name for target in targets if known[target] is which) for which in (True, False))
    application = min(targets).record.partition("@")[0].removeprefix("app-")
    raise InvalidArgument(
        f"version {number} of txnAppId {application!r} is in {has}, and not in {lacks}, to which this data "
        "frame goes, too. If two data frames were written under that name and version, give each a txnAppId of its "
        f"own. If {lacks} takes these rows only since then, as a stream or binding that was added or made anew, the "
        f"version is stored: leave it out, and go on with the next one. Another txnAppId would store it in {has} again"
    )


def check_follows(found: Adopted, query: str, number: int, plan: str, spool: str) -> None:
    """See that a batch of a query that hands in every batch is the next one, or the last one, repeated.

    Args:
        plan: what it is of; empty: that is not known.

    Raises:
        StorageError: the log lacks some before it, or has some behind it: it is not the one they were handed in to, or
            the checkpoint is not the one they were planned by.
    """
    is_another = found.batch == number and found.plan and plan and found.plan != plan
    if found.batch > number or is_another:
        raise StorageError(
            f"the checkpoint of query {query} is at batch {number}, and the spool at {spool} has its batches up to "
            f"{found.batch}{', which is of other messages' * bool(is_another)}: the checkpoint was replaced by an "
            "older copy, and what it plans under those numbers would be left out. Bring the newer one back, or begin "
            "anew with another checkpoint directory, from behind what has arrived"
        )
    if found.batch < number - 1 and (found.every or found.batch < 0):
        has = f"its batches up to {found.batch} only" if found.batch >= 0 else "none of its batches"
        raise StorageError(
            f"the checkpoint of query {query} is at batch {number}, and the spool at {spool} has {has}: it was made "
            "anew, or replaced by an older copy, and what came between would be missing. Bring that spool back, or "
            "begin anew with another checkpoint directory, from behind what has arrived"
        )


def _of_application(txn: Any, target: Target) -> int:
    """Return the highest batch of a target; also of logs in which all targets of an application had one record."""
    return max(read(txn, target.record).batch, read(txn, target.record.partition("@")[0]).batch)


def write(txn: Any, query: str, adopted: Adopted) -> None:
    """Replace what is known of a query. Cost: 5 µs, and a page of the log's."""
    txn.put(_PREFIX + query.encode(), seal(json.dumps(adopted).encode()))


def forget(
    txn: Any, now_ms: int, start: bytes = b"", limit: int = LOOKED_AT_ONCE, *, keep: Collection[str] = ()
) -> Forgotten:
    """Look at some records, and remove those of queries of one batch that were written `ONCE_EXPIRY_S` ago.

    Args:
        start: the `position` where the last call stopped; empty: begin with the first.
        limit: how many to look at.
        keep: queries to be left, for a stage of theirs lies in the inbox: it would be taken for one that is new.
    Cost: 5 µs a record.
    """

    def left(key: bytes, value: bytes) -> bytes | None:
        return value if _name(key) in keep or not _is_expired(now_ms, key, value) else None

    return table.forget(txn, _PREFIX, start, limit, left)


def problems(txn: Any) -> Iterator[str]:
    """Yield, in words, what is wrong with the records of all queries. Cost: 5 µs a query."""
    yield from table.damaged(txn, _PREFIX, lambda key, value: _decode(value, _name(key)))


def _is_expired(now_ms: int, key: bytes, value: bytes) -> bool:
    try:
        adopted = _decode(value, _name(key))
    except CorruptionError:
        return False  # whoever hands in a batch of that query is told
    return adopted.once and adopted.at_ms + ONCE_EXPIRY_S * 1000 <= now_ms


def _name(key: bytes) -> str:
    return key[1:].decode(errors="backslashreplace")


def _decode(value: bytes, query: str) -> Adopted:
    where = f"the record of batches of query {query!r}"
    try:
        batch, partial, *others = json.loads(unseal(value, where))
    except CorruptionError as error:
        raise CorruptionError(
            f"{error}: nobody knows which of them are in the log. Look what of them arrived, and start the query anew "
            "with another checkpoint directory"
        ) from error
    return Adopted(batch, None if partial is None else Partial(*partial), *others)
