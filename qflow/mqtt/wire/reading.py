"""What a client sends, as packets: bytes of one whole packet are decoded, and held against the specification."""

from __future__ import annotations

from collections.abc import Callable

from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.wire import fields
from qflow.mqtt.wire.fields import malformed, protocol_error
from qflow.mqtt.wire.limits import Limits
from qflow.mqtt.wire.packets import (
    MQTT_3_1_1,
    MQTT_5,
    Auth,
    Connect,
    Disconnect,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Subscription,
    Unsubscribe,
    Will,
)
from qflow.mqtt.wire.properties import Allowed, of_client, read_properties
from qflow.mqtt.wire.topics import checked_filter, topic_reader

CONNECT_BYTE, PINGREQ_BYTE = 0x10, 0xC0
PROTOCOL_NAMES = (b"MQTT", b"MQIsdp")
"""The second is that of MQTT 3.1: such a client is told that its version is not supported."""
MQTT_3_1 = 3
BRIDGE = 0x80
"""Added to the level by bridges that try an extension first; told in their version, they try without it."""

Packet = Publish | Puback | Pubrec | Pubrel | Pubcomp | Subscribe | Unsubscribe | Disconnect | Auth
Ack = Puback | Pubrec | Pubrel | Pubcomp
_CONNECT, _WILL, _PUBLISH = of_client("connect"), of_client("will"), of_client("publish")
_SUBSCRIBE, _UNSUBSCRIBE = of_client("subscribe"), of_client("unsubscribe")
_DISCONNECT, _AUTH = of_client("disconnect"), of_client("auth")
_RECEIVED = frozenset({0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99})
_RELEASED = frozenset({0x00, 0x92})
_ACKS: dict[int, tuple[type[Ack], frozenset[int], Allowed]] = {
    0x40: (Puback, _RECEIVED, of_client("puback")),
    0x50: (Pubrec, _RECEIVED, of_client("pubrec")),
    0x62: (Pubrel, _RELEASED, of_client("pubrel")),
    0x70: (Pubcomp, _RELEASED, of_client("pubcomp")),
}
"""By the first byte of the packet: its class, the reason codes of a client, its properties."""
_LEAVES = frozenset({0x00, 0x04, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99})
_AUTHENTICATES = frozenset({0x18, 0x19})
_OF_SERVERS = {2: "CONNACK", 9: "SUBACK", 11: "UNSUBACK", 13: "PINGRESP"}


class Reader:
    """Decodes the packets of one client; `version` is 0 up to its CONNECT. Memory: the topics of its aliases."""

    __slots__ = ("_aliases", "_limits", "_read_topic", "version")

    def __init__(self, limits: Limits) -> None:
        self.version = 0
        self._limits = limits
        self._read_topic = topic_reader(limits.topic_bytes, limits.topic_levels)
        self._aliases: dict[int, str] = {}

    def connect(self, buffer: bytes, at: int, end: int) -> Connect:
        """Decode a CONNECT; `version` is known once its protocol name and level are right.

        Raises:
            MqttError: 0x84 also for a protocol name that is none of MQTT's.
        """
        name, at = fields.read_binary(buffer, at, end)
        level, at = fields.read_byte(buffer, at, end)
        if name != PROTOCOL_NAMES[0] or level not in (MQTT_3_1_1, MQTT_5):
            if name in PROTOCOL_NAMES:
                is_older = name != PROTOCOL_NAMES[0] or level & ~BRIDGE < MQTT_5
                self.version = MQTT_3_1_1 if is_older else MQTT_5
            raise MqttError(ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, _other_protocol(name, level))
        self.version = level
        flags, at = fields.read_byte(buffer, at, end)
        self._check_connect_flags(flags)
        connect = Connect(level, "", bool(flags & 2))
        connect.keep_alive_s, at = fields.read_two(buffer, at, end)
        if level == MQTT_5:
            connect.properties, at = self._properties(buffer, at, end, _CONNECT)
        connect.client_id, at = self._client_id(buffer, at, end, connect.clean_start)
        if flags & 4:
            connect.will, at = self._will(buffer, at, end, flags)
        if flags & 0x80:
            connect.username, at = fields.read_string(buffer, at, end)
        if flags & 0x40:
            connect.password, at = fields.read_binary(buffer, at, end)
        if at != end:
            raise malformed("CONNECT is longer than its fields")
        if "authentication_data" in connect.properties and "authentication_method" not in connect.properties:
            raise protocol_error("authentication data without a method")
        return connect

    def packet(self, first: int, buffer: bytes, at: int, end: int) -> Packet:
        """Decode any other packet but PINGREQ, of which `first` is the first byte; `at` is behind the header."""
        if 0x30 <= first < 0x40:
            return self._publish(first, buffer, at, end)
        if first in _ACKS:
            return self._ack(first, buffer, at, end)
        read = _OTHERS.get(first)
        if read is None or (first == 0xF0 and self.version != MQTT_5):
            raise _unknown(first)
        return read(self, buffer, at, end)

    def _check_connect_flags(self, flags: int) -> None:
        if flags & 1:
            raise malformed("the reserved flag of CONNECT is set")
        if flags & 0x18 == 0x18:
            raise malformed("a will with QoS 3")
        if not flags & 4 and flags & 0x38:
            raise malformed("CONNECT has QoS or retain of a will, but no will")
        if self.version == MQTT_3_1_1 and flags & 0xC0 == 0x40:
            raise malformed("a password without a user name, which MQTT 3.1.1 does not allow")

    def _client_id(self, buffer: bytes, at: int, end: int, clean_start: bool) -> tuple[str, int]:
        client_id, stop = fields.read_string(buffer, at, end)
        if stop - at - 2 > self._limits.client_id_bytes:
            text = f"a client id of {stop - at - 2:,} bytes: at most {self._limits.client_id_bytes} are taken"
            raise MqttError(ReasonCode.CLIENT_ID_NOT_VALID, text)
        if not client_id and not clean_start and self.version == MQTT_3_1_1:
            raise MqttError(ReasonCode.CLIENT_ID_NOT_VALID, "no client id, for a session that is to be kept")
        return client_id, stop

    def _will(self, buffer: bytes, at: int, end: int, flags: int) -> tuple[Will, int]:
        will = Will("", b"", flags >> 3 & 3, bool(flags & 0x20))
        if self.version == MQTT_5:
            will.properties, at = self._properties(buffer, at, end, _WILL)
        raw, at = fields.read_binary(buffer, at, end)
        will.topic = self._read_topic(raw)
        will.payload, at = fields.read_binary(buffer, at, end)
        return will, at

    def _publish(self, first: int, buffer: bytes, at: int, end: int) -> Publish:
        qos = first >> 1 & 3
        if qos == 3:
            raise malformed("PUBLISH with QoS 3")
        dup = first & 8 != 0
        if dup and not qos:
            raise malformed("PUBLISH with DUP and QoS 0")
        raw, at = fields.read_binary(buffer, at, end)
        packet_id = 0
        if qos:
            packet_id, at = _packet_id(buffer, at, end)
        if self.version != MQTT_5:
            return Publish(self._read_topic(raw), buffer[at:end], qos, first & 1 != 0, dup, packet_id)
        if at < end and not buffer[at] and raw:
            return Publish(self._read_topic(raw), buffer[at + 1 : end], qos, first & 1 != 0, dup, packet_id)
        properties, at = self._properties(buffer, at, end, _PUBLISH)
        topic = self._aliased(raw, properties.pop("topic_alias", None))
        return Publish(topic, buffer[at:end], qos, first & 1 != 0, dup, packet_id, properties)

    def _aliased(self, raw: bytes, alias: int | None) -> str:
        if alias is None:
            if not raw:
                raise protocol_error("PUBLISH without a topic and without a topic alias")
            return self._read_topic(raw)
        if not 0 < alias <= self._limits.topic_alias_maximum:
            text = f"topic alias {alias}: 1 to {self._limits.topic_alias_maximum} are taken"
            raise MqttError(ReasonCode.TOPIC_ALIAS_INVALID, text)
        if raw:
            topic = self._aliases[alias] = self._read_topic(raw)
            return topic
        if alias not in self._aliases:
            raise protocol_error(f"topic alias {alias} stands for no topic yet")
        return self._aliases[alias]

    def _ack(self, first: int, buffer: bytes, at: int, end: int) -> Ack:
        kind, codes, allowed = _ACKS[first]
        packet_id, at = _packet_id(buffer, at, end)
        if at == end:
            return kind(packet_id)
        if self.version != MQTT_5:
            raise malformed(f"{_name(kind)} is longer than a packet id")
        code = _code(buffer[at], codes, kind)
        if at + 1 == end:
            return kind(packet_id, code)
        properties = self._last_properties(buffer, at + 1, end, allowed)
        return kind(packet_id, code, properties)

    def _subscribe(self, buffer: bytes, at: int, end: int) -> Subscribe:
        packet_id, at = _packet_id(buffer, at, end)
        subscribe = Subscribe(packet_id, [])
        if self.version == MQTT_5:
            subscribe.properties, at = self._properties(buffer, at, end, _SUBSCRIBE)
        while at < end:
            topic_filter, at = self._filter(buffer, at, end, len(subscribe.subscriptions))
            options, at = fields.read_byte(buffer, at, end)
            subscribe.subscriptions.append(self._subscription(topic_filter, options))
        if not subscribe.subscriptions:
            raise protocol_error("SUBSCRIBE without a topic filter")
        return subscribe

    def _subscription(self, topic_filter: str, options: int) -> Subscription:
        qos = options & 3
        if self.version != MQTT_5:
            if options > 2:
                raise malformed(f"SUBSCRIBE with options 0x{options:02X}, where QoS 0, 1 or 2 is expected")
            return Subscription(topic_filter, qos)
        if options & 0xC0:
            raise malformed("SUBSCRIBE with reserved bits in its options")
        if qos == 3 or options & 0x30 == 0x30:
            raise protocol_error("SUBSCRIBE with QoS 3, or retain handling 3")
        if options & 4 and topic_filter.startswith("$share/"):
            raise protocol_error("a shared subscription with no-local")
        return Subscription(topic_filter, qos, options & 4 != 0, options & 8 != 0, options >> 4)

    def _unsubscribe(self, buffer: bytes, at: int, end: int) -> Unsubscribe:
        packet_id, at = _packet_id(buffer, at, end)
        unsubscribe = Unsubscribe(packet_id, [])
        if self.version == MQTT_5:
            unsubscribe.properties, at = self._properties(buffer, at, end, _UNSUBSCRIBE)
        while at < end:
            topic_filter, at = self._filter(buffer, at, end, len(unsubscribe.filters))
            unsubscribe.filters.append(topic_filter)
        if not unsubscribe.filters:
            raise protocol_error("UNSUBSCRIBE without a topic filter")
        return unsubscribe

    def _filter(self, buffer: bytes, at: int, end: int, there: int) -> tuple[str, int]:
        limits = self._limits
        if there == limits.filters:
            raise MqttError(ReasonCode.QUOTA_EXCEEDED, f"more than {limits.filters:,} topic filters in a packet")
        text, at = fields.read_string(buffer, at, end)
        return checked_filter(text, limits.topic_bytes, limits.topic_levels), at

    def _disconnect(self, buffer: bytes, at: int, end: int) -> Disconnect:
        if at == end:
            return Disconnect()
        if self.version != MQTT_5:
            raise malformed("DISCONNECT of MQTT 3.1.1 is longer than its header")
        code = _code(buffer[at], _LEAVES, Disconnect)
        if at + 1 == end:
            return Disconnect(code)
        return Disconnect(code, self._last_properties(buffer, at + 1, end, _DISCONNECT))

    def _auth(self, buffer: bytes, at: int, end: int) -> Auth:
        code = _code(buffer[at] if at < end else 0, _AUTHENTICATES, Auth)
        auth = Auth(code, self._last_properties(buffer, at + 1, end, _AUTH))
        if "authentication_method" not in auth.properties:
            raise protocol_error("AUTH without an authentication method")
        return auth

    def _properties(self, buffer: bytes, at: int, end: int, allowed: Allowed) -> tuple[Properties, int]:
        return read_properties(buffer, at, end, allowed, self._limits.user_properties_bytes)

    def _last_properties(self, buffer: bytes, at: int, end: int, allowed: Allowed) -> Properties:
        properties, at = self._properties(buffer, at, end, allowed)
        if at != end:
            raise malformed("a packet is longer than its fields")
        return properties


_OTHERS: dict[int, Callable[[Reader, bytes, int, int], Packet]] = {
    0x82: Reader._subscribe,
    0xA2: Reader._unsubscribe,
    0xE0: Reader._disconnect,
    0xF0: Reader._auth,
}
"""By the first byte of the packet."""


def _other_protocol(name: bytes, level: int) -> str:
    """Tell what a client speaks, and what to do about it."""
    if name not in PROTOCOL_NAMES:
        text = fields.quote.repr(name.decode("latin-1"))
        return f"the client speaks {text} of level {level}, which is no MQTT: have it speak MQTT 3.1.1 or 5"
    if level in (BRIDGE | MQTT_3_1_1, BRIDGE | MQTT_5):
        version = "3.1.1" if level & ~BRIDGE == MQTT_3_1_1 else "5"
        return (
            f"a bridge of mosquitto tries MQTT {version} as bridges speak it (level {level}): it comes again without "
            "that, and at once with `try_private false` in mosquitto.conf"
        )
    if level == BRIDGE | MQTT_3_1:
        return "a bridge speaks MQTT 3.1: say `bridge_protocol_version mqttv311` in mosquitto.conf"
    if level == MQTT_3_1:
        return "the client speaks MQTT 3.1: have it speak 3.1.1 or 5"
    return f"the client speaks MQTT of level {level}: have it speak 3.1.1 (level 4) or 5 (level 5)"


def _packet_id(buffer: bytes, at: int, end: int) -> tuple[int, int]:
    packet_id, at = fields.read_two(buffer, at, end)
    if not packet_id:
        raise protocol_error("packet id 0")
    return packet_id, at


def _code(code: int, codes: frozenset[int], kind: type[Packet]) -> ReasonCode:
    if code not in codes:
        raise protocol_error(f"{_name(kind)} with reason code 0x{code:02X}")
    return ReasonCode(code)


def _name(kind: type[Packet]) -> str:
    return kind.__name__.upper()


def _unknown(first: int) -> MqttError:
    kind = first >> 4
    if kind == CONNECT_BYTE >> 4:
        return protocol_error("a second CONNECT")
    if kind in _OF_SERVERS:
        return protocol_error(f"{_OF_SERVERS[kind]}, which servers send")
    return malformed(f"a packet that begins with 0x{first:02X}")
