"""What comes from a spool as people may see it: control characters escaped, long texts cut, bytes as hex."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal

from qflow.names import printable

Form = Literal["text", "json", "hex"]
FORMS: tuple[Form, ...] = ("text", "json", "hex")
SHOWN_BYTES = 4096
"""Of a body."""
SHOWN_HEADERS = 100
"""Of a message."""
NOTHING = "-"
_NAME_CHARACTERS = 120
_VALUE_CHARACTERS = 400
_ROW = 16


def name(text: str) -> str:
    """Return a name for a table: escaped, and cut in the middle if it is long."""
    shown = printable(text) or "(empty)"
    if len(shown) <= _NAME_CHARACTERS:
        return shown
    half = _NAME_CHARACTERS // 2
    return f"{shown[:half]}…{shown[-half + 1 :]}"


def body(content: bytes, form: Form, size_bytes: int | None = None) -> str:
    """Return a body as text, indented JSON or hex; what is longer than `SHOWN_BYTES` is cut, and that is said.

    Args:
        size_bytes: how long it is, if `content` is the beginning of it.
    """
    size = len(content) if size_bytes is None else size_bytes
    if form == "json":
        text = _json(content if size == len(content) else b"") or "(not JSON)"
        shown, has_all = printable(text[:SHOWN_BYTES], keep="\n"), len(text) <= SHOWN_BYTES
    else:
        part = content[:SHOWN_BYTES]
        shown = _hex(part) if form == "hex" else printable(part.decode(errors="backslashreplace"), keep="\n\t")
        has_all = len(part) == size
    return shown if has_all else f"{shown}\n… cut: the body has {size:,} bytes"


_INDENTED = json.JSONEncoder(indent=2, ensure_ascii=False)


def _json(content: bytes) -> str:
    """Return JSON with indents, or of what is long some more than is shown: of what is nested they are megabytes."""
    parts, length = [], 0
    try:
        for part in _INDENTED.iterencode(json.loads(content)):
            parts.append(part)
            length += len(part)
            if length > SHOWN_BYTES:
                break
    except (ValueError, RecursionError):
        return ""
    return "".join(parts)


def headers(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of headers as a page has them: `SHOWN_HEADERS` at most, each cut."""
    return [(name(key[:_VALUE_CHARACTERS]), value(one)) for key, one in islice(found.items(), SHOWN_HEADERS)]


def value(of: Any) -> str:
    """Return the value of a header: escaped, and cut if it is long."""
    whole = str(of)
    return printable(whole[:_VALUE_CHARACTERS]) + "…" * (len(whole) > _VALUE_CHARACTERS)


def _hex(part: bytes) -> str:
    rows = (part[start : start + _ROW] for start in range(0, len(part), _ROW))
    return "\n".join(
        f"{number * _ROW:08x}  {row.hex(' '):<{_ROW * 3}} {''.join(map(_letter, row))}"
        for number, row in enumerate(rows)
    )


def _letter(byte: int) -> str:
    return chr(byte) if 32 <= byte < 127 else "."


def plain(value: Any) -> Any:
    """Return a value of headers as JSON has it: bytes as text, or in hex."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def count(number: float | None) -> str:
    """Return a number such as `12,345`; nothing for None."""
    if number is None:
        return NOTHING
    return f"{number:,.0f}" if number == int(number) or abs(number) >= 100 else f"{number:,.1f}"


def size(size_bytes: float | None) -> str:
    """Return a size such as `8.0 MiB`."""
    if size_bytes is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:,.0f} B" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.1f} TiB"


def span(seconds: float | None) -> str:
    """Return a time such as `12 s`, `40 min` or `3 d`."""
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.1f} s" if 0 < seconds < 10 else f"{seconds:.0f} s"
    for most, unit, length in ((7200, "min", 60), (172_800, "h", 3600)):
        if seconds < most:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
