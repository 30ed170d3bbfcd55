"""A client of the sans-I/O connection: packets built by hand, paho's encoder and decoder, and a connection that is open."""

from __future__ import annotations

import io
from typing import Any

from paho.mqtt import _packet
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from qflow.mqtt.wire import DEFAULT_LIMITS, Connection, Limits, State
from qflow.mqtt.wire.packets import Connack, Connect, Event, Properties

VERSIONS = (4, 5)
PAHO_NAMES = {
    "payload_format": "PayloadFormatIndicator",
    "message_expiry_s": "MessageExpiryInterval",
    "content_type": "ContentType",
    "response_topic": "ResponseTopic",
    "correlation_data": "CorrelationData",
    "subscription_identifiers": "SubscriptionIdentifier",
    "session_expiry_s": "SessionExpiryInterval",
    "assigned_client_id": "AssignedClientIdentifier",
    "server_keep_alive_s": "ServerKeepAlive",
    "authentication_method": "AuthenticationMethod",
    "authentication_data": "AuthenticationData",
    "request_problem_information": "RequestProblemInformation",
    "will_delay_s": "WillDelayInterval",
    "request_response_information": "RequestResponseInformation",
    "response_information": "ResponseInformation",
    "server_reference": "ServerReference",
    "reason_string": "ReasonString",
    "receive_maximum": "ReceiveMaximum",
    "topic_alias_maximum": "TopicAliasMaximum",
    "topic_alias": "TopicAlias",
    "maximum_qos": "MaximumQoS",
    "retain_available": "RetainAvailable",
    "user_properties": "UserProperty",
    "maximum_packet_bytes": "MaximumPacketSize",
    "wildcard_subscription_available": "WildcardSubscriptionAvailable",
    "subscription_identifiers_available": "SubscriptionIdentifierAvailable",
    "shared_subscription_available": "SharedSubscriptionAvailable",
}


# By hand.


def variable(value: int) -> bytes:
    """An integer of variable length."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes(encoded) + bytes((value,))


def packet(first: int, *parts: bytes) -> bytes:
    """A header, and what is behind it."""
    behind = b"".join(parts)
    return bytes((first,)) + variable(len(behind)) + behind


def string(text: str | bytes) -> bytes:
    """With its length, also if it is no UTF-8."""
    encoded = text if isinstance(text, bytes) else text.encode()
    return len(encoded).to_bytes(2) + encoded


def properties(*parts: bytes) -> bytes:
    """With their length."""
    behind = b"".join(parts)
    return variable(len(behind)) + behind


def connect(
    version: int, *, client_id: str | bytes = "c", flags: int = 2, having: bytes = b"", rest: bytes = b""
) -> bytes:
    """CONNECT with a keep-alive of 60 s; `having` is encoded properties, `rest` what follows the client id."""
    told = properties(having) if version == 5 else b""
    return packet(0x10, string("MQTT"), bytes((version, flags)), b"\0\x3c", told, string(client_id), rest)


def publish(
    version: int,
    topic: str | bytes,
    payload: bytes = b"",
    *,
    first: int = 0x30,
    packet_id: int = 0,
    having: bytes = b"",
) -> bytes:
    """PUBLISH, with a packet id if its first byte has a QoS."""
    number = packet_id.to_bytes(2) if first & 6 else b""
    return packet(first, string(topic), number, properties(having) if version == 5 else b"", payload)


def subscribe(version: int, *filters: tuple[str | bytes, int], packet_id: int = 1, having: bytes = b"") -> bytes:
    """SUBSCRIBE with (filter, options)."""
    each = b"".join(string(name) + bytes((options,)) for name, options in filters)
    return packet(0x82, packet_id.to_bytes(2), properties(having) if version == 5 else b"", each)


# Connections.


def events(connection: Connection, *data: bytes) -> list[Event]:
    """All events of some bytes."""
    return [event for one in data for event in connection.receive(one)]


def opened(version: int, limits: Limits = DEFAULT_LIMITS, *, having: bytes = b"") -> Connection:
    """A connection whose CONNECT was accepted; what was answered is taken."""
    connection = Connection(limits)
    (event,) = events(connection, connect(version, having=having))
    assert isinstance(event, Connect)
    connection.send(Connack())
    connection.data_to_send()
    assert connection.state is State.OPEN
    return connection


# paho.


class Writer(Client):
    """Encodes what a client sends."""

    def __init__(self, version: int, client_id: str = "c", **options: Any) -> None:
        super().__init__(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion(version), **options)
        self.written = b""
        self._sock = io.BytesIO()

    def _packet_queue(self, command: int, packet: bytes, mid: int, qos: int, info: object = None) -> int:
        self.written += bytes(packet)
        return 0

    def connect_bytes(self, keep_alive_s: int, clean_start: bool, having: PahoProperties | None) -> bytes:
        self._clean_start = clean_start
        self._connect_properties = having
        self._send_connect(keep_alive_s)
        return self.written

    def publish_bytes(
        self, mid: int, topic: str, payload: bytes, flags: tuple[int, bool, bool], having: PahoProperties | None
    ) -> bytes:
        qos, retain, dup = flags
        self._send_publish(mid, topic.encode(), payload, qos, retain, dup, None, having)
        return self.written

    def subscribe_bytes(self, topics: list[tuple[bytes, Any]], having: PahoProperties | None) -> bytes:
        self._send_subscribe(False, topics, having)
        return self.written

    def unsubscribe_bytes(self, topics: list[bytes], having: PahoProperties | None) -> bytes:
        self._send_unsubscribe(False, topics, having)
        return self.written

    def disconnect_bytes(self, code: Any, having: PahoProperties | None) -> bytes:
        self._send_disconnect(code, having)
        return self.written

    def ack_bytes(self, command: int, mid: int) -> bytes:
        self._send_command_with_mid(command, mid, False)
        return self.written


DECODERS = {
    2: _packet.decode_connack,
    3: _packet.decode_publish,
    4: _packet.decode_puback,
    5: _packet.decode_pubrec,
    6: _packet.decode_pubrel,
    7: _packet.decode_pubcomp,
    9: _packet.decode_suback,
    11: _packet.decode_unsuback,
    14: _packet.decode_disconnect,
}


def divided(data: bytes) -> list[tuple[int, bytes]]:
    """First byte and body of each packet."""
    found = []
    at = 0
    while at < len(data):
        first, size, shift = data[at], 0, 0
        at += 1
        while True:
            size |= (data[at] & 127) << shift
            shift += 7
            at += 1
            if data[at - 1] < 128:
                break
        assert at + size <= len(data)
        found.append((first, data[at : at + size]))
        at += size
    return found


def decoded(data: bytes, version: int) -> list[Any]:
    """What paho makes of the packets of a server, as (first byte, its result); a PINGRESP is (first byte, body)."""
    return [
        (first, body if first == 0xD0 else DECODERS[first >> 4](first, body, MQTTProtocolVersion(version)))
        for first, body in divided(data)
    ]


def as_paho(kind: int, values: Properties) -> PahoProperties:
    """The same for paho."""
    made = PahoProperties(kind)
    for name, value in values.items():
        setattr(made, PAHO_NAMES[name], value)
    return made


def from_paho(made: PahoProperties | None) -> dict[str, Any]:
    """The same from paho."""
    return {name: getattr(made, theirs) for name, theirs in PAHO_NAMES.items() if hasattr(made, theirs)}


WILL = PacketTypes.WILLMESSAGE
