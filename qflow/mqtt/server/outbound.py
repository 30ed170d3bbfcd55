"""What goes to one client: messages as long as it has room for them, and what it acknowledges.

Whoever has no room gets nothing held for it: its subscriptions remember the offset at which they fell behind, and are
read from the stream once there is room; see `feeding`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from qflow.loggers import get_logger
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.model.filters import OFFSET
from qflow.mqtt.model.messages import Message
from qflow.mqtt.model.sessions import Flight, SessionState, Subscribed
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.keeping import Held, Keeper
from qflow.mqtt.server.storing import SESSIONS
from qflow.mqtt.wire import Connection, Encoded, Tally
from qflow.mqtt.wire.packets import Properties, Puback, Pubcomp, Pubrec, Pubrel

MOST_FLIGHTS = 100
"""Messages with QoS 1 and 2 on their way to a client, whatever it says it can take."""
MOST_PENDING_BYTES = 256 * 1024
"""That are written and not taken by the network; above, a client has no room."""
MOST_IDENTIFIERS = 16
"""Of a message that is sent again."""
_NOTHING: Properties = {}

_logger = get_logger("qflow.mqtt")


class Line(Protocol):
    """The connection, as far as what goes out needs it; see `client.Client`."""

    machine: Connection
    will_is_due: bool
    """It has gone without a good-bye."""
    is_paused: bool
    """The network takes nothing more for now."""

    def flush_soon(self) -> None: ...


class Counts:
    """Figures of a hub."""

    def __init__(self) -> None:
        self.tally = Tally()
        """Of all connections."""
        self.sent = 0
        """Publishes that were written to clients."""
        self.sent_bytes = 0
        """Of their payloads."""
        self.received = 0
        """Publishes of clients."""
        self.received_bytes = 0
        """Of their payloads."""
        self.dropped = 0
        """Messages with QoS 0 for clients without room, and those larger than a client takes or not to be encoded."""
        self.lost = 0
        """Messages of the stream that retention took before all who wait for messages had passed them."""


class Outbound:
    """See the module. In the loop alone. To the keeper it is the session: what waits for its record waits here."""

    is_group = False

    def __init__(self, state: SessionState, line: Line, clock: Clock, counts: Counts, keeper: Keeper) -> None:
        self.state = state
        self.machine = line.machine
        self.client_id = state.client_id
        self.record: Callable[[], bytes] = bytes
        """Returns what the log is to have of the session."""
        self.behind: set[Subscribed] = set()
        """Subscriptions that are to be read from the stream."""
        self.resends: deque[int] = deque()
        """Packet ids of what was in flight when the client was here last, and is to be sent again."""
        self.may_have: Callable[[str], bool] = lambda topic: True
        """Tells whether what was in flight once may still be sent."""
        self.pump: Callable[[], object] = lambda: None
        """Goes on with what waits for room."""
        self.is_draining = False
        """What is not sent by now comes when the client is back."""
        self.given: Callable[[str], object] | None = None
        """Is told topics whose retained message was just given with QoS 0."""
        self._line = line
        self._clock = clock
        self._counts = counts
        self._keeper = keeper
        self._most = min(MOST_FLIGHTS, line.machine.receive_maximum)
        self._held: Held = []
        self._holding = 0
        self._held_bytes = 0

    # Room ------------------------------------------------------------------------------------------------------------

    @property
    def is_congested(self) -> bool:
        """The client does not take what is written fast enough."""
        line = self._line
        return line.is_paused or line.machine.pending_bytes + self._held_bytes > MOST_PENDING_BYTES

    @property
    def room(self) -> int:
        """How many messages with QoS 1 or 2 may be sent now."""
        if self.is_congested or self.is_draining:
            return 0
        return max(0, self._most - len(self.state.flights) + len(self.resends))

    @property
    def is_late(self) -> bool:
        """Subscriptions are behind that are no replays."""
        return not all(one.is_replaying for one in self.behind)

    def drain(self) -> bool:
        """Have nothing more sent with QoS 1 and 2; return whether the client is to acknowledge something."""
        self.is_draining = True
        return len(self.state.flights) > len(self.resends)

    # Messages --------------------------------------------------------------------------------------------------------

    def take(self, message: Message, matching: Sequence[Subscribed]) -> None:
        """Send a message that some live subscriptions match, once; without room, those fall behind at its offset.

        So they do while others are behind, that all of the session comes in order: but not for a replay.
        """
        matching = self._wanting(message, matching)
        if not matching:
            return
        qos = min(message.qos, max([one.qos for one in matching]))
        if not qos:
            self._send_qos_0(message, matching, False)
        elif self.room and not (self.behind and self.is_late):
            self.send(message, matching, qos)
        else:
            for one in matching:
                if one.qos:
                    one.cursor = message.offset
                    self.behind.add(one)
                else:
                    self._counts.dropped += 1

    def replay(self, message: Message, matching: Sequence[Subscribed], is_retained: bool = False) -> None:
        """Send a message that was read, for which there is room."""
        matching = self._wanting(message, matching)
        if matching:
            qos = min(message.qos, max([one.qos for one in matching]))
            if qos:
                self.send(message, matching, qos, is_retained)
            else:
                self._send_qos_0(message, matching, is_retained)

    def _wanting(self, message: Message, matching: Sequence[Subscribed]) -> Sequence[Subscribed]:
        if message.publisher and message.publisher == self.client_id:
            return [one for one in matching if not one.no_local]
        return matching

    def _send_qos_0(self, message: Message, matching: Sequence[Subscribed], is_retained: bool) -> None:
        machine = self.machine
        if self.is_congested:
            self._counts.dropped += 1
            return
        retain = is_retained or (message.retain and any(one.retain for one in matching))
        extra = self._extra(message, matching) if machine.version == 5 else _NOTHING
        encoded = self._encoded(message.encoded, 0, retain, extra)
        if encoded is not None and machine.publish(encoded):
            self._counts.sent += 1
            self._counts.sent_bytes += len(message.payload)
            self._line.flush_soon()
            if self.given is not None and message.retain and not is_retained:
                self.given(message.topic)
        else:
            self._counts.dropped += 1

    def send(self, message: Message, matching: Sequence[Subscribed], qos: int, is_retained: bool = False) -> int:
        """Send a message with QoS 1 or 2, for which there is room; return its packet id, 0 if it cannot be.

        With QoS 2, for a durable session, it is sent once it is in the log that this packet id is that message.
        """
        machine, state = self.machine, self.state
        retain = is_retained or (message.retain and any(one.retain for one in matching))
        extra = self._extra(message, matching) if machine.version == 5 else _NOTHING
        encoded = self._encoded(message.encoded, qos, retain, extra)
        if encoded is None or not machine.takes(encoded):
            self._counts.dropped += 1
            return 0
        packet_id = state.next_id()
        flight = Flight(qos, message.offset, "" if message.offset >= 0 else message.topic)
        flight.retain = retain
        if message.offset < 0 and qos == 2:
            flight.mark = message.mark
        if extra:
            flight.identifiers = extra.get("subscription_identifiers", [])[:MOST_IDENTIFIERS]
        state.flights[packet_id] = flight
        self._counts.sent += 1
        self._counts.sent_bytes += len(message.payload)
        if state.is_durable and qos == 2:
            self._held_bytes += len(encoded[0]) + len(encoded[1])
            self._hold(partial(machine.publish, encoded, packet_id))
            return packet_id
        if state.is_durable:
            self._keeper.lazily(self)
        if self._holding:
            self._held_bytes += len(encoded[0]) + len(encoded[1])
            self._hold(partial(machine.publish, encoded, packet_id))
        else:
            machine.publish(encoded, packet_id)
            self._line.flush_soon()
        return packet_id

    def _encoded(self, encode: Callable[..., Encoded], qos: int, retain: bool, extra: Properties) -> Encoded | None:
        """Return a message as a PUBLISH; None if it cannot be, by what a program has written."""
        try:
            return encode(self.machine.version, qos, retain, self._clock.now_ms(), extra)
        except Exception:
            _logger.exception("a message is left out for client %r, as it cannot be encoded", self.client_id)
            return None

    def _extra(self, message: Message, matching: Sequence[Subscribed]) -> Properties:
        identifiers = [one.identifier for one in matching if one.identifier]
        extra: Properties = {"subscription_identifiers": identifiers} if identifiers else {}
        if message.offset >= 0 and any(one.has_offsets for one in matching):
            extra["user_properties"] = [(OFFSET, str(message.offset))]
        return extra

    def resend(self, packet_id: int, message: Message | None) -> None:
        """Send again what was in flight when the client was here last; None: it is not in the log any more.

        Of a message with QoS 2 that is gone, PUBREL ends the exchange: the client has it, or it is lost by retention.
        """
        flight = self.state.flights.get(packet_id)
        if flight is None:
            return
        if message is not None and not self.may_have(message.topic):
            message = None
        if flight.released or message is None:
            self._give_up(packet_id, flight)
        else:
            identifiers = flight.identifiers
            extra: Properties = {"subscription_identifiers": identifiers} if identifiers else {}
            encoded = self._encoded(message.encoded_again, flight.qos, flight.retain, extra)
            if encoded is not None and self.machine.publish(encoded, packet_id):
                self._counts.sent += 1
                self._counts.sent_bytes += len(message.payload)
                self._line.flush_soon()
            elif encoded is not None and self.machine.takes(encoded):
                return  # the connection was closed this moment: it is sent again when the client is back
            else:
                self._counts.dropped += 1
                self._give_up(packet_id, flight)

    def _give_up(self, packet_id: int, flight: Flight) -> None:
        """Send again nothing of what was in flight; PUBREL ends an exchange with QoS 2."""
        if flight.qos == 2:
            flight.released = True
            self._write(Pubrel(packet_id))
        else:
            self._forget(packet_id)

    # Acknowledgements ------------------------------------------------------------------------------------------------

    def puback(self, packet: Puback) -> None:
        """A message with QoS 1 has arrived."""
        flight = self.state.flights.get(packet.packet_id)
        if flight is not None and flight.qos == 1:
            self._forget(packet.packet_id)
            self.pump()

    def pubrec(self, packet: Pubrec) -> None:
        """A message with QoS 2 has arrived, or is refused; PUBREL follows when that is in the log."""
        flight = self.state.flights.get(packet.packet_id)
        if flight is None or flight.qos != 2:
            self._write(Pubrel(packet.packet_id, ReasonCode.PACKET_ID_NOT_FOUND))
        elif packet.code >= ReasonCode.UNSPECIFIED:
            self._forget(packet.packet_id)
            self.pump()
        else:
            flight.released = True
            if self.state.is_durable:
                self._hold(partial(self._write, Pubrel(packet.packet_id)))
            else:
                self._write(Pubrel(packet.packet_id))

    def pubcomp(self, packet: Pubcomp) -> None:
        """An exchange with QoS 2 is over."""
        flight = self.state.flights.get(packet.packet_id)
        if flight is not None and flight.released:
            self._forget(packet.packet_id)
            self.pump()

    def _forget(self, packet_id: int) -> None:
        flight = self.state.flights.pop(packet_id)
        if flight.group is not None:
            flight.group.acknowledged(flight.offset)
        if self.state.is_durable:
            self._keeper.lazily(self)

    # What waits for the log ------------------------------------------------------------------------------------------

    def _hold(self, action: Callable[[], object]) -> None:
        self._held.append(action)
        self._holding += 1
        self._keeper.soon(self)

    def as_fact(self) -> tuple[str, str, bytes]:
        """Return room, key and value of the record."""
        return SESSIONS, self.client_id, self.record()

    def take_held(self) -> Held:
        """Return what is to be done, by `go_on`, once the record as it is now is in the log."""
        held, self._held = self._held, []
        return held

    def go_on(self, held: Held) -> None:
        """Send what waited for the log."""
        for action in held:
            action()
        self._holding -= len(held)
        if not self._holding:
            self._held_bytes = 0
        self._line.flush_soon()
        self.pump()

    def fail(self, error: MqttError) -> None:
        """End the connection: the log does not take the record."""
        self.machine.fail(error)
        self._line.flush_soon()

    def _write(self, packet: Pubrel) -> None:
        self.machine.send(packet)
        self._line.flush_soon()
