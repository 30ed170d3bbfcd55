"""How findings say numbers, times and sizes, and that there is nothing else in them."""

from __future__ import annotations

import re

from qflow.names import printable

_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB")
_LONGEST = 120
_LINES = re.compile(r"\s*[\r\n]\s*")


def span(seconds: float) -> str:
    """Return a time such as `12 s`, `40 minutes` or `2.5 hours`."""
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            number = seconds / length
            return f"{number:.1f} {unit}" if number < 10 and unit != "minutes" else f"{number:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(size_bytes: float) -> str:
    """Return a size such as `8.0 MiB`."""
    number, unit = float(size_bytes), _SIZES[0]
    for unit in _SIZES:
        if abs(number) < 1024 or unit == _SIZES[-1]:
            break
        number /= 1024
    return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"


def counted(number: int, thing: str) -> str:
    """Return a count such as `1 message` or `2,000 messages`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def ending(pid: int) -> str:
    """Return what ends a process, one as well that is stopped: that takes a signal when it goes on."""
    return f"`kill {pid}; kill -CONT {pid}`"


def quoted(text: str) -> str:
    """Return a name for a sentence: in quotes, escaped, not endless."""
    return repr(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")


def harmless(text: str) -> str:
    """Return a sentence on one line, with escapes for what a terminal would act on."""
    return printable(_LINES.sub(" ", text.strip()))
