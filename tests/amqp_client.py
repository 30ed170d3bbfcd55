"""A client of the sans-I/O connection: frames by pamqp, and a connection that is open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pamqp import body, commands, frame, header

from qflow.amqp.wire.connection import Connection
from qflow.amqp.wire.events import Event
from qflow.amqp.wire.limits import DEFAULT_LIMITS, Limits

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
Connections = commands.Connection
Channels = commands.Channel
Basic = commands.Basic


def method(channel: int, value: Any) -> bytes:
    return frame.marshal(value, channel)


def raw(kind: int, channel: int, payload: bytes) -> bytes:
    return bytes((kind,)) + channel.to_bytes(2) + len(payload).to_bytes(4) + payload + b"\xce"


def message(
    channel: int, content: bytes, *, key: str = "k", properties: Any = None, frame_max: int = DEFAULT_LIMITS.frame_max
) -> bytes:
    """A publish with its content, in frames of `frame_max`."""
    most = frame_max - 8
    parts = [
        method(channel, Basic.Publish(0, "x", key)),
        method(channel, header.ContentHeader(0, len(content), properties or Basic.Properties())),
        *(method(channel, body.ContentBody(content[at : at + most])) for at in range(0, len(content), most)),
    ]
    return b"".join(parts)


HANDSHAKE = (
    PROTOCOL_HEADER,
    method(0, Connections.StartOk({}, "PLAIN", "\0user\0secret")),
    method(0, Connections.TuneOk(2047, 131_072, 60)),
    method(0, Connections.Open("/")),
    method(1, Channels.Open()),
)


def events(connection: Connection, *data: bytes) -> list[Event]:
    return [event for part in data for event in connection.receive(part)]


def opened(
    limits: Limits = DEFAULT_LIMITS,
    *,
    frame_max: int = 0,
    capabilities: Sequence[str] = (),
    channels: Sequence[int] = (1,),
) -> Connection:
    """A connection that is open, with nothing to send."""
    connection = Connection(limits=limits)
    told = {"capabilities": dict.fromkeys(capabilities, True)}
    events(connection, PROTOCOL_HEADER, method(0, Connections.StartOk(told, "PLAIN", "\0user\0secret")))
    connection.accept_login()
    tune = Connections.TuneOk(limits.channel_max, frame_max or limits.frame_max, 60)
    events(connection, method(0, tune), method(0, Connections.Open("/")))
    connection.open_ok()
    events(connection, *(method(number, Channels.Open()) for number in channels))
    connection.data_to_send()
    return connection


def sent(connection: Connection) -> list[tuple[int, Any]]:
    """Take what is to be sent, as (channel, frame of pamqp)."""
    data = connection.data_to_send()
    found = []
    while data:
        used, channel, value = frame.unmarshal(data)
        found.append((channel, value))
        data = data[used:]
    return found


def close_code(connection: Connection) -> int | None:
    """The reply code of the close that is to be sent last, of the connection or of a channel."""
    closes = [value for _, value in sent(connection) if isinstance(value, Connections.Close | Channels.Close)]
    return closes[-1].reply_code if closes else None
