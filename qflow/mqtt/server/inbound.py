"""What one client publishes: stored, then acknowledged, in the order in which it came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from qflow.errors import InDoubt, QflowError
from qflow.mqtt.errors import MqttError, ReasonCode, as_mqtt_error
from qflow.mqtt.model.messages import published
from qflow.mqtt.model.sessions import SessionState
from qflow.mqtt.server.access import Access, refusal
from qflow.mqtt.server.hub import Hub
from qflow.mqtt.server.outbound import Line
from qflow.mqtt.server.storing import RECEIVED, Rooms, received_key
from qflow.mqtt.server.together import Stored
from qflow.mqtt.wire.limits import DEFAULT_LIMITS
from qflow.mqtt.wire.packets import MQTT_5, Puback, Pubcomp, Publish, Pubrec, Pubrel

Answer = Puback | Pubrec | Pubcomp

MOST_WAITING = DEFAULT_LIMITS.receive_maximum
"""Of publishes of a client that are not synced: above, no more is read from it, and no ping of it is answered."""
MOST_WAITING_BYTES = 64 * 1024
MOST_TOGETHER_BYTES = 16 * 1024**2
"""The same, where a client has so many bytes of them, and all have so many together."""
EACH_BYTES = 400
"""What each takes beside its payload and topic."""
SETTLE_S = 1.0
"""For so long a client that leaves has its publishes wait, for room in a queue or for the log."""


class _Waiting:
    """An acknowledgement that waits for the log, or for those before it."""

    __slots__ = ("answer", "size", "stored")

    def __init__(self, answer: Answer | None, stored: Stored | None, size: int) -> None:
        self.answer = answer
        """None: to a message with QoS 0 that is retained."""
        self.stored = stored
        """None: nothing of its own to wait for."""
        self.size = size


class Inbound:
    """See the module. In the loop alone."""

    def __init__(self, state: SessionState, line: Line, access: Access, hub: Hub) -> None:
        self._state = state
        self._line = line
        self._machine = line.machine
        self._access = access
        self._hub = hub
        self._earlier = set(state.received)
        """Packet ids of earlier connections, which their client may have forgotten: see `_is_anew`."""
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._awaited: asyncio.Future[Any] | None = None
        """The last one that tells when it is done; many messages may wait for the same one."""
        self._settled: asyncio.Future[None] | None = None
        self.wants_publisher = False
        """Messages have the client's id: a subscription of it wants none of its own."""
        self.is_resumed = False
        """The session was there: a packet id that it does not have was released, as PUBREC is sent after its record."""
        self.has_room_again: Callable[[], object] = lambda: None

    @property
    def is_full(self) -> bool:
        """So much waits for the log that no more is to be read."""
        is_large = self._bytes >= MOST_WAITING_BYTES and self._hub.unsynced_bytes >= MOST_TOGETHER_BYTES
        return is_large or len(self._waiting) > MOST_WAITING

    def publish(self, packet: Publish) -> None:
        """Take a message."""
        counts = self._hub.counts
        counts.received += 1
        counts.received_bytes += len(packet.payload)
        if packet.qos == 2 and packet.packet_id in self._state.received and not self._is_anew(packet):
            self._await(Pubrec(packet.packet_id), self._storing(packet.packet_id), 0)
            return
        refusal = self._refusal(packet)
        if refusal is not None:
            self._refuse(packet, refusal)
            return
        publisher = self._state.client_id if self.wants_publisher else ""
        message = published(packet, publisher, self._hub.now_ms())
        if not packet.qos:
            retained = self._hub.fan_out(message)
            if retained is not None:
                self._await(None, retained, len(packet.payload) + len(packet.topic))
            return
        rooms: Rooms = {}
        if packet.qos == 2:
            digest = self._state.received[packet.packet_id] = _digest(packet)
            if self._state.is_durable:
                rooms[RECEIVED] = {received_key(self._state.client_id, packet.packet_id): digest}
        answer = Puback(packet.packet_id) if packet.qos == 1 else Pubrec(packet.packet_id)
        size = len(packet.payload) + len(packet.topic)
        try:
            stored = self._hub.store(message, rooms)
        except QflowError as error:
            self._refused(answer, as_mqtt_error(error))
        else:
            self._await(answer, stored, size)

    def _is_anew(self, packet: Publish) -> bool:
        """Tell whether a packet id that is not released is, from now on, that of another message.

        Without DUP it is; with DUP, where what the client sent first of it has not come.
        """
        if packet.packet_id not in self._earlier:
            return False
        if packet.dup and self._state.received[packet.packet_id] in (b"", _digest(packet)):
            return False
        self._earlier.discard(packet.packet_id)
        return True

    def _storing(self, packet_id: int) -> Stored | None:
        """Return what the first PUBLISH with a packet id waits for; None if it is stored."""
        same = [one for one in self._waiting if isinstance(one.answer, Pubrec) and one.answer.packet_id == packet_id]
        return same[0].stored if same else None

    def _refusal(self, packet: Publish) -> MqttError | None:
        refused = refusal(packet.topic, self._access)
        if refused is None and packet.retain and packet.qos and packet.payload and not self._hub.retained.has_room():
            return MqttError(ReasonCode.QUOTA_EXCEEDED, "too much is retained: take some of it away")
        return refused

    def _refuse(self, packet: Publish, error: MqttError) -> None:
        """Tell a client that its message is not taken.

        One of 3.1.1 can be told only by closing its connection. To a topic of the server's, which no client may publish
        to, it gets an acknowledgement, and the message is dropped: section 3.3.5 allows either.
        """
        self._hub.tell("a message of client %r is not taken: %s", self._state.client_id, error)
        if self._machine.version < MQTT_5 and packet.qos and error.code != ReasonCode.TOPIC_NAME_INVALID:
            self._machine.fail(error)
            self._line.flush_soon()
        elif packet.qos == 1:
            self._await(Puback(packet.packet_id, error.code), None, 0)
        elif packet.qos == 2:
            self._await(Pubrec(packet.packet_id, error.code), None, 0)

    def release(self, packet: Pubrel) -> None:
        """A client has PUBREC: its packet id is free again once that is in the log."""
        packet_id = packet.packet_id
        if packet_id not in self._state.received:
            code = ReasonCode.SUCCESS if self.is_resumed else ReasonCode.PACKET_ID_NOT_FOUND
            self._await(Pubcomp(packet_id, code), None, 0)
            return
        del self._state.received[packet_id]
        self._earlier.discard(packet_id)
        if not self._state.is_durable:
            self._await(Pubcomp(packet_id), None, 0)
            return
        try:
            forgotten = self._hub.forget({RECEIVED: {received_key(self._state.client_id, packet_id): None}})
        except QflowError as error:
            self._refused(Pubcomp(packet_id), as_mqtt_error(error))
        else:
            self._await(Pubcomp(packet_id), Stored(forgotten), 0)

    # Acknowledging ---------------------------------------------------------------------------------------------------

    def _await(self, answer: Answer | None, stored: Stored | None, size: int) -> None:
        if answer is not None and stored is None and not self._waiting:
            self._machine.send(answer)
            self._line.flush_soon()
            return
        size += EACH_BYTES
        self._waiting.append(_Waiting(answer, stored, size))
        self._count(size)
        if stored is not None and stored.future is not self._awaited:
            self._awaited = stored.future
            stored.future.add_done_callback(self._acknowledge)

    def _count(self, size: int) -> None:
        """So many bytes more wait for the log, or fewer."""
        self._bytes += size
        self._hub.unsynced_bytes += size

    def _acknowledge(self, _: object) -> None:
        """Send all acknowledgements that wait for nothing any more, up to the first that does."""
        waiting = self._waiting
        while waiting and ((stored := waiting[0].stored) is None or stored.future.done()):
            one = waiting.popleft()
            self._count(-one.size)
            error = None if stored is None else stored.error()
            if one.answer is None:
                continue
            if error is None:
                self._machine.send(one.answer)
            elif isinstance(error, InDoubt):
                self._doubted(error)
            elif isinstance(error, QflowError):
                self._refused(one.answer, as_mqtt_error(error))
            else:
                self._refused(one.answer, MqttError(ReasonCode.UNSPECIFIED, "the server has failed"))
        self._line.flush_soon()
        if not waiting and self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
        if not self.is_full:
            self.has_room_again()

    def _refused(self, answer: Answer, error: MqttError) -> None:
        """Tell a client that the log does not take what it sent; the log tells, too, as one of 3.1.1 is not told."""
        if error.code != ReasonCode.SERVER_SHUTTING_DOWN:
            self._hub.tell("a message of client %r is not taken: %s", self._state.client_id, error)
        if isinstance(answer, Pubrec):
            self._state.received.pop(answer.packet_id, None)
        if self._machine.version < MQTT_5 or isinstance(answer, Pubcomp):
            self._machine.fail(error)
        else:
            self._machine.send(type(answer)(answer.packet_id, error.code, {"reason_string": error.text[:1000]}))
        self._line.flush_soon()

    def _doubted(self, error: InDoubt) -> None:
        """End the connection in place of an answer: with any, the client would send its message anew, or forget it.

        A packet id of QoS 2 stays with the session, as what is in the log decides what comes of it.
        """
        text = f"it is not known whether what was sent last is stored: {error}"
        self._hub.tell("client %r is closed: %s", self._state.client_id, text)
        self._machine.fail(MqttError(ReasonCode.UNSPECIFIED, text))

    async def settle(self) -> None:
        """Return when nothing waits for the log any more; what waits for longer than `SETTLE_S` is withdrawn.

        No client was told of that: it sends it again.
        """
        if not self._waiting:
            return
        self._settled = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([self._settled], timeout=SETTLE_S)
        finally:
            for one in self._waiting:
                if one.stored is not None:
                    one.stored.withdraw()
            self._waiting.clear()
            self._count(-self._bytes)


def _digest(packet: Publish) -> bytes:
    """Return 8 bytes that tell a message from another one under the same packet id."""
    return blake2b(packet.topic.encode() + b"\0" + packet.payload, digest_size=8).digest()
