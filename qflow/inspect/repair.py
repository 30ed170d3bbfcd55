"""Brings what can be read of a damaged spool into a new one; the old one is not touched.

Records are copied one by one, with their keys: sequences, offsets, positions and settings stay. What does not match its
checksum, or lies on pages that cannot be read, is left out and named. A read may kill the process that does it, so each
part is read in a child, which notes how far it came in memory that its parent has, too; behind such a place the next
record that can be read is looked for. Then rows, which count what blocks hold, are brought into line: see `mending`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from qflow.config import spool_path
from qflow.errors import CorruptionError, SpoolInUse
from qflow.identity import new_uuid
from qflow.inspect.child import in_child
from qflow.inspect.logs import check_there, opened_environment
from qflow.inspect.mending import Hole, mend
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import BlockKey
from qflow.storage.environment import BROKEN, Environment, put_pairs
from qflow.storage.files import Files
from qflow.storage.lock import owner_pid, process_in_words
from qflow.storage.log import recovery, table
from qflow.storage.log.bodies import BODIES
from qflow.storage.log.directory import put_in_place, staging
from qflow.storage.log.keys import BLOCKS, DAMAGED, META, QUEUES, parts_of
from qflow.storage.log.sealing import unseal
from qflow.storage.log.snapshots import making
from qflow.storage.topics.records import TABLES

PART_BYTES = 32 * 2**20
"""Copied in one go, at most, and a record more."""
KEY_BYTES = 14
_LEFT_OUT = frozenset({META, DAMAGED, *TABLES})
"""Made anew: what is known of the log as a whole, and indexes."""
_END = bytes((0xFF,)) * KEY_BYTES


@attrs.frozen(kw_only=True)
class Loss:
    """What could not be brought over."""

    name: str
    """Such as `queue 'jobs'`."""
    first: int | None
    """The first sequence, or offset, that is gone; None: it is not known which."""
    last: int | None
    messages: int | None
    """How many messages, at most; None: that is not known."""
    reason: str


@attrs.frozen(kw_only=True)
class Repair:
    """What a repair has brought into a new spool."""

    path: str
    uuid: str
    origin: str | None
    """The uuid of the damaged spool, if that could be read."""
    queues: int
    streams: int
    messages: int
    lost: list[Loss]
    problems: list[str]
    """What `qflow check` says of the new spool: gaps in streams stay, so that offsets do."""


class _Part(NamedTuple):
    """A part of a log that was copied."""

    position: bytes
    """Where to go on."""
    done: bool
    stopped: str
    """Why it could not be read on; empty: it can."""
    lost: list[tuple[bytes, str]]
    """Keys of records that do not match their checksum, and why."""


def repair_spool(path: str | os.PathLike[str], to: str | os.PathLike[str]) -> Repair:
    """Bring what can be read of a spool into a new one at `to`, a directory that does not exist or is empty.

    Raises:
        NotFound: there is no spool. SpoolInUse: somebody owns it. InvalidArgument: `to` is not empty, or inside it.
        CorruptionError: nothing of it can be read. DiskFull, StorageError: the new one could not be written; what was
            begun there was removed.
    Cost: reads the log once and writes what is whole.
    """
    spool = spool_path(path)
    check_there(spool)
    if (owner := owner_pid(spool)) is not None:
        raise SpoolInUse(
            f"the spool {spool} is in use by {process_in_words(owner)}: a repair reads it when it is closed"
        )
    files = Files()
    with making(spool, to, files, "new spool", unsafe_filesystem=False) as target:
        begun = in_child(spool, lambda: _begun(spool))
        done = _repair(spool, target, files, begun)
    if begun.journal is None:
        return done
    return attrs.evolve(done, lost=[*done.lost, _unknown("the journal", begun.journal)])


def _repair(spool: str, target: str, files: Files, begun: _Begun) -> Repair:
    staged, uuid, origin = staging(target, files), new_uuid(), begun.origin
    first = recovery.first_records(uuid, clean=begun.clean)
    put_pairs(staged, first | ({} if origin is None else recovery.copy_records(uuid, origin)))
    broken, damaged = _copy(spool, staged)
    mended = in_child(target, lambda: mend(staged, files))
    put_in_place(target, files)
    return Repair(
        path=target,
        uuid=uuid,
        origin=None if origin is None else str(origin),
        queues=mended.queues,
        streams=mended.streams,
        messages=mended.messages,
        lost=[*_losses(damaged, mended.holes), *(_unknown("pages of the log", reason) for reason in broken)],
        problems=mended.problems,
    )


def _unknown(name: str, reason: str) -> Loss:
    return Loss(name=name, first=None, last=None, messages=None, reason=reason)


def _losses(damaged: list[tuple[bytes, str]], holes: list[Hole]) -> Iterator[Loss]:
    """Yield what is gone of queues and streams that are there, and records of other kinds."""
    for hole in holes:
        yield Loss(name=hole.name, first=hole.first, last=hole.end - 1, messages=hole.messages, reason=hole.reason)
    for key, reason in damaged:
        if key[0] != BLOCKS:
            yield Loss(name=f"a record of table {key[0]}", first=None, last=None, messages=None, reason=reason)


# Reading the old log ---------------------------------------------------------------------------------------------


@contextmanager
def _reading(spool: str) -> Iterator[Any]:
    """Give a transaction of the old log, with what its journal has; without that where it cannot be read."""
    with opened_environment(spool, readahead=True) as env:
        if _journal_problem(env) is not None:
            env.seen = lambda txn: txn
        with env.reading() as txn:
            yield txn


def _journal_problem(env: Environment) -> str | None:
    try:
        with env.reading():
            return None
    except CorruptionError as error:
        return str(error)


class _Begun(NamedTuple):
    """What is known of the old log before anything is copied."""

    origin: str | None
    """Its uuid, if that can be read."""
    clean: bool
    """It was closed. Else every message may have been delivered, and says so."""
    journal: str | None
    """Why its journal cannot be read, if that is so."""


def _begun(spool: str) -> _Begun:
    with opened_environment(spool) as env:
        problem = _journal_problem(env)
    with _reading(spool) as txn:
        try:
            return _Begun(*recovery.read_identity(txn, spool), problem)
        except (CorruptionError, *BROKEN):
            return _Begun(None, False, problem)


def _copy(spool: str, staged: str) -> tuple[list[str], list[tuple[bytes, str]]]:
    """Copy all records that can be read; return why parts could not, and which records are damaged."""
    position, broken, damaged = b"\0" * KEY_BYTES, [], []
    with mmap.mmap(-1, mmap.PAGESIZE) as reached:
        while True:
            part = _copied(spool, staged, position, reached)
            damaged += part.lost
            if part.stopped:
                broken.append(part.stopped)
                found = _next_readable(spool, part.position)
                if found is None:
                    return broken, damaged
                position = found
            elif part.done:
                return broken, damaged
            else:
                position = part.position


def _copied(spool: str, staged: str, position: bytes, reached: mmap.mmap) -> _Part:
    """Copy some records from a position on, in a child; if that dies, up to where it died, in another one."""
    _note(reached, position)
    try:
        return in_child(spool, lambda: _copy_part(spool, staged, position, _END, reached))
    except CorruptionError as error:
        last, reason = _noted(reached), " ".join(str(error).split())
        lost: list[tuple[bytes, str]] = []
        while position < last:
            part = in_child(spool, lambda: _copy_part(spool, staged, position, last, reached))  # noqa: B023
            lost += part.lost
            if part.done or part.stopped:
                break
            position = part.position
        return _Part(last, False, reason, lost)


def _copy_part(spool: str, staged: str, position: bytes, stop: bytes, reached: mmap.mmap) -> _Part:
    pairs: dict[bytes, bytes] = {}
    lost: list[tuple[bytes, str]] = []
    size, done, stopped = 0, True, ""
    with _reading(spool) as txn:
        records = table.items(txn, position, stop)
        while True:
            try:
                key, value = next(records, (b"", b""))
            except BROKEN as error:
                done, stopped = False, f"pages behind the record with key {position.hex()} cannot be read: {error}"
                break
            if not key:
                break
            position = key + b"\0"
            _note(reached, position)
            if key[0] in _LEFT_OUT:
                continue
            if (problem := _problem(key, value)) is not None:
                lost.append((key, problem))
                continue
            pairs[key] = value
            size += len(value)
            if size >= PART_BYTES:
                done = False
                break
    put_pairs(staged, pairs)
    return _Part(position, done, stopped, lost)


def _problem(key: bytes, value: bytes) -> str | None:
    """Return why a record is left out, None if it is whole, or of a kind that its readers check."""
    try:
        if key[0] in (BLOCKS, BODIES):
            _check_lane_record(key, value)
        elif key[0] == QUEUES:
            unseal(value, "the record of a queue or stream")
    except CorruptionError as error:
        return str(error)
    return None


def _check_lane_record(key: bytes, value: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise CorruptionError("a key is too short, or too long")
    place = parts_of(key)
    if place[0] == BLOCKS and place[3] == table.LAST:
        unseal(value, "a row")
    elif place[0] == BLOCKS or (place[3] and not place[3] % 2):
        blocks.decode(value, BlockKey(*place), where=f"block {place[3]}")


def _note(reached: mmap.mmap, position: bytes) -> None:
    reached[: 2 + len(position)] = len(position).to_bytes(2, "big") + position


def _noted(reached: mmap.mmap) -> bytes:
    return reached[2 : 2 + int.from_bytes(reached[:2], "big")]


def _next_readable(spool: str, position: bytes) -> bytes | None:
    """Return the lowest key behind a place that cannot be read, found by halving; None if nothing is there."""
    low = int.from_bytes(position[:KEY_BYTES].ljust(KEY_BYTES, b"\0"), "big")
    step, found = 1, None
    while low + step < int.from_bytes(_END, "big"):
        found = _seek(spool, low + step)
        if found is not None:
            break
        step *= 2
    if found is None or found == _END:
        return None
    high, low = low + step, low + step // 2
    while high - low > 1:
        middle = (low + high) // 2
        at = _seek(spool, middle)
        low, high, found = (middle, high, found) if at is None else (low, middle, at)
    return None if found == _END else found


def _seek(spool: str, number: int) -> bytes | None:
    """Return the first key at or behind a number, the end if there is none; None if it cannot be read."""

    def look() -> bytes:
        with _reading(spool) as txn:
            return next((key for key, _ in table.items(txn, number.to_bytes(KEY_BYTES, "big"), _END)), _END)

    try:
        return in_child(spool, look)
    except CorruptionError:
        return None
