"""What stands around the table, as lines of text: whose spool it is, memory, sums, findings, and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs
from rich.cells import cell_len
from rich.text import Text

from qflow.doctor import Finding
from qflow.events import Event, EventKind
from qflow.names import printable
from qflow.top import words
from qflow.top.look import FLOWS, Board, Flow, Mode, Order, Row

NAME_LEAST, NAME_MOST = 12, 48
CURVE_LEAST = 8
NEAR = 0.9
"""Of the capacity: a bar gets another colour."""

Cell = Callable[[Board, Row, int], str]


@attrs.frozen
class Column:
    """One column beside the name; `rank` tells which go first where there is no room for all."""

    title: str
    width: int
    rank: int
    cell: Cell
    sorts: str = ""
    """What `look.ORDERS` calls it."""
    style: Callable[[Row], str] = lambda row: ""


def _rate(flow: Flow) -> Cell:
    return lambda board, row, width: words.count(row.rates[flow]).rjust(width)


def _curve(flow: Flow) -> Cell:
    return lambda board, row, width: words.curve(board.series(row.key, flow, width), width)


def _memory(board: Board, row: Row, width: int) -> str:
    return words.bar(row.resident_bytes, row.capacity_bytes, width)


def _memory_style(row: Row) -> str:
    is_near = (row.resident_bytes or 0) >= NEAR * (row.capacity_bytes or 1)
    return "yellow" if is_near else "green"


COLUMNS = (
    Column("lag", 6, 1, lambda board, row, width: words.count(row.lag).rjust(width), "lag"),
    Column("unack", 6, 9, lambda board, row, width: words.count(row.unacked).rjust(width), "unacked"),
    Column("oldest", 6, 4, lambda board, row, width: words.age(row.oldest_s).rjust(width), "oldest"),
    Column("in/s", 6, 2, _rate("in"), "in/s"),
    Column("", CURVE_LEAST, 13, _curve("in"), style=lambda row: "cyan"),
    Column("out/s", 6, 6, _rate("out"), "out/s"),
    Column("", CURVE_LEAST, 14, _curve("out"), style=lambda row: "blue"),
    Column("ack/s", 6, 3, _rate("acked"), "acked/s"),
    Column("", CURVE_LEAST, 7, _curve("acked"), style=lambda row: "green"),
    Column("memory", 8, 8, _memory, "memory", style=_memory_style),
    Column("spill", 6, 11, lambda board, row, width: words.size(row.spilled_bytes).rjust(width), "spilled"),
    Column("cons", 5, 10, lambda board, row, width: words.count(row.consumers).rjust(width), "consumers"),
    Column(
        "blkd",
        5,
        5,
        lambda board, row, width: (words.count(row.blocked) if row.blocked else "").rjust(width),
        "blocked",
        style=lambda row: "bold red" if row.blocked else "",
    ),
)


@attrs.frozen
class Layout:
    """The columns at a width, with their widths."""

    name_width: int
    columns: tuple[tuple[Column, int], ...]

    def heading(self, order: Order) -> Text:
        """Return the line above the rows; the column that sorts has an arrow."""
        arrow = "▴" if order.is_reversed != (order.by == "name") else "▾"
        line = Text("  ", "bold", no_wrap=True)
        line.append(words.fitted("name" + arrow * (order.by == "name"), self.name_width))
        for column, width in self.columns:
            title = column.title + arrow * (bool(column.sorts) and column.sorts == order.by)
            line.append(" ")
            line.append(title[-width:].rjust(width) if column.sorts != "memory" else words.fitted(title, width))
        return line

    def line(self, board: Board, row: Row) -> Text:
        """Return one row: a mark, the name and the cells."""
        mark, style = _mark(row)
        line = Text(f"{mark} ", style, no_wrap=True)
        line.append(words.fitted(row.key.name, self.name_width), "bold")
        for column, width in self.columns:
            line.append(" ")
            line.append(column.cell(board, row, width), column.style(row))
        return line


def _mark(row: Row) -> tuple[str, str]:
    if row.blocked:
        return "!", "bold red"
    if row.is_paused:
        return "P", "yellow"
    return ("~", "cyan") if row.key.kind == "stream" else (" ", "")


def layout(width: int, names: Sequence[str]) -> Layout:
    """Return what fits a width: columns by rank, the names of these rows as whole as there is room, then longer curves.

    Cost: a sort of the columns.
    """
    longest = max((cell_len(printable(name)) for name in names), default=0)
    name_width = max(NAME_LEAST, min(NAME_MOST, longest))
    left = width - 2 - NAME_LEAST
    chosen: set[int] = set()
    for number in sorted(range(len(COLUMNS)), key=lambda number: COLUMNS[number].rank):
        needed = COLUMNS[number].width + 1
        if needed > left:
            break
        left -= needed
        chosen.add(number)
    named = min(name_width - NAME_LEAST, left)
    left -= named
    curves = [number for number in chosen if not COLUMNS[number].title]
    longer = left // len(curves) if curves else 0
    columns = tuple(
        (COLUMNS[number], COLUMNS[number].width + (longer if number in curves else 0)) for number in sorted(chosen)
    )
    return Layout(NAME_LEAST + named, columns)


MODE_STYLES = {Mode.LIVE: "bold green", Mode.TOLD: "bold yellow", Mode.DEAD: "bold yellow", Mode.FAILED: "bold red"}
SHADES = (("█", "cyan"), ("▓", "magenta"), ("█", "green"), ("▓", "blue"), ("░", "white"))
"""Of the queues with the most memory, and of all others: different also without colours."""
BAD = {
    EventKind.DISK_FULL,
    EventKind.MESSAGES_LOST,
    EventKind.CONSUMER_FAILED,
    EventKind.SLOW_CONSUMER,
    EventKind.LIMIT_REACHED,
}
SEVERITY_STYLES = {"urgent": "bold red", "problem": "yellow", "notice": "cyan"}
NOTE_LINES = 3
HERE = {
    "held-too-long": "enter on the queue shows who holds what, and a sets its ack_timeout_s",
    "blocked-producers": "a on the queue raises its limit, x purges it",
    "no-consumer": "enter on the queue shows its first messages, x purges it",
    "paused": "p on the queue lets it go on",
    "coming-back": "enter on the queue shows its first messages, a sets dead_letter, then max_deliveries",
    "dead-letters": "enter on the queue shows why each is dead, R redrives them, x purges them",
}
"""The keys that are a remedy, by kind of finding."""


def head(board: Board, path: str, width: int, silent_s: float = 0.0, *, is_low: bool = False) -> list[Text]:
    """Return all lines above the table.

    Args:
        silent_s: for how long the owner has not answered, if that is longer than it should be.
        is_low: there is room for few lines.
    """
    lines = [title(board, path, width)]
    if silent_s:
        said = f"no answer for {words.age(silent_s)}; what is shown is as old"
        lines += _wrapped(said, width, "bold red")
    if board.look.note:
        note = board.look.note
        if board.look.mode is Mode.TOLD:
            note += f", {words.age(board.look.age_s)} old"
        lines += _wrapped(note, width, MODE_STYLES[board.look.mode])
    lines += memory(board, width)
    lines += sums(board, width)
    lines += findings(board, width, 1 if is_low else 2)
    return lines


def title(board: Board, path: str, width: int) -> Text:
    """Return the name of the spool, and how it is seen."""
    look = board.look
    who = " · its directory is gone" if look.is_removed else f" · pid {look.pid}" if look.pid else ""
    state = look.mode.value + who
    name = printable(path)
    room = width - len(state) - 1
    if len(name) > room:
        name = "…" + name[len(name) - room + 1 :] if room > 1 else ""
    line = Text(words.fitted(name, room), "bold", no_wrap=True)
    line.append(" ")
    line.append(state, MODE_STYLES[Mode.FAILED if look.is_removed else look.mode])
    return line


def sentence(said: str, width: int) -> list[Text]:
    """Return what became of what was asked for."""
    return _wrapped(said, width, "bold yellow") if said else []


def _wrapped(sentence: str, width: int, style: str = "") -> list[Text]:
    """Return a sentence in a few lines; the last one is cut."""
    lines = [""]
    for word in printable(sentence).split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width and len(lines) < NOTE_LINES:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return [Text(words.fitted(line, width), style, no_wrap=True) for line in lines]


def memory(board: Board, width: int) -> list[Text]:
    """Return the memory of the broker: who has how much of it, stacked, and their names."""
    capacity, resident = board.look.broker.get("capacity_bytes"), board.look.broker.get("resident_bytes")
    if not capacity or resident is None:
        return []
    parts = _largest(board, resident)
    figures = f" {words.size(resident)} of {words.size(capacity)}"
    line = Text("memory ", no_wrap=True)
    room = max(4, width - len(line) - len(figures))
    shown = 0
    names = Text("       ", no_wrap=True)
    for (name, used), (letter, style) in zip(parts, SHADES, strict=False):
        cells = min(room - shown, max(1, round(room * used / capacity)))
        shown += cells
        line.append(letter * cells, style)
        entry = f" {printable(name)} {words.size(used)} "
        if len(names) + 1 + len(entry) <= width:
            names.append(letter, style)
            names.append(entry)
    line.append("·" * (room - shown))
    line.append(figures)
    line.truncate(width)
    return [line, names] if parts else [line]


def _largest(board: Board, resident: int) -> list[tuple[str, int]]:
    """Return who has most of the memory, and what all others have."""
    found = [(row.key.name, row.resident_bytes) for row in board.rows.values() if row.resident_bytes]
    found.sort(key=lambda one: (-one[1], one[0]))
    top = found[: len(SHADES) - 1]
    others = resident - sum(used for _, used in top)
    return [*top, ("others", others)] if others > 0 else top


def sums(board: Board, width: int) -> list[Text]:
    """Return the rates of all together, how much there is, and what of that is on the disk."""
    rows = board.rows.values()
    rates = board.whole()
    held = sum(row.messages for row in rows if row.key.kind == "queue")
    queues = sum(row.key.kind == "queue" for row in rows)
    facts = [f"{words.counted(queues, 'queue')}: {words.counted(held, 'message')}"]
    if streams := len(board.rows) - queues:
        facts.append(words.counted(streams, "stream"))
    if spilled := board.look.broker.get("spilled_bytes"):
        facts.append(f"{words.size(spilled)} spilled")
    inside = board.look.inside
    if inside.log_bytes:
        facts.append(f"log {words.size(inside.log_used_bytes)} live of {words.size(inside.log_bytes)}")
    if inside.disk_bytes:
        facts.append(f"disk {words.size(inside.disk_free_bytes)} free")
    if board.look.mode in (Mode.DEAD, Mode.FAILED):
        return _wrapped(", ".join(facts), width)
    line = Text(no_wrap=True)
    each = 24 if width >= 76 else 13
    for flow in FLOWS:
        label = f"{flow} {words.count(rates[flow])}/s "
        line.append(label)
        line.append(words.curve(board.series(None, flow, max(0, each - len(label))), each - len(label)), "cyan")
        line.append(" ")
    lines = [line]
    rest = ", ".join(facts)
    if len(line) + len(rest) <= width:
        line.append(rest)
    else:
        line.truncate(width)
        lines += _wrapped(rest, width)
    return lines


def findings(board: Board, width: int, most: int) -> list[Text]:
    """Return the worst findings, a line each, how many more there are, and which key tells the rest."""
    found = board.look.findings
    lines = []
    for one in found[:most]:
        severity = _severity(one)
        line = Text(f"{severity}: ", SEVERITY_STYLES.get(severity, ""), no_wrap=True)
        line.append(printable(one.sentence))
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if found:
        more = f"{words.counted(len(found) - most, 'finding')} more, and " if len(found) > most else ""
        lines.append(Text(words.fitted(f"{more}what to do: press d", width), "dim", no_wrap=True))
    return lines


def _severity(finding: Finding) -> str:
    return finding.severity.name.lower()


def every_finding(board: Board) -> list[Text]:
    """Return all findings with their remedies."""
    lines = []
    for one in board.look.findings:
        severity = _severity(one)
        lines.append(Text(f"{severity}: {printable(one.sentence)}", SEVERITY_STYLES.get(severity, "")))
        lines += [Text(f"  {printable(part)}") for part in one.remedy.splitlines()]
        if one.kind in HERE:
            lines.append(Text(f"  here: {HERE[one.kind]}", "bold"))
    if board.look.mode is Mode.FAILED and not lines:
        return [Text(printable(board.look.note), "bold yellow")]
    return lines or [Text("nothing is wrong, as far as the figures tell; `qflow doctor` looks at more")]


def events(found: Sequence[Event], width: int) -> list[Text]:
    """Return a line for each event."""
    lines = []
    for one in found:
        clock = time.strftime("%H:%M:%S", time.localtime(one.time_s))
        line = Text(f"{clock} ", "dim", no_wrap=True)
        line.append(one.kind.value.replace("_", " "), "bold red" if one.kind in BAD else "bold")
        line.append(f" {printable(one.queue)} {printable(one.detail)}".rstrip())
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines
