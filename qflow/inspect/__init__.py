"""Read-only views and copies of a spool on disk, with or without a live owner: what the command line shows.

Nothing here takes the owner's lock or changes the log; each call reads a state of the log in short transactions. In the
process that owns the spool, use `Broker.stats` and `Broker.check` instead: LMDB opens a file once in a process.

A damaged log may kill the process that reads it. So all calls but `read_stream` read in a child process, and report its
death as an error.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from qflow.inspect.comparing import Difference, compare
    from qflow.inspect.copying import copy_spool
    from qflow.inspect.facts import Examination, MessageFacts, QueueFacts, SpilledFacts, SpoolFacts
    from qflow.inspect.health import Health, LettersFacts, owner_of, read_health
    from qflow.inspect.listing import Listed, Listing, list_spool
    from qflow.inspect.live import read_live
    from qflow.inspect.log_check import check_spool, examine
    from qflow.inspect.logs import check_there
    from qflow.inspect.pages import Page, read_first_pages, read_message, read_newest, read_page, read_whole
    from qflow.inspect.repair import Loss, Repair, repair_spool
    from qflow.inspect.spills import spilled
    from qflow.inspect.spools import Rooms, read_rooms, read_spool
    from qflow.inspect.stream_facts import PartitionFacts, StreamFacts, SubscriptionFacts
    from qflow.inspect.stream_reader import Gap, StreamReader, read_stream
    from qflow.inspect.usage import LaneUsage, StoreUsage, Usage, read_usage

__all__ = [
    "Difference",
    "Examination",
    "Gap",
    "Health",
    "LaneUsage",
    "LettersFacts",
    "Listed",
    "Listing",
    "Loss",
    "MessageFacts",
    "Page",
    "PartitionFacts",
    "QueueFacts",
    "Repair",
    "Rooms",
    "SpilledFacts",
    "SpoolFacts",
    "StoreUsage",
    "StreamFacts",
    "StreamReader",
    "SubscriptionFacts",
    "Usage",
    "check_spool",
    "check_there",
    "compare",
    "copy_spool",
    "examine",
    "list_spool",
    "owner_of",
    "read_first_pages",
    "read_health",
    "read_live",
    "read_message",
    "read_newest",
    "read_page",
    "read_rooms",
    "read_spool",
    "read_stream",
    "read_usage",
    "read_whole",
    "repair_spool",
    "spilled",
]

_MODULES = {
    "comparing": ("Difference", "compare"),
    "copying": ("copy_spool",),
    "facts": ("Examination", "MessageFacts", "QueueFacts", "SpilledFacts", "SpoolFacts"),
    "health": ("Health", "LettersFacts", "owner_of", "read_health"),
    "listing": ("Listed", "Listing", "list_spool"),
    "live": ("read_live",),
    "log_check": ("check_spool", "examine"),
    "logs": ("check_there",),
    "pages": ("Page", "read_first_pages", "read_message", "read_newest", "read_page", "read_whole"),
    "repair": ("Loss", "Repair", "repair_spool"),
    "spills": ("spilled",),
    "spools": ("Rooms", "read_rooms", "read_spool"),
    "stream_facts": ("PartitionFacts", "StreamFacts", "SubscriptionFacts"),
    "stream_reader": ("Gap", "StreamReader", "read_stream"),
    "usage": ("LaneUsage", "StoreUsage", "Usage", "read_usage"),
}
"""Where the names are. They are imported when they are asked for: whoever lists queues does not wait for the rest."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
