"""How much is retained: no more than a bound, about.

What is retained anew is added to an estimate, as if it replaced nothing. When that is above the bound, all is measured;
if it is too much, nothing is retained until what clients take away, or what has a shorter successor, made room.

What has expired is deleted: when the first of them has, all are looked at, once a minute at the most, and for no more
than a hundredth of the time.
"""

from __future__ import annotations

from functools import partial

from qflow.aio.broker import AsyncBroker, forget_unchanged, in_thread
from qflow.errors import BrokerClosed, QflowError
from qflow.loggers import get_logger
from qflow.mqtt.model.messages import Message
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.storing import RETAINED, Records
from qflow.serving.tasks import Tasks

MOST_BYTES = 2**30
MEASURED_EACH_S = 10.0
"""While it is full."""
EXPIRED_EACH_S = 60.0
LOOKING_SHARE = 0.01
"""Of the time, at the most, is spent on looking for what has expired."""

_logger = get_logger("qflow.mqtt")


class Retaining:
    """See the module. One a hub, in the loop alone."""

    def __init__(self, broker: AsyncBroker, records: Records, clock: Clock, tasks: Tasks) -> None:
        self.most_bytes = MOST_BYTES
        self._broker = broker
        self._records = records
        self._clock = clock
        self._tasks = tasks
        self._bytes = 0
        self.is_measuring = False
        """What there is is being counted."""
        self._is_full = False
        self._measured_s = 0.0
        self._next_ms: int | None = None
        """When the next one expires, as far as that is known, milliseconds since the epoch."""
        self._next_look_s = 0.0

    def begin(self) -> None:
        """Measure what there is, and delete what has expired."""
        self.is_measuring = True
        self._tasks.spawn(self._measure())

    def tick(self) -> None:
        """Have deleted what has expired. Once a second."""
        if self._next_ms is None or self.is_measuring or self._clock.monotonic() < self._next_look_s:
            return
        if self._clock.now_ms() >= self._next_ms:
            self.begin()

    def has_room(self) -> bool:
        """Tell whether one more message may be retained."""
        if self._is_full and not self.is_measuring and self._clock.monotonic() >= self._measured_s + MEASURED_EACH_S:
            self.begin()
        return not self._is_full

    def add(self, message: Message) -> None:
        """Count a message that is retained, or takes one away."""
        if message.payload:
            self._bytes += message.size
            self._expires(message.expires_ms or None)
        if self._bytes > self.most_bytes and not self.is_measuring and not self._is_full:
            self.begin()

    def _expires(self, moment_ms: int | None) -> None:
        if moment_ms is not None:
            self._next_ms = moment_ms if self._next_ms is None else min(self._next_ms, moment_ms)

    async def _measure(self) -> None:
        before, measured = self._bytes, 0
        began_s = self._clock.monotonic()
        self._next_ms = None
        position = b""
        try:
            while True:
                work = partial(self._records.measure_retained, position, self._clock.now_ms())
                found = await in_thread(self._broker, work)
                measured += found.size
                self._expires(found.next_ms)
                if found.expired:
                    await self._delete(found.expired)
                if not (position := found.position):
                    break
        except BaseException:
            self._expires(self._clock.now_ms())  # it is tried again
            raise
        finally:
            self.is_measuring = False
            self._measured_s = self._clock.monotonic()
            pause_s = max(EXPIRED_EACH_S, (self._measured_s - began_s) / LOOKING_SHARE)
            self._next_look_s = self._measured_s + pause_s
        self._bytes += measured - before
        self._is_full = self._bytes > self.most_bytes

    async def _delete(self, expired: dict[str, bytes]) -> None:
        """Delete messages, unless others are retained in their place by now."""
        try:
            await forget_unchanged(self._broker, RETAINED, expired)
        except BrokerClosed:
            raise
        except QflowError as error:
            self._expires(self._clock.now_ms())
            _logger.warning("retained messages that have expired are deleted later: %s", error)
