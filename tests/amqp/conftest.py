"""A broker for the tests with real clients: `qflow serve` in a process of its own, or what QFLOW_AMQP_URL names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from amqp_clients import OTHER, Server, other_broker, serving, unique


@pytest.fixture(scope="session")
def amqp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One broker for all tests of a process; each names its queues with `unique`."""
    if other := other_broker():
        yield other
        return
    with serving(tmp_path_factory.mktemp("amqp") / "spool") as (server, _):
        yield server


@pytest.fixture
def only_qflow(amqp_server: Server) -> None:
    """For what RabbitMQ 3.10 lacks or does otherwise than RabbitMQ 4: skipped on any other broker."""
    if not amqp_server.is_qflow:
        pytest.skip(f"{OTHER} names a broker that is not qflow")


@pytest.fixture
def connect(amqp_server: Server) -> Iterator[Callable[..., pika.BlockingConnection]]:
    """Open connections with some settings; those that are open at the end are closed."""
    opened: list[pika.BlockingConnection] = []

    def open_one(**settings: object) -> pika.BlockingConnection:
        opened.append(pika.BlockingConnection(amqp_server.parameters(**settings)))
        return opened[-1]

    yield open_one
    for connection in opened:
        if connection.is_open:
            connection.close()


@pytest.fixture
def connection(connect: Callable[..., pika.BlockingConnection]) -> pika.BlockingConnection:
    """A connection of pika's."""
    return connect()


@pytest.fixture
def channel(connection: pika.BlockingConnection) -> BlockingChannel:
    """A channel of it."""
    return connection.channel()


@pytest.fixture
def queue(channel: BlockingChannel) -> str:
    """An exclusive queue without arguments; it goes with the connection."""
    name = unique("queue")
    channel.queue_declare(name, exclusive=True)
    return name


@pytest.fixture
def declare(channel: BlockingChannel) -> Callable[..., str]:
    """Declare an exclusive queue with arguments: `declare(x_max_length=5)`; returns its name."""
    return partial(_declare, channel)


def _declare(channel: BlockingChannel, **arguments: object) -> str:
    name = unique("queue")
    named = {word.replace("_", "-"): value for word, value in arguments.items()}
    channel.queue_declare(name, exclusive=True, arguments=named)
    return name
