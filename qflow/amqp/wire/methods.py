"""Methods from bytes and to bytes, by pamqp."""

from __future__ import annotations

import struct
from typing import Any, TypeVar

from pamqp import base, commands, encode

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.wire.limits import Limits
from qflow.amqp.wire.properties import HEADERS, spans
from qflow.amqp.wire.tables import check_arguments, decode_table, malformed

Made = TypeVar("Made", bound=base.Frame)
_CONNECTION = commands.Connection
_CHANNEL = commands.Channel
_EXCHANGE = commands.Exchange
_QUEUE = commands.Queue
_BASIC = commands.Basic
_TX = commands.Tx

_FROM_CLIENTS: tuple[type[base.Frame], ...] = (
    *(_CONNECTION.StartOk, _CONNECTION.SecureOk, _CONNECTION.TuneOk, _CONNECTION.Open),
    *(_CONNECTION.Close, _CONNECTION.CloseOk, _CONNECTION.UpdateSecret),
    *(_CHANNEL.Open, _CHANNEL.Flow, _CHANNEL.FlowOk, _CHANNEL.Close, _CHANNEL.CloseOk),
    *(_EXCHANGE.Declare, _EXCHANGE.Delete, _EXCHANGE.Bind, _EXCHANGE.Unbind),
    *(_QUEUE.Declare, _QUEUE.Bind, _QUEUE.Purge, _QUEUE.Delete, _QUEUE.Unbind),
    *(_BASIC.Qos, _BASIC.Consume, _BASIC.Cancel, _BASIC.CancelOk, _BASIC.Publish, _BASIC.Get),
    *(_BASIC.Ack, _BASIC.Reject, _BASIC.RecoverAsync, _BASIC.Recover, _BASIC.Nack),
    *(_TX.Select, _TX.Commit, _TX.Rollback, commands.Confirm.Select),
)
_KNOWN = set(commands.INDEX_MAPPING)
_TYPES = {cls.index: (cls, tuple(cls.amqp_type(name) for name in cls.attributes())) for cls in _FROM_CLIENTS}


_NO_TABLE = bytes(4)


def decode_method(payload: bytes, limits: Limits) -> base.Frame:
    """Return the method of a frame that a client sent.

    Raises: `AmqpError` with 502 where it is malformed, 503 where only servers send it, 540 where nobody knows it.
    """
    if len(payload) < 4:
        raise malformed("a method frame has less than 4 bytes")
    index = int.from_bytes(payload[:4])
    found = _TYPES.get(index)
    class_id, method_id = index >> 16, index & 0xFFFF
    if found is None:
        code = ReplyCode.COMMAND_INVALID if index in _KNOWN else ReplyCode.NOT_IMPLEMENTED
        raise AmqpError(code, f"method {class_id}.{method_id}", class_id=class_id, method_id=method_id)
    cls, types = found
    method = cls.__new__(cls)
    try:
        start, end = check_arguments(types, payload, 4, limits)
        if end:
            method.unmarshal(payload[4:start] + _NO_TABLE + payload[end:])
            setattr(method, cls.attributes()[types.index("table")], decode_table(payload[start:end]))
        else:
            method.unmarshal(payload[4:])
    except AmqpError as error:
        raise error.about(method) from None
    except (ValueError, OverflowError, struct.error) as error:
        raise malformed(f"{cls.name}: {error}").about(method) from error
    return method


def unchecked(cls: type[Made], *values: Any) -> Made:
    """Return a method with these arguments, in the order of its frame.

    The constructors of pamqp refuse names that brokers allow, as those of queues beyond ASCII.
    """
    method = cls.__new__(cls)
    for name, value in zip(cls.attributes(), values, strict=True):
        setattr(method, name, value)
    return method


def decode_properties(properties: bytes) -> commands.Basic.Properties:
    """Return the properties of a message, from flags and list that were checked, as those of `Published` are."""
    decoded = commands.Basic.Properties()
    flags = int.from_bytes(properties[:2])
    start, end = next(((start, end) for bit, start, end in spans(properties) if bit == HEADERS), (2, 2))
    decoded.unmarshal(flags & ~HEADERS, properties[2:start] + properties[end:])
    if flags & HEADERS:
        decoded.headers = decode_table(properties[start:end])
    return decoded


def encode_method(method: base.Frame) -> bytes:
    """Return the payload of a method frame.

    As `marshal` of pamqp, which however refuses names that brokers allow, as those of queues beyond ASCII.
    """
    pieces = [method.index.to_bytes(4)]
    octet, bits = 0, 0
    for name in method.attributes():
        kind, value = method.amqp_type(name), getattr(method, name)
        if kind == "bit":
            if bits == 8:
                pieces.append(bytes((octet,)))
                octet, bits = 0, 0
            octet |= bool(value) << bits
            bits += 1
            continue
        if bits:
            pieces.append(bytes((octet,)))
            octet, bits = 0, 0
        pieces.append(encode.by_type(value, kind))
    if bits:
        pieces.append(bytes((octet,)))
    return b"".join(pieces)
