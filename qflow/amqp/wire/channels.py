"""The channels of a connection that is open."""

from __future__ import annotations

from pamqp import base, commands

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.wire import frames
from qflow.amqp.wire.channel import Channel
from qflow.amqp.wire.events import ChannelClosed, ChannelFailed, ChannelOpened, ChannelReleased, Event, Method
from qflow.amqp.wire.limits import Limits
from qflow.amqp.wire.methods import decode_method, unchecked
from qflow.amqp.wire.output import Output
from qflow.amqp.wire.states import ChannelState, ChannelStep

_OPEN = commands.Channel.Open.index.to_bytes(4)
_CLOSE = commands.Channel.Close.index.to_bytes(4)
_CLOSE_OK = commands.Channel.CloseOk.index.to_bytes(4)


class Channels:
    """Channels by their numbers, `channel_max` at most, and how many bytes of unfinished bodies they hold."""

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
        channel.step(ChannelStep.METHOD)
        return self._method(channel, decode_method(payload, self._limits))

    def fail(self, number: int, error: AmqpError) -> None:
        """Send `channel.close`, unless it is sent already or the channel is closed."""
        channel = self.by_number.get(number)
        if channel is None or channel.state is ChannelState.CLOSING:
            return
        channel.step(ChannelStep.SEND_CLOSE)
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
            self._drop(channel)
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
        self._drop(channel)
        return ChannelReleased(channel.number)

    def _drop(self, channel: Channel) -> None:
        channel.step(ChannelStep.CLOSED)
        del self.by_number[channel.number]

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
