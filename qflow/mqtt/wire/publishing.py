"""A publish to clients, encoded once for all who get it alike."""

from __future__ import annotations

from qflow.mqtt.wire.fields import read_variable, string, variable
from qflow.mqtt.wire.packets import MQTT_5, Properties
from qflow.mqtt.wire.properties import properties_bytes

Encoded = tuple[bytes, bytes]
"""Of a publish: what goes before its packet id, and what goes behind it."""
PACKET_ID_BYTES = 2
_ALIAS_BYTES = 3
_LEAST_NAME_BYTES = 8
"""With its length: what is shorter has no use of an alias."""


def encode_publish(
    version: int,
    topic: str,
    payload: bytes,
    qos: int = 0,
    retain: bool = False,
    dup: bool = False,
    properties: Properties | None = None,
) -> Encoded:
    """Return (head, tail) of a PUBLISH, between which its packet id goes, two bytes, if `qos` is not 0.

    With QoS 0 head is the whole packet and tail is empty. A client of 3.1.1 (`version` 4) gets no properties.

    Properties have no `topic_alias`: the connection of a client that wants aliases adds them.

    Raises:
        InvalidArgument: what MQTT has no place for, as a property of 64 KiB.
    Cost: 0.7 µs for 100 bytes, 2.3 with two properties; one copy of the payload.
    """
    name = string(topic, "topic")
    if version != MQTT_5:
        behind = payload
    elif properties:
        behind = properties_bytes(properties) + payload
    else:
        behind = b"\0" + payload
    return _encoded(0x30 | qos << 1 | retain | dup << 3, name, behind)


def _encoded(first: int, name: bytes, behind: bytes) -> Encoded:
    size = len(name) + len(behind)
    if first & 6:
        return bytes((first,)) + variable(size + PACKET_ID_BYTES) + name, behind
    return b"".join((bytes((first,)), variable(size), name, behind)), b""


class Aliases:
    """The topics of one client of MQTT 5 that wants aliases; the first that it gets have one, until `most` have.

    Memory: these topics.
    """

    __slots__ = ("_by_name", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_name: dict[bytes, int] = {}

    def apply(self, encoded: Encoded, most_bytes: int) -> Encoded:
        """Return a publish with the alias of its topic, or in its place; as it is if it has none.

        A topic gets one if it is longer than an alias, and if the packet with both is no larger than `most_bytes`.
        Cost: 2 µs, and a copy of the payload.
        """
        head, tail = encoded
        start = 2
        while head[start - 1] > 127:
            start += 1
        end = start + 2 + (head[start] << 8 | head[start + 1])
        name = head[start:end]
        alias = self._by_name.get(name)
        if alias is None and (len(self._by_name) >= self._most or len(name) < _LEAST_NAME_BYTES):
            return encoded
        behind = tail if head[0] & 6 else head[end:]
        size, at = read_variable(behind, 0, len(behind))
        number = alias or len(self._by_name) + 1
        behind = b"".join((variable(size + _ALIAS_BYTES), b"\x23", number.to_bytes(2), behind[at:]))
        if alias is None:
            made = _encoded(head[0], name, behind)
            if packet_bytes(made) > most_bytes:
                return encoded
            self._by_name[name] = number
            return made
        return _encoded(head[0], b"\0\0", behind)


def packet_bytes(encoded: Encoded) -> int:
    """Return how large the packet is, with its packet id."""
    head, tail = encoded
    return len(head) + len(tail) + (PACKET_ID_BYTES if head[0] & 6 else 0)
