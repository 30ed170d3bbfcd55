"""What of a spool takes how much of the disk, and how much of that holds something that is still wanted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import attrs

from qflow.config import spool_path
from qflow.errors import CorruptionError
from qflow.inspect.child import in_child
from qflow.inspect.live import read_live
from qflow.inspect.logs import opened_log
from qflow.inspect.spills import area_name
from qflow.named_tuples import NamedTuple
from qflow.storage import blocks
from qflow.storage.blocks import BlockKey
from qflow.storage.environment import Environment
from qflow.storage.lock import owner_pid
from qflow.storage.log import bodies, table
from qflow.storage.log.keys import BLOCKS, parts_of
from qflow.storage.log.recovery import Recovery
from qflow.storage.log.shared_reading import OLD
from qflow.storage.spill.store import SPILL

_STORES = ("log", "journal", SPILL, "wiping", "inbox", "cursors", "log.new", OLD)
_DEAD = frozenset({"wiping", "log.new", OLD})
"""Nobody wants what is in there any more; it is removed little by little, or by the next owner."""
_BLOCK_BYTES = 512
KEYS_AT_ONCE = 4096


@attrs.frozen(kw_only=True)
class StoreUsage:
    """One place in a spool's directory."""

    name: str
    disk_bytes: int
    """What its files take."""
    live_bytes: int | None
    """As much of it holds something that is wanted; None: that is not known."""
    files: int


@attrs.frozen(kw_only=True)
class LaneUsage:
    """What a queue or stream takes."""

    name: str
    kind: str
    """"queue", "stream", or "deleted" for what is left of one."""
    log_bytes: int
    """Its blocks in the log, and its part of the bodies that they refer to."""
    live_bytes: int
    """As much of that is messages that are not settled, or are retained; the rest lies in blocks with such ones."""
    spill_bytes: int
    """What its spill files take."""

    @property
    def dead_bytes(self) -> int:
        """As much of the log is settled."""
        return self.log_bytes - self.live_bytes


@attrs.frozen(kw_only=True)
class Usage:
    """A whole spool."""

    path: str
    stores: list[StoreUsage]
    lanes: list[LaneUsage]
    """The largest first."""


class _Blocks(NamedTuple):
    bytes: int = 0
    messages: int = 0


def read_usage(path: str | os.PathLike[str]) -> Usage:
    """Return what a spool takes of the disk, by store and by queue.

    Raises:
        NotFound: there is no spool. FormatTooNew, CorruptionError, StorageError: as `qflow.open`.
    Cost: reads the log once, and looks at each file.
    """
    spool = spool_path(path)
    used, lanes = in_child(spool, lambda: _logged(spool))
    live = read_live(spool) if owner_pid(spool) is not None else None
    known = {SPILL: 0 if live is None else int(live["spilled_bytes"]), "log": used}
    stores = [_store(spool, name, known.get(name)) for name in _STORES if os.path.lexists(os.path.join(spool, name))]
    stores.append(_others(spool))
    lanes.sort(key=lambda lane: (-lane.log_bytes - lane.spill_bytes, lane.name))
    return Usage(path=spool, stores=stores, lanes=lanes)


def _logged(spool: str) -> tuple[int, list[LaneUsage]]:
    with opened_log(spool, readahead=True) as (env, found):
        taken = _by_owner(env)
        spilled = _by_area(spool, {record.owner: record.name for record in found.queues})
        return env.used_bytes(), list(_lanes(found, taken, spilled))


def _by_owner(env: Environment) -> dict[int, _Blocks]:
    """Return what the blocks of each owner take, and how many messages they hold, settled ones included."""
    sizes: Counter[int] = Counter()
    messages: Counter[int] = Counter()
    start, stop = bytes((BLOCKS,)), bytes((BLOCKS + 1,))
    while start < stop:
        start = _some(env, start, stop, sizes, messages)
    return {owner: _Blocks(size, messages[owner]) for owner, size in sizes.items()}


def _some(env: Environment, start: bytes, stop: bytes, sizes: Counter[int], messages: Counter[int]) -> bytes:
    """Count some blocks; return where to go on."""
    with env.reading(buffers=True) as txn:
        for count, (key, value) in enumerate(table.items(txn, start, stop)):
            if count == KEYS_AT_ONCE:
                return key
            _, owner, _, number = parts_of(key)
            if number != table.LAST:
                sizes[owner] += len(value)
                with suppress(CorruptionError):  # it is dead: nobody can read it
                    messages[owner] += blocks.read_header(value, where="a block").count
                    references = blocks.references(value, BlockKey(*parts_of(key)), where="a block")
                    sizes[owner] += sum(bodies.share_of(txn, reference) for reference in references)
    return stop


def _lanes(found: Recovery, taken: dict[int, _Blocks], spilled: dict[str | None, int]) -> Iterator[LaneUsage]:
    for record in (*found.queues, *found.streams):
        size, messages = taken.pop(record.owner, _Blocks())
        waiting = sum(row.messages for row in (record.rows or {}).values())
        yield LaneUsage(
            name=record.name,
            kind="deleted" if record.deleted else record.kind,
            log_bytes=size,
            live_bytes=0 if record.deleted else min(size, size * waiting // messages) if messages else 0,
            spill_bytes=spilled.pop(record.name, 0) if record.kind == "queue" else 0,
        )
    cursors = {record.owner for record in found.cursors}
    for owner, (size, _) in taken.items():
        if owner not in cursors:
            yield LaneUsage(name=f"number {owner}", kind="deleted", log_bytes=size, live_bytes=0, spill_bytes=0)
    for name, size in spilled.items():
        yield LaneUsage(name=name or "not known", kind="queue", log_bytes=0, live_bytes=0, spill_bytes=size)


def _by_area(spool: str, names: dict[int, str]) -> dict[str | None, int]:
    """Return what spill files take, by queue."""
    found: Counter[str | None] = Counter()
    directory = os.path.join(spool, SPILL)
    for area in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        found[area_name(area, names)] += sum(size for size, _ in _files(os.path.join(directory, area)))
    return dict(found)


def _store(spool: str, name: str, live_bytes: int | None) -> StoreUsage:
    sizes = [size for size, _ in _files(os.path.join(spool, name))]
    return StoreUsage(
        name=name,
        disk_bytes=sum(sizes),
        live_bytes=0 if name in _DEAD else live_bytes,
        files=len(sizes),
    )


def _others(spool: str) -> StoreUsage:
    sizes = [size for name in os.listdir(spool) if name not in _STORES for size, _ in _files(os.path.join(spool, name))]
    return StoreUsage(name="the rest", disk_bytes=sum(sizes), live_bytes=None, files=len(sizes))


def _files(path: str) -> Iterator[tuple[int, str]]:
    """Yield (bytes on the disk, path) of a file, or of all files below a directory; links are not followed.

    What goes meanwhile is left out.
    """
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            with os.scandir(path) as entries:
                for entry in entries:
                    yield from _files(entry.path)
            return
        yield os.lstat(path).st_blocks * _BLOCK_BYTES, path
    except FileNotFoundError:
        return
