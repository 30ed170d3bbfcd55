"""One queue or stream, opened: its figures, limits, consumers and first messages, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from rich.text import Text

from qflow.altering import as_typed
from qflow.inspect.health import REASONS
from qflow.names import printable
from qflow.top import words
from qflow.top.look import FLOWS, Board, Key

if TYPE_CHECKING:
    from qflow.delivery import Entry
    from qflow.inspect.facts import MessageFacts

BODY_BYTES = 400
"""Of a message, at most; more fits no line."""
HEADER_LETTERS = 200
"""Of a header, at most."""
SIZES = {"capacity_bytes", "limit_bytes", "max_message_bytes"}


@attrs.frozen(kw_only=True)
class Inside:
    """What was asked about one queue or stream when it was opened."""

    settings: Mapping[str, Any] = attrs.field(factory=dict)
    messages: Sequence[MessageFacts | Entry] = ()
    note: str = ""
    """Why something is missing, as a sentence."""


def page(board: Board, key: Key, inside: Inside, width: int) -> list[Text]:
    """Return all there is to say of one."""
    row = board.rows.get(key)
    if row is None:
        return [Text(gone(key), "bold yellow")]
    facts = (board.look.queues if key.kind == "queue" else board.look.streams)[key.name]
    lines = [_heading(f"{key.kind} {key.name}" + (", paused" if row.is_paused else ""), width)]
    for flow in FLOWS:
        label = f"{flow:<6}{words.count(row.rates[flow]):>6}/s "
        line = Text(label, no_wrap=True)
        line.append(words.curve(board.series(key, flow, width - len(label)), width - len(label)), "cyan")
        lines.append(line)
    if row.resident_bytes is not None:
        figures = f" {words.size(row.resident_bytes)} of {words.size(row.capacity_bytes)}"
        room = max(4, width - 7 - len(figures))
        lines.append(Text(f"memory {words.bar(row.resident_bytes, row.capacity_bytes, room)}{figures}", no_wrap=True))
    lines += _pairs(_figures(facts), width)
    lines += _takers(facts, width) if key.kind == "queue" else _subscriptions(facts, width)
    if inside.settings:
        lines.append(_heading("limits and settings", width))
        lines += _pairs([(name, _setting(name, value)) for name, value in inside.settings.items()], width)
    lines += _messages(inside, width) if key.kind == "queue" else []
    if inside.note:
        lines += [Text(printable(inside.note), "yellow")]
    return lines


def gone(key: Key) -> str:
    """Return what is said of one that was deleted."""
    return f"{key.kind} {printable(key.name)} is not there any more"


def _heading(text: str, width: int) -> Text:
    return Text(words.fitted(text, width), "bold reverse", no_wrap=True)


def _pairs(pairs: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """Return names with values, as many beside each other as there is room for."""
    shown = [f"{printable(name)} {printable(value)}" for name, value in pairs]
    lines = [""]
    for one in shown:
        if lines[-1] and len(lines[-1]) + 3 + len(one) > width:
            lines.append(one)
        else:
            lines[-1] = f"{lines[-1]} · {one}" if lines[-1] else one
    return [Text(words.fitted(line, width), no_wrap=True) for line in lines if line]


def _figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all plain figures that are not 0."""
    found = []
    for name, value in facts.items():
        if isinstance(value, bool | str) or not isinstance(value, int | float) or not value:
            continue
        if name in ("limit_messages", "limit_bytes", "capacity_bytes"):
            continue  # among the settings
        found.append((name.removesuffix("_total").removesuffix("_s").replace("_", " "), _figure(name, value)))
    return found


def _figure(name: str, value: float) -> str:
    if name.endswith("bytes"):
        return words.size(value)
    return words.age(value) if name.endswith("_s") else f"{value:,.0f}"


def _setting(name: str, value: Any) -> str:
    if name in SIZES and isinstance(value, int):
        return words.size(value)
    return as_typed(getattr(value, "value", value))


def _takers(facts: Mapping[str, Any], width: int) -> list[Text]:
    """Return who is there to take messages, who holds some, and who waits to put."""
    lines = []
    if consumers := facts.get("consumers"):
        lines.append(_heading(f"consumers: {facts.get('consumers_total', len(consumers))}", width))
        for one in consumers:
            said = f"{one['name']} ({one['kind']}, pid {one['pid']}), for {words.age(one['since_s'])}"
            lines.append(Text(words.fitted(said, width), no_wrap=True))
    elif "consumers_total" in facts:
        lines.append(_heading("consumers: none", width))
    if holders := facts.get("holders"):
        lines.append(_heading("held, not acked", width))
        for one in holders:
            since = words.age(one["oldest_s"])
            said = f"{one['messages']:,} by {one['consumer']} (pid {one['pid']}), the oldest for {since}"
            lines.append(Text(words.fitted(said, width), no_wrap=True))
    if blocked := facts.get("blocked_putters"):
        longest, limit = words.age(facts["blocked_longest_s"]), facts["blocked_on"]
        said = f"{words.counted(blocked, 'blocked put')}, the longest for {longest}, at {limit}"
        lines.append(Text(words.fitted(said, width), "bold red", no_wrap=True))
    return lines


def _subscriptions(facts: Mapping[str, Any], width: int) -> list[Text]:
    lines = [_heading(f"subscriptions: {len(facts.get('subscriptions', ()))}", width)]
    for one in facts.get("subscriptions", ()):
        kind = "group " if one.get("group") else ""
        said = f"{kind}{one['name'] or '(no name)'}: {one['lag_messages']:,} behind"
        if "members" in one:
            said += f", {one['members']} open, {one['unsettled_messages']:,} not acked"
        lines.append(Text(words.fitted(f"{said}, filter {one['filter']}", width), no_wrap=True))
    return lines


def _messages(inside: Inside, width: int) -> list[Text]:
    if not inside.messages:
        return []
    lines = [_heading("the first messages", width)]
    for one in inside.messages:
        body = getattr(one, "body", None)
        if body is None:
            said = f"{one.sequence}  {words.size(one.size_bytes)}  in {one.state}"  # type: ignore[union-attr]
        else:
            text = body[:BODY_BYTES].decode(errors="replace")
            said = f"{one.sequence}  {words.size(one.size_bytes)}  {printable(text)}"
        lines.append(Text(words.fitted(said, width), no_wrap=True))
        if headers := getattr(one, "headers", None):
            lines.append(Text(words.fitted(_headers(headers), width), "dim", no_wrap=True))
    return lines


def _headers(headers: Mapping[str, Any]) -> str:
    """Return headers on a line, those first that say why a letter is dead."""
    names = sorted(headers, key=lambda name: REASONS.index(name) if name in REASONS else len(REASONS))
    return "   " + " · ".join(f"{name} {str(headers[name])[:HEADER_LETTERS]}" for name in names)
