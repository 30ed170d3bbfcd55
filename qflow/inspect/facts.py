"""What is told of a spool: plain values."""

from __future__ import annotations

from typing import Any

import attrs

from qflow.inspect.stream_facts import StreamFacts
from qflow.message import HeaderValue


@attrs.frozen(kw_only=True)
class QueueFacts:
    """One durable queue as the log has it, all its lanes together."""

    name: str
    number: int
    """What it is in the log, by which `read_page` finds it at once; of another queue of that name it is another one."""
    messages: int
    """Logged and not settled."""
    bytes: int
    next_sequence: int
    """The sequence of the next message, in the lane of priority 0."""
    floor: int
    """Sequences below are settled, in that lane."""
    settled_ranges: int
    """Ranges settled above the floors, of all lanes."""
    settings: dict[str, Any]
    problem: str | None


@attrs.frozen(kw_only=True)
class SpoolFacts:
    """A spool as its log and, if there is one, its live owner have it."""

    path: str
    uuid: str
    origin: str | None
    """The uuid of the spool it was copied from; None if it was not."""
    clean: bool
    """It was closed cleanly; False while an owner has it open."""
    journal_records: int
    """Batches that the journal has confirmed and the log does not hold yet; the other fields count them in."""
    owner_pid: int | None
    """Process that has it open; None = none, 0 = one that is not known."""
    queues: list[QueueFacts]
    streams: list[StreamFacts]
    live: dict[str, Any] | None
    """What the owner wrote last to `stats.json`: the fields of `BrokerStats`, `pid`, and `time_s` since the epoch."""
    live_age_s: float | None
    problems: list[str]


@attrs.frozen(kw_only=True)
class SpilledFacts:
    """One message in a spill file. The file is not part of the log and is removed when the spool is opened."""

    queue: str | None
    sequence: int | None
    size_bytes: int
    file: str
    position: int
    """Byte offset of its block in the file; 0 but in segments."""
    problem: str | None


@attrs.frozen(kw_only=True)
class MessageFacts:
    """One message in the log."""

    queue: str
    sequence: int
    body: bytes
    headers: dict[str, HeaderValue]
    time_ms: int
    """When it was confirmed, milliseconds since the epoch."""
    settled: bool
    size_bytes: int = 0
    """Of the whole body, which may be cut."""
    priority: int = 0
    expires_ms: int = 0
    """Milliseconds since the epoch; 0 = never."""
    due_ms: int = 0
    """It is not delivered before; 0 = at once."""
    topic: str = ""
    key: bytes = b""


@attrs.frozen(kw_only=True)
class Examination:
    """What is wrong with the log of a spool."""

    problems: list[str]
    """One text for each problem; blocks in a row with the same damage are one. Empty if all is well."""
    lost: dict[str, int]
    """Messages that should be there and cannot be read, by `queue 'name'` and `stream 'name'`."""
    journal_records: int
    """Records of the journal that the log does not hold yet; they were counted in."""
