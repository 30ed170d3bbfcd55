"""What nobody should send: the code that the protocol has for it, other connections unharmed, and few lines in the log."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress

import pytest
from pamqp import commands, header

from amqp_client import PROTOCOL_HEADER, Basic, Channels, Connections, method, raw
from amqp_clients import serving, unique
from amqp_raw import Queue, Raw, publish
from thorough import TORTURE

LOGINS = 1000 if TORTURE else 60
BINDINGS = 100_000 if TORTURE else 300
MOST_LINES = 12
"""That the server writes about all that is done here, beside one in ten seconds."""
TOLD = {"capabilities": {"authentication_failure_close": True}}
Exchange = commands.Exchange


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """One server for all tests here; what it says in the end is no flood."""
    directory = tmp_path_factory.mktemp("bad")
    with open(directory / "said", "w+") as said:
        with serving(directory / "spool", said=said) as (server, _):
            yield server.port
        said.seek(0)
        lines = said.readlines()
    assert len(lines) <= MOST_LINES + LOGINS // 50, lines[:50]
    assert not any("Traceback" in line for line in lines), lines


@pytest.fixture(autouse=True)
def neighbour(port: int) -> Iterator[Raw]:
    """Another connection, which is as good as before when the test ends."""
    with Raw(port).open() as one:
        name = unique("neighbour")
        one.declare(name)
        one.confirmed(name, b"before")
        yield one
        one.confirmed(name, b"after")
        assert [(one.send(method(1, Basic.Get(0, name))), one.delivered()[1])[1] for _ in range(2)] == [
            b"before",
            b"after",
        ]


@pytest.mark.parametrize(
    "began",
    [
        b"AMQP\x01\x01\x00\x0a",
        b"AMQP\x00\x01\x00\x00",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\0" * 8,
    ],
    ids=["AMQP 0-10", "AMQP 1.0", "HTTP", "TLS", "zeros"],
)
def test_another_protocol_is_told_which_one_is_spoken(port: int, began: bytes) -> None:
    """The protocol header of AMQP 0-9-1, and the end."""
    with Raw(port) as client:
        client.send(began)
        assert client.rest() == PROTOCOL_HEADER


def test_tls_on_the_plain_port_fails(port: int) -> None:
    """A real handshake."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port)) as client, pytest.raises(ssl.SSLError):
        context.wrap_socket(client)


def deep(levels: int) -> bytes:
    """A table of so many levels."""
    value = b"V"
    for _ in range(levels):
        entry = b"\x01a" + value
        value = b"F" + len(entry).to_bytes(4) + entry
    return value[1:]


def content(properties: bytes, size: int) -> bytes:
    return raw(2, 1, b"\x00\x3c\x00\x00" + size.to_bytes(8) + properties)


START = method(1, Basic.Publish(0, "", "nobody"))
HARD = {
    "a frame that is larger than agreed": (raw(1, 1, bytes(131_073)), 501),
    "a frame that says it is 4 GiB": (b"\x01\x00\x01\xff\xff\xff\xff", 501),
    "a frame without its end": (b"\x01\x00\x01\x00\x00\x00\x04\x00\x3c\x00\x0a\x00", 501),
    "a frame of an unknown type": (b"\x09\x00\x01\x00\x00\x00\x00\xce", 501),
    "more body than was said": (START + content(b"\0\0", 3) + raw(3, 1, b"abcd"), 501),
    "less body than was said": (START + content(b"\0\0", 30) + raw(3, 1, b"abcd") + START, 505),
    "a body without a header": (START + raw(3, 1, b"abcd"), 505),
    "a header without a publish": (content(b"\0\0", 3), 505),
    "another class in the header": (START + raw(2, 1, b"\x00\x32" + bytes(12)), 505),
    "headers of 10,000 levels": (START + content(b"\x20\x00" + deep(10_000), 0), 502),
    "a table that is cut short": (START + content(b"\x20\x00\x00\x00\x10\x00\x01a", 0), 502),
    "an unknown class": (raw(1, 1, b"\x7f\xff\x00\x0a"), 540),
    "an unknown method": (raw(1, 1, b"\x00\x3c\x7f\xff"), 540),
    "a method of the server": (method(1, Basic.QosOk()), 503),
    "a channel that is not open": (method(5, Basic.Qos(0, 1, False)), 504),
    "a channel that is open already": (method(1, Channels.Open()), 504),
    "a channel above the most": (b"".join(method(number, Channels.Open()) for number in range(2, 2049)), 530),
    "connection.open a second time": (method(0, Connections.Open("/")), 503),
    "connection.start-ok a second time": (method(0, Connections.StartOk({}, "PLAIN", "\0a\0b")), 503),
    "a heartbeat on a channel": (raw(8, 1, b""), 505),
    "immediate": (method(1, Basic.Publish(0, "", "nobody", immediate=True)) + content(b"\0\0", 0), 540),
    "a name that is not UTF-8": (raw(1, 1, b"\x00\x32\x00\x0a\x00\x00\x02\xff\xfe\x00\x00\x00\x00\x00"), 502),
    "a prefetch in bytes": (method(1, Basic.Qos(5, 1, False)), 540),
}


@pytest.mark.parametrize("name", list(HARD))
def test_a_wrong_frame_ends_the_connection(port: int, name: str) -> None:
    """With the code that RabbitMQ 4 has for it."""
    data, code = HARD[name]
    with Raw(port).open() as client:
        client.send(data)
        assert client.until(Connections.Close).reply_code == code
        with suppress(ConnectionError):
            client.send(method(0, Connections.CloseOk()))
        client.rest()


def test_before_the_login_little_is_taken(port: int) -> None:
    """Frames up to 4 KiB, no channels; who is not logged in is told nothing."""
    for data in (raw(1, 0, bytes(5000)), method(1, Channels.Open()), method(0, Connections.Open("/")), b"\xff" * 100):
        with Raw(port) as client:
            client.send(PROTOCOL_HEADER)
            client.until(Connections.Start)
            client.send(data)
            assert client.rest() == b""


SOFT = {
    "an unknown delivery tag": (Basic.Ack(77), 406),
    "an unknown delivery tag, rejected": (Basic.Reject(77), 406),
    "a queue that is not there": (Queue.Declare(0, "missing", passive=True), 404),
    "an exchange that is not there": (Exchange.Declare(0, "missing", "direct", passive=True), 404),
    "a name of the server": (Queue.Declare(0, "amq.mine"), 403),
    "an argument that is wrong": (Queue.Declare(0, "wrong", arguments={"x-message-ttl": -1}), 406),
    "a commit without a transaction": (commands.Tx.Commit(), 406),
}


@pytest.mark.parametrize("name", list(SOFT))
def test_a_wrong_use_ends_the_channel_alone(port: int, name: str) -> None:
    """The connection goes on, and the channel can be opened again."""
    value, code = SOFT[name]
    with Raw(port).open(channels=(1, 2)) as client:
        assert client.ask(value, Channels.Close, Connections.Close).reply_code == code
        client.send(method(1, Channels.CloseOk()))
        client.ask(Channels.Open(), Channels.OpenOk)
        client.ask(Basic.Qos(0, 1, False), Basic.QosOk, channel=2)


def test_publishes_behind_a_wrong_one_are_dropped(port: int) -> None:
    """On the channel that it closes."""
    queue = unique("queue")
    with Raw(port).open(channels=(1, 2)) as client:
        client.declare(queue)
        wrong = publish(queue, b"wrong", Basic.Properties(expiration="soon"))
        client.send(wrong, *[publish(queue, b"behind")] * 100, publish(queue, b"beside", channel=2))
        assert client.until(Channels.Close).reply_code == 406
        ready = client.ask(Queue.Declare(0, queue, passive=True), Queue.DeclareOk, channel=2).message_count
        assert ready == 1


def test_a_body_that_is_too_large_ends_its_channel(port: int) -> None:
    """It is refused by what its header says, before it comes."""
    with Raw(port).open() as client:
        client.send(START, method(1, header.ContentHeader(0, 2**60, Basic.Properties())))
        assert client.until(Channels.Close).reply_code == 406


@pytest.mark.parametrize("response", ["", "\0", "\0\0", "guest", "\0g\0g\0g", "\0" * 3000, "\0é\0\ud800"])
def test_a_login_that_cannot_be_read(port: int, response: str) -> None:
    """It is refused as another."""
    value = Connections.StartOk(TOLD, "PLAIN", "")
    bytes_of = response.encode(errors="surrogatepass")
    whole = method(0, value)[7:-1]
    at = whole.index(b"\x05PLAIN") + 6
    with Raw(port) as client:
        client.send(PROTOCOL_HEADER)
        client.until(Connections.Start)
        client.send(raw(1, 0, whole[:at] + len(bytes_of).to_bytes(4) + bytes_of + whole[at + 4 :]))
        assert client.until(Connections.Close).reply_code == 403


def test_a_login_that_is_tried_again_and_again(port: int) -> None:
    """At once: each is refused with 403, after a pause; the right one is taken meanwhile."""
    clients = [Raw(port) for _ in range(LOGINS)]
    try:
        for number, client in enumerate(clients):
            response = f"\0guest\0wrong{number}" if number % 3 else "\0nobody\0\0"
            client.send(PROTOCOL_HEADER)
            client.until(Connections.Start)
            client.send(method(0, Connections.StartOk(TOLD, "PLAIN", response)))
        for _ in range(5):
            Raw(port).open().socket.close()
        for client in clients if TORTURE else clients[:3]:
            assert client.until(Connections.Close).reply_code == 403
    finally:
        for client in clients:
            client.socket.close()


def test_a_virtual_host_that_is_not_there(port: int) -> None:
    """530, and the end."""
    with Raw(port) as client:
        client.log_in()
        assert client.ask(Connections.Open("other"), Connections.Close, channel=0).reply_code == 530


def test_names_up_to_255_bytes(port: int) -> None:
    """A longer one has no place in a frame."""
    name = unique("n") + "é" * 100
    name += "x" * (255 - len(name.encode()))
    with Raw(port).open() as client:
        declared = Queue.Declare(0, "placeholder", durable=True)
        framed = method(1, declared)[7:-1].replace(b"\x0bplaceholder", bytes([255]) + name.encode())
        client.send(raw(1, 1, framed))
        assert client.until(Queue.DeclareOk, Channels.Close, Connections.Close).queue == name


def test_many_bindings(port: int, neighbour: Raw) -> None:
    """Of one queue to one exchange; others are served meanwhile, and all of it goes."""
    with Raw(port).open() as client:
        exchange, queue = unique("exchange"), unique("queue")
        client.ask(Exchange.Declare(0, exchange, "topic"), Exchange.DeclareOk)
        client.ask(Queue.Declare(0, queue, exclusive=True), Queue.DeclareOk)
        for start in range(0, BINDINGS, 100):
            keys = range(start, start + 100)
            client.send(*(method(1, Queue.Bind(0, queue, exchange, f"a.{key}.*", nowait=True)) for key in keys))
            neighbour.ask(Basic.Qos(0, 1, False), Basic.QosOk)
        client.send(method(1, Basic.Publish(0, exchange, f"a.{BINDINGS - 1}.b")), content(b"\0\0", 0))
        assert client.ready(queue) == 1


def test_exchanges_in_a_circle(port: int) -> None:
    """By bindings and as alternates; a message goes round once."""
    one, two, queue = unique("one"), unique("two"), unique("queue")
    with Raw(port).open() as client:
        for name, other in ((one, two), (two, one)):
            arguments = {"alternate-exchange": other}
            client.ask(Exchange.Declare(0, name, "direct", arguments=arguments), Exchange.DeclareOk)
        client.declare(queue)
        for source, destination in ((one, two), (two, one)):
            client.ask(Exchange.Bind(0, destination, source, "key"), Exchange.BindOk)
        client.ask(Queue.Bind(0, queue, two, "key"), Queue.BindOk)
        for key in ("key", "nobody"):
            client.send(method(1, Basic.Publish(0, one, key)), content(b"\0\0", 0))
        assert client.ready(queue) == 1


def test_dead_letters_in_a_circle_end(port: int) -> None:
    """Those that expire in queues which send them to each other; RabbitMQ drops them as well."""
    one, two = unique("one"), unique("two")
    with Raw(port).open() as client:
        for name, other in ((one, two), (two, one)):
            client.declare(name, x_message_ttl=1, x_dead_letter_exchange="", x_dead_letter_routing_key=other)
        client.confirmed(one, b"round")
        while client.ready(one) or client.ready(two):
            pass


POISON = {
    "no array": b"\x07x-deathS\x00\x00\x00\x01a",
    "an array of texts": b"\x07x-deathA\x00\x00\x00\x06S\x00\x00\x00\x01a",
    "tables of wrong types": b"\x07x-deathA\x00\x00\x00\x10F\x00\x00\x00\x0b\x05countl" + b"\xff" * 4,
    "5,000 entries": b"\x07x-deathA" + (5000 * 5).to_bytes(4) + b"F\0\0\0\0" * 5000,
    "texts that are not UTF-8": b"\x07x-deathA\x00\x00\x00\x12F\x00\x00\x00\x0d\x05queueS\x00\x00\x00\x02\xff\xfe",
    "CC of numbers": b"\x02CCA\x00\x00\x00\x02t\x01",
}


@pytest.mark.parametrize("name", list(POISON))
def test_a_poison_death_stops_no_other(port: int, name: str) -> None:
    """What a client invents as `x-death` is taken as far as it makes sense, or refused with its message."""
    queue, dead = unique("queue"), unique("dead")
    entry = POISON[name]
    with Raw(port).open() as client, Raw(port).open() as other:
        client.declare(dead)
        client.declare(queue, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
        table = len(entry).to_bytes(4) + entry
        client.send(method(1, Basic.Publish(0, "", queue)), content(b"\x20\x00" + table, 0))
        other.confirmed(queue, b"good")
        other.consume(queue)
        while other.delivered()[1] != b"good":
            pass
        other.send(method(1, Basic.Nack(0, True, False)))
        other.ask(Channels.Close(200, "", 0, 0), Channels.CloseOk)
        other.ask(Channels.Open(), Channels.OpenOk)
        other.consume(dead)
        while other.delivered()[1] != b"good":
            pass


@pytest.mark.parametrize(
    "delay", [b"d\x7f\xf8" + bytes(6), b"d\x7f\xf0" + bytes(6), b"S\x00\x00\x00\x01x", b"t\x01", b"V"]
)
def test_delays_that_are_none(port: int, delay: bytes) -> None:
    """Not a number, infinity, a text: the message comes, later or at once, or it is refused."""
    exchange, queue = unique("delayed"), unique("queue")
    with Raw(port).open(channels=(1, 2)) as client:
        arguments = {"x-delayed-type": "direct"}
        client.ask(Exchange.Declare(0, exchange, "x-delayed-message", arguments=arguments), Exchange.DeclareOk)
        client.declare(queue)
        client.ask(Queue.Bind(0, queue, exchange, "key"), Queue.BindOk)
        table = b"\x07x-delay" + delay
        client.send(
            method(1, Basic.Publish(0, exchange, "key")), content(b"\x20\x00" + len(table).to_bytes(4) + table, 0)
        )
        assert client.ask(Queue.Declare(0, queue, passive=True), Queue.DeclareOk, channel=2)
