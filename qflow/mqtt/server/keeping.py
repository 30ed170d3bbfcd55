"""The records of durable sessions: written soon where something waits for it, else once a second, many in a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from qflow.aio.broker import AsyncBroker, keep
from qflow.errors import QflowError
from qflow.loggers import get_logger
from qflow.mqtt.errors import MqttError, ReasonCode, as_mqtt_error
from qflow.mqtt.server.storing import MOST_RECORD_BYTES, Rooms

MOST_AT_ONCE = 1_000
MOST_BYTES = 256 * 1024
"""Of records that are written at once, but for the last: to make them takes 35 ns a byte."""

_logger = get_logger("qflow.mqtt")


Held = list[Callable[[], object]]
"""What is to be done once a record is in the log."""


class Keepable(Protocol):
    """Who has a record: a session, or a group. It is written again as often as that is asked for."""

    @property
    def is_group(self) -> bool:
        """Its record says what its members' sessions were given, so it is never in the log before theirs."""

    def as_fact(self) -> tuple[str, str, bytes]:
        """Return room, key and value of its record, as it is now."""

    def take_held(self) -> Held:
        """Return what waits for the record."""

    def go_on(self, held: Held) -> None:
        """The record is in the log: do what waited for it."""

    def fail(self, error: MqttError) -> None:
        """The record is not taken."""


class Keeper:
    """See the module. One a hub."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._dirty: dict[Keepable, None] = {}
        self._urgent: dict[Keepable, None] = {}
        self._is_writing = False
        self._is_called = False

    def lazily(self, one: Keepable) -> None:
        """Have a record written within a second."""
        self._dirty[one] = None

    def soon(self, one: Keepable) -> None:
        """Have a record written at once; what waits for it goes on then."""
        self._urgent[one] = None
        if not self._is_writing and not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._write)

    def drop(self, one: Keepable) -> None:
        """Write nothing of it any more."""
        self._dirty.pop(one, None)
        self._urgent.pop(one, None)

    def with_urgent(self, rooms: Rooms) -> Rooms:
        """Return what is to be kept, and all records to be written at once: those that changed together go together."""
        for one in self._urgent:
            room, key, record = one.as_fact()
            if len(record) <= MOST_RECORD_BYTES:
                rooms.setdefault(room, {}).setdefault(key, record)
        return rooms

    def tick(self) -> None:
        """Have the records written that changed. Once a second."""
        self._urgent.update(self._dirty)
        self._dirty.clear()
        if self._urgent and not self._is_writing:
            self._write()

    def _write(self) -> None:
        self._is_called = False
        waiting: list[tuple[Keepable, Held]] = []
        rooms: Rooms = {}
        size = 0
        for one in sorted(self._urgent, key=attrgetter("is_group"))[:MOST_AT_ONCE]:
            if size >= MOST_BYTES:
                break
            del self._urgent[one]
            self._dirty.pop(one, None)
            room, key, record = one.as_fact()
            if len(record) > MOST_RECORD_BYTES:
                one.fail(MqttError(ReasonCode.QUOTA_EXCEEDED, "there is too much to be kept"))
                continue
            rooms.setdefault(room, {})[key] = record
            size += len(record)
            waiting.append((one, one.take_held()))
        if not waiting:
            return
        self._is_writing = True
        try:
            kept = keep(self._broker, rooms)
        except QflowError as error:
            self._done(waiting, error)
        else:
            kept.add_done_callback(lambda done: self._done(waiting, done.exception()))

    def _done(self, waiting: list[tuple[Keepable, Held]], error: BaseException | None) -> None:
        self._is_writing = False
        if isinstance(error, QflowError):
            _logger.warning("sessions are not kept, their connections end: %s", error)
            for one, _ in waiting:
                one.fail(as_mqtt_error(error))
        elif error is not None:
            raise error
        else:
            for one, held in waiting:
                one.go_on(held)
        if self._urgent and not self._is_writing:
            self._write()
