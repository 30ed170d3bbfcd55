"""What a log says when it is opened: a plain value. Nothing here calls upward.

Only rows and registry records are read, one of each for a lane and a queue, and of a log that was not closed the blocks
of the last commits, so opening takes the same time whatever waits.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from qflow.errors import CorruptionError, FormatTooNew, FormatTooOld
from qflow.identity import bytes_of, uuid_of
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import NO_PREVIOUS
from qflow.storage.environment import BROKEN, Environment
from qflow.storage.log import table
from qflow.storage.log.journal import NO_JOURNAL, STATE_KEY, encode_state
from qflow.storage.log.keys import BLOCKS, FORMAT, OLDEST_FORMAT, QUEUES, key_of, meta_key, queue_key
from qflow.storage.log.reading import is_empty
from qflow.storage.log.rows import Row, read_rows
from qflow.storage.log.sealing import seal, unseal

CLEAN, DIRTY = b"clean", b"dirty"
_OWNER = struct.Struct("<Q")
_FIELDS = {"name", "incarnation", "settings", "deleted", "kind"}

QUEUE, STREAM, CURSOR = "queue", "stream", "cursor"
"""What an owner of lanes may be; a cursor has no blocks, only rows and marks: how far a subscription came."""
BINDINGS = "bindings"
"""Beside the settings in a queue's record: the filters it is bound with."""


class QueueRecord(NamedTuple):
    """One owner of lanes as the log knows it: a queue, a stream, a cursor."""

    owner: int
    name: str
    incarnation: int
    settings: dict[str, Any]
    rows: dict[int, Row] | None
    """The row of each lane that was ever used, lane 0 among them. None: one is damaged, the queue cannot be served."""
    deleted: bool
    kind: str = QUEUE


class Recovery(NamedTuple):
    """The whole log."""

    uuid: str
    clean: bool
    queues: list[QueueRecord]
    streams: list[QueueRecord]
    cursors: list[QueueRecord]
    problems: list[str]
    next_owner: int
    """Above every number that was ever given: what was written late under one of them is never taken for another's."""
    unread: frozenset[int]
    """Numbers of records that are damaged, or of a kind that this version does not know."""


def first_records(uuid: str, *, clean: bool = True) -> dict[bytes, bytes]:
    """Return what a new log begins with. `clean`: nothing in it was delivered that does not say so."""
    return {
        meta_key("format"): _format(),
        meta_key("uuid"): seal(bytes_of(uuid)),
        meta_key("state"): seal(CLEAN if clean else DIRTY),
    }


def copy_records(uuid: str, origin: str) -> dict[bytes, bytes]:
    """Return what makes a copy a log of its own. Its state stays: it opens as the original would after a crash now."""
    return {
        meta_key("uuid"): seal(bytes_of(uuid)),
        meta_key("origin"): seal(bytes_of(origin)),
        STATE_KEY: encode_state(NO_JOURNAL),
    }


def read_origin(txn: Any, path: str) -> str | None:
    """Return the uuid of the spool that a log was copied from, None if it is no copy."""
    value = txn.get(meta_key("origin"))
    return None if value is None else uuid_of(unseal(value, f"{path}: the log's origin"))


def queue_value(
    name: str, incarnation: int, settings: dict[str, Any], *, deleted: bool = False, kind: str = QUEUE
) -> bytes:
    fields = {"name": name, "incarnation": incarnation, "settings": settings, "deleted": deleted, "kind": kind}
    return seal(json.dumps(fields).encode())


def fields_of(value: Any, owner: int) -> dict[str, Any]:
    """Return what the record of an owner of lanes says, as `queue_value` was given it. Raises CorruptionError."""
    where = f"the record of queue {owner}"
    fields: dict[str, Any] = json.loads(unseal(value, where))
    if not fields.keys() >= _FIELDS:
        raise CorruptionError(f"{where} does not say its {min(_FIELDS - fields.keys())}: another version wrote it")
    return fields


def write_new(txn: Any, owner: int, value: bytes) -> None:
    """Write the record of a new owner of lanes, and that its number is given: it does not come back."""
    txn.put(queue_key(owner), value)
    if _noted_owner(txn) <= owner:
        txn.put(meta_key("next_owner"), seal(_OWNER.pack(owner + 1)))


def _noted_owner(txn: Any) -> int:
    """Return the number that the next owner gets at the least; 0 if that is not noted, or damaged."""
    value = txn.get(meta_key("next_owner"))
    try:
        return 0 if value is None else int(_OWNER.unpack(unseal(value, "the log's next number"))[0])
    except (CorruptionError, struct.error):
        return 0


def set_state(txn: Any, state: bytes) -> None:
    txn.put(meta_key("state"), seal(state))


def set_format(txn: Any) -> None:
    """From now on the log may hold what only this format knows."""
    txn.put(meta_key("format"), _format())


def _format() -> bytes:
    return seal(struct.pack("<I", FORMAT))


def touch(txn: Any) -> None:
    """Write what is there, so that there is something to commit."""
    key = meta_key("state")
    txn.put(key, txn.get(key))


class _Unreadable(Exception):
    """The rows of one owner lie on pages that are damaged; the transaction cannot go on."""


def read_log(env: Environment) -> Recovery:
    """Read what the log says; pages that cannot be read cost the queues and streams whose rows they hold, not all.

    Raises:
        as `read`, of the rest.
    """
    broken: dict[int, str] = {}
    while True:
        try:
            with env.reading() as txn:
                found = read(txn, env.path, broken)
                found.problems[:0] = env.problems
                return found
        except _Unreadable as error:
            owner, text = error.args
            broken[owner] = text


def read_identity(txn: Any, path: str) -> tuple[str, bool]:
    """Return the uuid of a log, and whether it was closed.

    Raises:
        FormatTooNew, FormatTooOld: it was written by a newer version, or by one from before the first release.
        CorruptionError: it is not a log of ours, or its first records are damaged.
    """
    values = {}
    for name in ("format", "uuid", "state"):
        value = txn.get(meta_key(name))
        if value is None:
            raise CorruptionError(f"{path} is not a qflow log: its {name} is missing. It was left as it is")
        values[name] = unseal(value, f"{path}: the log's {name}")
    (version,) = struct.unpack("<I", values["format"])
    if version > FORMAT:
        raise FormatTooNew(
            f"{path} has format {version}, this qflow reads up to {FORMAT}: open it with the newer qflow that wrote it"
        )
    if version < OLDEST_FORMAT:
        raise FormatTooOld(
            f"{path} has format {version}, from before the first release; this qflow reads {OLDEST_FORMAT} and later: "
            "drain it with the version that wrote it, or open another directory. It was left as it is"
        )
    return uuid_of(values["uuid"]), values["state"] == CLEAN


def read(txn: Any, path: str, broken: Mapping[int, str] | None = None) -> Recovery:
    """Read what the log says.

    Args:
        broken: owners whose rows are known to be unreadable, and why; see `read_log`.

    Raises:
        FormatTooNew, FormatTooOld: it was written by a newer version, or by one from before the first release.
        CorruptionError: it is not a log of ours, or its first records are damaged.
    """
    uuid, clean = read_identity(txn, path)
    found: dict[str, list[QueueRecord]] = {QUEUE: [], STREAM: [], CURSOR: []}
    problems: list[str] = []
    unread: set[int] = set()
    highest = 0
    for owner, fields in _all_records(txn, problems):
        highest = owner
        if fields is None:
            unread.add(owner)
        elif fields["kind"] in found:
            found[fields["kind"]].append(_queue(txn, owner, fields, problems, broken))
        else:
            problems.append(
                f"record {owner}, {fields['name']!r}, is of kind {fields['kind']!r}, which this qflow does not "
                "know: open the spool with the newer one that wrote it"
            )
            unread.add(owner)
    return Recovery(
        uuid,
        clean,
        found[QUEUE],
        found[STREAM],
        found[CURSOR],
        problems,
        max(highest + 1, _noted_owner(txn)),
        frozenset(unread),
    )


def check_last_commits(env: Environment, found: Recovery) -> Iterator[str]:
    """Read the blocks that the last commit to each lane wrote; yield what is wrong with them, in words.

    For a log that was not closed: its last commit may be one that failed, of which the disk has a part. Messages of one
    commit have one time. Cost: a block for each lane, or as many as that commit had.
    """
    for record in (*found.queues, *found.streams):
        for lane, row in (record.rows or {}).items():
            try:
                with env.reading() as txn:
                    _check_last_commit(txn, record.owner, lane, row)
            except CorruptionError as error:
                yield f"{record.kind} {record.name!r}, lane {lane}: {error}"


def _check_last_commit(txn: Any, owner: int, lane: int, row: Row) -> None:
    first, time_ms = row.tail, None
    while first != NO_PREVIOUS:
        key = blocks.BlockKey(BLOCKS, owner, lane, first)
        value = txn.get(key_of(*key))
        if value is None:  # settled and removed; if it vanished, whoever reads the one behind it tells
            return
        where = f"block {first}"
        header = blocks.read_header(value, where=where)
        if header.end <= row.floor or time_ms not in (None, header.time_ms):
            return
        block = blocks.decode(value, key, where=where, header=header)
        first, time_ms = header.previous, block.times_ms[-1]


def records_of(txn: Any, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (owner, fields) of what there is of queues, streams and cursors, and was not deleted; no rows are read.

    Args:
        problems: is added a text for each record that is damaged.
    """
    for owner, fields in _all_records(txn, problems):
        if fields is not None and not fields["deleted"]:
            yield owner, fields


def _all_records(txn: Any, problems: list[str]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the owner of each record, in order, and its fields; None of one that is damaged: see `problems`."""
    prefix = bytes((QUEUES,))
    for key, value in table.items(txn, prefix, table.behind(prefix)):
        owner = int.from_bytes(key[1:], "big")
        fields = None
        try:
            fields = fields_of(value, owner)
        except CorruptionError as error:
            problems.append(str(error))
        yield owner, fields


def read_record(txn: Any, owner: int) -> QueueRecord | None:
    """Return the record of one owner of lanes; None if there is none. Cost: 50 µs. Raises CorruptionError."""
    value = txn.get(queue_key(owner))
    return None if value is None else _queue(txn, owner, fields_of(value, owner), [], None)


def is_there(txn: Any, owner: int) -> bool:
    """Tell whether an owner of lanes has a record and was not deleted. Cost: 5 µs. Raises CorruptionError."""
    value = txn.get(queue_key(owner))
    return value is not None and not fields_of(value, owner)["deleted"]


def _queue(
    txn: Any, owner: int, fields: dict[str, Any], problems: list[str], broken: Mapping[int, str] | None
) -> QueueRecord:
    rows: dict[int, Row] | None = None
    kind, name = fields["kind"], fields["name"]
    if not fields["deleted"]:
        try:
            if broken is not None and owner in broken:
                raise CorruptionError(broken[owner])
            rows = read_rows(txn, owner)
            if kind == QUEUE:
                rows = _believed(txn, owner, name, rows, problems)
        except CorruptionError as error:
            problems.append(f"{error}; {kind} {name!r} cannot be served")
        except BROKEN as error:
            if broken is None:
                raise
            raise _Unreadable(owner, f"the pages of its rows are damaged ({error})") from error
    return QueueRecord(owner, name, fields["incarnation"], fields["settings"], rows, fields["deleted"], kind)


def _believed(txn: Any, owner: int, name: str, rows: dict[int, Row], problems: list[str]) -> dict[int, Row]:
    """Return the rows of a queue, those changed that say it is empty where blocks hold messages above the floor."""
    believed = dict(rows)
    for lane, row in rows.items():
        if not (row.messages or is_empty(txn, owner, lane, row)):
            believed[lane] = row._replace(messages=1)  # so that they are read, and then counted
            problems.append(
                f"queue {name!r}: the row of lane {lane} says that it is empty, but blocks hold messages from "
                f"{row.floor} on: they are served"
            )
    return believed
