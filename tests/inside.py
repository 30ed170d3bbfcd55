"""Where tests reach inside a broker, under names: what many of them need that no user has."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import qflow
import qflow.aio
from qflow.memory import inventory
from qflow.memory.schedule import Schedule
from qflow.problems import Problems
from qflow.queues import tending
from qflow.queues.consumer import Consuming
from qflow.queues.queue import parts_of
from qflow.remote.client.link import Link
from qflow.storage.log.journal import JOURNAL
from qflow.streams.cursor import Cursor
from qflow.streams.subscription import member_of
from qflow.upkeep import Upkeep


def upkeep(broker: qflow.Broker) -> Upkeep:
    """Return what takes the steps of maintenance."""
    return broker.engine.upkeep


def maintenance(broker: qflow.Broker) -> threading.Thread:
    """Return the thread of maintenance."""
    return upkeep(broker)._thread


def copy_as_killed(broker: qflow.Broker, path: Path) -> Path:
    """Make a spool of what lies on the disk: what a kill would leave of the log, and of its journal."""
    env, journal = broker.engine.log._env, Path(broker.path) / JOURNAL
    while True:
        commit = env.last_transaction()
        (path / "log").mkdir(parents=True, exist_ok=True)
        if journal.exists():
            shutil.copy(journal, path / JOURNAL)
        env.copy_to(str(path / "log"))
        if env.last_transaction() == commit:
            return path
        shutil.rmtree(path / "log")  # a journal from before a commit, and the log from behind it, are of no kill


def still(broker: qflow.Broker) -> None:
    """End the thread of maintenance: its steps are those of the test."""
    upkeep(broker).end()


@contextmanager
def without_maintenance() -> Iterator[None]:
    """Have brokers that are made meanwhile take no round of maintenance: `still` comes after the first one at times."""
    run = Upkeep._run
    Upkeep._run = lambda upkeep: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Upkeep._run = run  # type: ignore[method-assign]


@contextmanager
def before_lock(
    queue: qflow.Queue, act: Callable[[], object], entry: int = 1, *, straight: bool = False
) -> Iterator[None]:
    """Have another thread do something as the calling one is about to get a queue's lock for the n-th time.

    `straight`: in a straight line of `Queue` itself; else elsewhere.
    """
    owner: Any = queue if straight else parts_of(queue).context
    name, me, entries = "_lock" if straight else "lock", threading.get_ident(), count(1)
    lock = getattr(owner, name)

    class Watched:
        """The lock, until then."""

        def __enter__(self) -> None:
            if threading.get_ident() == me and next(entries) == entry:
                setattr(owner, name, lock)
                thread = threading.Thread(target=act)
                thread.start()
                thread.join()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    setattr(owner, name, Watched())
    try:
        yield
    finally:
        is_done = getattr(owner, name) is lock
        setattr(owner, name, lock)
    assert is_done


def paused(broker: qflow.Broker) -> threading.Lock:
    """Return what is held while nothing is to be moved by maintenance."""
    return upkeep(broker).moving


def is_released(broker: qflow.Broker) -> bool:
    """Tell whether whoever closes a broker is done: its spool may be opened again."""
    return broker.closed and broker.engine.spool._closer is None


def is_due(broker: qflow.Broker) -> None:
    """Have the next `tick` look at everything, however soon that is."""
    upkeep(broker)._ticked = upkeep(broker)._due = -math.inf


def troubles(broker: qflow.Broker) -> dict[str, str]:
    """Return the errors of parts of maintenance that were reported."""
    return upkeep(broker)._troubles


def tick(queue: qflow.Queue) -> bool:
    """Do to a queue what time does; return whether there is more of it, or another thread does some of it."""
    parts = parts_of(queue)
    return tending.tick(parts) or parts.expiry.is_under_way


def fit(queue: qflow.Queue) -> bool:
    """Take a step of what follows from an opening, or from other settings."""
    return tending.fit(parts_of(queue))


def due_resident(schedule: Schedule, now_ms: int) -> bool:
    """Tell whether a `take` from a schedule would find something."""
    return schedule._resident_before(schedule._due_bound(now_ms))


def entries(schedule: Schedule) -> Iterator[tuple[int, int | None, str, int | None]]:
    """Yield (sequence, message bytes, "resident", due time) and (sequence, None, "spilled", None) of each message."""
    for due_ms, first, _, *records in inventory._resident(schedule):
        for sequence, record in enumerate(records, first):
            yield sequence, len(record), "resident", due_ms
    for chunk in schedule.spilled:
        for sequence in chunk.sequences:
            yield sequence, None, "spilled", None


def left_behind(queue: qflow.Queue) -> dict[str, object]:
    """Return what is still on its way or waits in a queue, by name: nothing, where no call is."""
    parts = parts_of(queue)
    gate, admission = parts.gate, parts.admission
    found = {
        "pending": (admission.pending, admission.pending_messages, admission.pending_bytes),
        "charged": (gate.incoming, gate.restoring),
        "waiting": (gate.getters, gate.starved, gate.arrived.watching, gate.room.watching, gate.arrived.rung),
        "line": (*admission.line, *admission.admitted, *admission.ready),
        "leaving": tuple(parts.held.leaving),
        "sought": (
            *parts.restorer.waiting,
            *(one for each in parts.lanes.schedules.values() for one in each.shelves.sought),
        ),
    }
    return {name: values for name, values in found.items() if any(values)}


def problems(broker: qflow.Broker) -> Problems:
    """Return what was found damaged: a test that has looked at it clears it."""
    return broker.engine.spool._problems


def cursor(subscription: qflow.Subscription) -> Cursor:
    """Return what a subscription shares with the members of its group."""
    return member_of(subscription).cursor


def consuming(consumer: qflow.Consumer) -> Consuming:
    """Return what a queue knows of a consumer."""
    return consumer._threads[0]


def grants(session: Any) -> list[Any]:
    """Return what the connection of a session holds."""
    return list(session.grants._grants.values())


def link(broker: qflow.aio.AsyncRemoteBroker) -> Link:
    """Return what a connection for tasks knows of its requests."""
    return broker._connection._link


class Counted(list[Any]):
    """A list that counts how many of its items were looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        for one in super().__iter__():
            self.looks += 1
            yield one


def charged_to(cursor: Cursor) -> int:
    """Return what memory for subscribers has to hold for one: what they have, what came back, what was read ahead."""
    held = cursor.held
    charged = held.freed + sum(batch.charged for batch in held.batches)
    back = sum(share.charged for share in held.returned.shares())
    return charged + back + sum(part.charged for part in cursor.parts)
