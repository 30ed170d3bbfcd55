"""The bytes that are to be sent."""

from __future__ import annotations

from pamqp import base, commands

from qflow.amqp.errors import AmqpError
from qflow.amqp.wire.frames import METHOD, Piece, frame
from qflow.amqp.wire.methods import encode_method


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
