"""A message of MQTT as one of AMQP, and the other way round.

MQTT                    AMQP
topic `a/b.c`           routing key `a/b.c` with `/` and `.` exchanged: `a.b/c`
payload                 body
QoS 0; 1 and 2          delivery mode 1; 2
content type            content_type
correlation data        correlation_id, if it is UTF-8 of at most 255 bytes
message expiry          expiration, of ten years at most
user properties         headers, of a name the last value; other values than text as JSON
QoS, response topic     headers `x-mqtt-publish-qos`, `x-mqtt-response-topic`, in this direction alone
"""

from __future__ import annotations

import json
from typing import Any

from pamqp.commands import Basic

from qflow.amqp.model.arguments import LONGEST_MS
from qflow.amqp.server.content import MAX_NAME_BYTES, PERSISTENT, Properties, headers_of, read_properties
from qflow.amqp.server.parcels import Parcel
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.methods import decode_properties
from qflow.mqtt.model.messages import Message, is_reserved

EXCHANGE = "amq.topic"
MARK = "amqp:amq.topic"
"""The publisher of messages that came from AMQP: they do not go back there."""
QOS, RESPONSE_TOPIC = "x-mqtt-publish-qos", "x-mqtt-response-topic"
_SWAPPED = str.maketrans("/.", "./")
_FORBIDDEN = frozenset("+#\0")
TRANSIENT = 1


def key_of(topic: str) -> str | None:
    """Return the routing key for a topic; None if it is too long for one."""
    key = topic.translate(_SWAPPED)
    return key if len(key.encode()) <= MAX_NAME_BYTES else None


def topic_of(key: str) -> str | None:
    """Return the topic for a routing key; None if it is none: empty, the server's own, or with a wildcard."""
    topic = key.translate(_SWAPPED)
    return topic if topic and not is_reserved(topic) and _FORBIDDEN.isdisjoint(topic) else None


def topics_of(content: Content) -> list[str | None]:
    """Return the topics for the routing keys of a message, those of its header `CC` among them; see `topic_of`."""
    copies = (decode_properties(content.properties).headers or {}).get("CC")
    others = [key for key in copies if isinstance(key, str)] if isinstance(copies, list) else []
    return [topic_of(key) for key in dict.fromkeys([content.routing_key, *others])]


def parcel_of(message: Message, key: str, now_ms: int) -> tuple[Parcel, Properties]:
    """Return a message of MQTT as queues of AMQP take it, and its properties."""
    given = message.properties
    headers: dict[str, Any] = {name: value for name, value in given.get("user_properties", ()) if _fits(name)}
    headers[QOS] = message.qos
    if "response_topic" in given:
        headers[RESPONSE_TOPIC] = given["response_topic"]
    content_type = given.get("content_type", "")
    properties = Basic.Properties(
        content_type=content_type if _fits(content_type) else None,
        correlation_id=_text_of(given.get("correlation_data", b"")),
        headers=headers,
        delivery_mode=PERSISTENT if message.qos else TRANSIENT,
        expiration=str(min(max(1, message.expires_ms - now_ms), LONGEST_MS)) if message.expires_ms else None,
    )
    read = read_properties(properties.marshal())
    stored = headers_of(read, EXCHANGE, key)
    return Parcel(message.payload, stored, read.durable, 0, read.ttl_s, None), read


def message_of(content: Content, topic: str, now_ms: int) -> Message:
    """Return a message of AMQP as MQTT's clients get it, with QoS 1."""
    given = decode_properties(content.properties)
    message = Message(topic, content.body, 1, False, {})
    message.publisher = MARK
    properties = message.properties
    if given.content_type:
        properties["content_type"] = given.content_type
    if given.correlation_id:
        properties["correlation_data"] = given.correlation_id.encode()
    users = [(name, _shown(value)) for name, value in (given.headers or {}).items() if "\0" not in name]
    if users:
        properties["user_properties"] = users
    if given.expiration:
        message.expires_ms = now_ms + int(given.expiration)
    return message


def _fits(text: str) -> bool:
    return len(text.encode()) <= MAX_NAME_BYTES


def _text_of(data: bytes) -> str | None:
    try:
        return data.decode() if 0 < len(data) <= MAX_NAME_BYTES else None
    except UnicodeDecodeError:
        return None


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.replace("\0", "")
