"""A channel: its state, and the message that comes in on it frame by frame."""

from __future__ import annotations

from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.wire.events import Published
from qflow.amqp.wire.frames import decode_header, decode_publish
from qflow.amqp.wire.limits import Limits
from qflow.amqp.wire.states import CHANNEL, ChannelState, ChannelStep
from qflow.amqp.wire.tables import check_properties

_SMALL_BYTES = 4096
"""Parts of a body below this size are collected in a buffer: an object for each would cost more than its bytes."""
_EXPECTED = {
    ChannelState.IDLE: "a method",
    ChannelState.WANTS_HEADER: "a content header",
    ChannelState.WANTS_BODY: "a content body",
    ChannelState.CLOSING: "close-ok",
    ChannelState.CLOSED: "nothing",
}


class Channel:
    """One channel of a connection.

    `held_bytes` is what there is of a body that is not whole.
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

    def step(self, step: ChannelStep) -> None:
        """Change the state as the table says; raise 505 if the frame is not expected."""
        state = CHANNEL[self.state].get(step)
        if state is None:
            text = f"expected {_EXPECTED[self.state]} on channel {self.number}"
            raise AmqpError(ReplyCode.UNEXPECTED_FRAME, text)
        self.state = state

    def publish(self, payload: bytes) -> None:
        """Take the method frame of a message."""
        self.step(ChannelStep.PUBLISH)
        self._publish = decode_publish(payload)

    def header(self, payload: bytes) -> Published | None:
        """Take a content header; return the message if its body is empty.

        Raises: `AmqpError`, soft with 406 if the message is too large.
        """
        if self.state is not ChannelState.WANTS_HEADER:
            self.step(ChannelStep.HEADER)
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
        self.step(ChannelStep.HEADER)
        return None

    def body(self, payload: bytes) -> Published | None:
        """Take a body frame; return the message if it is whole."""
        if self.state is not ChannelState.WANTS_BODY:
            self.step(ChannelStep.FRAGMENT)
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
        self.step(ChannelStep.FRAGMENT)
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
        self.step(ChannelStep.WHOLE)
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
