"""Keyword arguments that several calls share, as type checkers see them. Settings are documented here, and only here.

`broker.alter_queue("jobs", limit_mesages=3)` is an error of mypy and of pyright, and so is `start="earlyest"`. Code
that passes such arguments on takes them as `**options: Unpack[qflow.QueueOptions]`.
"""

import os
from collections.abc import Iterable, Mapping, Set
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, Required, TypeAlias, TypedDict

from qflow.backoff import Backoff
from qflow.config import Overflow
from qflow.durations import Duration
from qflow.message import Headers

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Policy = TypeVar("Policy", default=Overflow)
    """The overflow policies that a queue may be given."""
else:
    from typing import TypeVar

    Policy = TypeVar("Policy")

Size: TypeAlias = int | str
"""Bytes: an int, or a text with a unit such as `"64MiB"` (1024) or `"1.5GB"` (1000)."""
Admits: TypeAlias = Literal[Overflow.BLOCK, Overflow.REJECT, Overflow.DROP_OLDEST]
"""The overflow policies with which a put appends its message or raises: it never returns None."""
Body: TypeAlias = bytes | bytearray | memoryview
"""What a message carries; `bytearray` and `memoryview` are copied."""
Key: TypeAlias = bytes | str
"""Chooses the partition of a published message; a text is encoded as UTF-8."""
Spill: TypeAlias = Literal["files", "segments"]
"""How spilled messages lie on disk: one file each, or many in a file."""
Moment: TypeAlias = datetime | float
"""A datetime with a time zone, or seconds since the epoch."""
Publication: TypeAlias = tuple[str, Body] | tuple[str, Body, Key | None]
"""A message to publish: its topic, its body, and perhaps its key."""
Start: TypeAlias = Literal["latest", "earliest", "committed"] | int | datetime
"""Where a subscription begins: see `SubscriptionOptions`."""


class BrokerOptions(TypedDict, total=False):
    """How a broker uses memory and disk: the arguments of `qflow.open`.

    capacity_bytes: memory for the messages of all queues, streams and open transactions together; default "64MiB".
    spill: how messages that do not fit in memory lie on disk: `"files"` (the default), one each, or `"segments"`, many
        in a file of fixed size, which costs a hundredth of the file operations.
    segment_bytes: size of a segment, "4KiB" to "256MiB"; a larger message has its own; default "8MiB".
    max_mapped_segments: how many segments of all queues are mapped into memory for reading at once, each with a file
        descriptor; 0 (the default) maps none and reads with `pread`, which was found as fast.
    max_transaction_bytes: the most one `put_many` or publish may hold, or a transaction, where each message counts with
        80 bytes more; its commit has all of it in memory, but for bodies of 64 KiB and more; default "64MiB".
    unsafe_filesystem: accept a network file system, whose locks and syncs may not hold; default False.
    journal: `"auto"` (the default) confirms small commits by one write to a journal, which the log takes over within a
        second; `"off"` commits each to the log, at twice the time.
    journal_bytes: size of the journal, "8KiB" to "256MiB", all of it on the disk; default "4MiB".
    door: let other processes of this user in, who use the spool through `qflow.connect`, by a socket in its directory;
        default True.
    """

    capacity_bytes: Size
    spill: Spill
    segment_bytes: Size
    max_mapped_segments: int
    max_transaction_bytes: Size
    unsafe_filesystem: bool
    journal: Literal["auto", "off"]
    journal_bytes: Size
    door: bool


class UrlOptions(TypedDict, total=False):
    """What lets in at a URL: arguments of `qflow.workers.run`, and of `qflow.connect`.

    token_file: a file with the access token, its first word, to show; read anew for each connection.
    ca: certificates (PEM) to trust in place of the system's.
    cert, key: for a broker that asks for a certificate: the one to show, and its private key (PEM).
    """

    token_file: str | os.PathLike[str] | None
    ca: str | os.PathLike[str] | None
    cert: str | os.PathLike[str] | None
    key: str | os.PathLike[str] | None


class WorkOptions(BrokerOptions, UrlOptions, total=False):
    """What `qflow.workers.run` takes, beside its own arguments."""


class QueueChanges(TypedDict, Generic[Policy], total=False):
    """Settings of a queue that can be changed while it is used: the arguments of `Broker.alter_queue`.

    capacity_bytes: memory it may use; None (the default) = as much as the broker has.
    limit_messages, limit_bytes: how deep it may get, memory and disk together; None (the default) = no limit.
    max_message_bytes: the largest message, body and headers; default "64MiB".
    on_overflow: what a put does at a limit; default `Overflow.BLOCK`. With `DROP_OLDEST` a lower limit drops at once.
    ttl_s: seconds after which a message expires, from when it could first be delivered; None (the default) = never.
    max_deliveries: a message that comes back after so many deliveries is a dead letter; None (the default) = it is
        delivered again without end.
    dead_letter: name of the queue for expired, rejected and too often delivered messages; None (the default) = they
        are dropped. It need not exist: it is declared when it is first needed, durable if a queue that names it is.
    ack_timeout_s: a message held for more seconds goes back to the queue; None (the default) = it is held until it is
        settled.
    dedupe_window_s: a second put with the same `dedupe_key` stores nothing for so long after the first, and returns its
        sequence; durable queues only; None (the default) = there are no keys. A new one holds for later puts.
    resume_ratio: puts that wait at a limit go on when the depth is down to this share of it, 0 to 1; default 0.8.
    """

    capacity_bytes: Size | None
    limit_messages: int | None
    limit_bytes: Size | None
    max_message_bytes: Size
    on_overflow: Policy
    ttl_s: Duration | None
    max_deliveries: int | None
    dead_letter: str | None
    ack_timeout_s: Duration | None
    dedupe_window_s: Duration | None
    resume_ratio: float


class QueueOptions(QueueChanges[Policy], Generic[Policy], total=False):
    """Settings of a queue: the arguments of `Broker.declare_queue`, which are those of `QueueChanges` and two more.

    durable: messages are synced in the log before a put returns (True, the default); False = they are lost at a
        restart, and so is the queue.
    priorities: how many there are, 1 to 10, of which the highest is delivered first; 1 (the default) is a plain FIFO.
    """

    durable: bool
    priorities: int


class Retention(TypedDict, total=False):
    """How long a stream keeps messages, and how large they may be: part of `StreamChanges` and `StreamOptions`.

    retention_s: messages are dropped when they are older; None (the default) = never for that. Age is by the time a
        message has in its partition, which never falls: if the clock was ahead and is set back, messages keep the later
        time until the clock is there again, and stay so much longer.
    retention_bytes, retention_messages: how much is kept of the newest, of all partitions together, in bytes of
        messages, not of the disk; None (the default) = all. A message that is larger than `retention_bytes` is dropped
        itself, with all before it: set it above `max_message_bytes`.
    retain_until_consumed: no message is dropped that a durable subscription is still to get. With no other limit, a
        message is dropped when all of them have it; as long as there is none, everything is kept; default False.
    max_message_bytes: the largest message, headers and key included; default "64MiB".
    """

    retention_s: Duration | None
    retention_bytes: Size | None
    retention_messages: int | None
    retain_until_consumed: bool
    max_message_bytes: Size


class StreamChanges(Retention, total=False):
    """Settings of a stream that can be changed while it is used, the arguments of `Broker.alter_stream`: `Retention`,
    and `topics`, the filters as in MQTT of which one must match the topic of a message.
    """

    topics: Iterable[str]


class StreamOptions(Retention, total=False):
    """Settings of a stream, the arguments of `Broker.declare_stream`: those of `Retention`, and two more.

    topics: filters as in MQTT, at least one; a message is in the stream if one of them matches its topic.
    partitions: how many there are, 1 to 64; messages are in order within each, not across them; default 1.
    """

    topics: Required[Iterable[str]]
    partitions: int


class SubscriptionOptions(TypedDict, total=False):
    """What a subscription is asked for with: the arguments of `Broker.subscribe`.

    name: makes it durable: its position is in the log. Nobody else may have it open at the same time.
    start: where a new one begins: `"latest"` (the default) = with what is published from now on, `"earliest"` = with
        what is retained; an offset, or a datetime with a time zone = the first message not earlier. `"committed"` =
        where the name or group is, which must be known.
    group: share the work with other members of it; the first to join sets filter and start.
    session_expiry_s: a durable one that nobody has open for so many seconds is deleted; None (the default) = as it was
        given before, and for a new one never.
    follow: wait for more at the end of the stream (True, the default), or end there.
    ack_timeout_s: a message that this one holds for more seconds goes to somebody else; None (the default) = 60 s in a
        group, else without end.
    on_gap: what a get does when messages that were to come are gone: `"raise"` a `GapError` (the default), or `"skip"`
        and count them.
    """

    name: str | None
    start: Start
    group: str | None
    session_expiry_s: Duration | None
    follow: bool
    ack_timeout_s: Duration | None
    on_gap: Literal["raise", "skip"]


class ConsumeOptions(TypedDict, total=False):
    """How a callback gets the messages of a queue: the arguments of `consume`.

    prefetch: the most messages acquired and not handed to a callback yet: the callback's slowness is the queue's
        back-pressure. What was acquired and not handed out goes back, uncounted, when the consumer is closed, or its
        ack timeout ends; default 100.
    concurrency: the most callbacks that run at once, each in a thread, or task, of its own; with 1 (the default),
        messages are handled in order.
    name: what `stats()` calls it, and its threads are called; None (the default) = one made from the queue's.
    retry: how long a message whose callback failed waits for its next attempt, and how many it has; None (the default)
        = it goes back at once.
    """

    prefetch: int
    concurrency: int
    name: str | None
    retry: Backoff | None


class ScheduleOptions(TypedDict, total=False):
    """When messages are put again and again, and their headers: the arguments of `Broker.schedule`; see there."""

    every_s: Duration | None
    cron: str | None
    time_zone: str
    headers: Headers | None


class PutOptions(TypedDict, total=False):
    """Options of a put: arguments of `Queue.put`, which describes them, all but `dedupe_key` and `timeout_s`."""

    headers: Headers | None
    durable: bool | None
    priority: int
    ttl_s: Duration | None
    delay_s: Duration | None
    not_before: Moment | None


class PutOnceOptions(PutOptions, total=False):
    """Options of a put: those of `PutOptions`, and `dedupe_key`."""

    dedupe_key: str | None


def check_options(what: str, options: Mapping[str, Any], known: Set[str]) -> None:
    """Refuse keyword arguments that a call does not have. Raises TypeError."""
    if not options.keys() <= known:
        unknown = min(options.keys() - known)
        raise TypeError(f"a {what} has no option {unknown!r}; there are {', '.join(sorted(known))}")
