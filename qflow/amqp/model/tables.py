"""Field tables of AMQP as values of Python: written for the log, compared, and named in errors.

`pamqp` decodes; it is not used to encode, because its encoder makes 32 bits of each float, refuses texts that are not
UTF-8 and cuts names at 128 bytes. Of a value that was decoded, the bytes written here decode to the same value again.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, TypeAlias

from pamqp import decode, encode

Table: TypeAlias = dict[str, Any]
"""A field table: names and values as `pamqp` decodes them."""

_TYPES: list[tuple[type, str]] = [
    (bool, "bool"),
    (float, "double"),
    (Decimal, "decimal"),
    (str, "longstr"),
    (bytes, "longstr"),
    (bytearray, "binary"),
    (datetime, "timestamp"),
    (dict, "table"),
    (list, "array"),
]


def encode_table(table: Mapping[str, Any], *, wide: bool = False) -> bytes:
    """Return the bytes of a table, the same for equal ones: names are in order. Cost: 1 µs for each value.

    Args:
        wide: write each integer in 64 bits, as RabbitMQ does: clients take what a broker tells for that, and older
            ones of Go and Java have no unsigned types. Else each is as short as it can be.
    """
    parts = bytearray()
    for name in sorted(table):
        encoded = name.encode()
        parts += bytes((len(encoded),)) + encoded + _encode_value(table[name], wide)
    return len(parts).to_bytes(4, "big") + parts


def _encode_value(value: Any, wide: bool) -> bytes:
    if wide and isinstance(value, int) and not isinstance(value, bool):
        return b"l" + encode.long_long_int(value)
    if isinstance(value, float):
        return b"d" + encode.double(value)
    if isinstance(value, str | bytes):
        text = value.encode() if isinstance(value, str) else value
        return b"S" + len(text).to_bytes(4, "big") + text
    if isinstance(value, dict):
        return b"F" + encode_table(value, wide=wide)
    if isinstance(value, list):
        items = b"".join(_encode_value(item, wide) for item in value)
        return b"A" + len(items).to_bytes(4, "big") + items
    if isinstance(value, Decimal):
        return b"D" + _encode_decimal(value)
    return encode.encode_table_value(value)


def _encode_decimal(value: Decimal) -> bytes:
    """Return a decimal: a scale, and a number of 32 bits."""
    exponent = value.as_tuple().exponent
    scale = -exponent if isinstance(exponent, int) and exponent < 0 else 0
    return bytes((scale,)) + (int(value.scaleb(scale)) & 0xFFFFFFFF).to_bytes(4, "big")


def decode_table(encoded: bytes) -> Table:
    """Return the table of `encode_table`. Raises ValueError: these are not the bytes of one."""
    try:
        taken, table = decode.field_table(encoded)
    except (TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"not a field table: {error}") from error
    if taken != len(encoded):
        raise ValueError(f"a field table of {taken} bytes in {len(encoded)}")
    return table


def type_name(value: Any) -> str:
    """Return how RabbitMQ names the type of a value in its texts."""
    if value is None:
        return "void"
    if isinstance(value, int) and not isinstance(value, bool):
        return "signedint" if -(2**31) <= value < 2**31 else "long"
    return next((name for kind, name in _TYPES if isinstance(value, kind)), type(value).__name__)


def comparable(value: Any) -> tuple[str, Any]:
    """Return what equal values have the same of, with their type: all integers are of one, all floats of another."""
    name = type_name(value)
    return ("int" if name in ("signedint", "long") else name), value
