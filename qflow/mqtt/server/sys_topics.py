"""How the server is, as messages with QoS 0 below `$SYS/broker/`, to who subscribes to them, each ten seconds.

    version                         such as `qflow 0.1.0`
    uptime                          such as `86400 seconds`, since the first door was opened
    clients/connected               of all doors
    subscriptions/count             of clients that are connected
    bytes/received                  from clients, of MQTT alone: without what TLS and WebSockets add
    bytes/sent                      to clients
    messages/received               packets of all kinds, PINGREQ among them
    messages/sent
    publish/messages/received       from clients
    publish/messages/sent           to clients
    publish/bytes/received          of the payloads of those
    publish/bytes/sent
    publish/messages/dropped        to clients that took no more of QoS 0, or take nothing so large
    publish/messages/lost           taken by retention before a session had them
    retained messages/count

Numbers begin at 0 with the server. The names are those of mosquitto, but for `lost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from qflow import __version__
from qflow.errors import BrokerClosed, QflowError
from qflow.loggers import get_logger
from qflow.mqtt.model.messages import Message
from qflow.mqtt.server.outbound import Counts

INTERVAL_S = 10.0
COUNTING_SHARE = 0.01
"""Of the time, at the most, retained messages are counted: some 1 µs each."""
ROOT = "$SYS/broker/"
RETAINED_COUNT = "retained messages/count"

_logger = get_logger("qflow.mqtt")


class Told(Protocol):
    """Who gives messages to subscribers, and knows how the server is; see `hub.Hub`."""

    @property
    def counts(self) -> Counts: ...
    @property
    def connected(self) -> int: ...
    @property
    def subscriptions(self) -> int: ...
    def monotonic(self) -> float: ...
    def has_subscribers(self, topic: str) -> bool: ...
    def fan_out(self, message: Message) -> object: ...
    async def count_retained(self) -> int: ...


class SysTopics:
    """Tells subscribers; see the module. In the loop alone."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._since_s = told.monotonic()
        self._retained = 0
        self._next_count_s = 0.0
        self._figures: dict[str, Callable[[], object]] = {
            "version": lambda: f"qflow {__version__}",
            "uptime": lambda: f"{int(told.monotonic() - self._since_s)} seconds",
            "clients/connected": lambda: told.connected,
            "subscriptions/count": lambda: told.subscriptions,
            "bytes/received": lambda: told.counts.tally.bytes_received,
            "bytes/sent": lambda: told.counts.tally.bytes_sent,
            "messages/received": lambda: told.counts.tally.packets_received,
            "messages/sent": lambda: told.counts.sent + told.counts.tally.other_packets_sent,
            "publish/messages/received": lambda: told.counts.received,
            "publish/messages/sent": lambda: told.counts.sent,
            "publish/bytes/received": lambda: told.counts.received_bytes,
            "publish/bytes/sent": lambda: told.counts.sent_bytes,
            "publish/messages/dropped": lambda: told.counts.dropped,
            "publish/messages/lost": lambda: told.counts.lost,
            RETAINED_COUNT: lambda: self._retained,
        }

    async def run(self) -> None:
        """Tell them until this is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.tell()
            except BrokerClosed:
                return
            except QflowError as error:
                _logger.warning("what is below %s is not told now: %s", ROOT, error)

    async def tell(self) -> None:
        """Tell them once; what nobody asks for costs nothing."""
        if self._told.has_subscribers(ROOT + RETAINED_COUNT):
            await self._count()
        for name, figure in self._figures.items():
            topic = ROOT + name
            if self._told.has_subscribers(topic):
                self._told.fan_out(Message(topic, str(figure()).encode(), 0, False, {}))

    async def _count(self) -> None:
        began_s = self._told.monotonic()
        if began_s < self._next_count_s:
            return
        self._retained = await self._told.count_retained()
        ended_s = self._told.monotonic()
        self._next_count_s = ended_s + (ended_s - began_s) / COUNTING_SHARE
