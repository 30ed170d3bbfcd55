"""Figures and names in few characters, and the bars and curves that are made of characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from qflow.names import printable

CURVE = "▁▂▃▄▅▆▇█"
BAR = " ▏▎▍▌▋▊▉█"


def fitted(text: str, width: int) -> str:
    """Return a text that takes so many cells: padded, or cut with an ellipsis."""
    text = printable(text)
    if width <= 0:
        return ""
    return set_cell_size(text, width - 1) + "…" if cell_len(text) > width else set_cell_size(text, width)


def count(number: float | None) -> str:
    """Return a number in at most five characters, such as `950`, `1.2k`, `12.3k`, `4.1M`."""
    if number is None:
        return "-"
    if 0 < number < 9.95 and number != int(number):
        return f"{number:.1f}"
    if number < 1000:
        return f"{number:.0f}" if number < 999.5 else "1.0k"
    return _scaled(number, 1000, "kMGTPE")


def counted(number: int, thing: str) -> str:
    """Return a count in words, such as `1 queue` or `1.2k queues`."""
    return f"{count(number)} {thing}{'' if number == 1 else 's'}"


def size(number: float | None) -> str:
    """Return bytes in at most six characters, such as `512`, `3.4K`, `64.0M`: powers of 1,024."""
    if number is None:
        return "-"
    return f"{number:.0f}" if number < 1024 else _scaled(number, 1024, "KMGTPE")


def _scaled(number: float, step: int, units: str) -> str:
    place = -1
    while number >= step - 0.5 and place < len(units) - 1:
        number /= step
        place += 1
    unit = units[place]
    return f"{number:.1f}{unit}" if number < 99.95 else f"{number:.0f}{unit}"


def age(seconds: float | None) -> str:
    """Return a time in at most five characters, such as `12s`, `3m05`, `40m`, `2h10`, `5d`."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60:02}"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 36_000:
        return f"{whole // 3600}h{whole % 3600 // 60:02}"
    return f"{whole // 3600}h" if whole < 172_800 else f"{whole // 86_400}d"


def curve(values: Sequence[float], width: int) -> str:
    """Return a sparkline of the last values, from 0 to the largest of them; a value of 0 is the lowest line."""
    last = list(values)[-width:] if width > 0 else []
    top = max(last, default=0.0)
    steps = len(CURVE) - 1
    line = "".join(CURVE[0 if not value else max(1, round(steps * value / top))] for value in last)
    return line.rjust(max(width, 0))


def bar(part: float | None, whole: float | None, width: int) -> str:
    """Return a bar that is as full as `part` of `whole`; something is seen of all that is not nothing."""
    if part is None or not whole or width <= 0:
        return " " * max(width, 0)
    eighths = min(8 * width, max(int(part > 0), round(8 * width * part / whole)))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (BAR[rest] if rest else "")).ljust(width, "·")
