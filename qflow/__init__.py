"""A queue engine to embed: bounded memory, disk only when memory is full, nothing confirmed is ever lost.

import qflow

with qflow.open("spool", capacity_bytes="64MiB") as broker:
    jobs = broker.declare_queue("jobs")
    jobs.put(b"hello")               # returns once it is synced
    with jobs.get() as delivery:     # acked on success, given back on an exception
        print(delivery.body)
"""

from __future__ import annotations

from atexit import register as _at_exit
from sys import modules as _modules
from sys import platform as _platform

TYPE_CHECKING = False
"""As type checkers know it: `typing` is not imported for them."""
if TYPE_CHECKING:
    from typing import Any

    from qflow.backoff import Backoff
    from qflow.broker import Broker
    from qflow.config import Overflow, SlowConsumer
    from qflow.deliveries import Deliveries
    from qflow.delivery import Delivery, Entry
    from qflow.errors import (
        AlreadySettled,
        BrokerClosed,
        BrokerFailed,
        CorruptionError,
        DiskFull,
        ForkedProcess,
        FormatTooNew,
        FormatTooOld,
        GapError,
        GroupInUse,
        InDoubt,
        InvalidArgument,
        MessageTooLarge,
        NotFound,
        PermissionDenied,
        ProducerBusy,
        QflowError,
        QueueDeleted,
        QueueEmpty,
        QueueFull,
        Reentered,
        SettingsConflict,
        SpoolInUse,
        StorageError,
        StreamDeleted,
        TooManyUnsettled,
        TransactionTooLarge,
    )
    from qflow.events import Event, EventKind
    from qflow.opening import open
    from qflow.options import (
        BrokerOptions,
        ConsumeOptions,
        PutOnceOptions,
        PutOptions,
        QueueChanges,
        QueueOptions,
        ScheduleOptions,
        StreamChanges,
        StreamOptions,
        SubscriptionOptions,
    )
    from qflow.periodic import Schedule
    from qflow.queues.consumer import Consumer
    from qflow.queues.queue import Queue
    from qflow.queues.transaction import Transaction
    from qflow.remote.client.broker import RemoteBroker
    from qflow.remote.client.connecting import connect
    from qflow.remote.client.queue import RemoteQueue
    from qflow.remote.client.streams import RemoteStream, RemoteSubscription
    from qflow.remote.client.transaction import RemoteTransaction
    from qflow.routing.results import PublishResult
    from qflow.stats import (
        BrokerStats,
        CompactionReport,
        QueueStats,
        RecoveryReport,
        RedriveReport,
        SnapshotReport,
        StreamStats,
        SubscriptionStats,
    )
    from qflow.streams.deliveries import StreamDeliveries, StreamDelivery, StreamMessage
    from qflow.streams.stream import Stream
    from qflow.streams.subscription import Subscription

__version__ = "0.1.0"


def _check_platform(platform: str) -> None:
    """Refuse to be imported where nothing that is promised could be kept. Raises ImportError: this is not Linux."""
    if platform != "linux":
        raise ImportError(
            f"qflow runs on Linux, and this is {platform!r}: use WSL 2 or a container, with the spool on a disk of "
            "its own; clients of AMQP, MQTT and Arrow Flight reach it from anywhere"
        )


_check_platform(_platform)


@_at_exit
def _end_sessions() -> None:
    """End sessions of URLs behind what the program has registered since: that may use them."""
    tunnel = _modules.get("qflow.flight.tunnel")
    if tunnel is not None:
        tunnel.end_sessions()


__all__ = [
    "AlreadySettled",
    "Backoff",
    "Broker",
    "BrokerClosed",
    "BrokerFailed",
    "BrokerOptions",
    "BrokerStats",
    "CompactionReport",
    "ConsumeOptions",
    "Consumer",
    "CorruptionError",
    "Deliveries",
    "Delivery",
    "DiskFull",
    "Entry",
    "Event",
    "EventKind",
    "ForkedProcess",
    "FormatTooNew",
    "FormatTooOld",
    "GapError",
    "GroupInUse",
    "InDoubt",
    "InvalidArgument",
    "MessageTooLarge",
    "NotFound",
    "Overflow",
    "PermissionDenied",
    "ProducerBusy",
    "PublishResult",
    "PutOnceOptions",
    "PutOptions",
    "QflowError",
    "Queue",
    "QueueChanges",
    "QueueDeleted",
    "QueueEmpty",
    "QueueFull",
    "QueueOptions",
    "QueueStats",
    "RecoveryReport",
    "RedriveReport",
    "Reentered",
    "RemoteBroker",
    "RemoteQueue",
    "RemoteStream",
    "RemoteSubscription",
    "RemoteTransaction",
    "Schedule",
    "ScheduleOptions",
    "SettingsConflict",
    "SlowConsumer",
    "SnapshotReport",
    "SpoolInUse",
    "StorageError",
    "Stream",
    "StreamChanges",
    "StreamDeleted",
    "StreamDeliveries",
    "StreamDelivery",
    "StreamMessage",
    "StreamOptions",
    "StreamStats",
    "Subscription",
    "SubscriptionOptions",
    "SubscriptionStats",
    "TooManyUnsettled",
    "Transaction",
    "TransactionTooLarge",
    "connect",
    "open",
]

_ROOMS = (
    "backoff",
    "errors",
    "config",
    "options",
    "periodic",
    "delivery",
    "events",
    "stats",
    "streams.deliveries",
    "streams.subscription",
    "streams.stream",
    "queues.consumer",
    "queues.transaction",
    "queues.queue",
    "routing",
    "broker",
    "opening",
    "remote.client.queue",
    "remote.client.streams",
    "remote.client.transaction",
    "remote.client.broker",
    "remote.client.connecting",
)
"""Where the names are, the light ones first. They are imported when they are asked for: whoever takes but a part of the
package, as Spark's workers do, does not wait for the engine."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _ROOMS or name == "inspect":
        return import_module(f"qflow.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'qflow' has no attribute {name!r}")
    if name == "open":  # many ask for nothing else: no other room is looked into for it
        found = import_module("qflow.opening").open
    else:
        modules = (import_module(f"qflow.{room}") for room in _ROOMS)
        found = next(vars(module)[name] for module in modules if name in vars(module))
    globals()[name] = found  # the next time it is there
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "aio", "inspect"])
