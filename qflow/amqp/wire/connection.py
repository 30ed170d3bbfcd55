"""The server's side of a connection, without I/O.

    connection = Connection()
    for event in connection.receive(data):
        ...                       # and here `connection.deliver(...)`, `connection.send(...)`
    write(connection.data_to_send())

Contract. `receive` takes bytes as they come, cut anywhere; its iterator decodes one event with each step, so that the
caller may wait between two. What the protocol itself answers — `close-ok`, `channel.open-ok`, an error — is written by
the machine. What a client does wrong is `Failed` or `ChannelFailed`, never an exception. Answers for a channel that is
closed meanwhile are dropped; answers in a wrong state of the connection raise `WrongState`, but not once it ends.

States are in `states.py`. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pamqp import base, commands
from pamqp.common import FieldTable

from qflow.amqp.errors import AmqpError, ReplyCode, short_text
from qflow.amqp.wire import frames
from qflow.amqp.wire.channels import Channels, Output
from qflow.amqp.wire.events import (
    ConnectionClosed,
    ConnectionReleased,
    Event,
    Failed,
    Login,
    Method,
    Published,
    VhostAsked,
)
from qflow.amqp.wire.frames import AROUND_PAYLOAD_BYTES, FRAME, FRAME_BYTES, Content
from qflow.amqp.wire.limits import DEFAULT_LIMITS, Limits
from qflow.amqp.wire.methods import decode_method, encode_method, unchecked
from qflow.amqp.wire.states import NEXT, TRUSTED, ChannelState, State, WrongState
from qflow.amqp.wire.tables import check_properties
from qflow.serving.input import Input

CAPABILITIES = (
    "publisher_confirms",
    "exchange_exchange_bindings",
    "basic.nack",
    "consumer_cancel_notify",
    "connection.blocked",
    "consumer_priorities",
    "authentication_failure_close",
    "per_consumer_qos",
)
SERVER_PROPERTIES: FieldTable = {
    "product": "qflow",
    "platform": "Python",
    "capabilities": dict.fromkeys(CAPABILITIES, True),
}
_REMEMBERED_BYTES = 1024
"""Properties up to here are compared with those of the message before, which most often were the same."""
_CLOSE = commands.Connection.Close.index.to_bytes(4)
_CLOSE_OK = commands.Connection.CloseOk.index.to_bytes(4)


class Connection:
    """One client's connection; see the top of this file.

    `frame_max` (bytes), `channel_max` and `heartbeat_s` (0: none) are what was agreed, `client_properties` what the
    client told of itself. Memory: the frame and the bodies that are not whole, and what is to be sent.
    """

    __slots__ = (
        "_channels",
        "_checked",
        "_input",
        "_largest",
        "_limits",
        "_mechanisms",
        "_output",
        "_server_properties",
        "channel_max",
        "client_properties",
        "frame_max",
        "heartbeat_s",
        "state",
    )

    def __init__(
        self,
        *,
        limits: Limits = DEFAULT_LIMITS,
        mechanisms: Sequence[str] = ("PLAIN", "AMQPLAIN", "EXTERNAL"),
        server_properties: FieldTable = SERVER_PROPERTIES,
    ) -> None:
        self.state = State.WAITING
        self.frame_max = limits.frame_min
        self.channel_max = limits.channel_max
        self.heartbeat_s = 0
        self.client_properties: FieldTable = {}
        self._limits = limits
        self._mechanisms = mechanisms
        self._server_properties = server_properties
        self._checked = b"\0\0"
        self._largest = limits.frame_min - AROUND_PAYLOAD_BYTES
        self._input = Input()
        self._output = Output()
        self._channels = Channels(limits, self._output)

    @property
    def capabilities(self) -> dict[str, Any]:
        """What the client says that it can."""
        told = self.client_properties.get("capabilities")
        return told if isinstance(told, dict) else {}

    @property
    def assembling_bytes(self) -> int:
        """Bytes of the messages that are not whole, in all channels: of their bodies and properties."""
        return self._channels.assembling_bytes

    # What comes.

    def receive(self, data: bytes) -> Iterator[Event]:
        """Take what came, and return an iterator that decodes an event with each step.

        Events that were not asked for are kept for the next call. Cost: one copy of each body.
        """
        if self.state is not State.OVER:
            self._input.take(data)
        return iter(self._next, None)

    def _next(self) -> Event | None:
        try:
            if self.state is State.WAITING and not self._protocol_header():
                return None
            return self._frames()
        except AmqpError as error:
            self.fail(error)
            return Failed(error.code, error.reply_text)

    def _protocol_header(self) -> bool:
        """Whether it is there, and right; a wrong one is answered with the right one, and is the end."""
        came = self._input.buffer[self._input.at : self._input.at + 8]
        if not (frames.PROTOCOL_HEADER.startswith(came) or frames.HEADER_OF_0_9.startswith(came)):
            self._output.write(frames.PROTOCOL_HEADER)
            self._end()
            raise AmqpError(ReplyCode.FRAME_ERROR, f"no AMQP 0-9-1: the connection began with {came!r}")
        if len(came) < 8:
            self._input.keep(8)
            return False
        self._input.at += 8
        self._go(State.STARTING)
        start = commands.Connection.Start(
            server_properties=self._server_properties, mechanisms=" ".join(self._mechanisms)
        )
        self._output.method(0, start)
        return True

    def _frames(self) -> Event | None:
        """Decode frames up to one that is an event; None if none is left."""
        taken = self._input
        buffer = taken.buffer
        length = len(buffer)
        needed = FRAME_BYTES
        while self.state is not State.OVER:
            at = taken.at
            if length - at < FRAME_BYTES:
                needed = FRAME_BYTES
                break
            kind, number, size = FRAME.unpack_from(buffer, at)
            if size > self._largest or kind not in frames.KINDS:
                return self._lose_framing(
                    f"a frame of type {kind} and {size} bytes, at most {self._largest} are agreed"
                )
            start = at + FRAME_BYTES
            end = start + size
            if end >= length:
                needed = size + AROUND_PAYLOAD_BYTES
                break
            if buffer[end] != frames.END:
                return self._lose_framing(f"a frame of type {kind} and {size} bytes without its end")
            taken.at = end + 1
            event = None
            if kind == frames.METHOD and self.state is State.OPEN:
                event = self._hot(buffer, start, end, number)
            if event is None:
                event = self._frame(kind, number, buffer[start:end])
            if event is not None:
                return event
        self._input.keep(needed)
        return None

    def _hot(self, buffer: bytes, start: int, end: int, number: int) -> Event | None:
        """Decode what comes with every message, if it is whole and regular."""
        channel = self._channels.by_number.get(number)
        if channel is None or channel.state is not ChannelState.IDLE:
            return None
        index = buffer[start : start + 4]
        if index == frames.PUBLISH:
            found = frames.whole_content(buffer, end + 1, number, self._largest, self._limits)
            if found is None:
                return None
            exchange, routing_key, mandatory, immediate = frames.decode_publish(buffer[start:end])
            properties, body, self._input.at = found
            if properties != self._checked:
                check_properties(properties, self._limits)
                self._checked = properties if len(properties) <= _REMEMBERED_BYTES else self._checked
            return Published(number, exchange, routing_key, mandatory, immediate, properties, body)
        if index == frames.ACK and end - start == frames.ACK_BYTES:
            return Method(number, commands.Basic.Ack(*frames.decode_ack(buffer, start)))
        return None

    def _lose_framing(self, text: str) -> Event:
        """End at once: where the next frame begins is unknown."""
        error = AmqpError(ReplyCode.FRAME_ERROR, text)
        was_closing = self.state is State.CLOSING
        self.fail(error)
        self._end()
        if was_closing:
            return ConnectionReleased()
        return Failed(error.code, error.reply_text)

    def _frame(self, kind: int, number: int, payload: bytes) -> Event | None:
        if self.state is State.CLOSING:
            return self._while_closing(kind, number, payload)
        if kind == frames.HEARTBEAT:
            if number or payload:
                raise AmqpError(ReplyCode.UNEXPECTED_FRAME, "a heartbeat with a channel or a payload")
            return None
        if number == 0:
            if kind != frames.METHOD:
                raise AmqpError(ReplyCode.UNEXPECTED_FRAME, "a content frame on channel 0")
            return self._connection_method(decode_method(payload, self._limits))
        if self.state is not State.OPEN:
            raise AmqpError(ReplyCode.CHANNEL_ERROR, "a channel was used before the connection was open")
        return self._channels.frame(kind, number, payload)

    def _while_closing(self, kind: int, number: int, payload: bytes) -> Event | None:
        if kind != frames.METHOD or number or payload[:4] not in (_CLOSE, _CLOSE_OK):
            return None
        if payload[:4] == _CLOSE:
            self._output.method(0, commands.Connection.CloseOk())
        self._end()
        return ConnectionReleased()

    # The connection.

    def _connection_method(self, method: base.Frame) -> Event | None:
        if isinstance(method, commands.Connection.StartOk):
            self._client_asks(State.LOGIN, method)
            if method.mechanism not in self._mechanisms:
                raise AmqpError(ReplyCode.COMMAND_INVALID, f"mechanism {method.mechanism!r}").about(method)
            self.client_properties = method.client_properties
            response: str | bytes = method.response or ""
            encoded = response if isinstance(response, bytes) else response.encode()
            return Login(method.mechanism, encoded, method.client_properties, method.locale)
        if isinstance(method, commands.Connection.TuneOk):
            self._client_asks(State.TUNED, method)
            self._tuned(method)
            return None
        if isinstance(method, commands.Connection.Open):
            self._client_asks(State.OPENING, method)
            return VhostAsked(method.virtual_host)
        if isinstance(method, commands.Connection.Close):
            self._output.method(0, commands.Connection.CloseOk())
            self._end()
            return ConnectionClosed(method.reply_code or 0, method.reply_text)
        if isinstance(method, commands.Connection.UpdateSecret) and self.state is State.OPEN:
            return Method(0, method)
        code = (
            ReplyCode.COMMAND_INVALID if method.index >> 16 == commands.Connection.frame_id else ReplyCode.CHANNEL_ERROR
        )
        raise AmqpError(code, f"{method.name} on channel 0, {self.state.name}").about(method)

    def _tuned(self, method: commands.Connection.TuneOk) -> None:
        limits = self._limits
        self.frame_max = method.frame_max or limits.frame_max
        self.channel_max = method.channel_max or limits.channel_max
        self.heartbeat_s = method.heartbeat
        for name, value, least, most in (
            ("frame_max", self.frame_max, limits.frame_min, limits.frame_max),
            ("channel_max", self.channel_max, 1, limits.channel_max),
        ):
            if not least <= value <= most:
                text = f"negotiated {name} = {value} is not within {least} and {most}"
                raise AmqpError(ReplyCode.NOT_ALLOWED, text).about(method)
        self._channels.channel_max = self.channel_max
        self._largest = self.frame_max - AROUND_PAYLOAD_BYTES

    def _client_asks(self, state: State, method: base.Frame) -> None:
        """Go on to a state, as a client wants it."""
        if state not in NEXT[self.state]:
            raise AmqpError(ReplyCode.COMMAND_INVALID, f"{method.name} while {self.state.name}").about(method)
        self._go(state)

    # Answers.

    def data_to_send(self) -> bytes:
        """Take what is to be sent; `b""` if nothing is. Cost: one copy."""
        return self._output.take()

    def pending_bytes(self) -> int:
        """Return how many bytes are to be sent."""
        return self._output.pending_bytes

    def accept_login(self) -> None:
        """Send `tune`."""
        limits = self._limits
        if self._answers(State.TUNING):
            tune = commands.Connection.Tune(limits.channel_max, limits.frame_max, limits.heartbeat_s)
            self._output.method(0, tune)

    def refuse_login(self, text: str) -> None:
        """Send `connection.close` with 403 if the client can take it; if not, all is over at once."""
        can_be_told = self.capabilities.get("authentication_failure_close") is True
        if self._answers(State.CLOSING if can_be_told else State.OVER) and can_be_told:
            self._output.close(AmqpError(ReplyCode.ACCESS_REFUSED, text, hard=True))

    def open_ok(self) -> None:
        """Say that the connection is open."""
        if self._answers(State.OPEN):
            self._output.method(0, commands.Connection.OpenOk())

    def refuse_vhost(self, text: str) -> None:
        """Send `connection.close` with 530."""
        self.fail(AmqpError(ReplyCode.NOT_ALLOWED, text, class_id=10, method_id=40))

    def send(self, channel: int, method: base.Frame) -> bool:
        """Send a method; False if the channel is closed, or is being closed.

        Raises: `TypeError` or `ValueError` if a value has no place in its field, as a name of 256 bytes.
        """
        if not self._is_open(channel):
            return False
        self._output.method(channel, method)
        return True

    def deliver(self, channel: int, consumer_tag: str, delivery_tag: int, redelivered: bool, content: Content) -> bool:
        """Send `basic.deliver`; False if the channel is closed, or is being closed: the message is not sent.

        Raises: `ValueError` if a name has more than 255 bytes. Cost: one copy of a body up to 64 KiB, none of a larger.
        """
        if not self._is_open(channel):
            return False
        tag = consumer_tag, delivery_tag, redelivered
        self._output.write(*frames.deliver_frames(channel, tag, content, self._largest))
        return True

    def get_ok(self, channel: int, delivery_tag: int, redelivered: bool, message_count: int, content: Content) -> bool:
        """Send `basic.get-ok`; as `deliver`."""
        waiting = min(message_count, 0xFFFFFFFF)
        names = content.exchange, content.routing_key
        method = unchecked(commands.Basic.GetOk, delivery_tag, redelivered, *names, waiting)
        return self._send_content(channel, method, content)

    def return_(self, channel: int, code: int, text: str, content: Content) -> bool:
        """Send `basic.return`; as `deliver`."""
        method = unchecked(commands.Basic.Return, code, short_text(text), content.exchange, content.routing_key)
        return self._send_content(channel, method, content)

    def confirm(self, channel: int, delivery_tag: int, multiple: bool, positive: bool) -> bool:
        """Send `basic.ack`, or `basic.nack`, to a publisher; as `send`."""
        if not self._is_open(channel):
            return False
        self._output.write(frames.confirm_frame(channel, delivery_tag, multiple, positive))
        return True

    def fail_channel(self, channel: int, error: AmqpError) -> None:
        """Send `channel.close`; what comes on the channel is ignored up to `ChannelReleased`.

        A hard error ends the connection. Nothing is done if the channel is closed, or is being closed.
        """
        if error.hard:
            self.fail(error)
        elif self.state is State.OPEN:
            self._channels.fail(channel, error)

    def fail(self, error: AmqpError) -> None:
        """Send `connection.close`; what comes is ignored up to `ConnectionReleased`.

        A client that has not logged in is told nothing: all is over at once. Nothing is done if it is so already.
        """
        if self.state in (State.CLOSING, State.OVER):
            return
        if self.state not in TRUSTED:
            self._end()
            return
        self._go(State.CLOSING)
        self._channels.clear()
        self._output.close(error)

    def heartbeat(self) -> None:
        """Send one; nothing before the login."""
        if self.state in TRUSTED:
            self._output.write(frames.HEARTBEAT_FRAME)

    def blocked(self, reason: str) -> None:
        """Say that publishing waits, if the client can take it."""
        self._tell(commands.Connection.Blocked(short_text(reason)))

    def unblocked(self) -> None:
        """Say that publishing goes on, if the client can take it."""
        self._tell(commands.Connection.Unblocked())

    def _tell(self, method: base.Frame) -> None:
        if self.state is State.OPEN and self.capabilities.get("connection.blocked") is True:
            self._output.method(0, method)

    def _send_content(self, channel: int, method: base.Frame, content: Content) -> bool:
        if not self._is_open(channel):
            return False
        self._output.write(*frames.content_frames(channel, encode_method(method), content, self._largest))
        return True

    def _is_open(self, number: int) -> bool:
        return self.state is State.OPEN and self._channels.is_open(number)

    def _answers(self, state: State) -> bool:
        """Go on to a state by an answer; False if the connection ends, so that there is nothing to answer."""
        if self.state in (State.CLOSING, State.OVER):
            return False
        self._go(state)
        return True

    def _go(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise WrongState(f"{state.name} while {self.state.name}")
        self.state = state

    def _end(self) -> None:
        """Read nothing any more."""
        if self.state is not State.OVER:
            self._go(State.OVER)
        self._channels.clear()
        self._input.clear()
