"""A client on a bare socket: it sends what a library would not, and reads only when it is told to."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pamqp import body, commands, frame

from amqp_client import PROTOCOL_HEADER, Basic, Channels, Connections, message, method
from amqp_clients import PATIENCE_S

ALL = (
    "authentication_failure_close",
    "basic.nack",
    "connection.blocked",
    "consumer_cancel_notify",
    "publisher_confirms",
)
Queue = commands.Queue


class Raw:
    """One connection; `with` closes its socket. What comes waits for `PATIENCE_S` at most."""

    def __init__(self, port: int, *, receive_bytes: int | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            self.socket.connect(("127.0.0.1", port))
            if tls is not None:
                self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        except OSError:
            self.socket.close()
            raise
        self._data = b""
        self._published = 0

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        """Write bytes."""
        self.socket.sendall(b"".join(parts))

    def next(self) -> tuple[int, Any]:
        """Return the channel and the value of the next frame that is no heartbeat.

        Raises:
            EOFError: the server has closed.
        """
        while True:
            found = None
            if len(self._data) >= 8 and len(self._data) >= 8 + int.from_bytes(self._data[3:7]):
                used, channel, found = frame.unmarshal(self._data)
                self._data = self._data[used:]
            if found is not None and type(found).__name__ != "Heartbeat":
                return channel, found
            if found is None and not self._more():
                raise EOFError(self._data)

    def peek(self) -> Any:
        """Return the value of the next frame, which `next` returns once more."""
        channel, value = self.next()
        self._data = frame.marshal(value, channel) + self._data
        return value

    def until(self, *kinds: Any) -> Any:
        """Return the next frame of these kinds; others are dropped."""
        while True:
            _, value = self.next()
            if isinstance(value, kinds):
                return value

    def rest(self) -> bytes:
        """Return all that comes until the server closes."""
        with suppress(ConnectionError):
            while self._more():
                pass
        data, self._data = self._data, b""
        return data

    def _more(self) -> bool:
        came = self.socket.recv(1 << 16)
        self._data += came
        return bool(came)

    # What clients do.

    def log_in(
        self,
        response: str = "\0guest\0guest",
        *,
        heartbeat_s: int = 0,
        told: Sequence[str] = ALL,
        mechanism: str = "PLAIN",
    ) -> Any:
        """Log in, and return the answer: `tune`, or `close`."""
        properties = {"capabilities": dict.fromkeys(told, True)}
        self.send(PROTOCOL_HEADER)
        self.until(Connections.Start)
        self.send(method(0, Connections.StartOk(properties, mechanism, response)))
        answer = self.until(Connections.Tune, Connections.Close)
        if isinstance(answer, Connections.Tune):
            self.send(method(0, Connections.TuneOk(2047, 131_072, heartbeat_s)))
        return answer

    def open(self, *, heartbeat_s: int = 0, channels: Sequence[int] = (1,), **settings: Any) -> Raw:
        """Log in, and open the virtual host and channels."""
        self.log_in(heartbeat_s=heartbeat_s, **settings)
        self.send(method(0, Connections.Open("/")))
        self.until(Connections.OpenOk)
        for number in channels:
            self.send(method(number, Channels.Open()))
            self.until(Channels.OpenOk)
        return self

    def ask(self, value: Any, *answers: Any, channel: int = 1) -> Any:
        """Send a method, and return its answer."""
        self.send(method(channel, value))
        return self.until(*answers)

    def declare(self, name: str, **arguments: Any) -> Any:
        """Declare a durable queue; `x_max_length=5` is the argument `x-max-length`."""
        named = {word.replace("_", "-"): value for word, value in arguments.items()}
        return self.ask(Queue.Declare(0, name, durable=True, arguments=named), Queue.DeclareOk)

    def ready(self, name: str) -> int:
        """Return how many messages are ready in a queue."""
        return int(self.ask(Queue.Declare(0, name, passive=True), Queue.DeclareOk).message_count)

    def consume(self, name: str, *, prefetch: int = 0, no_ack: bool = False) -> None:
        """Begin to consume."""
        self.ask(Basic.Qos(0, prefetch, False), Basic.QosOk)
        self.ask(Basic.Consume(0, name, "", False, no_ack), Basic.ConsumeOk)

    def publish(self, queue: str, *bodies: bytes, properties: Any = None) -> None:
        """Publish to a queue, persistent if nothing else is said."""
        wanted = properties or Basic.Properties(delivery_mode=2)
        self.send(*(publish(queue, one, wanted) for one in bodies))

    def confirmed(self, queue: str, *bodies: bytes, properties: Any = None) -> None:
        """Publish to a queue, and return when all are confirmed; nothing else is published on this channel."""
        self.ask(commands.Confirm.Select(), commands.Confirm.SelectOk)
        self.publish(queue, *bodies, properties=properties)
        self._published += len(bodies)
        while True:
            answer = self.until(Basic.Ack, Basic.Nack)
            assert isinstance(answer, Basic.Ack)
            if answer.delivery_tag == self._published:
                return

    def delivered(self) -> tuple[Any, bytes]:
        """Return the method and the body of the next message."""
        deliver = self.until(Basic.Deliver, Basic.GetOk)
        header = self.next()[1]
        parts = b""
        while len(parts) < header.body_size:
            part = self.next()[1]
            assert isinstance(part, body.ContentBody)
            parts += part.value
        return deliver, parts


def publish(queue: str, content: bytes, properties: Any = None, *, channel: int = 1) -> bytes:
    """Return the frames of a message for a queue."""
    return message(channel, content, key=queue, properties=properties).replace(
        method(channel, Basic.Publish(0, "x", queue)), method(channel, Basic.Publish(0, "", queue)), 1
    )
