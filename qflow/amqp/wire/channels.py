"""The channels of a connection that is open."""

from __future__ import annotations

from pamqp import base, commands

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.wire import frames
from qflow.amqp.wire.events import (
    ChannelClosed,
    ChannelFailed,
    ChannelOpened,
    ChannelReleased,
    Event,
    Method,
    Published,
)
from qflow.amqp.wire.frames import METHOD, Piece, decode_header, decode_publish, frame
from qflow.amqp.wire.limits import Limits
from qflow.amqp.wire.methods import decode_method, encode_method, unchecked
from qflow.amqp.wire.states import ChannelState
from qflow.amqp.wire.tables import check_properties


class Output:
    """Pieces in the order they are sent; bodies are views of what the caller has, up to `take`."""

    __slots__ = ("_pieces", "pending_bytes")

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self.pending_bytes = 0

    def write(self, *pieces: Piece) -> None:
        """Add some."""
        self._pieces += pieces
        for piece in pieces:
            self.pending_bytes += len(piece)

    def method(self, channel: int, method: base.Frame) -> None:
        """Add the frame of a method."""
        self.write(frame(METHOD, channel, encode_method(method)))

    def close(self, error: AmqpError) -> None:
        """Add `connection.close`."""
        self.method(0, commands.Connection.Close(error.code, error.reply_text, error.class_id, error.method_id))

    def take(self) -> bytes:
        """Return all of it, once. Cost: one copy, none of a single piece."""
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces = []
        self.pending_bytes = 0
        only = pieces[0]
        return only if len(pieces) == 1 and isinstance(only, bytes) else b"".join(pieces)


_SMALL_BYTES = 4096
"""Parts of a body below this size are collected in a buffer: an object for each would cost more than its bytes."""
FLAGS_BYTES = 2
"""Of the properties of each message; their list follows."""
_EXPECTED = {
    ChannelState.IDLE: "a method",
    ChannelState.WANTS_HEADER: "a content header",
    ChannelState.WANTS_BODY: "a content body",
}


class Channel:
    """One channel of a connection.

    `held_bytes` is what there is of a message that is not whole: of its body, and its properties.
    """

    __slots__ = ("_limits", "_missing_bytes", "_parts", "_properties", "_publish", "held_bytes", "number", "state")

    def __init__(self, number: int, limits: Limits) -> None:
        self.number = number
        self.state = ChannelState.IDLE
        self.held_bytes = 0
        self._limits = limits
        self._publish = ("", "", False, False)
        self._properties = b""
        self._missing_bytes = 0
        self._parts: list[bytes | bytearray] = []

    def expect(self, state: ChannelState) -> None:
        """Refuse a frame that another state takes. Raises AmqpError: 505."""
        if self.state is not state:
            text = f"expected {_EXPECTED[self.state]} on channel {self.number}"
            raise AmqpError(ReplyCode.UNEXPECTED_FRAME, text)

    def publish(self, payload: bytes) -> None:
        """Take the method frame of a message."""
        self.expect(ChannelState.IDLE)
        self._publish = decode_publish(payload)
        self.state = ChannelState.WANTS_HEADER

    def header(self, payload: bytes) -> Published | None:
        """Take a content header; return the message if its body is empty.

        Raises: `AmqpError`, soft with 406 if the message is too large.
        """
        self.expect(ChannelState.WANTS_HEADER)
        size, properties = decode_header(payload)
        most = self._limits.max_body_bytes
        if size > most:
            raise AmqpError(
                ReplyCode.PRECONDITION_FAILED,
                f"message size {size} is larger than configured max size {most}",
                class_id=60,
                method_id=40,
            )
        if len(properties) > self._limits.max_properties_bytes:
            raise AmqpError(
                ReplyCode.PRECONDITION_FAILED,
                f"properties of {len(properties)} bytes are larger than {self._limits.max_properties_bytes}",
                class_id=60,
                method_id=40,
            )
        check_properties(properties, self._limits)
        self._properties = properties
        self._missing_bytes = size
        if size == 0:
            return self._whole()
        self.state = ChannelState.WANTS_BODY
        self.held_bytes = len(properties) - FLAGS_BYTES
        return None

    def body(self, payload: bytes) -> Published | None:
        """Take a body frame; return the message if it is whole."""
        self.expect(ChannelState.WANTS_BODY)
        size = len(payload)
        if size > self._missing_bytes:
            raise AmqpError(
                ReplyCode.FRAME_ERROR,
                f"a body frame of {size} bytes on channel {self.number}, where {self._missing_bytes} are missing",
            )
        self._missing_bytes -= size
        self.held_bytes += size
        if self._missing_bytes == 0:
            self._parts.append(payload)
            return self._whole()
        self._collect(payload)
        return None

    def _collect(self, part: bytes) -> None:
        parts = self._parts
        if len(part) >= _SMALL_BYTES:
            parts.append(part)
        elif parts and isinstance(parts[-1], bytearray) and len(parts[-1]) < 16 * _SMALL_BYTES:
            parts[-1] += part
        elif part:
            parts.append(bytearray(part))

    def _whole(self) -> Published:
        self.state = ChannelState.IDLE
        parts = self._parts
        only = parts[0] if len(parts) == 1 else None
        body = only if isinstance(only, bytes) else b"".join(parts)
        message = Published(self.number, *self._publish, self._properties, body)
        self.drop_content()
        return message

    def drop_content(self) -> None:
        """Forget the message that was coming in."""
        self._properties = b""
        self._parts = []
        self._missing_bytes = 0
        self.held_bytes = 0


_OPEN = commands.Channel.Open.index.to_bytes(4)
_CLOSE = commands.Channel.Close.index.to_bytes(4)
_CLOSE_OK = commands.Channel.CloseOk.index.to_bytes(4)


class Channels:
    """Channels by their numbers, `channel_max` at most, and how many bytes of unfinished messages they hold."""

    __slots__ = ("_limits", "_output", "assembling_bytes", "by_number", "channel_max")

    def __init__(self, limits: Limits, output: Output) -> None:
        self.by_number: dict[int, Channel] = {}
        self.channel_max = limits.channel_max
        self.assembling_bytes = 0
        self._limits = limits
        self._output = output

    def is_open(self, number: int) -> bool:
        """Whether something may be sent on it; 0 is the connection itself."""
        channel = self.by_number.get(number)
        return number == 0 if channel is None else channel.state is not ChannelState.CLOSING

    def frame(self, kind: int, number: int, payload: bytes) -> Event | None:
        """Take a frame that a client sent on a channel."""
        channel = self.by_number.get(number)
        if channel is None:
            return self._open(kind, number, payload)
        if channel.state is ChannelState.CLOSING:
            return self._while_closing(channel, kind, payload)
        if kind != frames.METHOD:
            return self._content(channel, kind, payload)
        if payload[:4] == frames.PUBLISH:
            channel.publish(payload)
            return None
        channel.expect(ChannelState.IDLE)
        return self._method(channel, decode_method(payload, self._limits))

    def fail(self, number: int, error: AmqpError) -> None:
        """Send `channel.close`, unless it is sent already or the channel is closed."""
        channel = self.by_number.get(number)
        if channel is None or channel.state is ChannelState.CLOSING:
            return
        channel.state = ChannelState.CLOSING
        self.assembling_bytes -= channel.held_bytes
        channel.drop_content()
        close = commands.Channel.Close(error.code, error.reply_text, error.class_id, error.method_id)
        self._output.method(number, close)

    def clear(self) -> None:
        """Forget all of them."""
        self.by_number.clear()
        self.assembling_bytes = 0

    def _open(self, kind: int, number: int, payload: bytes) -> Event | None:
        if kind != frames.METHOD or payload[:4] != _OPEN:
            if payload[:4] == _CLOSE_OK and kind == frames.METHOD:
                return None
            raise AmqpError(ReplyCode.CHANNEL_ERROR, f"channel {number} was used before it was opened")
        method = decode_method(payload, self._limits)
        if len(self.by_number) >= self.channel_max:
            text = f"{len(self.by_number)} channels are open, the most that was negotiated (channel_max)"
            raise AmqpError(ReplyCode.NOT_ALLOWED, text).about(method)
        self.by_number[number] = Channel(number, self._limits)
        self._output.method(number, unchecked(commands.Channel.OpenOk, ""))
        return ChannelOpened(number)

    def _method(self, channel: Channel, method: base.Frame) -> Event | None:
        number = channel.number
        if isinstance(method, commands.Channel.Close):
            del self.by_number[number]
            self._output.method(number, commands.Channel.CloseOk())
            return ChannelClosed(number, method.reply_code or 0, method.reply_text)
        if isinstance(method, commands.Channel.Open):
            raise AmqpError(ReplyCode.CHANNEL_ERROR, f"channel {number} is open already").about(method)
        if isinstance(method, commands.Channel.CloseOk) or method.index >> 16 == commands.Connection.frame_id:
            raise AmqpError(ReplyCode.COMMAND_INVALID, f"{method.name} on channel {number}").about(method)
        return Method(number, method)

    def _while_closing(self, channel: Channel, kind: int, payload: bytes) -> Event | None:
        index = payload[:4] if kind == frames.METHOD else b""
        if index == _CLOSE:
            self._output.method(channel.number, commands.Channel.CloseOk())
        if index != _CLOSE_OK:
            return None
        del self.by_number[channel.number]
        return ChannelReleased(channel.number)

    def _content(self, channel: Channel, kind: int, payload: bytes) -> Event | None:
        before = channel.held_bytes
        try:
            message = channel.header(payload) if kind == frames.HEADER else channel.body(payload)
        except AmqpError as error:
            if error.hard:
                raise
            self.fail(channel.number, error)
            return ChannelFailed(channel.number, error.code, error.reply_text)
        self.assembling_bytes += channel.held_bytes - before
        most = self._limits.max_assembling_bytes
        if self.assembling_bytes > most:
            raise AmqpError(ReplyCode.RESOURCE_ERROR, f"messages that are not whole have more than {most} bytes")
        return message
