"""What `stats()`, `recovery`, `snapshot()` and `compact()` return: frozen, plain values."""

from __future__ import annotations

import attrs

from qflow import durations

TIME_BOUNDS_S = durations.TIME_BOUNDS_S


@attrs.frozen(kw_only=True)
class HolderStats:
    """Who holds messages that were delivered and are not settled."""

    consumer: str
    """The name that was given with `get` or `consume`, else that of the thread or task that took them."""
    pid: int
    """Its process; 0 where that is not known, as of one on another host."""
    messages: int
    oldest_s: float
    """For how long it has held the first of them; to the second, as `QueueStats.oldest_unacked_s`."""


@attrs.frozen(kw_only=True)
class ConsumerStats:
    """Who is there to take messages: a consumer that runs, or a get that waits now."""

    name: str
    """As `HolderStats.consumer`."""
    pid: int
    kind: str
    """`"consumer"`; `"get"` for one that waits; the name of a protocol, as `"amqp"`, for consumers of its clients."""
    since_s: float
    """For how long it has been there."""


@attrs.frozen(kw_only=True)
class Rates:
    """Messages a second, over the last 1, 10 and 60 seconds; of a stream, what was published is `put`."""

    put_1s: float = 0.0
    put_10s: float = 0.0
    put_60s: float = 0.0
    delivered_1s: float = 0.0
    delivered_10s: float = 0.0
    delivered_60s: float = 0.0
    acked_1s: float = 0.0
    acked_10s: float = 0.0
    acked_60s: float = 0.0
    redelivered_1s: float = 0.0
    redelivered_10s: float = 0.0
    redelivered_60s: float = 0.0


@attrs.frozen(kw_only=True)
class QueueStats:
    """One queue at one moment. Bytes of messages are body + headers; `resident_bytes` is what memory is charged."""

    name: str
    durable: bool
    messages: int
    """Everything not settled: waiting in memory, spilled, logged, and acquired."""
    bytes: int
    transient_messages: int = 0
    """Of these, as many as are in no log, and gone after a restart; less than that while acks of others are written."""
    transient_bytes: int = 0
    resident_messages: int
    resident_bytes: int
    """Charged against the capacity: waiting in memory, acquired, and on the way in."""
    spilled_messages: int
    spilled_bytes: int
    logged_messages: int
    acquired_messages: int
    acquired_bytes: int
    lag_messages: int
    """Not settled and with nobody: how far the consumers are behind, what is delayed included."""
    delayed_messages: int
    """In memory or spilled, and not due when they were put or given back; those in the log are not counted apart."""
    oldest_unacked_s: float
    """For how long the message that was delivered first has been held; to the second, unless the queue has an ack
    timeout or watches for slow consumers. 0 if none is held."""
    capacity_bytes: int
    limit_messages: int | None
    limit_bytes: int | None
    put_total: int
    delivered_total: int
    acked_total: int
    redelivered_total: int
    """Deliveries that came back: given back, held for too long, or rejected; dead letters included."""
    expired_total: int
    dropped_total: int
    """By an overflow policy, or for lack of a dead-letter queue."""
    dead_lettered_total: int
    """Moved to the dead-letter queue, expired ones included."""
    deleted_total: int = 0
    """One by one, by `Queue.delete`."""
    purged_total: int
    lost_total: int
    """Spilled messages that could not be read back and were in no log."""
    quarantined_total: int
    """Messages in damaged blocks of the log; `qflow check` names them."""
    lost_ranges: tuple[tuple[int, int], ...]
    """The first and the last sequence of each stretch in which messages were lost, since the spool was opened: the
    first 1,000, neighbours as one."""
    spill_repaired_total: int
    """Spilled messages that could not be read back and were read from the log instead."""
    spill_files_created_total: int
    """Files, or segments; likewise below."""
    spill_files_overwritten_total: int
    """Taken into use again."""
    spill_files_read_total: int
    """Reads: one a message that has a file of its own, one a block of a segment."""
    spill_files_unlinked_total: int
    holders: tuple[HolderStats, ...] = ()
    """Those that hold the oldest, 100 at most."""
    consumers: tuple[ConsumerStats, ...] = ()
    """100 at most: those that have been there longest."""
    consumers_total: int = 0
    """All of them, at this moment."""
    blocked_putters: int = 0
    """Puts that wait for room."""
    blocked_longest_s: float = 0.0
    """For how long the first of them has waited."""
    blocked_on: str = ""
    """What that one waits for: `"limit_messages"` or `"limit_bytes"`, or `"capacity"`: memory; empty if none waits."""
    at_limit: bool = False
    """A put was not admitted at once, whatever the policy made of it, and the depth was not down to `resume_ratio` of
    the limit since."""
    paused: bool = False
    """See `Queue.pause`."""
    rates: Rates = Rates()


@attrs.frozen(kw_only=True)
class SubscriptionStats:
    """One subscription of a stream, or a group of them, at one moment."""

    stream: str
    name: str | None
    """None: it is gone when it is closed."""
    filter: str
    group: bool
    members: int
    """How many have it open now."""
    positions: list[int]
    """The next offset to be delivered, by partition."""
    committed: list[int] | None
    """Everything below is settled, in the log; None without a name."""
    lag_messages: int
    """How many it is behind, of all topics; see `Subscription.lag`."""
    matching_messages: int | None
    """How many of those its filter wants; None unless that was asked for."""
    unsettled_messages: int
    delivered_total: int
    acked_total: int
    redelivered_total: int
    gap_total: int
    """Messages that were gone before they could be delivered."""


@attrs.frozen(kw_only=True)
class StreamStats:
    """One stream at one moment."""

    name: str
    topics: tuple[str, ...]
    """The filters of what it takes."""
    partitions: int
    messages: int
    """Retained now."""
    bytes: int
    first_offsets: list[int]
    """The lowest that is retained, by partition."""
    next_offsets: list[int]
    published_total: int
    dropped_total: int
    """By retention, since the spool was opened; likewise above."""
    damaged_total: int
    """Messages of blocks that could not be read; `qflow check` names them."""
    subscriptions: list[SubscriptionStats]
    rates: Rates = Rates()
    """Of `put`: what was published. All else has its totals in `subscriptions`, and is 0 here."""


@attrs.frozen(kw_only=True)
class InboxStats:
    """Batches that were handed in from outside, by a sink of Spark's."""

    waiting: int
    """Handed in, and not adopted yet."""
    problem: str | None
    """Why one of them waits."""
    adopted_total: int
    """Since the spool was opened; likewise below."""
    messages_total: int
    """In those, and in batches of which a part is in the log."""
    replayed_total: int
    """Handed in once more, and not stored again."""
    refused_total: int
    """Set aside, because they are damaged or go nowhere."""


@attrs.frozen(kw_only=True)
class TimeStats:
    """How long something took, each time since the spool was opened."""

    counts: tuple[int, ...] = (0,) * (len(TIME_BOUNDS_S) + 1)
    """How often, by buckets: see `TIME_BOUNDS_S`; the last one has what took longer."""
    sum_s: float = 0.0
    longest_s: float = 0.0
    """The longest that ended in this minute or in the one before."""
    under_way_s: float = 0.0
    """Of syncs: for how long the one has taken that has not ended; 0 where there is none."""


@attrs.frozen(kw_only=True)
class BrokerStats:
    """The whole broker at one moment."""

    capacity_bytes: int
    resident_bytes: int
    """Of all queues, streams and open transactions together; of streams also the cache of what came last."""
    spilled_bytes: int
    messages: int
    commits_total: int
    """Batches that were confirmed, by the journal or by a commit of the log."""
    journal_records: int
    """Batches that the journal has confirmed and the log does not hold yet."""
    unrouted_total: int
    """Published messages that no queue was bound for, and no stream takes."""
    queues: dict[str, QueueStats]
    streams: dict[str, StreamStats]
    duplicates_total: int
    """Published messages of producers who had published them before."""
    inbox: InboxStats
    commit_times: TimeStats = TimeStats()
    """From the first write of a batch to the moment when it was confirmed."""
    sync_times: TimeStats = TimeStats()
    """Syncs of the journal, and commits of the log, which LMDB writes and syncs in one step."""
    troubles: dict[str, str] = attrs.field(factory=dict)
    """Parts of maintenance that failed when they were tried last, and why; they are tried again each second."""


@attrs.frozen(kw_only=True)
class RecoveryReport:
    """What opening the spool found."""

    clean: bool
    """The last owner closed it; if not, every recovered message is `redelivered`."""
    queues: int
    messages: int
    bytes: int
    quarantined_blocks: int
    """Damaged blocks met since the spool was opened."""
    problems: tuple[str, ...]
    """What was damaged, in words: the first 1,000 things, and a line that says how many more."""
    seconds: float
    journal_records: int = 0
    """Batches that were confirmed by the journal, and carried over from it into the log."""
    journal_problems: tuple[str, ...] = ()
    """Those of `problems` that the journal has: commits are lost, or may be."""


@attrs.frozen(kw_only=True)
class SnapshotReport:
    """What a copy of a spool holds."""

    path: str
    uuid: str
    """Its own: a copy is another spool."""
    origin: str
    """The uuid of the spool it was copied from."""
    clean: bool
    """The original was closed; if not, every message of the copy is `redelivered`."""
    queues: int
    streams: int
    messages: int
    """Of both."""
    bytes: int
    """Of the messages: bodies and headers."""
    log_bytes: int
    """What the copy takes on disk."""
    problems: tuple[str, ...]
    """What was damaged in the original, and so is in the copy, as far as opening a spool tells: `inspect.examine` reads
    all of it."""


@attrs.frozen(kw_only=True)
class RedriveReport:
    """Which dead letters went back."""

    moved: dict[str, int]
    """How many went to each queue."""
    kept: dict[str, int]
    """How many stay, by reason."""


@attrs.frozen(kw_only=True)
class CompactionReport:
    """What a compaction gave back."""

    bytes_before: int
    """Length of the log's file."""
    bytes_after: int
