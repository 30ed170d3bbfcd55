"""Looks at a spool: at its owner through the door, at what an owner writes that lets nobody in, or at the log."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from qflow import doctor, inspect
from qflow.config import spool_path
from qflow.doctor import Finding
from qflow.errors import NotFound, QflowError
from qflow.events import Event
from qflow.storage.lock import owner_pid, process_in_words
from qflow.top.look import EVENTS_KEPT, Look, Mode

if TYPE_CHECKING:
    from qflow.inspect.facts import SpoolFacts
    from qflow.inspect.health import Legible
    from qflow.remote.client.broker import RemoteBroker

PATIENCE_S = 5.0
"""How long an owner may take to let in."""
JUDGED_S = 2.0
"""How often findings are looked for."""
INSIDE_S = 10.0
"""How often log and disk are looked at for that."""
WHOLE_SHARE = 200
"""What is told of the broker as a whole is read again after so many times as long as that took."""
DISK_FILES = ("stats.json", "log/data.mdb", "log/journal")


class Source:
    """Follows a spool through its owners and the times between. Its looks are taken by one thread.

    Args:
        clock: seconds; of looks through the door.
        legible: returns the headers of a message for who reads them.
    """

    def __init__(
        self, path: str | os.PathLike[str], clock: Callable[[], float] = time.monotonic, legible: Legible = dict
    ) -> None:
        self.path = spool_path(path)
        self.legible = legible
        self.broker: RemoteBroker | None = None
        """As the owner lets others use it; None while it does not."""
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._refusal = ""
        self._seen: object = None
        self._on_disk: Look | None = None
        self._queues: dict[str, dict[str, Any]] = {}
        self._number = 0
        """Of the last look at what has changed."""
        self._whole: dict[str, Any] = {}
        self._whole_due_s = 0.0
        self._elsewhere_bytes = 0
        """What streams and transactions have in memory."""
        self._findings: tuple[Finding, ...] = ()
        self._judged: tuple[Mode, int | None, float] | None = None
        self._inside = doctor.Look(path=self.path)
        self._inside_due_s = 0.0

    def look(self) -> Look:
        """Return what there is to see now; errors become looks that say what is wrong."""
        return self._judge(self._look())

    def _look(self) -> Look:
        if self.broker is None:
            self._come_in()
        if self.broker is not None:
            try:
                return self._through_the_door(self.broker)
            except (QflowError, OSError):
                self.leave()  # it has gone: the disk tells the rest
        try:
            return self._from_disk()
        except (QflowError, OSError) as error:
            self._seen = None
            return Look(mode=Mode.FAILED, note=" ".join(str(error).split()), time_s=self._clock())

    def _judge(self, look: Look) -> Look:
        """Return the look with what is wrong, as of a moment ago."""
        now_s, before = self._clock(), self._judged
        if before is None or before[:2] != (look.mode, look.pid) or now_s - before[2] >= JUDGED_S:
            if before is None or before[:2] != (look.mode, look.pid) or now_s >= self._inside_due_s:
                self._inside, self._inside_due_s = _inside(self.path), now_s + INSIDE_S
            self._findings, self._judged = tuple(judged(self._inside, look)), (look.mode, look.pid, now_s)
        return attrs.evolve(look, findings=self._findings, inside=self._inside)

    def leave(self) -> None:
        """End the connection, if there is one."""
        broker, self.broker = self.broker, None
        self._queues, self._number, self._whole = {}, 0, {}
        if broker is not None:
            with suppress(QflowError, OSError):
                broker.close()

    def _come_in(self) -> None:
        import qflow

        self._refusal = ""
        try:
            broker = qflow.connect(self.path, timeout_s=PATIENCE_S)
        except NotFound:
            return
        except (QflowError, OSError) as error:
            self._refusal = str(error)
            return
        try:
            broker.on_event(self._events.append)
        except (QflowError, OSError):
            broker.close()
            return
        self._seen, self.broker = None, broker

    def _through_the_door(self, broker: RemoteBroker) -> Look:
        if not self._whole or self._clock() >= self._whole_due_s:
            self._read_whole(broker)
        self._number, changed = broker.figures(self._number)
        if not self._number:
            self._queues = {}
            self._number, changed = broker.figures()
        known = self._queues
        told = known | {name: facts for name, facts in changed.items() if known.get(name) != facts}
        self._queues = {name: facts for name, facts in told.items() if facts}  # those that are gone have none
        streams = {name: attrs.asdict(broker.stream(name).stats()) for name in broker.streams()}
        resident = self._elsewhere_bytes + _total(self._queues, "resident_bytes")
        sums = {"resident_bytes": resident, "spilled_bytes": _total(self._queues, "spilled_bytes")}
        return Look(
            mode=Mode.LIVE,
            pid=owner_pid(self.path),
            time_s=self._clock(),
            broker=self._whole | sums,
            queues=self._queues,
            streams=streams,
            events=self._new_events(),
        )

    def _read_whole(self, broker: RemoteBroker) -> None:
        """Read what is told of the broker as a whole: `figures` tells of queues alone. Cost: 150 µs a queue."""
        began_s = time.monotonic()
        facts = attrs.asdict(broker.stats())
        queues, _ = facts.pop("queues"), facts.pop("streams")
        self._elsewhere_bytes = facts["resident_bytes"] - _total(queues, "resident_bytes")
        self._whole = facts
        self._whole_due_s = self._clock() + WHOLE_SHARE * (time.monotonic() - began_s)

    def _new_events(self) -> tuple[Event, ...]:
        found = []
        while self._events:
            found.append(self._events.popleft())
        return tuple(found)

    def _from_disk(self) -> Look:
        """Read the spool if it has changed since it was read last."""
        seen = (owner_pid(self.path), self._refusal, *(_changed(os.path.join(self.path, name)) for name in DISK_FILES))
        if self._on_disk is None or seen != self._seen:
            self._on_disk = look_at(inspect.read_spool(self.path), self._refusal)
        elif self._on_disk.mode is Mode.TOLD:
            age_s = max(0.0, time.time() - self._on_disk.time_s)
            self._on_disk = attrs.evolve(self._on_disk, age_s=age_s)
        self._seen = seen
        return attrs.evolve(self._on_disk, events=self._new_events())


def _total(queues: dict[str, dict[str, Any]], name: str) -> int:
    return sum(facts[name] for facts in queues.values())


def _inside(path: str) -> doctor.Look:
    """Return what log and disk tell; nothing where they cannot be read."""
    try:
        return doctor.look_inside(path)
    except (QflowError, OSError):
        return doctor.Look(path=path)


def judged(inside: doctor.Look, look: Look) -> list[Finding]:
    """Return what is wrong with what a look has, worst first. Cost: 5 µs a queue."""
    if look.mode is Mode.FAILED:
        return doctor.judge(inside)  # which knows why it cannot be read
    stats: dict[str, Any] | None = None
    if look.broker:
        stats = {**look.broker, "queues": look.queues, "streams": look.streams}
    is_told = look.mode is Mode.LIVE
    seen = attrs.evolve(
        inside,
        stats=stats,
        told_s_ago=look.age_s,
        is_told=is_told,
        is_there=not look.is_removed,
        owner_pid=look.pid,
        is_stopped=not is_told and doctor.is_stopped(look.pid or 0),
    )
    return doctor.judge(seen)


def _changed(path: str) -> tuple[int, int] | None:
    """Return what differs when a file was written."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def look_at(facts: SpoolFacts, refusal: str = "") -> Look:
    """Return what is to be seen of a spool that lets nobody in."""
    live = facts.live
    streams = {stream.name: attrs.asdict(stream) for stream in facts.streams}
    if facts.owner_pid is not None and live is not None and facts.owner_pid in (live["pid"], 0) and _is_sound(live):
        why = refusal or f"{process_in_words(facts.owner_pid)} owns it and lets nobody in"
        return Look(
            mode=Mode.TOLD,
            note=f"{why}: read-only, from stats.json",
            pid=facts.owner_pid,
            time_s=live["time_s"],
            age_s=max(0.0, facts.live_age_s or 0.0),
            broker={name: value for name, value in live.items() if name not in ("queues", "streams")},
            queues=live["queues"],
            streams=live["streams"],
        )
    note = "nobody owns it: read-only, what its log holds"
    if facts.owner_pid is not None:
        note = f"{refusal or f'{process_in_words(facts.owner_pid)} owns it'}: read-only, what its log holds"
    elif not facts.clean:
        note += "; its last owner did not close it"
    return Look(
        mode=Mode.DEAD,
        note=note,
        pid=facts.owner_pid,
        time_s=time.time(),
        queues={queue.name: attrs.asdict(queue) for queue in facts.queues},
        streams=streams,
    )


NUMBERS = ("resident_bytes", "capacity_bytes", "spilled_bytes")
OF_QUEUE = (
    *("messages", "lag_messages", "acquired_messages", "oldest_unacked_s", *NUMBERS),
    *("put_total", "delivered_total", "acked_total"),
)
OF_SUBSCRIPTION = ("members", "lag_messages", "unsettled_messages", "delivered_total", "acked_total")


def _is_sound(live: dict[str, Any]) -> bool:
    """Tell whether what is shown of `stats.json` are numbers: whoever may write there may write anything."""
    streams = live["streams"]
    return (
        _has_numbers(live, NUMBERS)
        and all(_has_numbers(queue, OF_QUEUE) for queue in live["queues"].values())
        and isinstance(streams, dict)
        and all(
            _has_numbers(stream, ("messages", "published_total"))
            and isinstance(stream.get("subscriptions"), list)
            and all(_has_numbers(one, OF_SUBSCRIPTION) for one in stream["subscriptions"])
            for stream in streams.values()
        )
    )


def _has_numbers(facts: Any, names: tuple[str, ...]) -> bool:
    return isinstance(facts, dict) and all(type(facts.get(name)) in (int, float) for name in names)
