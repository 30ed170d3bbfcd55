"""Which metrics there are: one line for each, in the order in which they are shown."""

from __future__ import annotations

from typing import Literal

from qflow.named_tuples import NamedTuple

PREFIX = "qflow_"
OTHER = "other"
"""The label of what is summed."""
Kind = Literal["gauge", "counter"]


class Figure(NamedTuple):
    """A metric that is one field of what `stats()` tells."""

    name: str
    """Without the prefix, and without `_total`."""
    kind: Kind
    field: str
    text: str
    together: Literal["sum", "max", "none"] = "sum"
    """What those are together that have no series of their own; `none`: it would say nothing."""


def _gauge(name: str, field: str, text: str, together: Literal["sum", "max", "none"] = "sum") -> Figure:
    return Figure(name, "gauge", field, text, together)


def _counter(name: str, field: str, text: str) -> Figure:
    return Figure(name, "counter", field, text)


BROKER: tuple[Figure, ...] = (
    _gauge("memory_capacity_bytes", "capacity_bytes", "Memory that messages may take."),
    _gauge("memory_resident_bytes", "resident_bytes", "Memory that messages of queues, streams and transactions take."),
    _gauge("spilled_bytes", "spilled_bytes", "Messages in the spill store."),
    _gauge("messages", "messages", "Messages in queues that are not settled."),
    _gauge("journal_records", "journal_records", "Batches that the journal has confirmed and the log does not hold."),
    _counter("commits", "commits_total", "Batches that were confirmed."),
    _counter("unrouted_messages", "unrouted_total", "Published messages that no queue and no stream takes."),
    _counter("duplicate_messages", "duplicates_total", "Published messages of producers who had published them."),
)
INBOX: tuple[Figure, ...] = (
    _gauge("inbox_waiting_batches", "waiting", "Batches of Spark's that were handed in and are not adopted."),
    _counter("inbox_adopted_batches", "adopted_total", "Batches that were adopted."),
    _counter("inbox_messages", "messages_total", "Messages in those."),
    _counter("inbox_replayed_batches", "replayed_total", "Batches that were handed in once more."),
    _counter("inbox_refused_batches", "refused_total", "Batches that were set aside."),
)
QUEUE: tuple[Figure, ...] = (
    _gauge("queue_messages", "messages", "Messages that are not settled."),
    _gauge("queue_bytes", "bytes", "Their bodies and headers."),
    _gauge("queue_resident_messages", "resident_messages", "Those that are in memory."),
    _gauge("queue_resident_bytes", "resident_bytes", "What memory is charged for them."),
    _gauge("queue_spilled_messages", "spilled_messages", "Those that are in the spill store."),
    _gauge("queue_spilled_bytes", "spilled_bytes", "Their bodies and headers."),
    _gauge("queue_logged_messages", "logged_messages", "Those that only the log has."),
    _gauge("queue_unacked_messages", "acquired_messages", "Those that were delivered."),
    _gauge("queue_unacked_bytes", "acquired_bytes", "Their bodies and headers."),
    _gauge("queue_lag_messages", "lag_messages", "Those that nobody has yet, delayed ones included."),
    _gauge("queue_delayed_messages", "delayed_messages", "Those that are not due."),
    _gauge("queue_oldest_unacked_seconds", "oldest_unacked_s", "For how long the first of them has been held.", "max"),
    _gauge("queue_consumers", "consumers_total", "Consumers, and gets that wait."),
    _gauge("queue_blocked_putters", "blocked_putters", "Puts that wait for room."),
    _gauge("queue_blocked_seconds", "blocked_longest_s", "For how long the first of them has waited.", "max"),
    _gauge("queue_paused", "paused", "1 if it delivers nothing until it is resumed."),
    _gauge("queue_capacity_bytes", "capacity_bytes", "Memory that its messages may take.", "none"),
    _gauge("queue_limit_messages", "limit_messages", "Its limit in messages, if it has one.", "none"),
    _gauge("queue_limit_bytes", "limit_bytes", "Its limit in bytes, if it has one.", "none"),
    _counter("queue_put_messages", "put_total", "Messages that were put."),
    _counter("queue_delivered_messages", "delivered_total", "Deliveries."),
    _counter("queue_acked_messages", "acked_total", "Messages that were acked."),
    _counter("queue_redelivered_messages", "redelivered_total", "Deliveries that came back."),
    _counter("queue_expired_messages", "expired_total", "Messages that outlived their time."),
    _counter("queue_dropped_messages", "dropped_total", "Messages dropped, at a limit or without a dead-letter queue."),
    _counter("queue_dead_lettered_messages", "dead_lettered_total", "Messages moved to the dead-letter queue."),
    _counter("queue_deleted_messages", "deleted_total", "Messages that were deleted one by one."),
    _counter("queue_purged_messages", "purged_total", "Messages that were purged."),
    _counter("queue_lost_messages", "lost_total", "Messages that could not be read back and were in no log."),
    _counter("queue_quarantined_messages", "quarantined_total", "Messages in damaged blocks of the log."),
)
STREAM: tuple[Figure, ...] = (
    _gauge("stream_messages", "messages", "Messages that are retained."),
    _gauge("stream_bytes", "bytes", "Their bodies and headers."),
    _gauge("stream_partitions", "partitions", "Partitions.", "none"),
    _counter("stream_published_messages", "published_total", "Messages that were published to it."),
    _counter("stream_dropped_messages", "dropped_total", "Messages that retention has removed."),
    _counter("stream_damaged_messages", "damaged_total", "Messages of blocks that could not be read."),
)
SUBSCRIPTION: tuple[Figure, ...] = (
    _gauge("subscription_lag_messages", "lag_messages", "How many messages it is behind, of all topics."),
    _gauge("subscription_unsettled_messages", "unsettled_messages", "Messages delivered and not settled."),
    _gauge("subscription_members", "members", "How many have it open."),
    _counter("subscription_delivered_messages", "delivered_total", "Deliveries."),
    _counter("subscription_acked_messages", "acked_total", "Messages that were acked."),
    _counter("subscription_redelivered_messages", "redelivered_total", "Deliveries that came back."),
    _counter("subscription_missed_messages", "gap_total", "Messages that were gone before they could be delivered."),
)
TIMES = {
    "commit_duration_seconds": ("commit_times", "From the first write of a batch until it was confirmed."),
    "sync_duration_seconds": ("sync_times", "Syncs of the journal, and commits of the log."),
}
"""Histograms: name -> (field, what it is of)."""
UNDER_WAY = {
    "sync_under_way_seconds": ("sync_times", "For how long the sync has taken that has not ended; 0 without one."),
}
"""Of what histograms leave out: name -> (field, what it is of)."""
COUNTS = {
    "queues": "Queues.",
    "queues_summed": "Those without series of their own: summed as `other`.",
    "streams": "Streams.",
    "streams_summed": "Those without series of their own.",
    "subscriptions": "Subscriptions of streams.",
    "subscriptions_summed": "Those without series of their own, and those without a name.",
}
DISK = {
    "log_file_bytes": "Length of the log's file.",
    "disk_size_bytes": "The file system of the spool.",
    "disk_free_bytes": "What of it this process may still use.",
}
LABELS = {QUEUE: ("queue",), STREAM: ("stream",), SUBSCRIPTION: ("stream", "subscription")}


class Listed(NamedTuple):
    """One metric, as a table has it."""

    name: str
    type: str
    labels: tuple[str, ...]
    text: str


def listed() -> list[Listed]:
    """Return all metrics there may be, in order."""
    alone = [Listed("up", "gauge", (), "1 if the spool has an owner that answers.")]
    alone.append(Listed("build_info", "gauge", ("version",), "1; which qflow tells this."))
    alone += [Listed(name, "gauge", (), text) for name, text in {**COUNTS, **DISK}.items()]
    alone += [Listed(name, "histogram", (), text) for name, (_, text) in TIMES.items()]
    alone += [Listed(name, "gauge", (), text) for name, (_, text) in UNDER_WAY.items()]
    figures = [(one, LABELS.get(group, ())) for group in (BROKER, INBOX, QUEUE, STREAM, SUBSCRIPTION) for one in group]
    told = [
        Listed(one.name + "_total" * (one.kind == "counter"), one.kind, labels, one.text) for one, labels in figures
    ]
    return [one._replace(name=PREFIX + one.name) for one in (*alone, *told)]
