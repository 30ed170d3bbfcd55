"""Batches as a sink hands them in, without Spark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from qflow.storage.inbox.stage_files import StageFile, StageWriter
from qflow.storage.inbox.stages import Batch, Manifest

from qflow.message import Message, Record, encode_headers
from qflow.storage import blocks
from qflow.storage.files import Files
from qflow.storage.inbox import stages

Row = tuple[Any, ...]
"""(topic, body), (topic, body, key) or (topic, body, key, headers)."""


def record_of(body: bytes, key: bytes | None = None, headers: Any = None) -> Record:
    """Return a row as it lies in a stage."""
    return Message(body, encode_headers(headers), key=key or b"") if key or headers else body


def write_file(
    spool: Path, batch: Batch, token: str, name: str, rows: Sequence[Row], files: Files | None = None, at_once: int = 4
) -> StageFile:
    """Write what one task writes, in blocks of a few rows."""
    writer = StageWriter(files or Files(), stages.staged(str(spool), batch, token), name)
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        records = [record_of(*row[1:]) for row in part]
        block = blocks.encode(writer.key, records, topics=[row[0] for row in part])
        writer.add(block, len(part), sum(map(len, records)))
    return writer.finish()


def staged(
    spool: Path,
    uuid: object,
    rows: Sequence[Row] | Iterable[Sequence[Row]],
    *,
    query: str = "q",
    number: int = 0,
    once: bool = False,
    files: Files | None = None,
    at_once: int = 4,
) -> Manifest:
    """Write a stage of two files, and hand it in not yet."""
    rows = list(rows)
    batch, token = Batch(query, number), uuid4().hex
    half = len(rows) // 2
    parts = [("000000-a", rows[:half]), ("000001-b", rows[half:])]
    found = [write_file(spool, batch, token, name, part, files, at_once) for name, part in parts if part]
    return Manifest(batch=batch, token=token, uuid=str(uuid), once=once, files=tuple(found))


def hand(spool: Path, uuid: object, rows: Any, *, files: Files | None = None, **options: Any) -> bool:
    """Write a stage and hand it in; see `stages.hand_in`."""
    return stages.hand_in(files or Files(), str(spool), staged(spool, uuid, rows, files=files, **options))
