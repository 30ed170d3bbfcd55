"""Answers to a client as bytes, for its version and not larger than it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from qflow.mqtt.errors import RETURN_CODES, ReasonCode
from qflow.mqtt.wire.fields import variable
from qflow.mqtt.wire.packets import (
    MQTT_5,
    Answer,
    Auth,
    Connack,
    Disconnect,
    Properties,
    Puback,
    Pubcomp,
    Pubrec,
    Pubrel,
    Suback,
    Unsuback,
)
from qflow.mqtt.wire.properties import properties_bytes

PINGRESP = b"\xd0\x00"
_ACKS: dict[type[Answer], bytes] = {Puback: b"\x40", Pubrec: b"\x50", Pubrel: b"\x62", Pubcomp: b"\x70"}
"""Their first bytes."""
_CAN_BE_LEFT_OUT = ("reason_string", "user_properties")
_REASON_CHARACTERS = 1000

_IN_CONNACK = frozenset(ReasonCode) & {0, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F}
_IN_DISCONNECT = frozenset(ReasonCode) & {
    0,
    *range(0x80, 0x84),
    0x87,
    0x89,
    0x8B,
    0x8D,
    0x8E,
    0x8F,
    0x90,
    *range(0x93, 0xA3),
}
"""The reason codes of a server, by MQTT 5.0, sections 3.2.2.2 and 3.14.2.1."""


def connack_code(code: int) -> int:
    """Return a code that a CONNACK may have: one that it has no place for is 0x80, a server that ends 0x88."""
    if code == ReasonCode.SERVER_SHUTTING_DOWN:
        return ReasonCode.SERVER_UNAVAILABLE
    return code if code in _IN_CONNACK else ReasonCode.UNSPECIFIED


def reason(text: str) -> str:
    """Return a text as a reason string can be: without NUL, with what UTF-8 can encode, and not too long."""
    return text[:_REASON_CHARACTERS].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def encode(packet: Answer, version: int) -> bytes:
    """Encode a packet; `b""` if the version has no place for it.

    Raises:
        InvalidArgument: a value has no place in its field.
    Cost: 0.2 µs for an acknowledgement without a reason.
    """
    return _WRITERS[type(packet)](packet, version)


def fitting(packet: Answer, version: int, most_bytes: int, wants_reasons: bool) -> bytes:
    """Encode a packet as `encode` does; also `b""` if it has no place in `most_bytes`.

    Reason string and user properties are left out where they are not wanted, or would make it too large: MQTT 5.0,
    sections 3.1.2.11.7 and 3.1.2.11.4. CONNACK and DISCONNECT have them always.
    """
    may_have_them = wants_reasons or isinstance(packet, Connack | Disconnect)
    encoded = encode(packet if may_have_them else _without_reasons(packet), version)
    if len(encoded) > most_bytes and may_have_them:
        encoded = encode(_without_reasons(packet), version)
    return encoded if len(encoded) <= most_bytes else b""


def _without_reasons(packet: Answer) -> Answer:
    kept: Any = {name: value for name, value in packet.properties.items() if name not in _CAN_BE_LEFT_OUT}
    return attrs.evolve(packet, properties=kept)


def _ack(packet: Puback | Pubrec | Pubrel | Pubcomp, version: int) -> bytes:
    first = _ACKS[type(packet)]
    packet_id = packet.packet_id.to_bytes(2)
    if version != MQTT_5 or not (packet.code or packet.properties):
        return first + b"\x02" + packet_id
    return _packet(first, packet_id + _code_and_properties(packet.code, packet.properties))


def _connack(packet: Connack, version: int) -> bytes:
    present = b"\1" if packet.session_present and not packet.code else b"\0"
    if version == MQTT_5:
        behind = bytes((connack_code(packet.code),)) + properties_bytes(packet.properties)
        return _packet(b"\x20", present + behind)
    code = RETURN_CODES.get(ReasonCode(packet.code))
    return b"" if code is None else b"\x20\x02" + present + bytes((code,))


def _suback(packet: Suback, version: int) -> bytes:
    if version == MQTT_5:
        behind = properties_bytes(packet.properties) + bytes(packet.codes)
    else:
        behind = bytes(min(code, 0x80) for code in packet.codes)
    return _packet(b"\x90", packet.packet_id.to_bytes(2) + behind)


def _unsuback(packet: Unsuback, version: int) -> bytes:
    behind = properties_bytes(packet.properties) + bytes(packet.codes) if version == MQTT_5 else b""
    return _packet(b"\xb0", packet.packet_id.to_bytes(2) + behind)


def _disconnect(packet: Disconnect, version: int) -> bytes:
    if version != MQTT_5:
        return b""
    code = packet.code if packet.code in _IN_DISCONNECT else ReasonCode.UNSPECIFIED  # one that it has no place for
    return _packet(b"\xe0", _code_and_properties(code, packet.properties))


def _auth(packet: Auth, version: int) -> bytes:
    return _packet(b"\xf0", _code_and_properties(packet.code, packet.properties)) if version == MQTT_5 else b""


def _code_and_properties(code: int, properties: Properties) -> bytes:
    """Encode both, or what is needed of them."""
    if properties:
        return bytes((code,)) + properties_bytes(properties)
    return bytes((code,)) if code else b""


def _packet(first: bytes, behind: bytes) -> bytes:
    return first + variable(len(behind)) + behind


_WRITERS: dict[type[Answer], Callable[[Any, int], bytes]] = {
    Connack: _connack,
    Puback: _ack,
    Pubrec: _ack,
    Pubrel: _ack,
    Pubcomp: _ack,
    Suback: _suback,
    Unsuback: _unsuback,
    Disconnect: _disconnect,
    Auth: _auth,
}
