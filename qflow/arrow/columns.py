"""The columns of rows that are to be published, found by name in the batches of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qflow.arrow.schema import headers_type
from qflow.errors import InvalidArgument

_TYPES = {"key": pa.binary(), "value": pa.binary(), "topic": pa.string(), "headers": headers_type()}
_WORDS = {
    "key": "binary or string",
    "value": "binary or string",
    "topic": "string",
    "headers": "list<struct<key: string, value: binary>>",
}


Check = Callable[[int, Mapping[str, int]], None]
"""Is told how many rows a batch has, and how many bytes each of its columns, before it is decoded; it may raise."""


def found_columns(schema: pa.Schema, names: Sequence[str]) -> dict[str, int]:
    """Return the indexes of the columns of these names that are there.

    Raises:
        InvalidArgument: one is there twice, or has a type that cannot be converted; or there is no `value`.
    """
    found: dict[str, int] = {}
    for number, field in enumerate(schema):
        if field.name not in names:
            continue
        if field.name in found:
            raise InvalidArgument(f"there are two columns {field.name!r}: rename or leave out one of them")
        if not _fits(field.name, field.type):
            raise InvalidArgument(f"column {field.name!r} must be {_WORDS[field.name]}, not {field.type}")
        found[field.name] = number
    if "value" not in found:
        raise InvalidArgument(
            f"there is no column 'value', which becomes the body of a message; there are: "
            f"{', '.join(schema.names) or 'none'}"
        )
    return found


def _fits(name: str, type_: pa.DataType) -> bool:
    if pa.types.is_dictionary(type_) and name != "headers":  # nothing casts to a list
        type_ = type_.value_type
    if pa.types.is_null(type_):
        return name in ("key", "headers")
    if name == "headers":
        pair = type_.value_type if pa.types.is_list(type_) or pa.types.is_large_list(type_) else None
        if pair is None or not pa.types.is_struct(pair) or [field.name for field in pair] != ["key", "value"]:
            return False
        return _is_text(pair.field(0).type) and (_is_text(pair.field(1).type) or _is_binary(pair.field(1).type))
    return _is_text(type_) or (name != "topic" and _is_binary(type_))


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def _is_binary(type_: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_fixed_size_binary(type_)
        or pa.types.is_binary_view(type_)
    )


def taken(batch: pa.RecordBatch, columns: dict[str, int], check: Check | None = None) -> pa.RecordBatch:
    """Return these columns of a batch in the types of a message, checked: nothing in them points elsewhere.

    Raises:
        InvalidArgument: the batch is damaged, or a text is none. What `check` raises.
    """
    with _damage_told(batch):
        chosen = batch.select(list(columns.values()))  # nobody looks at the others
        chosen.validate(full=True)
        sizes = {name: _size(column) for name, column in zip(columns, chosen.columns, strict=True)}
    if check is not None:
        check(chosen.num_rows, sizes)
    with _damage_told(batch):
        arrays = [column.cast(_TYPES[name]) for name, column in zip(columns, chosen.columns, strict=True)]
        found = pa.RecordBatch.from_arrays(arrays, names=list(columns))
        found.validate(full=True)
    return found


@contextmanager
def _damage_told(batch: pa.RecordBatch) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise InvalidArgument(f"the batch of {batch.num_rows} rows is damaged, or not what it says: {error}") from error


def _size(column: pa.Array) -> int:
    """Return how many bytes a column stands for, each value where it stands: a dictionary or views may repeat one."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        pairs = column.flatten()
        return _size(pairs.field(0)) + _size(pairs.field(1))
    if pa.types.is_dictionary(column.type):
        lengths = _lengths(column.dictionary).take(column.indices)
    else:
        lengths = _lengths(column)
    return int(pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0)


def _lengths(values: pa.Array) -> pa.Array:
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.int32())
    if not (pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type)):
        return pc.binary_length(values)
    validity, views, *_ = values.buffers()
    stop = values.offset + len(values)
    found = np.frombuffer(views, np.int32)[: 4 * stop : 4].copy()  # a view of 16 bytes begins with its length
    return pa.Array.from_buffers(pa.int32(), len(values), [validity, pa.py_buffer(found)], offset=values.offset)
