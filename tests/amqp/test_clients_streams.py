"""Streams as AMQP clients read them: from an offset, as often as they like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker

from amqp_clients import PATIENCE_S, Message, count, unique, wait_until

Connect = Callable[..., pika.BlockingConnection]
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@pytest.fixture
def stream(connect: Connect) -> Iterator[str]:
    """A stream with messages 0 to 9."""
    connection = connect()
    name = unique("stream")
    with connection.channel() as channel:
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
        channel.confirm_delivery()
        for number in range(10):
            channel.basic_publish("", name, str(number).encode(), PERSISTENT)
    yield name
    with connection.channel() as channel:
        channel.queue_delete(name)


def read(
    connection: pika.BlockingConnection, stream: str, number: int, offset: object = None, **others: object
) -> list[Message]:
    """Read so many messages from an offset."""
    channel = connection.channel()
    channel.basic_qos(prefetch_count=100)
    arguments = others | ({} if offset is None else {"x-stream-offset": offset})
    found: list[Message] = []
    for method, properties, body in channel.consume(stream, arguments=arguments, inactivity_timeout=PATIENCE_S):
        assert method is not None, f"{len(found)} of {number} messages came"
        found.append(Message(method, properties, body))
        channel.basic_ack(method.delivery_tag)
        if len(found) == number:
            break
    channel._cancel_all_consumers()
    channel.close()
    return found


@pytest.mark.parametrize(
    ("offset", "first"), [("first", 0), (0, 0), (4, 4), (9, 9), ("1h", 0), ("7D", 0)], ids=lambda value: str(value)
)
def test_a_stream_is_read_from_an_offset(
    connection: pika.BlockingConnection, stream: str, offset: object, first: int
) -> None:
    """A number, `first`, or how long ago; each message tells its own in `x-stream-offset`."""
    found = read(connection, stream, 10 - first, offset)
    assert [message.body for message in found] == [str(number).encode() for number in range(first, 10)]
    assert [message.properties.headers["x-stream-offset"] for message in found] == [*range(first, 10)]


def test_a_stream_is_read_again_and_again(connection: pika.BlockingConnection, stream: str) -> None:
    """An ack takes nothing away."""
    for _ in range(3):
        assert len(read(connection, stream, 10, "first")) == 10


def test_a_stream_is_read_from_a_time(connection: pika.BlockingConnection, stream: str) -> None:
    """An hour ago is all of it."""
    offset = datetime.now(UTC) - timedelta(hours=1)
    assert read(connection, stream, 10, offset)[0].body == b"0"


def test_the_last_offset_begins_with_the_last_chunk(connection: pika.BlockingConnection, stream: str) -> None:
    """It has the newest message at its end, and is no more than all there is."""
    channel = connection.channel()
    channel.basic_qos(prefetch_count=100)
    found: list[bytes] = []
    for _, _, body in channel.consume(stream, arguments={"x-stream-offset": "last"}, inactivity_timeout=PATIENCE_S):
        found.append(body)
        if body in (b"9", None):
            break
    channel._cancel_all_consumers()
    assert found
    assert found == [str(number).encode() for number in range(10 - len(found), 10)]


@pytest.mark.parametrize("offset", [None, "next"])
def test_the_next_offset_is_what_is_published_from_now_on(
    connection: pika.BlockingConnection, stream: str, offset: object
) -> None:
    """As it is for who names none."""
    channel = connection.channel()
    channel.basic_qos(prefetch_count=100)
    found: list[bytes] = []
    arguments = {} if offset is None else {"x-stream-offset": offset}
    channel.basic_consume(stream, lambda *told: found.append(told[3]), arguments=arguments)
    publisher = connection.channel()
    publisher.confirm_delivery()
    publisher.basic_publish("", stream, b"new", PERSISTENT)
    wait_until(connection, lambda: found)
    assert found == [b"new"]


def test_each_reader_has_all_messages(connect: Connect, stream: str) -> None:
    """They share nothing."""
    one, two = connect(), connect()
    assert [message.body for message in read(one, stream, 10, "first")] == [
        message.body for message in read(two, stream, 10, "first")
    ]


def test_a_prefetch_is_needed(channel: BlockingChannel, stream: str) -> None:
    """406 without one."""
    with pytest.raises(ChannelClosedByBroker) as raised:
        channel.basic_consume(stream, lambda *_: None)
    assert raised.value.reply_code == 406


def test_a_reader_has_no_more_than_its_prefetch(channel: BlockingChannel, stream: str) -> None:
    """An ack lets more come."""
    consuming = channel.connection.channel()
    consuming.basic_qos(prefetch_count=3)
    tags: list[int] = []
    consuming.basic_consume(
        stream, lambda *told: tags.append(told[1].delivery_tag), arguments={"x-stream-offset": "first"}
    )
    wait_until(channel.connection, lambda: len(tags) >= 3)
    count(channel, stream)
    channel.connection.process_data_events(time_limit=0)
    assert tags == [1, 2, 3]
    consuming.basic_ack(3, multiple=True)
    wait_until(channel.connection, lambda: len(tags) >= 6)


def test_acks_are_needed(channel: BlockingChannel, stream: str) -> None:
    """A consumer without them ends its connection with 540."""
    channel.basic_qos(prefetch_count=10)
    with pytest.raises(ConnectionClosedByBroker) as raised:
        channel.basic_consume(stream, lambda *_: None, auto_ack=True)
    assert raised.value.reply_code == 540


@pytest.mark.parametrize("method", ["basic_get", "queue_purge"])
def test_a_stream_is_not_taken_from(channel: BlockingChannel, stream: str, method: str) -> None:
    """Neither get nor purge is implemented: 540."""
    with pytest.raises(ConnectionClosedByBroker) as raised:
        getattr(channel, method)(stream)
    assert raised.value.reply_code == 540


@pytest.mark.parametrize("offset", ["5x", "soon", True], ids=str)
def test_an_offset_that_makes_no_sense_is_refused(
    channel: BlockingChannel, stream: str, offset: object, request: pytest.FixtureRequest
) -> None:
    """406; RabbitMQ 3.10 has that for a wrong unit only, and ends the connection with 541 otherwise."""
    if offset != "5x":
        request.getfixturevalue("only_qflow")
    channel.basic_qos(prefetch_count=10)
    with pytest.raises(ChannelClosedByBroker) as raised:
        channel.basic_consume(stream, lambda *_: None, arguments={"x-stream-offset": offset})
    assert raised.value.reply_code == 406


@pytest.mark.parametrize(
    "arguments",
    [{"x-max-age": "1 fortnight"}, {"x-max-age": 5}, {"x-message-ttl": 5}, {"x-max-priority": 5}],
    ids=str,
)
def test_arguments_that_do_not_fit_a_stream_are_refused(channel: BlockingChannel, arguments: dict[str, object]) -> None:
    """406; those of queues are not for streams."""
    arguments = {"x-queue-type": "stream"} | arguments
    with pytest.raises(ChannelClosedByBroker) as raised:
        channel.queue_declare(unique("stream"), durable=True, arguments=arguments)
    assert raised.value.reply_code == 406


@pytest.mark.parametrize("arguments", [{"x-max-age": "1h"}, {"x-max-length-bytes": 10_000_000}], ids=str)
def test_a_stream_may_forget(channel: BlockingChannel, arguments: dict[str, object]) -> None:
    """By age or by bytes."""
    name = unique("stream")
    arguments = {"x-queue-type": "stream"} | arguments
    channel.queue_declare(name, durable=True, arguments=arguments)
    channel.queue_declare(name, durable=True, arguments=arguments)
    channel.queue_delete(name)


def test_a_filter_chooses_messages(connection: pika.BlockingConnection, stream: str, only_qflow: None) -> None:
    """`x-stream-filter` takes those published with that `x-stream-filter-value`; of RabbitMQ 3.13 and later."""
    with connection.channel() as channel:
        channel.confirm_delivery()
        for number, value in enumerate(("red", "blue", "red", None, "green")):
            headers = {"x-stream-filter-value": value} if value else {}
            properties = pika.BasicProperties(delivery_mode=2, headers=headers)
            channel.basic_publish("", stream, f"{number}:{value}".encode(), properties)
    filtered = {"x-stream-filter": "red"}
    assert [message.body for message in read(connection, stream, 2, "first", **filtered)] == [b"0:red", b"2:red"]
    several = {"x-stream-filter": ["red", "green"], "x-stream-match-unfiltered": True}
    found = [message.body for message in read(connection, stream, 14, "first", **several)]
    assert found == [*(str(number).encode() for number in range(10)), b"0:red", b"2:red", b"3:None", b"4:green"]
