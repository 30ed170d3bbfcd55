"""What a head of a request says, looked at: it comes from another process."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from qflow.errors import InvalidArgument
from qflow.message import is_plain
from qflow.options import PutOptions

Head = Mapping[str, Any]
Columns = Sequence[list[Any]]
_PUT = tuple(PutOptions.__annotations__)


def _must_be(head: Head, name: str, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"{name} of operation {head.get('op')!r} must be {wanted}, got {head.get(name)!r}")


def text(head: Head, name: str) -> str:
    """Return an argument that is a text. Raises InvalidArgument: it is none."""
    value = head.get(name)
    if not isinstance(value, str):
        raise _must_be(head, name, "a text")
    return value


def number(head: Head, name: str, least: int = 0) -> int:
    """Return an argument that is an int of at least so much. Raises InvalidArgument: it is none."""
    value = head.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _must_be(head, name, f"an int of at least {least}")
    return value


def flag(head: Head, name: str, default: bool = False) -> bool:
    """Return an argument that is True or False. Raises InvalidArgument: it is something else."""
    value = head.get(name, default)
    if not isinstance(value, bool):
        raise _must_be(head, name, "true or false")
    return value


def mapping(head: Head, name: str) -> dict[str, Any]:
    """Return an argument that is an object, {} where there is none. Raises InvalidArgument: it is something else."""
    value = head.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _must_be(head, name, "an object")
    return value


def settings(head: Head, name: str, known: Collection[str]) -> dict[str, Any]:
    """Return keyword arguments of a call, {} where there are none. Raises InvalidArgument: the call has no such."""
    given = mapping(head, name)
    unknown = given.keys() - known
    if unknown:
        raise InvalidArgument(
            f"{name} of operation {head.get('op')!r}: {min(unknown)!r} is none of {', '.join(sorted(known))}"
        )
    return given


def put_options(head: Head, *more: str) -> dict[str, Any]:
    """Return the options of a put, and what else is given of `more`. Raises InvalidArgument: headers are no object."""
    mapping(head, "headers")
    return {name: head[name] for name in (*_PUT, *more) if head.get(name) is not None}


def texts(head: Head, name: str) -> list[str]:
    """Return an argument that is a list of texts. Raises InvalidArgument: it is none."""
    value = head.get(name)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _must_be(head, name, "a list of texts")
    return value


def places(head: Head, total: int) -> list[int] | None:
    """Return the positions that ranges of a request name, None for all. Raises InvalidArgument: they make no sense."""
    value = head.get("places")
    if value is None:
        return None
    found: list[int] = []
    last = 0
    for one in value if isinstance(value, list) else [value]:
        if not (isinstance(one, list) and len(one) == 2 and all(type(end) is int for end in one)):
            raise InvalidArgument(f"places of operation {head.get('op')!r} must be ranges [first, end], got {one!r}")
        first, end = one
        if not last <= first < end <= total:
            raise InvalidArgument(f"ranges of places must be in order, and within 0 to {total}; got [{first}, {end}]")
        found += range(first, end)
        last = end
    return found


def column(head: Head, columns: Columns, index: int, count: int | None = None) -> list[bytes]:
    """Return a column of byte strings. Raises InvalidArgument: there is none, or it has another number of items."""
    if index >= len(columns) or not is_plain(columns[index]):
        raise InvalidArgument(f"operation {head.get('op')!r} needs byte strings in column {index}")
    found = columns[index]
    if count is not None and len(found) != count:
        raise InvalidArgument(
            f"column {index} of operation {head.get('op')!r} must have {count} items, it has {len(found)}"
        )
    return found
