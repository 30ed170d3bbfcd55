"""The newest messages of the stream, shared by all who are a little behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from qflow.mqtt.model.messages import Message

MOST_MESSAGES = 4096
MOST_BYTES = 8 * 1024**2


class Recent:
    """See the module; without holes between the first and the last. In the loop alone."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._size = 0

    def add(self, message: Message) -> None:
        """Add the next message of the stream; the oldest go."""
        messages = self._messages
        if messages and messages[-1].offset + 1 != message.offset:
            messages.clear()
            self._size = 0
        messages.append(message)
        self._size += message.size
        while len(messages) > MOST_MESSAGES or self._size > MOST_BYTES:
            self._size -= messages.popleft().size

    def has(self, offset: int) -> bool:
        """Tell whether all messages from an offset on are here."""
        return bool(self._messages) and offset >= self._messages[0].offset

    def since(self, offset: int) -> Iterator[Message]:
        """Yield the messages from an offset on, which `has` said are here."""
        for message in islice(self._messages, offset - self._messages[0].offset, None):
            try:
                yield message
            finally:
                message.forget_encodings()
