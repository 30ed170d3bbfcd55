"""What is answered to each wrong use: the code, and whether the channel or the whole connection is closed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pika
import pytest
from pika import spec
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, ConnectionClosedByBroker

from amqp_clients import PATIENCE_S, Server, unique, wait_until

CHANNEL = ChannelClosedByBroker
CONNECTION = ConnectionClosedByBroker
NO = "no.such.thing"


class Case(NamedTuple):
    """A wrong use."""

    call: Callable[[BlockingChannel, str], object]
    code: int
    closed: type[Exception]


def publish(channel: BlockingChannel, *arguments: object, **settings: object) -> None:
    """Publish and wait for the confirm, or what comes instead."""
    channel.confirm_delivery()
    channel.basic_publish(*arguments, **settings)


def send(channel: BlockingChannel, method: pika.amqp_object.Method, number: int | None = None) -> None:
    """Send a method as it is, and wait for what comes."""
    connection = channel.connection._impl
    connection._send_method(channel.channel_number if number is None else number, method)
    channel.connection.process_data_events(time_limit=PATIENCE_S)
    if not channel.is_open:
        raise channel._closing_reason or AssertionError("closed without a reason")


def send_only(channel: BlockingChannel, method: pika.amqp_object.Method) -> None:
    """Send a method as it is."""
    channel._impl._send_method(method)


CASES = {
    "get from no queue": Case(lambda channel, _: channel.basic_get(NO), 404, CHANNEL),
    "consume from no queue": Case(lambda channel, _: channel.basic_consume(NO, lambda *_: None), 404, CHANNEL),
    "purge no queue": Case(lambda channel, _: channel.queue_purge(NO), 404, CHANNEL),
    "bind no queue": Case(lambda channel, _: channel.queue_bind(NO, "amq.direct", "k"), 404, CHANNEL),
    "bind to no exchange": Case(lambda channel, queue: channel.queue_bind(queue, NO, "k"), 404, CHANNEL),
    "ask for no queue": Case(lambda channel, _: channel.queue_declare(NO, passive=True), 404, CHANNEL),
    "ask for no exchange": Case(lambda channel, _: channel.exchange_declare(NO, passive=True), 404, CHANNEL),
    "publish to no exchange": Case(lambda channel, _: publish(channel, NO, "k", b""), 404, CHANNEL),
    "declare a reserved queue": Case(lambda channel, _: channel.queue_declare("amq.mine"), 403, CHANNEL),
    "declare a reserved exchange": Case(
        lambda channel, _: channel.exchange_declare("amq.mine", "direct"), 403, CHANNEL
    ),
    "delete a predeclared exchange": Case(lambda channel, _: channel.exchange_delete("amq.topic"), 403, CHANNEL),
    "bind to the default exchange": Case(lambda channel, queue: channel.queue_bind(queue, "", "k"), 403, CHANNEL),
    "bind what is not there to the default exchange": Case(
        lambda channel, _: channel.queue_bind("missing", "", "k"), 403, CHANNEL
    ),
    "another kind": Case(lambda channel, _: channel.exchange_declare("amq.topic", "direct"), 406, CHANNEL),
    "ack of no delivery": Case(lambda channel, _: send(channel, spec.Basic.Ack(1)), 406, CHANNEL),
    "ack of 0 when none is held": Case(
        lambda channel, queue: (send_only(channel, spec.Basic.Ack(0, multiple=False)), channel.basic_get(queue)),
        406,
        CHANNEL,
    ),
    "ack of too many": Case(lambda channel, _: send(channel, spec.Basic.Ack(7, multiple=True)), 406, CHANNEL),
    "nack of no delivery": Case(lambda channel, _: send(channel, spec.Basic.Nack(1)), 406, CHANNEL),
    "reject of no delivery": Case(lambda channel, _: send(channel, spec.Basic.Reject(1)), 406, CHANNEL),
    "commit without a transaction": Case(lambda channel, _: channel.tx_commit(), 406, CHANNEL),
    "a prefetch in bytes": Case(lambda channel, _: channel.basic_qos(prefetch_size=10), 540, CONNECTION),
    "recover without requeue": Case(lambda channel, _: channel.basic_recover(requeue=False), 540, CONNECTION),
    "channel 0 for a method of channels": Case(
        lambda channel, _: send(channel, spec.Basic.Get(queue=NO), number=0), 504, CONNECTION
    ),
    "a channel that is not open": Case(
        lambda channel, _: send(channel, spec.Basic.Get(queue=NO), number=77), 504, CONNECTION
    ),
    "open a channel again": Case(lambda channel, _: send(channel, spec.Channel.Open()), 504, CONNECTION),
    "an answer that is not the client's": Case(
        lambda channel, _: send(channel, spec.Basic.GetEmpty()), 503, CONNECTION
    ),
}


@pytest.fixture
def wrong(amqp_server: Server) -> Iterator[pika.BlockingConnection]:
    """A connection that a test may have closed by the broker."""
    connection = pika.BlockingConnection(amqp_server.parameters())
    yield connection
    if connection.is_open:
        connection.close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_wrong_use_closes_what_it_should(
    wrong: pika.BlockingConnection, channel: BlockingChannel, queue: str, case: Case
) -> None:
    """With the code that RabbitMQ documents; another connection goes on, and so does this one if it can."""
    with wrong.channel() as first:
        first.queue_declare(own := unique("queue"), exclusive=True)
    using = wrong.channel()
    with pytest.raises((ChannelClosedByBroker, ConnectionClosedByBroker)) as raised:
        case.call(using, own)
    assert (raised.value.reply_code, raised.type) == (case.code, case.closed)
    assert raised.value.reply_text
    assert wrong.is_open == (case.closed is CHANNEL)
    if wrong.is_open:
        assert wrong.channel().queue_declare(own, passive=True).method.queue == own
    assert channel.queue_declare(queue, passive=True).method.queue == queue


def test_an_ack_given_twice_closes_the_channel(channel: BlockingChannel, queue: str) -> None:
    """406 for the second one, and the connection goes on."""
    channel.confirm_delivery()
    channel.basic_publish("", queue, b"body")
    method, _, _ = channel.basic_get(queue)
    channel.basic_ack(method.delivery_tag)
    channel.basic_ack(method.delivery_tag)
    with pytest.raises(ChannelClosedByBroker) as raised:
        channel.basic_get(queue)
    assert raised.value.reply_code == 406
    assert "unknown delivery tag 1" in raised.value.reply_text
    assert channel.connection.channel().is_open


def test_a_consumer_tag_is_used_once(wrong: pika.BlockingConnection, queue: str, channel: BlockingChannel) -> None:
    """A second one of the same name on the channel ends the connection with 530."""
    using = wrong.channel()
    using.queue_declare(own := unique("queue"), exclusive=True)
    using.basic_consume(own, lambda *_: None, consumer_tag="tag")
    with pytest.raises(ConnectionClosedByBroker) as raised:
        send(using, spec.Basic.Consume(queue=own, consumer_tag="tag"))
    assert raised.value.reply_code == 530
    assert channel.queue_declare(queue, passive=True).method.queue == queue


def test_a_cancel_of_no_consumer_is_answered(channel: BlockingChannel) -> None:
    """It is no error."""
    answers: list[object] = []
    channel._impl._rpc(spec.Basic.Cancel(consumer_tag="nobody"), answers.append, [spec.Basic.CancelOk])
    wait_until(channel.connection, lambda: answers)


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"credentials": pika.PlainCredentials("guest", "wrong")}, 403), ({"virtual_host": "no such host"}, 530)],
    ids=["password", "virtual host"],
)
def test_a_login_that_fails_is_told_why(amqp_server: Server, settings: dict[str, object], code: int) -> None:
    """403 for a wrong password, 530 for a virtual host that is not there."""
    if code == 403 and amqp_server.is_qflow:
        pytest.skip("without a users file qflow takes any login from the loopback; tests of users have this one")
    parameters = amqp_server.parameters()
    for name, value in settings.items():
        setattr(parameters, name, value)
    with pytest.raises(AMQPConnectionError) as raised:
        pika.BlockingConnection(parameters)
    assert str(code) in repr(raised.value)


# Bytes that are no AMQP 0-9-1 ----------------------------------------------------------------------------------------

START = b"AMQP\x00\x00\x09\x01"


def frame(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    """Return the bytes of a frame."""
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def talk(server: Server, data: bytes) -> bytes:
    """Send bytes to the broker; return all it says until it closes the connection."""
    with socket.create_connection((server.host, server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(data)
        found = b""
        try:
            while piece := connection.recv(65536):
                found += piece
        except ConnectionResetError:
            pass
        return found


@pytest.mark.parametrize(
    "data",
    [
        b"AMQP\x00\x01\x00\x00",
        b"AMQP\x01\x01\x00\x0a",
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
    ],
    ids=["AMQP 1.0", "AMQP 0-10", "HTTP", "TLS"],
)
def test_another_protocol_is_told_which_one_is_spoken(amqp_server: Server, data: bytes) -> None:
    """`AMQP 0-9-1`, and the connection is closed."""
    assert talk(amqp_server, data) == START


def test_the_server_begins_with_connection_start(amqp_server: Server) -> None:
    """Mechanisms and locales stand in it, with what the broker can do."""
    with socket.create_connection((amqp_server.host, amqp_server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(START)
        head = b""
        while len(head) < 7:
            head += connection.recv(7 - len(head))
        kind, channel, size = struct.unpack(">BHI", head)
        payload = b""
        while len(payload) < size + 1:
            payload += connection.recv(size + 1 - len(payload))
    assert (kind, channel, payload[:4], payload[-1:]) == (1, 0, b"\x00\x0a\x00\x0a", b"\xce")
    for word in (b"PLAIN", b"AMQPLAIN", b"en_US", b"publisher_confirms", b"basic.nack", b"consumer_cancel_notify"):
        assert word in payload


BROKEN = {
    "a frame that does not end": frame(1, 0, bytes(10), end=b"\x00"),
    "a frame of an unknown kind": frame(9, 0, bytes(10)),
    "a frame that is too large": struct.pack(">BHI", 1, 0, 0xFFFFFFF0),
    "a method of no class": frame(1, 0, struct.pack(">HH", 99, 1)),
    "content instead of start-ok": frame(2, 1, bytes(14)),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_broken_frames_end_their_connection_only(
    amqp_server: Server, channel: BlockingChannel, queue: str, data: bytes
) -> None:
    """Others go on."""
    assert talk(amqp_server, START + data).startswith(b"\x01\x00\x00")
    assert channel.queue_declare(queue, passive=True).method.queue == queue
