"""What an AMQP client is answered when something is wrong: a reply code, and whether channel or connection ends by it.

The codes and which of them are hard are those of AMQP 0-9-1, as RabbitMQ 4 uses them.
"""

from __future__ import annotations

from enum import IntEnum

from pamqp import base

from qflow.errors import (
    BrokerClosed,
    DiskFull,
    InvalidArgument,
    NotFound,
    QflowError,
    QueueDeleted,
    StreamDeleted,
)

MAX_REPLY_TEXT_BYTES = 255


class ReplyCode(IntEnum):
    """Reply codes by name."""

    REPLY_SUCCESS = 200
    CONTENT_TOO_LARGE = 311
    NO_ROUTE = 312
    NO_CONSUMERS = 313
    CONNECTION_FORCED = 320
    INVALID_PATH = 402
    ACCESS_REFUSED = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    COMMAND_INVALID = 503
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    RESOURCE_ERROR = 506
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541


SOFT = frozenset(
    {
        ReplyCode.CONTENT_TOO_LARGE,
        ReplyCode.NO_ROUTE,
        ReplyCode.NO_CONSUMERS,
        ReplyCode.ACCESS_REFUSED,
        ReplyCode.NOT_FOUND,
        ReplyCode.RESOURCE_LOCKED,
        ReplyCode.PRECONDITION_FAILED,
    }
)
"""Codes that end a channel; every other one ends the connection."""


class AmqpError(QflowError):
    """A request that is refused.

    `hard` tells whether the connection ends by it, or its channel only. `class_id` and `method_id` name the method that
    was refused; both are 0 where no method was.
    """

    def __init__(
        self, code: int, text: str, *, class_id: int = 0, method_id: int = 0, hard: bool | None = None
    ) -> None:
        super().__init__(text)
        self.code = ReplyCode(code)
        self.text = text
        self.class_id = class_id
        self.method_id = method_id
        self.hard = self.code not in SOFT if hard is None else hard

    def __str__(self) -> str:
        return f"{self.code.value} {self.reply_text}"

    @property
    def reply_text(self) -> str:
        """The text as RabbitMQ writes it, `NOT_FOUND - no queue ...`, cut to the 255 bytes of a short string."""
        return short_text(f"{self.code.name} - {self.text}")

    def about(self, method: base.Frame) -> AmqpError:
        """Name the method that is refused, unless one is named already; return the error."""
        if not self.class_id:
            self.class_id, self.method_id = method.index >> 16, method.index & 0xFFFF
        return self


_CODES: tuple[tuple[type[QflowError], ReplyCode], ...] = (
    (BrokerClosed, ReplyCode.CONNECTION_FORCED),
    (NotFound, ReplyCode.NOT_FOUND),
    (QueueDeleted, ReplyCode.NOT_FOUND),
    (StreamDeleted, ReplyCode.NOT_FOUND),
    (InvalidArgument, ReplyCode.PRECONDITION_FAILED),
    (DiskFull, ReplyCode.RESOURCE_ERROR),
)


def as_amqp_error(error: QflowError) -> AmqpError:
    """Return what a client is told of an error of the broker."""
    if isinstance(error, AmqpError):
        return error
    code = next((code for kind, code in _CODES if isinstance(error, kind)), ReplyCode.INTERNAL_ERROR)
    return AmqpError(code, str(error))


def short_text(text: str) -> str:
    """Cut a text to the 255 bytes of UTF-8 that a short string holds."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_REPLY_TEXT_BYTES:
        return encoded.decode()
    return encoded[:MAX_REPLY_TEXT_BYTES].decode("utf-8", "ignore")
