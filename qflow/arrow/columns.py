"""The columns of rows that are to be published, found by name in the batches of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


Check = Callable[[int, int], None]
"""Is told how many rows a batch has and how large their bodies are, before one is decoded; it may raise."""


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
        InvalidArgument: the batch is damaged, or a text is none.
    """
    try:
        chosen = batch.select(list(columns.values()))  # nobody looks at the others
        chosen.validate(full=True)
        if check is not None:
            check(chosen.num_rows, _size(chosen.column(list(columns).index("value"))))
        arrays = [column.cast(_TYPES[name]) for name, column in zip(columns, chosen.columns, strict=True)]
        found = pa.RecordBatch.from_arrays(arrays, names=list(columns))
        found.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidArgument(f"the batch of {batch.num_rows} rows is damaged, or not what it says: {error}") from error
    return found


def _size(bodies: pa.Array) -> int:
    """Return how many bytes bodies are, each where it stands."""
    if pa.types.is_dictionary(bodies.type):
        lengths = pc.binary_length(bodies.dictionary.cast(pa.binary())).take(bodies.indices)
    else:
        lengths = pc.binary_length(bodies.cast(pa.binary()))
    return int(pc.sum(lengths).as_py() or 0)
