"""Checks the columns of a data frame that is to be published, and shares its rows out to places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from qflow.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_TEXT = ("binary", "string")
_HEADERS = "array<struct<key:string,value:binary>>"


def check_columns(schema: StructType, topic: str | None) -> dict[str, int]:
    """Return the indexes of the columns to write, by name, after checking their types; other columns are left out.

    Raises:
        InvalidArgument: one is missing, or has another type.
    """
    wanted = {"key": _TEXT, "value": _TEXT, "topic": ("string",), "headers": (_HEADERS,)}
    found: dict[str, int] = {}
    for number, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in wanted or (name == "topic" and topic is not None):
            continue
        if name in found:
            raise InvalidArgument(f"the data frame has two columns {name!r}: rename or drop one of them")
        type_ = field.dataType.simpleString()
        if type_ not in wanted[name]:
            raise InvalidArgument(
                f"column {field.name!r} is {type_}, and must be {' or '.join(wanted[name])} to be written: cast it"
            )
        found[name] = number
    if "value" not in found:
        raise InvalidArgument(
            f"there is no column 'value' (there are: {', '.join(schema.fieldNames()) or 'none'}), and it is what "
            "becomes the body of a message: make one, for example with to_json(struct('*')).alias('value')"
        )
    if "topic" not in found and topic is None:
        raise InvalidArgument(
            "say where the rows are published: with a column 'topic', or .option('topic', 'plant/1/heat') for all"
        )
    return found


def shares_of(rows: pa.RecordBatch, columns: dict[str, int], count: int) -> list[pa.RecordBatch]:
    """Return the rows that each of `count` places gets, with the columns to write under their names, in order.

    Those of one key go to one place; those without a key, by their topic. Cost: 1 µs a key or topic where there are
    several places, else nothing.
    """
    import pyarrow as pa

    chosen = pa.RecordBatch.from_arrays([rows.column(number) for number in columns.values()], names=list(columns))
    if count == 1:
        return [chosen]
    places = _places_of(chosen, "topic", count)
    if "key" in columns:
        keyed = _places_of(chosen, "key", count)
        places = [by_topic if by_key is None else by_key for by_key, by_topic in zip(keyed, places, strict=True)]
    return [chosen.filter(pa.array([place == number for place in places], pa.bool_())) for number in range(count)]


def _places_of(rows: pa.RecordBatch, name: str, count: int) -> list[Any]:
    """Return the place of each row by a column; None where that is null, place 0 where there is no such column."""
    if name not in rows.schema.names:
        return [0] * rows.num_rows
    encoded = rows.column(rows.schema.names.index(name)).cast("binary").dictionary_encode()
    places = [xxh3_64_intdigest(one) % count for one in encoded.dictionary.to_pylist()]
    return [None if number is None else places[number] for number in encoded.indices.to_pylist()]
