"""What queues and streams a spool has, and how much is in them: read fast, however much that is."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import attrs

from qflow.config import spool_path
from qflow.errors import CorruptionError
from qflow.inspect.child import in_child
from qflow.inspect.logs import opened_environment
from qflow.message import DELAYED
from qflow.storage.lock import owner_pid
from qflow.storage.log.recovery import CURSOR, QUEUE, read_identity, records_of
from qflow.storage.log.rows import Row, rows_among


@attrs.frozen(kw_only=True)
class Listed:
    """One queue or stream."""

    name: str
    kind: str
    """"queue" or "stream"."""
    durable: bool
    messages: int | None
    """Not settled, or retained; None: its row is damaged."""
    bytes: int | None
    held_messages: int | None
    """Delivered and not settled; None without an owner that tells."""


@attrs.frozen(kw_only=True)
class Listing:
    """A spool, with its queues and streams by name."""

    path: str
    owner_pid: int | None
    """Process that has it open; None = none, 0 = one that is not known."""
    entries: list[Listed]
    problems: list[str]


def list_spool(path: str | os.PathLike[str]) -> Listing:
    """Return the queues and streams of a spool, as the log has them; what is in no log, as its owner told within 15 s.

    That is transient queues, messages that are not logged, and how many are held.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: 20 µs a queue, whatever waits in it.
    """
    spool = spool_path(path)
    problems: list[str] = []
    owner = owner_pid(spool) if os.path.isdir(spool) else None
    entries, problems = in_child(spool, lambda: _logged(spool))
    if owner is not None:
        from qflow.inspect import live  # not loaded where nobody owns it: that takes a tenth of the time

        told = live.read_live(spool)
        if told is not None and live.is_of_now(told) and owner in (0, told["pid"]):
            _add_told(entries, told["queues"])
    return Listing(path=spool, owner_pid=owner, entries=[entries[key] for key in sorted(entries)], problems=problems)


_Key = tuple[str, str]


def _logged(spool: str) -> tuple[dict[_Key, Listed], list[str]]:
    problems: list[str] = []
    found = {}
    with opened_environment(spool) as env, env.reading() as txn:
        read_identity(txn, spool)
        for owner, fields in records_of(txn, problems):
            if fields["kind"] != CURSOR:
                entry = _entry(fields, _rows(txn, owner, fields, problems))
                found[entry.kind, entry.name] = entry
    return found, problems


def _rows(txn: Any, owner: int, fields: dict[str, Any], problems: list[str]) -> list[Row] | None:
    settings = fields["settings"]
    count = settings["priorities"] if fields["kind"] == QUEUE else settings["partitions"]
    lanes = (*range(count), *range(DELAYED, DELAYED + count)) if fields["kind"] == QUEUE else range(count)
    with suppress(CorruptionError):
        return list(rows_among(txn, owner, lanes).values())
    problems.append(f"a row of {fields['kind']} {fields['name']!r} is damaged")
    return None


def _entry(fields: dict[str, Any], rows: list[Row] | None) -> Listed:
    return Listed(
        name=fields["name"],
        kind=fields["kind"],
        durable=True,
        messages=None if rows is None else sum(row.messages for row in rows),
        bytes=None if rows is None else sum(row.bytes for row in rows),
        held_messages=None,
    )


def _add_told(entries: dict[_Key, Listed], queues: dict[str, dict[str, Any]]) -> None:
    """Add what an owner told to what the log has, which is newer, and lacks the messages that are not logged."""
    for name, queue in queues.items():
        logged = entries.get((QUEUE, name))
        if logged is None and queue["durable"]:
            continue  # it was deleted since
        messages, size_bytes = queue["messages"], queue["bytes"]
        if logged is not None and logged.messages is not None and logged.bytes is not None:
            messages = logged.messages + queue.get("transient_messages", 0)
            size_bytes = logged.bytes + queue.get("transient_bytes", 0)
        entries[QUEUE, name] = Listed(
            name=name,
            kind=QUEUE,
            durable=queue["durable"],
            messages=messages,
            bytes=size_bytes,
            held_messages=queue["acquired_messages"],
        )
