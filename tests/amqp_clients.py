"""What tests with real AMQP clients share: where the broker is, and a process of `qflow serve`.

`tests/amqp` can't hold it: a folder of that name is hidden by the client library `amqp`, which kombu uses.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

PATIENCE_S = 60.0
"""What a test waits for that must come; nothing is measured by it."""
OTHER = "QFLOW_AMQP_URL"
"""The environment variable that has the tests run against another broker: `amqp://guest:guest@127.0.0.1:5672`."""
ROOT = Path(__file__).parent.parent


class Server(NamedTuple):
    """A broker that listens."""

    host: str
    port: int
    user: str = "guest"
    password: str = "guest"
    is_qflow: bool = True

    @property
    def url(self) -> str:
        return f"amqp://{self.user}:{self.password}@{self.host}:{self.port}"

    def parameters(self, **settings: object) -> pika.ConnectionParameters:
        credentials = pika.PlainCredentials(self.user, self.password)
        settings = {"blocked_connection_timeout": PATIENCE_S, "connection_attempts": 1} | settings
        return pika.ConnectionParameters(self.host, self.port, credentials=credentials, **settings)


class Message(NamedTuple):
    """What a client was given."""

    method: pika.spec.Basic.Deliver
    properties: pika.BasicProperties
    body: bytes


def other_broker() -> Server | None:
    """Return the broker that the environment names, if it names one."""
    if not (url := os.environ.get(OTHER)):
        return None
    parts = urlsplit(url)
    return Server(
        parts.hostname or "127.0.0.1", parts.port or 5672, parts.username or "guest", parts.password or "guest", False
    )


@contextmanager
def serving(
    spool: Path, *options: str, port: int = 0, said: IO[str] | None = None
) -> Iterator[tuple[Server, subprocess.Popen[str]]]:
    """Run `qflow serve` on a spool until the block ends; give where it listens, and its process.

    The only place where the tests start a server. What it writes on stderr goes to `said`, or to the test's own.
    """
    command = [sys.executable, "-m", "qflow", "serve", str(spool), "--amqp", f"127.0.0.1:{port}", *options]
    with subprocess.Popen(command, cwd=spool.parent, stdout=subprocess.PIPE, stderr=said, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            assert line.startswith("amqp on "), f"{line!r} instead of where it listens; it ended with {process.poll()}"
            host, _, told = line.split()[2].rpartition(":")
            yield Server(host, int(told)), process
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


def unique(word: str = "test") -> str:
    """Return a name that no other test uses."""
    return f"{word}.{uuid4().hex}"


def messages(channel: BlockingChannel, queue: str, number: int, **settings: object) -> list[Message]:
    """Take and ack so many messages of a queue, waiting for them."""
    found: list[Message] = []
    for method, properties, body in channel.consume(queue, inactivity_timeout=PATIENCE_S, **settings):
        assert method is not None, f"{len(found)} of {number} messages came"
        found.append(Message(method, properties, body))
        if not settings.get("auto_ack"):
            channel.basic_ack(method.delivery_tag)
        if len(found) == number:
            break
    channel.cancel()
    return found


def bodies(channel: BlockingChannel, queue: str, number: int) -> list[bytes]:
    """Take and ack so many messages of a queue; return their bodies."""
    return [message.body for message in messages(channel, queue, number)]


def wait_until(connection: pika.BlockingConnection, holds: Callable[[], object]) -> None:
    """Handle what comes on a connection until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        connection.process_data_events(time_limit=0.05)


def count(channel: BlockingChannel, queue: str) -> int:
    """Return how many messages are ready in a queue."""
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def refused(call: Callable[[], object]) -> int:
    """Return the code with which the channel is closed."""
    with pytest.raises(ChannelClosedByBroker) as raised:
        call()
    return int(raised.value.reply_code)
