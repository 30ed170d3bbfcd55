"""Opens spools, or connects to their owners, and finds queues, for the commands that act on them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar, overload

from qflow.cli import damage
from qflow.cli.options import DEFAULT_CAPACITY
from qflow.cli.stop import Stop
from qflow.config import QueueSettings, parse_size
from qflow.errors import NotFound, QflowError, SpoolInUse
from qflow.names import choices, command

if TYPE_CHECKING:
    from qflow.broker import Broker
    from qflow.options import Spill
    from qflow.queues.queue import Queue
    from qflow.remote.client.broker import RemoteBroker
    from qflow.remote.client.queue import RemoteQueue
    from qflow.streams.stream import Stream

AnyBroker: TypeAlias = "Broker | RemoteBroker"
AnyQueue: TypeAlias = "Queue | RemoteQueue"
Found = TypeVar("Found")

CAPACITY_BYTES = parse_size(DEFAULT_CAPACITY, "capacity")
"""Of a command that has no option for it."""

ANSWERS_S = 5.0
"""Seconds that an owner may take to answer a command that can do without."""
WIPING_S = 0.1
"""Seconds a command spends on removing spill files of an earlier owner: it may end before maintenance does that."""


@contextmanager
def reached_if_there(spool: Path, capacity: int = CAPACITY_BYTES, stop: Stop | None = None) -> Iterator[AnyBroker]:
    """`reached` for a spool that must exist; none is made. Raises NotFound: there is no spool."""
    from qflow import inspect

    inspect.check_there(spool)
    with reached(spool, capacity, stop) as broker:
        yield broker


@contextmanager
def asked_if_there(spool: Path) -> Iterator[RemoteBroker | None]:
    """Reach the owner of a spool; None: nobody answers, and its log may be read. Raises NotFound: there is no spool."""
    import qflow
    from qflow import inspect

    inspect.check_there(spool)
    with ExitStack() as stack:
        owner = None
        with suppress(QflowError, OSError):
            owner = stack.enter_context(qflow.connect(spool, timeout_s=ANSWERS_S))
        yield owner


@contextmanager
def reached(spool: Path, capacity: int = CAPACITY_BYTES, stop: Stop | None = None) -> Iterator[AnyBroker]:
    """Own a spool as long as the context lasts; if another process owns it, act on it through its door.

    Args:
        stop: waits for an owner that has no door to go; None = that is an error.

    Raises:
        SpoolInUse: its owner lets nobody in. Stopped: asked to stop while waiting.
    """
    while True:
        with ExitStack() as stack:
            broker: AnyBroker
            try:
                broker = stack.enter_context(owned(spool, capacity))
            except SpoolInUse as in_use:
                found = _connected(spool)
                if found is None:
                    if stop is None:
                        raise _locked_out(spool) from in_use
                    stop.sleep(Stop.PATIENCE_S)
                    continue
                broker = stack.enter_context(found)
            yield broker
            return


def _locked_out(spool: Path) -> SpoolInUse:
    """Return the error of a spool whose owner lets nobody in: what else `SpoolInUse` advises is done already."""
    from qflow import inspect

    pid, why = inspect.owner_of(spool), command("doctor", str(spool))
    owner = f"process {pid}" if pid else "another process"
    return SpoolInUse(
        f"the spool {spool} is in use by {owner}, which lets nobody in, and {why} says why: wait for it to end"
    )


def _connected(spool: Path) -> RemoteBroker | None:
    """Return the broker as its owner lets others use it; None if it lets nobody in, or has gone."""
    import qflow

    try:
        return qflow.connect(spool)
    except NotFound:
        return None


def is_owner(broker: AnyBroker) -> bool:
    """Tell whether this process owns the spool of a broker."""
    from qflow.broker import Broker

    return isinstance(broker, Broker)


@contextmanager
def owned(spool: Path, capacity: int, *, spill: Spill = "files", door: bool = False) -> Iterator[Broker]:
    """Own a spool as long as the context lasts.

    Args:
        door: others may connect to it, which is for commands that stay: nobody is to be cut off by one that ends.

    Raises:
        SpoolInUse: another process owns it.
    """
    import qflow

    told_elsewhere = logging.getLogger("qflow.damage")  # `damage` prints one line at the end of the command
    if told_elsewhere.propagate:
        told_elsewhere.propagate = False
        told_elsewhere.addHandler(logging.NullHandler())
    with qflow.open(spool, capacity_bytes=capacity, spill=spill, door=door) as broker:
        try:
            yield broker
        finally:
            damage.of_command().note(spool, broker)
        broker.engine.upkeep.finish_wiping(WIPING_S)


def largest_message(broker: AnyBroker) -> int:
    """Return how many bytes the largest message may have that any stream or queue takes.

    Cost: of an owner that is asked, a look at its log, and a call for each queue that is not there; else one for each.
    """
    from qflow import inspect

    streams, queues = set(broker.streams()), set(broker.queues())
    sizes: list[int] = []
    if not is_owner(broker):
        with suppress(QflowError):  # what cannot be read there is asked for
            found = inspect.read_spool(broker.path)
            sizes += [stream.settings["max_message_bytes"] for stream in found.streams]
            sizes += [queue.settings["max_message_bytes"] for queue in found.queues]
            streams -= {stream.name for stream in found.streams}
            queues -= {queue.name for queue in found.queues}
    for name in streams:
        with suppress(NotFound):  # it went meanwhile
            sizes.append(broker.stream(name).settings.max_message_bytes)
    for name in queues:
        with suppress(NotFound):
            sizes.append(broker.queue(name).settings.max_message_bytes)
    return max(sizes, default=QueueSettings().max_message_bytes)


@overload
def queue_to_fill(broker: Broker, name: str) -> Queue: ...
@overload
def queue_to_fill(broker: AnyBroker, name: str) -> AnyQueue: ...
def queue_to_fill(broker: AnyBroker, name: str) -> AnyQueue:
    """Return the queue as it was declared; a missing one is made, durable and without limits."""
    try:
        return broker.queue(name)
    except NotFound:
        return broker.declare_queue(name)


def existing_queue(broker: AnyBroker, name: str) -> AnyQueue:
    """Return the queue; raise `NotFound` with the names of those that exist."""
    try:
        return broker.queue(name)
    except NotFound as error:
        raise not_there(broker.path, name, "queue", broker.queues(), streams=broker.streams()) from error


def existing_stream(broker: AnyBroker, name: str) -> Stream:
    """Return the stream; raise `NotFound` with the names of those that exist."""
    if name not in broker.streams():
        raise not_there(broker.path, name, "stream", broker.streams(), queues=broker.queues())
    return broker.stream(name)


def named(spool: Path, name: str, kind: str, found: Mapping[str, Found], **others: Iterable[str]) -> Found:
    """Return the one of this name; raise `NotFound` with the names of those that exist."""
    if name not in found:
        raise not_there(spool, name, kind, found, **others)
    return found[name]


def not_there(spool: str | Path, name: str, kind: str, there: Iterable[str], **others: Iterable[str]) -> NotFound:
    """Return the error for a name that nothing of this kind has; `others`: as `choices` has them."""
    return NotFound(f"there is no {kind} {name!r} in {spool}; {choices(name, there, **others)}")
