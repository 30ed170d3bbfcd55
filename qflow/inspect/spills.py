"""What lies in the spill directory of a spool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import unquote

from qflow.config import spool_path
from qflow.errors import CorruptionError, NotFound
from qflow.inspect.child import in_child
from qflow.inspect.facts import SpilledFacts
from qflow.inspect.live import read_live
from qflow.inspect.logs import opened_log
from qflow.names import choices
from qflow.storage import blocks
from qflow.storage.files import READ
from qflow.storage.spill.store import SPILL, SPILL_TABLE


def spilled(path: str | os.PathLike[str], queue: str | None = None) -> Iterator[SpilledFacts]:
    """Yield the messages in the spill directory now, file by file; a live owner may change them meanwhile.

    Files kept for reuse still hold their last messages, which are listed, too.

    Args:
        queue: name of the only one to list; `NotFound` if neither log nor owner know it.
    """
    spool = spool_path(path)
    names = in_child(spool, lambda: _names(spool))
    live = read_live(spool)
    transient = set((live or {}).get("queues", {})) - set(names.values())
    if queue is not None and queue not in names.values() and queue not in transient:
        known = choices(queue, {*names.values(), *transient})
        raise NotFound(f"neither the log nor its owner knows a queue {queue!r}; {known}")
    directory = os.path.join(spool, SPILL)
    try:
        areas = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    for area in areas:
        name = area_name(area, names)
        if queue is None or name == queue:
            yield from _spilled_files(os.path.join(directory, area), name)


def _names(spool: str) -> dict[int, str]:
    with opened_log(spool) as (_, found):
        return {record.owner: record.name for record in found.queues}


def area_name(area: str, names: dict[int, str]) -> str | None:
    """Return the queue of a spill directory: by its number, or if that is not in the log, by its escaped name."""
    escaped, _, numbers = area.rpartition(".")
    try:
        owner = int(numbers.partition("-")[0], 16)
    except ValueError:
        return None
    if owner in names:
        return names[owner]
    return unquote(escaped)


def _spilled_files(directory: str, name: str | None) -> Iterator[SpilledFacts]:
    try:
        entries = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in sorted(entries, key=lambda entry: (len(entry.name), entry.name)):
            yield from _spilled_file(entry.path, name)


def _spilled_file(path: str, name: str | None) -> Iterator[SpilledFacts]:
    """Yield the messages of a file: one block, or a segment of blocks that ends at zeros or the end of the file."""
    position = 0
    try:
        with open(path, "rb", opener=lambda name, _flags: os.open(name, READ)) as file:
            size = os.fstat(file.fileno()).st_size
            while True:
                head = file.read(blocks.HEADER_BYTES)
                if position and head[:4] in (b"", bytes(4)):
                    return
                where = f"{path}, byte {position}" if position else path
                header = blocks.read_header(head, where=where)
                data = head + file.read(min(max(header.total_bytes(head), len(head)), size) - len(head))
                try:
                    block = blocks.decode(data, None, where=where)
                except CorruptionError as error:
                    yield SpilledFacts(
                        queue=name, sequence=None, size_bytes=0, file=path, position=position, problem=str(error)
                    )
                    position += len(data)
                    continue
                if header.key.table != SPILL_TABLE:
                    raise CorruptionError(f"{path}: not a spilled message")
                for offset, record in zip(block.offsets, block.records, strict=True):
                    yield SpilledFacts(
                        queue=name,
                        sequence=block.first + offset,
                        size_bytes=len(record),
                        file=path,
                        position=position,
                        problem=None,
                    )
                position += len(data)
    except (OSError, CorruptionError) as error:
        problem = f"{error}; what follows in the file was not read" if position else str(error)
        yield SpilledFacts(queue=name, sequence=None, size_bytes=0, file=path, position=position, problem=problem)
