"""Frames as bytes; the methods that every message needs have an encoder and a decoder of their own.

A frame is type (1 byte), channel (2), size (4), payload, 0xCE. A message is a method frame, a content header frame
(class, weight, size of the body, property flags and list) and as many body frames as `frame_max` makes of it.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.wire.limits import Limits
from qflow.amqp.wire.tables import check_short_string, malformed
from qflow.named_tuples import NamedTuple

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
KINDS = frozenset({METHOD, HEADER, BODY, HEARTBEAT})
FRAME = struct.Struct(">BHI")
FRAME_BYTES = FRAME.size
END = 0xCE
AROUND_PAYLOAD_BYTES = FRAME_BYTES + 1

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
HEADER_OF_0_9 = b"AMQP\x01\x01\x00\x09"
"""Sent by some clients that speak 0-9-1 all the same, such as Perl's Net::AMQP."""
HEARTBEAT_FRAME = b"\x08\x00\x00\x00\x00\x00\x00\xce"
BASIC = 60
DELIVER, PUBLISH, ACK, NACK = 0x3C003C, b"\x00\x3c\x00\x28", b"\x00\x3c\x00\x50", 0x3C0078
_ACK = int.from_bytes(ACK)

CONTENT_HEADER = struct.Struct(">HHQ")
"""Class, weight, size of the body; the properties follow."""
_METHOD_START = struct.Struct(">BHII")
_TAG = struct.Struct(">QB")
_HEADER_FRAME = struct.Struct(">BBHIHHQ")
_BODY_FRAME = struct.Struct(">BBHI")
"""These two begin with the end of the frame before."""
_WHOLE_ACK = struct.Struct(">BHIIQBB")
_ACK_ARGUMENTS = struct.Struct(">QB")
ACK_BYTES = 13
_END = b"\xce"
_COPIED_BYTES = 65_536
"""A body up to here is copied next to its frames; pieces of a larger one are views."""


class Content(NamedTuple):
    """A message on its way to a client; `properties` are property flags and list, as in `Published`."""

    exchange: str
    routing_key: str
    properties: bytes
    body: bytes


Piece = bytes | memoryview


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return b"".join((FRAME.pack(kind, channel, len(payload)), payload, _END))


@lru_cache(1024)
def short_string(text: str) -> bytes:
    """Encode one; the same few names come with every message."""
    encoded = text.encode()
    return bytes((len(encoded),)) + encoded


def deliver_frames(channel: int, tag: tuple[str, int, bool], content: Content, largest: int) -> list[Piece]:
    """Encode `basic.deliver` with its content; `tag` is consumer tag, delivery tag, redelivered.

    `largest` is the largest payload of a frame, in bytes. A content header cannot be divided: it is sent as it is.
    """
    consumer_tag, delivery_tag, redelivered = tag
    exchange, routing_key, properties, body = content
    consumer = short_string(consumer_tag)
    exchange_name = short_string(exchange)
    key = short_string(routing_key)
    method = _METHOD_START.pack(METHOD, channel, 13 + len(consumer) + len(exchange_name) + len(key), DELIVER)
    size = len(body)
    header = _HEADER_FRAME.pack(END, HEADER, channel, 12 + len(properties), BASIC, 0, size)
    tags = _TAG.pack(delivery_tag, redelivered)
    if 0 < size <= largest and size <= _COPIED_BYTES:
        start = _BODY_FRAME.pack(END, BODY, channel, size)
        return [b"".join((method, consumer, tags, exchange_name, key, header, properties, start, body, _END))]
    head = b"".join((method, consumer, tags, exchange_name, key, header, properties, _END))
    return [head, *body_frames(channel, body, largest)]


def content_frames(channel: int, method: bytes, content: Content, largest: int) -> list[Piece]:
    """Encode any other method that carries a content; `method` is its payload."""
    size = len(content.body)
    header = _HEADER_FRAME.pack(END, HEADER, channel, 12 + len(content.properties), BASIC, 0, size)
    head = b"".join((FRAME.pack(METHOD, channel, len(method)), method, header, content.properties, _END))
    return [head, *body_frames(channel, content.body, largest)]


def body_frames(channel: int, body: bytes, largest: int) -> list[Piece]:
    """Divide a body into frames, of views of it."""
    pieces: list[Piece] = []
    whole = memoryview(body)
    for at in range(0, len(body), largest):
        part = whole[at : at + largest]
        pieces += (FRAME.pack(BODY, channel, len(part)), part, _END)
    return pieces


def confirm_frame(channel: int, delivery_tag: int, multiple: bool, positive: bool) -> bytes:
    """Encode `basic.ack`, or `basic.nack` without requeue."""
    return _WHOLE_ACK.pack(METHOD, channel, ACK_BYTES, _ACK if positive else NACK, delivery_tag, multiple, END)


def decode_ack(buffer: bytes, at: int) -> tuple[int, bool]:
    """Return delivery tag and multiple of the 13 bytes of a `basic.ack`."""
    delivery_tag, bits = _ACK_ARGUMENTS.unpack_from(buffer, at + 4)
    return delivery_tag, bool(bits & 1)


@lru_cache(1024)
def decode_publish(payload: bytes) -> tuple[str, str, bool, bool]:
    """Return exchange, routing key, mandatory, immediate; a publisher sends the same bytes time and again."""
    try:
        stop = len(payload)
        key_at = check_short_string(payload, 6, stop)
        end = check_short_string(payload, key_at, stop)
        if end + 1 != stop:
            raise malformed("the arguments of a method have another length than their frame")
    except AmqpError as error:
        error.class_id, error.method_id = BASIC, 40
        raise
    bits = payload[end]
    return payload[7:key_at].decode(), payload[key_at + 1 : end].decode(), bool(bits & 1), bool(bits & 2)


def decode_header(payload: bytes) -> tuple[int, bytes]:
    """Return the size of the body, and the properties, of a content header of class basic."""
    if len(payload) < CONTENT_HEADER.size:
        raise malformed("a content header is cut short")
    class_id, _, size = CONTENT_HEADER.unpack_from(payload)
    if class_id != BASIC:
        raise AmqpError(ReplyCode.UNEXPECTED_FRAME, f"a content header of class {class_id} after basic.publish")
    return size, payload[CONTENT_HEADER.size :]


_WHOLE_HEADER = struct.Struct(">BHIHHQ")


def whole_content(buffer: bytes, at: int, number: int, largest: int, limits: Limits) -> tuple[bytes, bytes, int] | None:
    """Return properties, body and where the next frame begins, if header and only body frame are there and regular.

    Anything else is None, and goes frame by frame: what is wrong is found there. Most messages are read here, with two
    copies, of the properties and of the body.
    """
    length = len(buffer)
    if length - at < _WHOLE_HEADER.size:
        return None
    kind, channel, size, class_id, _, body_size = _WHOLE_HEADER.unpack_from(buffer, at)
    end = at + FRAME_BYTES + size
    body_at = end + AROUND_PAYLOAD_BYTES
    body_end = body_at + body_size
    if (
        body_end >= length
        or kind != HEADER
        or channel != number
        or class_id != BASIC
        or not 12 <= size <= largest
        or size - 12 > limits.max_properties_bytes
        or not 0 < body_size <= largest
        or body_size > limits.max_body_bytes
        or buffer[end] != END
        or buffer[body_end] != END
        or FRAME.unpack_from(buffer, end + 1) != (BODY, number, body_size)
    ):
        return None
    return buffer[at + _WHOLE_HEADER.size : end], buffer[body_at:body_end], body_end + 1
