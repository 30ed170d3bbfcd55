"""What is published when a client is gone: kept in the log from its CONNECT on, so that a kill does not lose it."""

from __future__ import annotations

import json

from qflow.mqtt.model.messages import Message, published, unpack
from qflow.mqtt.wire.packets import Will as Given

_LENGTH_BYTES = 4


class Will:
    """A will, and when it is due."""

    __slots__ = ("_expiry_s", "_message", "delay_s", "due_ms")

    def __init__(self, message: Message, delay_s: int, expiry_s: int | None, due_ms: int = 0) -> None:
        self._message = message
        self._expiry_s = expiry_s
        self.delay_s = delay_s
        """Seconds after its client has gone."""
        self.due_ms = due_ms
        """Milliseconds since the epoch; 0: its client is there."""

    @classmethod
    def of(cls, given: Given, session_expiry_s: int) -> Will:
        """Return the will of a CONNECT: it is due when the session ends, at the latest."""
        properties = given.properties
        message = published(given, "", 0)
        message.expires_ms = 0
        delay_s = min(properties.get("will_delay_s", 0), session_expiry_s)
        return cls(message, delay_s, properties.get("message_expiry_s"))

    @property
    def topic(self) -> str:
        """Where it is published."""
        return self._message.topic

    def message(self, now_ms: int) -> Message:
        """Return what is published now."""
        message = self._message
        if self._expiry_s is not None:
            message.expires_ms = max(1, now_ms + self._expiry_s * 1000)
        return message

    def pack(self) -> bytes:
        """Return it as the log has it."""
        fields = {"topic": self.topic, "delay_s": self.delay_s, "expiry_s": self._expiry_s, "due_ms": self.due_ms}
        head = json.dumps(fields, ensure_ascii=False).encode()
        return len(head).to_bytes(_LENGTH_BYTES, "big") + head + self._message.pack()

    @classmethod
    def unpack(cls, data: bytes) -> Will:
        """Return what `pack` gave."""
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
        fields = json.loads(data[_LENGTH_BYTES:start])
        return cls(unpack(fields["topic"], data[start:]), fields["delay_s"], fields["expiry_s"], fields["due_ms"])
