"""What the log has of sessions, wills and retained messages: rooms of facts, each with its keys.

mqtt.sessions   client id                   see `SessionState.record`
mqtt.received   client id, NUL, packet id   the digest of a message with QoS 2 that is stored and not released by its
                                            publisher; earlier versions kept none
mqtt.retained   topic                       see `Message.pack`
mqtt.wills      client id                   see `Will.pack`
mqtt.groups     group, NUL, filter          see `Group.as_fact`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from qflow.aio.broker import AsyncBroker, in_thread
from qflow.mqtt.model.messages import expires_ms_of
from qflow.mqtt.model.sessions import SessionState, expires_ms, left_ms_of, shared_of
from qflow.mqtt.model.wills import Will
from qflow.named_tuples import NamedTuple
from qflow.steps import Steps

SESSIONS, RECEIVED, RETAINED, WILLS = "mqtt.sessions", "mqtt.received", "mqtt.retained", "mqtt.wills"
GROUPS = "mqtt.groups"
STREAM = "mqtt"
"""Where messages are stored, unless another one is named."""
MOST_RECORD_BYTES = 2**20
RETAINED_BYTES = 60
"""Of a retained message, beside its topic and itself."""

Rooms = dict[str, dict[str, bytes | None]]


class Kept(NamedTuple):
    """What the log has of a client."""

    state: SessionState | None
    """None: there is no session, or it has expired."""
    has_record: bool
    received: dict[int, bytes]
    will: Will | None
    shared: list[tuple[str, str]]
    """Group and filter of its shared subscriptions."""

    def forgotten(self, client_id: str) -> Rooms:
        """Return what forgets the session, but not the will."""
        return forgetting(client_id, self.received) if self.has_record or self.received else {}


class Looked(NamedTuple):
    """Some sessions."""

    found: list[str]
    """Client ids of those that have expired, and of those whose records do not say when their clients went."""
    next_ms: int | None
    """When the next of the others ends, milliseconds since the epoch."""
    position: bytes
    """Where those behind them begin; empty where these were the last."""


class Measured(NamedTuple):
    """Some retained messages."""

    size: int
    """Bytes that those take which have not expired."""
    expired: dict[str, bytes]
    """The others as they are in the log, by topic."""
    next_ms: int | None
    """When the next one expires, milliseconds since the epoch."""
    position: bytes
    """Where those behind them begin; empty where these were the last."""


class Records:
    """See the module. One a hub."""

    def __init__(self, broker: AsyncBroker, started_ms: int, steps: Steps) -> None:
        self._broker = broker
        self._log = broker.broker.engine.log
        self._started_ms = started_ms
        self._steps = steps

    async def load(self, client_id: str, now_ms: int) -> Kept:
        """Return what is kept of a client. Raises CorruptionError: a record is damaged."""
        return await in_thread(self._broker, partial(self._load, client_id, now_ms))

    def _load(self, client_id: str, now_ms: int) -> Kept:
        record = self._log.fact(SESSIONS, client_id)
        received = self.received(client_id)
        will = self._log.fact(WILLS, client_id)
        shared = [] if record is None else shared_of(record)
        state = None
        if record is not None and not self.is_over(record, now_ms):
            state = SessionState.of_record(client_id, record)
            state.received.update(received)
        return Kept(state, record is not None, received, None if will is None else Will.unpack(will), shared)

    def is_over(self, record: bytes, now_ms: int) -> bool:
        """Tell whether a session that sleeps has expired."""
        end_ms = self.expires_ms(record)
        return end_ms is not None and end_ms <= now_ms

    def expires_ms(self, record: bytes) -> int | None:
        """Return when a session ends that sleeps, by the clock as it is set now; None: never."""
        return expires_ms(record, self.left_ms(record))

    def left_ms(self, record: bytes) -> int:
        """Return when a client went, by the clock as it is set now; one that was there at a kill went at the start."""
        return round(self._steps.moment(left_ms_of(record) or self._started_ms))

    def sessions_page(self, position: bytes, now_ms: int, report: Callable[[str], object]) -> Looked:
        """Look at some of the sessions, in a thread. Cost: 5 µs each.

        Args:
            report: told of records that are damaged.
        """
        page = self._log.facts_page(SESSIONS, position=position, report=report)
        found: list[str] = []
        next_ms: int | None = None
        for client_id, record in page.facts:
            ends_ms = self.expires_ms(record)
            if (ends_ms is not None and ends_ms <= now_ms) or left_ms_of(record) != self.left_ms(record):
                found.append(client_id)
            elif ends_ms is not None:
                next_ms = ends_ms if next_ms is None else min(next_ms, ends_ms)
        return Looked(found, next_ms, page.position)

    def received(self, client_id: str) -> dict[int, bytes]:
        """Return the digests of what a client has not released, by packet id; there are 65,535 at most."""
        prefix, position = f"{client_id}\0", b""
        found: dict[int, bytes] = {}
        while True:
            page = self._log.facts_page(RECEIVED, prefix, position)
            found |= {int(key.removeprefix(prefix)): digest for key, digest in page.facts}
            if not (position := page.position):
                return found

    def measure_retained(self, position: bytes, now_ms: int) -> Measured:
        """Look at some of the retained messages but those damaged, in a thread. Cost: 4 µs each."""
        page = self._log.facts_page(RETAINED, position=position, report=lambda problem: None)
        measured = 0
        expired: dict[str, bytes] = {}
        next_ms: int | None = None
        for topic, packed in page.facts:
            ends_ms = expires_ms_of(packed)
            if 0 < ends_ms <= now_ms:
                expired[topic] = packed
                continue
            measured += len(topic) + len(packed) + RETAINED_BYTES
            if ends_ms:
                next_ms = ends_ms if next_ms is None else min(next_ms, ends_ms)
        return Measured(measured, expired, next_ms, page.position)

    def count_retained(self) -> int:
        """Count the retained messages, in a thread. Cost: 1 µs each."""
        counted, position = 0, b""

        def count(_: str) -> bool:
            nonlocal counted
            counted += 1
            return False

        while True:
            position = self._log.facts_page(RETAINED, position=position, wanted=count).position
            if not position:
                return counted


def forgetting(client_id: str, received: Iterable[int]) -> Rooms:
    """Return what forgets a session."""
    rooms: Rooms = {SESSIONS: {client_id: None}}
    if keys := [received_key(client_id, packet_id) for packet_id in received]:
        rooms[RECEIVED] = dict.fromkeys(keys)
    return rooms


def received_key(client_id: str, packet_id: int) -> str:
    """Return under which key a packet id is kept."""
    return f"{client_id}\0{packet_id}"
