"""What time does to clients that are gone: their wills are published, and their sessions end."""

from __future__ import annotations

import asyncio
import heapq
from contextlib import suppress
from functools import partial
from typing import Any

from qflow.aio.broker import in_thread, keep
from qflow.errors import BrokerClosed, QflowError, QueueFull, StorageError
from qflow.loggers import get_logger
from qflow.mqtt.model.sessions import left_at, left_ms_of
from qflow.mqtt.model.wills import Will
from qflow.mqtt.server.groups import Groups
from qflow.mqtt.server.hub import Hub
from qflow.mqtt.server.storing import SESSIONS, WILLS, Rooms

LOOK_S = 60.0
"""Between two looks at all sessions, at the least."""
ROOM_S = 1.0
"""For so long a will waits for room in a queue, or for the log."""
NO_ROOM = (StorageError, QueueFull)
"""Why a will is not published now, and nothing was kept."""
LATER_MS = 60_000
"""When a will that the log does not take is tried again."""
STALE = 1_000
"""Wills that were awaited and are not any more, of which so many are remembered at the most."""

_logger = get_logger("qflow.mqtt")


class Leaving:
    """See the module. One a hub; in the loop alone."""

    def __init__(self, hub: Hub, groups: Groups) -> None:
        self._hub = hub
        self._groups = groups
        self._due: dict[str, int] = {}
        """When the wills of clients that are gone are due, the latest of each; the log has the wills themselves.

        0 = it was due before, and stays so if the clock is set back.
        """
        self._heap: list[tuple[int, str]] = []
        """When they are looked at: as they are due, and later those for which there was no room; some in vain."""
        self._timer: asyncio.TimerHandle | None = None
        """Of the first of those."""
        self._next_look_s = 0.0
        """On the monotonic clock: the other one may be set back."""
        self._steps = 0
        """How often that was set forward, for which records were looked at."""
        self._next_end_ms: int | None = 0
        """When the next session ends, or before, milliseconds since the epoch; None: none does, as far as is known."""
        self.is_looking = False
        """Sessions are looked at that may have expired."""

    def ends(self, moment_ms: int) -> None:
        """Have sessions looked at then, since one ends."""
        self._next_end_ms = moment_ms if self._next_end_ms is None else min(self._next_end_ms, moment_ms)

    async def load(self) -> None:
        """Note the wills that are in the log: of clients that were there at a kill, they are due from now on."""
        position = b""
        log = self._hub.broker.broker.engine.log
        while True:
            page = await in_thread(self._hub.broker, partial(log.facts_page, WILLS, "", position, report=_warn))
            for client_id, data in page.facts:
                will = Will.unpack(data)
                self._note(will.due_ms or self._hub.started_ms + will.delay_s * 1000, client_id)
            if not (position := page.position):
                return

    def wait_for(self, due_ms: int, client_id: str) -> None:
        """Have a will published then, unless its client is back."""
        self._note(due_ms, client_id)
        if self._heap[0][0] == due_ms:
            self._set_timer()

    def _note(self, due_ms: int, client_id: str) -> None:
        self._due[client_id] = due_ms
        self._try_at(due_ms, client_id)

    def _try_at(self, time_ms: int, client_id: str) -> None:
        heapq.heappush(self._heap, (time_ms, client_id))
        if len(self._heap) > 2 * len(self._due) + STALE:
            later_ms = self._hub.now_ms() + LATER_MS
            self._heap = [(due or later_ms, client) for client, due in self._due.items()]
            heapq.heapify(self._heap)

    def _set_timer(self) -> None:
        self.end()
        if self._heap:
            delay_s = max(0, self._heap[0][0] - self._hub.now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._begin_due)

    def end(self) -> None:
        """Publish nothing more by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def is_due(self, client_id: str) -> bool:
        """Tell whether the will of a client that is gone was to be published by now; the log may have none."""
        due_ms = self._due.get(client_id)
        return due_ms is not None and due_ms <= self._hub.now_ms()

    def is_over(self, client_id: str) -> None:
        """There is nothing to be published for a client any more: it was, or its client is back."""
        self._due.pop(client_id, None)

    async def publish_now(self, client_id: str, will: Will, rooms: Rooms) -> None:
        """`publish` for a client that is gone; a will that has no room now is published later.

        Raises NO_ROOM: so it is, and nothing was kept.
        """
        try:
            await self.publish(will, rooms)
        except NO_ROOM as error:
            self._due[client_id] = 0
            self._try_at(self._hub.now_ms() + LATER_MS, client_id)
            _logger.warning("the will of %r is published later: %s", client_id, error)
            raise
        self.is_over(client_id)

    async def publish(self, will: Will, rooms: Rooms) -> None:
        """Publish a will, and keep facts with it in one commit. Raises NO_ROOM."""
        message = will.message(self._hub.now_ms())
        if message.qos:
            try:
                stored = self._hub.store(message, rooms)
                if stored.waits and not (await asyncio.wait([stored.future], timeout=ROOM_S))[0]:
                    stored.withdraw()
                    raise QueueFull(f"a queue to which {will.topic[:200]!r} goes has no room")
                await stored.future
                return
            except (BrokerClosed, *NO_ROOM):
                raise
            except QflowError as error:  # it never can be: a session must not depend on that
                _logger.warning("the will for %r is not published: %s", will.topic, error)
        if rooms:
            await keep(self._hub.broker, rooms)
        if not message.qos:
            self._hub.fan_out(message)

    @property
    def awaited(self) -> int:
        """How many wills are remembered, some of them in vain."""
        return len(self._heap)

    def tick(self) -> None:
        """Have done what is due. Once a second."""
        self._begin_due()
        if self._steps != self._hub.steps.count and not self.is_looking:
            self._steps = self._hub.steps.count
            self._next_look_s = 0.0
            self.ends(self._hub.now_ms())
        if (
            self._next_end_ms is not None
            and self._hub.now_ms() >= self._next_end_ms
            and self._hub.monotonic() >= self._next_look_s
            and not self.is_looking
        ):
            self._next_look_s = self._hub.monotonic() + LOOK_S
            self.is_looking = True
            self._hub.tasks.spawn(self._look())

    def _begin_due(self) -> None:
        """Publish the wills that are due; the clock may have been set, so it is looked each second, too."""
        now_ms = self._hub.now_ms()
        while self._heap and self._heap[0][0] <= now_ms:
            _, client_id = heapq.heappop(self._heap)
            if self.is_due(client_id):
                self._due[client_id] = 0
                self._hub.tasks.spawn(self._publish_due(client_id))
        self._set_timer()

    async def _publish_due(self, client_id: str) -> None:
        hub = self._hub
        async with hub.turn(client_id):
            if not self.is_due(client_id):  # it is back, and goes again
                return
            kept = await hub.records.load(client_id, hub.now_ms())
            if kept.will is None:
                self.is_over(client_id)
                return
            with suppress(*NO_ROOM):
                await self.publish_now(client_id, kept.will, {WILLS: {client_id: None}})

    async def _look(self) -> None:
        """Look through all sessions that are kept: end what has expired, note when those left that a kill cut off."""
        hub = self._hub
        position = b""
        self._next_end_ms = None
        try:
            while True:
                page = await in_thread(
                    hub.broker, partial(hub.records.sessions_page, position, hub.now_ms(), report=_warn)
                )
                if page.next_ms is not None:
                    self.ends(page.next_ms)
                for client_id in page.found:
                    await self._look_at(client_id)
                if not (position := page.position):
                    return
        except BaseException:
            self.ends(hub.now_ms())  # it is tried again
            raise
        finally:
            self.is_looking = False

    async def _look_at(self, client_id: str) -> None:
        hub = self._hub
        if client_id in hub.sessions:  # that tells of its end when its client goes
            return
        async with hub.turn(client_id):
            if client_id in hub.sessions:
                return
            try:
                await self._end_or_note(client_id)
            except BrokerClosed:
                raise
            except QflowError as error:
                self.ends(hub.now_ms())
                _logger.warning("the session of %r is left as it is: %s", client_id, error)

    async def _end_or_note(self, client_id: str) -> None:
        hub = self._hub
        record: Any = await in_thread(hub.broker, partial(hub.broker.broker.engine.log.fact, SESSIONS, client_id))
        if record is None:
            return
        if not hub.records.is_over(record, hub.now_ms()):
            left_ms, ends_ms = hub.records.left_ms(record), hub.records.expires_ms(record)
            if left_ms != left_ms_of(record):
                await keep(hub.broker, {SESSIONS: {client_id: left_at(record, left_ms)}})
            if ends_ms is not None:
                self.ends(ends_ms)
            return
        kept = await hub.records.load(client_id, hub.now_ms())
        forgotten = await self._groups.forget(client_id, kept.shared)
        rooms = self._groups.as_they_are({**kept.forgotten(client_id), **forgotten})
        if kept.will is None:
            await keep(hub.broker, rooms)
        else:
            await self.publish(kept.will, {**rooms, WILLS: {client_id: None}})
            self.is_over(client_id)


def _warn(problem: str) -> None:
    _logger.warning("%s", problem)
