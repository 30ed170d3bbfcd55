"""A message as the broker has it: in a stream, among the retained ones, or on its way to clients.

In a stream, the topic is the stream's, the payload its body, and everything else stands in headers that begin with
`mqtt.`: none if there is nothing but QoS 1, so that a message of a program, which has none, has QoS 1 as well. What
headers a program gives are user properties; of one that MQTT has no place for, `mqtt.problem` tells.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Mapping
from typing import Any, cast

from qflow.config import AMQP_STREAMS, APART_IN_STREAMS
from qflow.message import EncodedHeaders, Headers
from qflow.mqtt.wire import MAX_FIELD_BYTES, Encoded, encode_publish, has_place
from qflow.mqtt.wire.packets import Properties, Publish, Will
from qflow.streams.deliveries import StreamDelivery, StreamMessage

_PREFIX = "mqtt."
_QOS, _RETAIN, _PUBLISHER, _EXPIRES = "mqtt.qos", "mqtt.retain", "mqtt.publisher", "mqtt.expires_ms"
_FORMAT, _TYPE, _RESPONSE = "mqtt.payload_format", "mqtt.content_type", "mqtt.response_topic"
_CORRELATION, USER_PROPERTIES = "mqtt.correlation_data", "mqtt.user_properties"
_MARK = "mqtt.mark"
_QOS_2 = EncodedHeaders({_QOS: 2})
_KINDS: dict[str, type] = {
    _QOS: int, _RETAIN: bool, _PUBLISHER: str, _EXPIRES: int, _FORMAT: int, _TYPE: str, _RESPONSE: str,
    _MARK: str, _CORRELATION: str, USER_PROPERTIES: str,
}  # fmt: skip
CARRIED: tuple[str, ...] = ("payload_format", "content_type", "response_topic", "correlation_data", "user_properties")
"""Properties of a publish that belong to the message; the others belong to the packet."""
LONGEST_S = 0xFFFF_FFFF
"""Until a message expires, as MQTT can say it: some 136 years."""
_LENGTH_BYTES = 4
_NOTHING: Properties = {}


class Message:
    """See the module. It does not change, but for what is remembered of its encodings."""

    __slots__ = (
        "_encoded",
        "expires_ms",
        "mark",
        "offset",
        "payload",
        "properties",
        "publisher",
        "qos",
        "retain",
        "topic",
    )

    def __init__(self, topic: str, payload: bytes, qos: int, retain: bool, properties: Properties) -> None:
        self.topic = topic
        self.payload = payload
        self.qos = qos
        self.retain = retain
        """It was published with the flag."""
        self.properties = properties
        """Of `CARRIED`."""
        self.publisher = ""
        """The client that published it, where a subscription of it wants none of its own."""
        self.mark = ""
        """Of one that was published with the flag: which it was, in this run of the server; see `Marks`."""
        self.expires_ms = 0
        """When it expires, milliseconds since the epoch; 0 = never."""
        self.offset = -1
        """Its place in the stream; -1 if it is not from there."""
        self._encoded: dict[tuple[int, int, bool], Encoded] = {}

    def forget_encodings(self) -> None:
        """Remember none: they take as much as it does, each."""
        self._encoded.clear()

    @property
    def size(self) -> int:
        """Return about how many bytes it takes."""
        size = len(self.topic) + len(self.payload) + 300
        if self.properties:
            size += sum(len(str(value)) + 100 for value in self.properties.values())
        return size

    def is_expired(self, now_ms: int) -> bool:
        """Tell whether it is not to be delivered any more."""
        return 0 < self.expires_ms <= now_ms

    def encoded(self, version: int, qos: int, retain: bool, now_ms: int, extra: Properties = _NOTHING) -> Encoded:
        """Return it as a PUBLISH; those without expiry and extra properties are encoded once."""
        if version < 5 or not (extra or self.expires_ms):
            key = (version, qos, retain)
            found = self._encoded.get(key)
            if found is None:
                found = self._encoded[key] = encode_publish(
                    version, self.topic, self.payload, qos, retain, False, self.properties
                )
            return found
        return self._encode(version, qos, retain, False, now_ms, extra)

    def encoded_again(self, version: int, qos: int, retain: bool, now_ms: int, extra: Properties = _NOTHING) -> Encoded:
        """Return it as a PUBLISH that may have been sent before."""
        return self._encode(version, qos, retain, True, now_ms, extra)

    def _encode(self, version: int, qos: int, retain: bool, dup: bool, now_ms: int, extra: Properties) -> Encoded:
        properties = cast(Properties, {**self.properties, **extra})
        if "user_properties" in extra:
            properties["user_properties"] = [*self.properties.get("user_properties", ()), *extra["user_properties"]]
        if self.expires_ms:
            properties["message_expiry_s"] = min(max(0, -(-(self.expires_ms - now_ms) // 1000)), LONGEST_S)
        return encode_publish(version, self.topic, self.payload, qos, retain, dup, properties)

    def headers(self) -> Headers | None:
        """Return what stands beside it in the stream."""
        if not (self.properties or self.retain or self.publisher or self.expires_ms):
            return None if self.qos == 1 else _QOS_2 if self.qos == 2 else {_QOS: self.qos}
        headers: dict[str, str | int | float | bool | None] = {_QOS: self.qos}
        if self.retain:
            headers[_RETAIN] = True
        if self.mark:
            headers[_MARK] = self.mark
        if self.publisher:
            headers[_PUBLISHER] = self.publisher
        if self.expires_ms:
            headers[_EXPIRES] = self.expires_ms
        properties = self.properties
        for name, value in ((_FORMAT, "payload_format"), (_TYPE, "content_type"), (_RESPONSE, "response_topic")):
            if value in properties:
                headers[name] = cast(Any, properties)[value]
        if "correlation_data" in properties:
            headers[_CORRELATION] = b64encode(properties["correlation_data"]).decode()
        if "user_properties" in properties:
            headers[USER_PROPERTIES] = json.dumps(
                properties["user_properties"], ensure_ascii=False, separators=(",", ":")
            )
        return headers

    def pack(self) -> bytes:
        """Return it as bytes, without the topic."""
        head = json.dumps(dict(self.headers() or {_QOS: 1}), ensure_ascii=False, separators=(",", ":")).encode()
        return len(head).to_bytes(_LENGTH_BYTES, "big") + head + self.payload


def published(publish: Publish | Will, publisher: str, now_ms: int) -> Message:
    """Return the message that a client publishes; `publisher`: empty if nobody asks."""
    properties = publish.properties
    if not properties:
        message = Message(publish.topic, publish.payload, publish.qos, publish.retain, _NOTHING)
    else:
        kept = cast(Properties, {name: value for name, value in properties.items() if name in CARRIED})
        message = Message(publish.topic, publish.payload, publish.qos, publish.retain, kept)
        if "message_expiry_s" in properties:
            message.expires_ms = max(1, now_ms + properties["message_expiry_s"] * 1000)
    message.publisher = publisher
    return message


def is_reserved(topic: str) -> bool:
    """Tell whether a topic is the server's: no client publishes to it."""
    return topic.startswith(APART_IN_STREAMS)


def unpack(topic: str, data: bytes) -> Message:
    """Return the message of `pack`."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    return of_headers(topic, data[start:], json.loads(data[_LENGTH_BYTES:start]))


def expires_ms_of(data: bytes) -> int:
    """Return when the message of `pack` expires, milliseconds since the epoch; 0: never. Cost: 0.4 µs; 2 if it does."""
    head = data[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")]
    return int(json.loads(head).get(_EXPIRES, 0)) if _EXPIRES.encode() in head else 0


def message_of(read: StreamMessage | StreamDelivery) -> Message:
    """Return a message of the stream that the server follows."""
    message = of_headers(read.topic, read.body, read.headers)
    message.offset = read.offset
    if message.topic.startswith(AMQP_STREAMS):
        message.expires_ms = 1  # nobody has it
    return message


def of_headers(topic: str, payload: bytes, headers: Mapping[str, Any]) -> Message:
    """Return a message of a stream, whoever published it: headers that are none of ours are user properties."""
    if not headers:
        return Message(topic, payload, 1, False, _NOTHING)
    mine: dict[str, Any] = {name: value for name, value in headers.items() if isinstance(value, _KINDS.get(name, ()))}
    wrong = [name for name in (_TYPE, _RESPONSE) if not has_place(mine.get(name, ""))]
    if not {"+", "#"}.isdisjoint(mine.get(_RESPONSE, "")) and _RESPONSE not in wrong:
        wrong.append(_RESPONSE)  # it is a topic, and no filter
    for name in wrong:
        del mine[name]  # it is told of among the user properties
    users = [(name, _text(value)) for name, value in headers.items() if name not in mine]
    message = Message(topic, payload, min(max(mine.get(_QOS, 1), 0), 2), mine.get(_RETAIN, False), {})
    message.publisher = mine.get(_PUBLISHER, "")
    message.mark = mine.get(_MARK, "")
    message.expires_ms = mine.get(_EXPIRES, 0)
    properties = message.properties
    if mine.get(_FORMAT) in (0, 1):
        properties["payload_format"] = mine[_FORMAT]
    if _TYPE in mine:
        properties["content_type"] = mine[_TYPE]
    if _RESPONSE in mine:
        properties["response_topic"] = mine[_RESPONSE]
    try:
        if _CORRELATION in mine:
            correlation = b64decode(mine[_CORRELATION], validate=True)
            if len(correlation) > MAX_FIELD_BYTES:
                raise ValueError(f"MQTT has no place for correlation data of {len(correlation):,} bytes")
            properties["correlation_data"] = correlation
        if USER_PROPERTIES in mine:
            users = [(str(name), str(value)) for name, value in json.loads(mine[USER_PROPERTIES])] + users
    except (NotBase64, ValueError, TypeError, RecursionError) as error:  # a program wrote headers with our names
        users.append((f"{_PREFIX}problem", str(error)))
    if users:
        properties["user_properties"] = [one if all(map(has_place, one)) else _problem(one[0]) for one in users]
    return message


def _problem(name: str) -> tuple[str, str]:
    return f"{_PREFIX}problem", f"MQTT has no place for header {name[:80]!a}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
