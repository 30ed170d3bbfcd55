"""An export as a Parquet file: a row a message; how queues and streams are declared is in its metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from qflow.cli.portable.items import KINDS, Declared, declared
from qflow.errors import InvalidArgument, NotFound
from qflow.restoring import Item

MAGIC = b"PAR1"
READ_ROWS, READ_BYTES = 1000, 2**20
"""About so much is read at once; of a group of rows, which an export writes for each batch, all may be decoded."""
_DECLARED = b"qflow.declared"
_NUMBERS = ("number", "time_ms", "expires_ms", "due_ms")
_SMALL = ("partition", "priority")
_BYTES = ("key", "body")
_TYPES = {**dict.fromkeys((*_NUMBERS, *_SMALL), int), **dict.fromkeys(_BYTES, bytes)}
"""What is in a column; in others it is text."""


def write(path: Path, declarations: Iterable[Declared], batches: Iterable[list[Item]]) -> None:
    """Write a file."""
    arrow, parquet = _arrow()
    kinds = {
        **dict.fromkeys(_NUMBERS, arrow.uint64()),
        **dict.fromkeys(_SMALL, arrow.int32()),
        **dict.fromkeys(_BYTES, arrow.binary()),
    }
    names = [field.name for field in attrs.fields(Item)]
    metadata = {_DECLARED: json.dumps([attrs.asdict(one) for one in declarations]).encode()}
    schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in names], metadata)
    with parquet.ParquetWriter(path, schema) as writer:
        for batch in batches:
            columns = {name: [getattr(one, name) for one in batch] for name in names}
            columns["headers"] = [json.dumps(headers) for headers in columns["headers"]]
            if batch:
                writer.write_table(arrow.table(columns, schema))


def read(path: Path) -> Iterator[Declared | Item]:
    """Yield what a file holds. Raises InvalidArgument: it is none of an export."""
    arrow, parquet = _arrow()
    try:
        with parquet.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata or {}
            if _DECLARED not in metadata:
                raise InvalidArgument(f"{path} was not written by qflow export")
            yield from map(declared, json.loads(metadata[_DECLARED]))
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                rows = group.num_rows * READ_BYTES // max(1, group.total_byte_size)
                for batch in file.iter_batches(min(max(1, rows), READ_ROWS), row_groups=[number]):
                    yield from map(_item, batch.to_pylist())
    except (arrow.ArrowException, ValueError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no Parquet file of qflow export, or is damaged: {error}") from error


def _item(row: dict[str, Any]) -> Item:
    """Return the message of a row, which another program may have written. Raises TypeError, ValueError: it is none."""
    for name, value in row.items():
        kind = _TYPES.get(name, str)
        if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
            raise TypeError(f"{name} is {value!r:.40}")
    if row.get("kind") not in KINDS:
        raise ValueError(f"kind is queue or stream, not {row.get('kind')!r:.40}")
    return Item(**{**row, "headers": json.loads(row.get("headers", "{}"))})


def check_installed() -> None:
    """Raise NotFound if there is no pyarrow."""
    _arrow()


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise NotFound("Parquet needs pyarrow: pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
