"""What a broker tells besides results: events. Its maintenance thread hands them to callbacks, never under a lock."""

from __future__ import annotations

import enum
from typing import Protocol

from qflow.named_tuples import NamedTuple


class EventKind(enum.Enum):
    """What has happened."""

    SPILL_STARTED = "spill_started"
    """The first message of a queue left memory for the disk."""
    SPILL_STOPPED = "spill_stopped"
    """Nothing of the queue lies in the spill store any more."""
    LIMIT_REACHED = "limit_reached"
    """A message was not admitted at once."""
    LIMIT_LEFT = "limit_left"
    """The depth came down to `resume_ratio` of the limit."""
    DISK_FULL = "disk_full"
    """The disk took no spilled messages. (That it takes no commit is raised to who waits for that.)"""
    DISK_RECOVERED = "disk_recovered"
    MESSAGES_LOST = "messages_lost"
    """Stored messages were damaged and are in no log, or a block of the log was set aside; `detail` names them."""
    SLOW_CONSUMER = "slow_consumer"
    """A message has been held for longer than `on_slow_consumer` allows."""
    DEAD_LETTERED = "dead_lettered"
    """Messages have left the queue as dead letters; `detail` says how many, and why."""
    LEASE_EXPIRED = "lease_expired"
    """Messages were held for longer than `ack_timeout_s`, or `on_slow_consumer`, allows, and went back; `detail` says
    who held how many for how long."""
    CONSUMER_FAILED = "consumer_failed"
    """The callback of a `Consumer` raised, and its message went back; or it could not get one, and tries again."""


class Event(NamedTuple):
    """Something that happened in a queue.

    Args:
        kind: what it was.
        queue: the name of the queue.
        detail: more of it, as a text for people: what is lost, how many, why; empty where there is no more to say.
        time_s: when it was, in seconds since the epoch, by the clock of the machine.
    """

    kind: EventKind
    queue: str
    detail: str
    time_s: float


class Teller(Protocol):
    """Who takes an event without waiting: the broker."""

    def __call__(self, kind: EventKind, queue: str, detail: str = "") -> None: ...
