"""Properties of MQTT 5 as bytes; the table is that of MQTT 5.0, section 2.2.2.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qflow.errors import InvalidArgument
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.wire import fields
from qflow.mqtt.wire.fields import malformed, protocol_error
from qflow.mqtt.wire.packets import Properties
from qflow.mqtt.wire.topics import checked_topic
from qflow.named_tuples import NamedTuple

USER_PROPERTY = 38
Reader = Callable[[bytes, int, int], tuple[Any, int]]
Writer = Callable[[Any, str], bytes]
MANY = frozenset({"user_properties", "subscription_identifiers"})
"""Whose values are lists; all others come once."""


class Type(NamedTuple):
    """How the value of a property is read and written."""

    read: Reader
    write: Writer


class Property(NamedTuple):
    name: str
    read: Reader


def _pair(buffer: bytes, at: int, end: int) -> tuple[tuple[str, str], int]:
    name, at = fields.read_string(buffer, at, end)
    value, at = fields.read_string(buffer, at, end)
    return (name, value), at


def _topic(buffer: bytes, at: int, end: int) -> tuple[str, int]:
    text, at = fields.read_string(buffer, at, end)
    return checked_topic(text), at


def _flag(buffer: bytes, at: int, end: int) -> tuple[int, int]:
    value, at = fields.read_byte(buffer, at, end)
    if value > 1:
        raise protocol_error(f"a property that is 0 or 1 is {value}")
    return value, at


def _not_zero(read: Reader) -> Reader:
    def checked(buffer: bytes, at: int, end: int) -> tuple[int, int]:
        value, at = read(buffer, at, end)
        if not value:
            raise protocol_error("a property is 0 that may not be")
        return value, at

    return checked


def _number(size: int) -> Writer:
    def written(value: int, what: str) -> bytes:
        if not 0 <= value < 1 << 8 * size:
            raise InvalidArgument(f"{what} = {value:,}: MQTT has {size} bytes for it")
        return int(value).to_bytes(size)

    return written


def _written_pair(value: tuple[str, str], what: str) -> bytes:
    return fields.string(value[0], what) + fields.string(value[1], what)


def _written_variable(value: int, _: str) -> bytes:
    return fields.variable(value)


FLAG = Type(_flag, _number(1))
TWO = Type(fields.read_two, _number(2))
FOUR = Type(fields.read_four, _number(4))
NATURAL_TWO = Type(_not_zero(fields.read_two), _number(2))
NATURAL_FOUR = Type(_not_zero(fields.read_four), _number(4))
NATURAL = Type(_not_zero(fields.read_variable), _written_variable)
STRING = Type(fields.read_string, fields.string)
TOPIC = Type(_topic, fields.string)
BINARY = Type(fields.read_binary, fields.binary)
PAIR = Type(_pair, _written_pair)

_ACKS = "puback pubrec pubrel pubcomp"
_TABLE: tuple[tuple[int, str, Type, str], ...] = (
    (1, "payload_format", FLAG, "publish will"),
    (2, "message_expiry_s", FOUR, "publish will"),
    (3, "content_type", STRING, "publish will"),
    (8, "response_topic", TOPIC, "publish will"),
    (9, "correlation_data", BINARY, "publish will"),
    (11, "subscription_identifiers", NATURAL, "subscribe -publish"),
    (17, "session_expiry_s", FOUR, "connect disconnect"),
    (18, "assigned_client_id", STRING, ""),
    (19, "server_keep_alive_s", TWO, ""),
    (21, "authentication_method", STRING, "connect auth"),
    (22, "authentication_data", BINARY, "connect auth"),
    (23, "request_problem_information", FLAG, "connect"),
    (24, "will_delay_s", FOUR, "will"),
    (25, "request_response_information", FLAG, "connect"),
    (26, "response_information", STRING, ""),
    (28, "server_reference", STRING, "-disconnect"),
    (31, "reason_string", STRING, f"{_ACKS} disconnect auth"),
    (33, "receive_maximum", NATURAL_TWO, "connect"),
    (34, "topic_alias_maximum", TWO, "connect"),
    (35, "topic_alias", TWO, "publish"),
    (36, "maximum_qos", FLAG, ""),
    (37, "retain_available", FLAG, ""),
    (USER_PROPERTY, "user_properties", PAIR, f"connect will publish {_ACKS} subscribe unsubscribe disconnect auth"),
    (39, "maximum_packet_bytes", NATURAL_FOUR, "connect"),
    (40, "wildcard_subscription_available", FLAG, ""),
    (41, "subscription_identifiers_available", FLAG, ""),
    (42, "shared_subscription_available", FLAG, ""),
)
"""Number, name, type, and the packets of a client that may have it; with `-` those that have it from a server alone."""
_WRITERS = {name: (bytes((number,)), kind.write) for number, name, kind, _ in _TABLE}
_NAMES = {number: name for number, name, _, _ in _TABLE}

Allowed = dict[int, Property]


def of_client(packet: str) -> Allowed:
    """Return what a client may send in a packet, "will" being one of its own."""
    allowed = {}
    for number, name, kind, packets in _TABLE:
        if packet in packets.split():
            allowed[number] = Property(name, kind.read)
        elif f"-{packet}" in packets.split():
            allowed[number] = Property(name, _refused)
    return allowed


def _refused(buffer: bytes, at: int, end: int) -> tuple[Any, int]:
    raise protocol_error("a property that only servers send in such a packet")


def read_properties(buffer: bytes, at: int, end: int, allowed: Allowed, most: int) -> tuple[Properties, int]:
    """Read the properties of a packet, their length before them; `most` bytes of user properties.

    Raises:
        MqttError: 0x81 if one has no place in the packet, 0x82 if one comes twice, 0x97 for too many user properties.
    """
    size, at = fields.read_variable(buffer, at, end)
    stop = at + size
    if stop > end:
        raise malformed("properties are longer than their packet")
    found: dict[str, Any] = {}
    user_bytes = 0
    while at < stop:
        number = buffer[at]
        known = allowed.get(number)
        if known is None:
            name = _NAMES.get(number)
            raise malformed(f"property {name} in a packet that has no such" if name else f"a property {number}")
        name = known.name
        start = at + 1
        value, at = known.read(buffer, start, stop)
        if number == USER_PROPERTY:
            user_bytes += at - start
            if user_bytes > most:
                raise _too_many(most)
            found.setdefault(name, []).append(value)
        elif name in found:
            raise protocol_error(f"property {name} comes twice in a packet")
        else:
            found[name] = [value] if name in MANY else value
    return found, at  # type: ignore[return-value]


def _too_many(most: int) -> MqttError:
    text = f"user properties of more than {most:,} bytes in a packet: send fewer, or put them into the payload"
    return MqttError(ReasonCode.QUOTA_EXCEEDED, text)


def properties_bytes(properties: Properties) -> bytes:
    """Encode properties, their length before them. Raises InvalidArgument: a value has no place in its property."""
    if not properties:
        return b"\0"
    parts: list[bytes] = []
    for name, value in properties.items():
        number, write = _WRITERS[name]
        for one in value if name in MANY else (value,):  # type: ignore[attr-defined]
            parts += (number, write(one, name))
    encoded = b"".join(parts)
    return fields.variable(len(encoded)) + encoded
