"""The server's side of a connection, without I/O.

    connection = Connection()
    for event in connection.receive(data):     # bytes cut anywhere; events are packets, or `Failed`
        ...                                    # and here `connection.send(...)`, `connection.publish(...)`
    write(connection.data_to_send())

Contract. `receive` takes bytes as they come; its iterator decodes one event with each step, so that the caller may wait
between two. PINGREQ is answered by the machine and is no event. What a client does wrong is `Failed`, once, never an
exception; the CONNACK or DISCONNECT with the code is then among the bytes to send, if its version has one.

After a `Connect` the iterator ends; what the client sent behind it is decoded once `send(Connack(...))` has accepted
it: call `receive(b"")` then. The caller reads no more from the network in between, since what came is kept whole.

States are in `states.py`. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

from qflow.errors import InvalidArgument
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.wire.fields import MAX_VARIABLE, malformed, protocol_error
from qflow.mqtt.wire.limits import DEFAULT_LIMITS, Limits
from qflow.mqtt.wire.packets import (
    MQTT_5,
    Answer,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Event,
    Failed,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
)
from qflow.mqtt.wire.publishing import PACKET_ID_BYTES, Aliases, Encoded, packet_bytes
from qflow.mqtt.wire.reading import CONNECT_BYTE, PINGREQ_BYTE, Reader
from qflow.mqtt.wire.states import NEXT, State, WrongState
from qflow.mqtt.wire.writing import PINGRESP, encode, fitting, reason
from qflow.serving.input import Input

MAX_PACKET_BYTES = MAX_VARIABLE + 5
"""What a client takes that says nothing of it."""
MAX_RECEIVED = 65_535


class Tally:
    """What passes through the connections that share it, counted. One thread at a time."""

    __slots__ = ("bytes_received", "bytes_sent", "other_packets_sent", "packets_received")

    def __init__(self) -> None:
        self.bytes_received = 0
        self.bytes_sent = 0
        self.packets_received = 0
        """Of all kinds."""
        self.other_packets_sent = 0
        """Of all kinds but PUBLISH, which who sends them counts."""


class Connection:
    """One client's connection; see the top of this file. What passes is counted in `tally`.

    `state`; `connect`, the client's CONNECT, or None before it; `receive_maximum` and `topic_alias_maximum` of the
    client; `maximum_packet_bytes` that it takes; `pending_bytes`, how many are to be sent. Memory: 1 KB, a packet
    that is not whole, and what is to be sent.
    """

    __slots__ = (
        "_aliases",
        "_input",
        "_limits",
        "_pieces",
        "_reader",
        "_tally",
        "_unacknowledged_qos_1",
        "_unreleased",
        "connect",
        "maximum_packet_bytes",
        "pending_bytes",
        "receive_maximum",
        "state",
        "topic_alias_maximum",
    )

    def __init__(self, limits: Limits = DEFAULT_LIMITS, tally: Tally | None = None) -> None:
        self.state = State.WAITING
        self.connect: Connect | None = None
        self.receive_maximum = MAX_RECEIVED
        self.topic_alias_maximum = 0
        self.maximum_packet_bytes = MAX_PACKET_BYTES
        self.pending_bytes = 0
        self._limits = limits
        self._tally = Tally() if tally is None else tally
        self._reader = Reader(limits)
        self._input = Input()
        self._pieces: list[bytes] = []
        self._aliases: Aliases | None = None
        self._unacknowledged_qos_1 = 0
        self._unreleased: set[int] = set()

    @property
    def version(self) -> int:
        """Protocol level of the client, `MQTT_3_1_1` or `MQTT_5`; 0 before it is known."""
        return self._reader.version

    @property
    def incomplete_bytes(self) -> int:
        """What has come of a packet that is not whole."""
        return self._input.kept

    @property
    def unacknowledged(self) -> int:
        """How many publishes of the client with QoS 1 or 2 wait for PUBACK or PUBCOMP."""
        return self._unacknowledged_qos_1 + len(self._unreleased)

    # What comes.

    def receive(self, data: bytes) -> Iterator[Event]:
        """Take what came, and return an iterator that decodes an event with each step.

        Events that were not asked for are kept for the next call. Cost: 1.5 to 2 µs for a publish of 100 bytes, 0.9 for
        an acknowledgement; one copy of each payload.
        """
        if self.state is not State.CLOSED:
            self._tally.bytes_received += len(data)
            self._input.take(data)
        return iter(self._next, None)

    def _next(self) -> Event | None:
        try:
            return self._packets()
        except MqttError as error:
            self.fail(error)
            return Failed(error.code, error.text)

    def _packets(self) -> Event | None:
        """Decode packets up to one that is an event; None if none is left."""
        taken = self._input
        limits = self._limits
        most = limits.connect_bytes if self.state is State.WAITING else limits.maximum_packet_bytes
        while self.state is State.OPEN or self.state is State.WAITING:
            buffer = taken.buffer
            at = taken.at
            length = len(buffer)
            if length - at < 2:
                if at < length:
                    self._check_first(buffer[at])
                taken.keep(2)
                return None
            first = buffer[at]
            size = buffer[at + 1]
            start = at + 2
            if size > 127:
                size, start = self._size(buffer, start)
            end = start + size
            if end > length or end - at > most:
                self._check_first(first)
                if end - at > most:
                    text = f"a packet of {end - at:,} bytes, at most {most:,} are taken"
                    raise MqttError(ReasonCode.PACKET_TOO_LARGE, text)
                taken.keep(end - at)
                return None
            taken.at = end
            self._tally.packets_received += 1
            event = self._packet(first, buffer, start, end)
            if event is not None:
                return event
        return None

    def _size(self, buffer: bytes, start: int) -> tuple[int, int]:
        """Return the remaining length that begins before `start` and goes on there, and where it ends.

        If it is not whole: what leads to waiting for one byte more.
        """
        size = buffer[start - 1] & 127
        for shift in (7, 14, 21):
            if start == len(buffer):
                return 1, start
            byte = buffer[start]
            start += 1
            size |= (byte & 127) << shift
            if byte < 128:
                if not byte and self.version == MQTT_5:
                    raise malformed("the remaining length takes more bytes than it needs")
                return size, start
        raise malformed("the remaining length takes more than 4 bytes")

    def _check_first(self, first: int) -> None:
        """Refuse at once what is no MQTT: nothing is waited for."""
        if self.state is State.WAITING and first != CONNECT_BYTE:
            raise protocol_error(f"the connection began with 0x{first:02X}, not with CONNECT")

    def _packet(self, first: int, buffer: bytes, start: int, end: int) -> Event | None:
        if self.state is State.WAITING:
            self._check_first(first)
            return self._connected(self._reader.connect(buffer, start, end))
        if first == PINGREQ_BYTE:
            if start != end:
                raise malformed("PINGREQ is longer than its header")
            self._write(PINGRESP)
            return None
        packet = self._reader.packet(first, buffer, start, end)
        if isinstance(packet, Publish):
            self._count(packet)
        elif isinstance(packet, Disconnect):
            self._disconnected(packet)
        elif isinstance(packet, Auth):
            self._check_method(packet)
        return packet

    def _connected(self, connect: Connect) -> Connect:
        properties = connect.properties
        self.receive_maximum = properties.get("receive_maximum", MAX_RECEIVED)
        self.topic_alias_maximum = properties.get("topic_alias_maximum", 0)
        self.maximum_packet_bytes = properties.get("maximum_packet_bytes", MAX_PACKET_BYTES)
        if most := min(self.topic_alias_maximum, self._limits.topic_alias_maximum):
            self._aliases = Aliases(most)
        self.connect = connect
        self._go(State.CONNECTING)
        return connect

    def _count(self, publish: Publish) -> None:
        """Count what the client may have unacknowledged: MQTT 5.0, section 4.9; 3.1.1 knows no such bound."""
        if not publish.qos:
            return
        if publish.qos == 1:
            self._unacknowledged_qos_1 += 1
        else:
            self._unreleased.add(publish.packet_id)
        if self.version == MQTT_5 and self.unacknowledged > self._limits.receive_maximum:
            text = f"more than {self._limits.receive_maximum:,} publishes that are not acknowledged"
            raise MqttError(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED, text)

    def _disconnected(self, disconnect: Disconnect) -> None:
        connect = self.connect
        if disconnect.properties.get("session_expiry_s") and connect and not connect.session_expiry_s:
            raise protocol_error("DISCONNECT gives a session an expiry that ends with the connection")
        self.close()

    def _check_method(self, auth: Auth) -> None:
        """Refuse an authentication that CONNECT did not begin: MQTT 5.0, section 4.12."""
        begun = self.connect.properties.get("authentication_method") if self.connect else None
        if auth.properties.get("authentication_method") != begun:
            raise protocol_error("AUTH with a method that CONNECT did not name")

    # Answers.

    def send(self, packet: Answer) -> bool:
        """Encode an answer for the client's version.

        False, and nothing is sent, if the connection is closed, the version has no place for the packet, or it is
        larger than the client takes. `Connack` with success opens the connection, and tells a client of MQTT 5 the
        limits, too; any other `Connack`, and `Disconnect`, close it. Reason string and user properties are left out
        where the client does not want them or they would make the packet larger than it takes.

        Raises:
            WrongState: a `Connack` that nobody waits for, or any other packet before it.
            InvalidArgument: a value has no place in its field.
        Cost: 0.7 µs for an acknowledgement.
        """
        if self.state is State.CLOSED:
            return False
        if self.state is not (State.CONNECTING if isinstance(packet, Connack) else State.OPEN):
            raise WrongState(f"{type(packet).__name__} while {self.state.name}")
        if isinstance(packet, Connack):
            packet = self._announced(packet)
        if packet.properties:
            asked = {} if self.connect is None else self.connect.properties
            wants_reasons = asked.get("request_problem_information", 1) != 0
            encoded = fitting(packet, self.version, self.maximum_packet_bytes, wants_reasons)
        else:
            encoded = encode(packet, self.version)
            if len(encoded) > self.maximum_packet_bytes:
                encoded = b""
        self._write(encoded)
        self._sent(packet, bool(encoded))
        return bool(encoded)

    def _sent(self, packet: Answer, is_told: bool) -> None:
        """Do what an answer means for this side; one that the client does not take counts as sent."""
        if isinstance(packet, Puback):
            if self._unacknowledged_qos_1:
                self._unacknowledged_qos_1 -= 1
        elif isinstance(packet, Pubcomp) or (isinstance(packet, Pubrec) and packet.code >= ReasonCode.UNSPECIFIED):
            self._unreleased.discard(packet.packet_id)
        elif isinstance(packet, Connack) and is_told and not packet.code:
            self._go(State.OPEN)
        elif isinstance(packet, Connack | Disconnect):
            self.close()

    def publish(self, encoded: Encoded, packet_id: int = 0) -> bool:
        """Write a publish; False, and nothing is sent, if the connection is closed or `takes` says no.

        `packet_id` is 1 to 65,535 if it was encoded with QoS 1 or 2. A client that takes topic aliases gets them.

        Raises:
            WrongState: the connection is not open yet.
            InvalidArgument: a packet id without QoS, or QoS without a packet id.
        Cost: 0.4 µs; 3 with an alias.
        """
        if self.state is not State.OPEN:
            if self.state is State.CLOSED:
                return False
            raise WrongState(f"a publish while {self.state.name}")
        size = packet_bytes(encoded)
        if size > self.maximum_packet_bytes:
            return False
        has_qos = encoded[0][0] & 6 != 0
        if not (0 < packet_id <= MAX_RECEIVED if has_qos else packet_id == 0):
            raise InvalidArgument(f"packet id {packet_id}: 1 to {MAX_RECEIVED} with QoS 1 or 2, and 0 with QoS 0")
        if self._aliases is not None:
            encoded = self._aliases.apply(encoded, self.maximum_packet_bytes)
            size = packet_bytes(encoded)
        if has_qos:
            self._pieces += (encoded[0], packet_id.to_bytes(PACKET_ID_BYTES), encoded[1])
        else:
            self._pieces.append(encoded[0])
        self.pending_bytes += size
        return True

    def takes(self, encoded: Encoded) -> bool:
        """Tell whether the client takes packets so large: one that it does not take is never sent to it."""
        return packet_bytes(encoded) <= self.maximum_packet_bytes

    def fail(self, error: MqttError, properties: Properties | None = None) -> None:
        """Close, because of something that the machine does not see, as a keep-alive that is over.

        CONNACK or DISCONNECT with the error's code and text, and other `properties`, as far as the version has it;
        nothing if it is closed.
        """
        told: Properties = {"reason_string": reason(error.text), **(properties or {})}
        if self.state is State.OPEN:
            self.send(Disconnect(error.code, told))
        elif self.state is State.CONNECTING:
            self.send(Connack(error.code, False, told))
        elif self.state is State.WAITING:
            if self.version:  # CONNECT has come, and it is wrong
                self._write(fitting(Connack(error.code, False, told), self.version, MAX_PACKET_BYTES, True))
            self.close()

    def close(self) -> None:
        """Read nothing any more: the network connection is gone, or the server is in a hurry."""
        if self.state is not State.CLOSED:
            self._go(State.CLOSED)
        self._input.clear()

    def data_to_send(self) -> bytes:
        """Take what is to be sent, once; `b""` if nothing is. Cost: one copy, none of a single publish of QoS 0."""
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces = []
        self._tally.bytes_sent += self.pending_bytes
        self.pending_bytes = 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _announced(self, connack: Connack) -> Connack:
        """Add what this side holds the client to."""
        if connack.code or self.version != MQTT_5:
            return connack
        limits = self._limits
        properties: Properties = {
            **connack.properties,
            "receive_maximum": limits.receive_maximum,
            "maximum_packet_bytes": limits.maximum_packet_bytes,
            "topic_alias_maximum": limits.topic_alias_maximum,
        }
        return Connack(connack.code, connack.session_present, properties)

    def _write(self, piece: bytes) -> None:
        if piece:
            self._pieces.append(piece)
            self._tally.other_packets_sent += 1
            self.pending_bytes += len(piece)

    def _go(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise WrongState(f"{state.name} while {self.state.name}")
        self.state = state
