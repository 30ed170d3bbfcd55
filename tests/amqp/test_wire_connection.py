"""The handshake, channels, limits and errors of a connection, by examples."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest
from pamqp import body, commands, header, heartbeat

from amqp_client import (
    HANDSHAKE,
    PROTOCOL_HEADER,
    Basic,
    Channels,
    Connections,
    close_code,
    events,
    message,
    method,
    opened,
    raw,
    sent,
)
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.wire.connection import Connection
from qflow.amqp.wire.events import (
    ChannelClosed,
    ChannelFailed,
    ChannelOpened,
    ChannelReleased,
    ConnectionClosed,
    ConnectionReleased,
    Failed,
    Login,
    Method,
    Published,
    VhostAsked,
)
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.limits import Limits
from qflow.amqp.wire.methods import unchecked
from qflow.amqp.wire.states import NEXT, State, WrongState

CONTENT = Content("x", "k", b"\0\0", b"body")


def test_a_handshake_leads_to_an_open_channel() -> None:
    """Each step is an event, and an answer."""
    connection = Connection(limits=Limits(heartbeat_s=7))
    assert events(connection, HANDSHAKE[0]) == []
    [(_, start)] = sent(connection)
    assert start.mechanisms == "PLAIN AMQPLAIN EXTERNAL"
    told = start.server_properties["capabilities"]
    assert told["publisher_confirms"] is told["consumer_priorities"] is True
    assert events(connection, HANDSHAKE[1]) == [Login("PLAIN", b"\0user\0secret", {}, "en_US")]
    connection.accept_login()
    [(_, tune)] = sent(connection)
    assert (tune.channel_max, tune.frame_max, tune.heartbeat) == (2047, 131_072, 7)
    assert events(connection, HANDSHAKE[2]) == []
    assert (connection.frame_max, connection.channel_max, connection.heartbeat_s) == (131_072, 2047, 60)
    assert events(connection, HANDSHAKE[3]) == [VhostAsked("/")]
    connection.open_ok()
    assert [value.name for _, value in sent(connection)] == ["Connection.OpenOk"]
    assert events(connection, HANDSHAKE[4]) == [ChannelOpened(1)]
    assert [(channel, value.name) for channel, value in sent(connection)] == [(1, "Channel.OpenOk")]


def test_what_open_ok_has_no_use_for_is_empty() -> None:
    """As RabbitMQ has it: clients skip those 4 bytes without a look at the length that they are."""
    connection = Connection()
    for began in HANDSHAKE:
        for event in connection.receive(began):
            if isinstance(event, Login):
                connection.accept_login()
            elif isinstance(event, VhostAsked):
                connection.open_ok()
    assert connection.data_to_send().endswith(b"\x01\x00\x01\x00\x00\x00\x08\x00\x14\x00\x0b\x00\x00\x00\x00\xce")


def test_a_client_that_waits_for_no_answer_gets_the_events_one_by_one() -> None:
    """Between two of them this side answers."""
    connection = Connection()
    came = connection.receive(b"".join(HANDSHAKE))
    assert isinstance(next(came), Login)
    connection.accept_login()
    assert next(came) == VhostAsked("/")
    connection.open_ok()
    assert list(came) == [ChannelOpened(1)]


def test_the_header_of_amqp_0_9_begins_a_connection_too() -> None:
    """Clients of Perl send it, and speak 0-9-1."""
    connection = Connection()
    assert events(connection, b"AMQP\x01\x01\x00\x09", HANDSHAKE[1]) == [Login("PLAIN", b"\0user\0secret", {}, "en_US")]


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b"AMQP\x03\x01\x00\x00", b"AMQP\x01\x01\x08\x00"],
)
def test_another_protocol_is_answered_with_the_header_of_ours(data: bytes) -> None:
    """And that is all."""
    connection = Connection()
    assert [type(event) for event in events(connection, data, HANDSHAKE[0])] == [Failed]
    assert connection.data_to_send() == PROTOCOL_HEADER
    assert connection.state is State.OVER


def test_a_login_that_is_refused_is_told_to_a_client_that_can_take_it() -> None:
    """Any other finds its connection over."""
    for capable in (True, False):
        connection = Connection()
        told = {"capabilities": {"authentication_failure_close": capable}}
        events(connection, PROTOCOL_HEADER, method(0, Connections.StartOk(told, "PLAIN", "")))
        connection.data_to_send()
        connection.refuse_login("no")
        assert close_code(connection) == (403 if capable else None)
        assert connection.state is (State.CLOSING if capable else State.OVER)
        connection.accept_login()
        assert connection.data_to_send() == b""
    events(connection, method(0, Connections.CloseOk()))
    assert connection.state is State.OVER


def test_a_mechanism_that_was_not_offered_ends_the_connection() -> None:
    """Silently, as everything before a login."""
    connection = Connection(mechanisms=["PLAIN"])
    [failed] = events(connection, PROTOCOL_HEADER, method(0, Connections.StartOk({}, "EXTERNAL", "")))
    assert isinstance(failed, Failed)
    assert failed.code == 503
    assert connection.state is State.OVER


@pytest.mark.parametrize(
    ("tune", "code"),
    [
        (Connections.TuneOk(2047, 4095, 0), 530),
        (Connections.TuneOk(2047, 131_073, 0), 530),
        (Connections.TuneOk(2048, 131_072, 0), 530),
        (Connections.TuneOk(0, 0, 0), None),
        (Connections.TuneOk(1, 4096, 0), None),
    ],
)
def test_what_a_client_tunes_is_within_what_was_proposed(tune: Connections.TuneOk, code: int | None) -> None:
    """0 leaves it at what was proposed."""
    connection = Connection()
    events(connection, *HANDSHAKE[:2])
    connection.accept_login()
    connection.data_to_send()
    events(connection, method(0, tune))
    assert close_code(connection) == code
    assert code or (connection.frame_max, connection.channel_max) in {(131_072, 2047), (4096, 1)}


def test_before_the_tuning_frames_are_small() -> None:
    """A login of 5,000 bytes is none."""
    connection = Connection()
    [failed] = events(connection, PROTOCOL_HEADER, method(0, Connections.StartOk({}, "PLAIN", "p" * 5000)))
    assert isinstance(failed, Failed)
    assert failed.code == 501
    assert connection.state is State.OVER


def test_a_virtual_host_that_is_refused_closes_the_connection() -> None:
    """With 530, as RabbitMQ does."""
    connection = Connection()
    events(connection, *HANDSHAKE[:2])
    connection.accept_login()
    events(connection, *HANDSHAKE[2:4])
    connection.refuse_vhost("vhost / not found")
    assert close_code(connection) == 530


def test_an_answer_in_a_wrong_state_is_a_mistake_of_this_side() -> None:
    """It is not one once the connection ends."""
    connection = opened()
    with pytest.raises(WrongState, match="TUNING while OPEN"):
        connection.accept_login()
    connection.fail(AmqpError(320, "going down"))
    connection.accept_login()
    connection.open_ok()


def test_each_side_closes_the_connection() -> None:
    """The client's close is answered; ours waits for the answer, ignores the rest, and stands a close that crosses it."""
    connection = opened()
    assert events(connection, method(0, Connections.Close(200, "bye", 0, 0)), HANDSHAKE[4]) == [
        ConnectionClosed(200, "bye")
    ]
    assert [value.name for _, value in sent(connection)] == ["Connection.CloseOk"]
    for answer in (Connections.CloseOk(), Connections.Close(200, "bye", 0, 0)):
        connection = opened()
        connection.fail(AmqpError(320, "going down"))
        [(_, close)] = sent(connection)
        assert (close.reply_code, close.reply_text) == (320, "CONNECTION_FORCED - going down")
        assert not connection.deliver(1, "t", 1, False, CONTENT)
        assert not connection.send(0, Connections.Blocked("x"))
        assert events(connection, message(1, b"late"), method(0, answer)) == [ConnectionReleased()]
        assert connection.state is State.OVER


def test_each_side_closes_a_channel() -> None:
    """After it the number is free; what comes between close and close-ok is ignored, and what goes is dropped."""
    connection = opened()
    assert events(connection, method(1, Channels.Close(200, "bye", 0, 0))) == [ChannelClosed(1, 200, "bye")]
    assert not connection.confirm(1, 1, False, True)
    assert events(connection, HANDSHAKE[4]) == [ChannelOpened(1)]
    connection.data_to_send()
    failing = method(1, Basic.Publish(0, "x", "k")) + method(1, header.ContentHeader(0, 9))
    events(connection, failing, method(1, body.ContentBody(b"half")))
    assert connection.assembling_bytes == 4
    connection.fail_channel(1, AmqpError(404, "no exchange 'x'").about(Basic.Publish()))
    connection.fail_channel(1, AmqpError(404, "no exchange 'x'"))
    assert connection.assembling_bytes == 0
    [(number, close)] = sent(connection)
    assert (number, close.reply_code, close.class_id, close.method_id) == (1, 404, 60, 40)
    assert not connection.deliver(1, "t", 1, False, CONTENT)
    rest = method(1, body.ContentBody(b"12345")), message(1, b"m"), method(1, Channels.Close(200, "", 0, 0))
    assert events(connection, *rest) == []
    assert [value.name for _, value in sent(connection)] == ["Channel.CloseOk"]
    assert events(connection, method(1, Channels.CloseOk()), HANDSHAKE[4]) == [ChannelReleased(1), ChannelOpened(1)]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (method(2, Basic.Qos()), 504),
        (method(1, Channels.Open()), 504),
        (raw(1, 1, struct.pack(">HH", 60, 200)), 540),
        (raw(1, 1, struct.pack(">HH", 999, 1)), 540),
        (method(1, Basic.Deliver("t", 1, False, "x", "k")), 503),
        (method(1, Channels.CloseOk()), 503),
        (method(1, Connections.Open("/")), 503),
        (method(0, Basic.Qos()), 504),
        (method(0, Connections.StartOk({}, "PLAIN", "")), 503),
        (method(0, Connections.CloseOk()), 503),
        (method(1, body.ContentBody(b"x")), 505),
        (method(1, header.ContentHeader(0, 1)), 505),
        (method(0, header.ContentHeader(0, 1)), 505),
        (method(1, Basic.Publish()) + method(1, Basic.Qos()), 505),
        (method(1, Basic.Publish()) + method(1, Basic.Publish()), 505),
        (method(1, Basic.Publish()) + raw(2, 1, struct.pack(">HHQH", 50, 0, 0, 0)), 505),
        (method(1, Basic.Publish()) + raw(2, 1, struct.pack(">HHQ", 60, 0, 0)), 502),
        (method(1, Basic.Publish()) + raw(2, 1, b"\0\x3c"), 502),
        (method(1, Basic.Publish()) + raw(2, 1, struct.pack(">HHQH", 60, 0, 3, 1)) + raw(3, 1, b"abc"), 502),
        (method(1, Basic.Publish()) + method(1, header.ContentHeader(0, 2)) + method(1, body.ContentBody(b"abc")), 501),
        (raw(1, 1, b"\0"), 502),
        (raw(1, 1, b"\0\x3c\0\x28\0\0\x05x"), 502),
        (method(1, Basic.Qos())[:-1].replace(b"\x0b", b"\x0c", 1) + b"\0\xce", 502),
        (raw(8, 1, b""), 505),
        (raw(8, 0, b"x"), 505),
        (raw(4, 1, b"x"), 501),
        (method(1, Basic.Qos())[:-1] + b"\0", 501),
        (message(1, b"abc")[:-1] + b"\0", 501),
        (message(1, b"abc").replace(b"\xce\x03", b"\0\x03"), 501),
        (b"\x01\0\x01" + (131_073 - 8).to_bytes(4), 501),
    ],
)
def test_what_a_client_does_wrong_has_the_documented_code(data: bytes, code: int) -> None:
    """The connection is closed by it, and a publish after it is none."""
    connection = opened()
    came = events(connection, data + message(1, b"late"))
    assert [type(event) for event in came] == [Failed]
    assert close_code(connection) == code
    assert connection.state in (State.CLOSING, State.OVER)
    assert events(connection, message(1, b"late")) == []


def test_channels_are_counted_and_may_have_any_number() -> None:
    """A client numbers them on, as aiormq does while another one is open."""
    connection = opened(Limits(channel_max=2), channels=(65_534,))
    for _ in range(2):
        came = events(connection, method(65_535, Channels.Open()) + method(65_535, Channels.Close(0, "", 0, 0)))
        assert [type(event) for event in came] == [ChannelOpened, ChannelClosed]
    [_, failed] = events(connection, method(1, Channels.Open()) + method(2, Channels.Open()))
    assert isinstance(failed, Failed)
    assert failed.code == 530


def test_a_channel_before_the_connection_is_open_is_an_error() -> None:
    """504, as for a channel that was not opened."""
    connection = Connection()
    events(connection, *HANDSHAKE[:2])
    connection.accept_login()
    [failed] = events(connection, HANDSHAKE[4])
    assert isinstance(failed, Failed)
    assert close_code(connection) == failed.code == 504


def test_a_message_above_the_limit_costs_its_channel() -> None:
    """406, from its header on; the other channels go on."""
    connection = opened(Limits(max_body_bytes=10, max_properties_bytes=20), channels=(1, 2))
    large = Basic.Properties(message_id="m" * 30)
    for number, data in ((1, message(1, b"x" * 11)), (2, message(2, b"x", properties=large))):
        [failed] = events(connection, data)
        assert isinstance(failed, ChannelFailed)
        assert (failed.channel, failed.code) == (number, 406)
        assert close_code(connection) == 406
        events(connection, method(number, Channels.CloseOk()), method(number, Channels.Open()))
    assert [type(event) for event in events(connection, message(1, b"x" * 10), message(2, b""))] == [
        Published,
        Published,
    ]


def test_properties_of_messages_that_are_not_whole_are_bounded_with_them() -> None:
    """A header alone, in each of thousands of channels, is as much as bodies are."""
    connection = opened(Limits(max_assembling_bytes=150), channels=(1, 2))
    begun = [
        method(number, Basic.Publish()) + method(number, header.ContentHeader(0, 1, Basic.Properties("t" * 79)))
        for number in (1, 2)
    ]
    assert events(connection, begun[0], method(1, body.ContentBody(b"x"))) != []
    assert connection.assembling_bytes == 0
    assert events(connection, begun[0]) == []
    assert connection.assembling_bytes == 80
    [failed] = events(connection, begun[1])
    assert isinstance(failed, Failed)
    assert close_code(connection) == 506


def test_bodies_that_are_not_whole_are_bounded_together() -> None:
    """Over all channels of a connection: 506."""
    connection = opened(Limits(max_body_bytes=100, max_assembling_bytes=150), channels=(1, 2))
    for number in (1, 2):
        events(connection, method(number, Basic.Publish()) + method(number, header.ContentHeader(0, 100)))
    assert events(connection, method(1, body.ContentBody(b"x" * 99)), method(2, body.ContentBody(b"x" * 51))) == []
    assert connection.assembling_bytes == 150
    [failed] = events(connection, method(2, body.ContentBody(b"x")))
    assert isinstance(failed, Failed)
    assert close_code(connection) == 506
    assert connection.assembling_bytes == 0


def test_messages_of_several_channels_come_in_among_each_other() -> None:
    """Each is whole when its last frame is there; empty frames do not matter."""
    connection = opened(channels=(1, 2))
    starts = [method(number, Basic.Publish(0, "x", f"k{number}", mandatory=True)) for number in (1, 2)]
    headers = [method(number, header.ContentHeader(0, 4)) for number in (1, 2)]
    parts = [method(1, body.ContentBody(b"ab")), method(2, body.ContentBody(b"")), method(2, body.ContentBody(b"wxyz"))]
    came = events(connection, *starts, *headers, *parts, method(1, body.ContentBody(b"cd")))
    assert came == [
        Published(2, "x", "k2", True, False, b"\0\0", b"wxyz"),
        Published(1, "x", "k1", True, False, b"\0\0", b"abcd"),
    ]
    assert connection.assembling_bytes == 0


@pytest.mark.parametrize("parts", [2, 3, 4095, 4096, 5000])
def test_a_body_in_many_frames_is_put_together(parts: int) -> None:
    """Small frames cost no object each."""
    connection = opened(frame_max=8192)
    content = bytes(index % 251 for index in range(30_000))
    start = method(1, Basic.Publish()) + method(1, header.ContentHeader(0, len(content)))
    frames = [method(1, body.ContentBody(content[at : at + parts])) for at in range(0, len(content), parts)]
    came = events(connection, start, *frames[:-1])
    assert came == []
    [published] = events(connection, frames[-1])
    assert isinstance(published, Published)
    assert published.body == content


def test_a_large_body_goes_out_in_frames_of_what_was_agreed() -> None:
    """And comes out of them as it was; an empty one has none."""
    connection = opened(frame_max=4096)
    for size in (0, 1, 4088, 4089, 200_000):
        content = bytes(size)
        assert connection.deliver(1, "t", 3, True, Content("x", "k", b"\0\0", content))
        waiting = connection.pending_bytes()
        data = connection.data_to_send()
        assert len(data) == waiting
        connection.send(1, Basic.QosOk())
        assert connection.get_ok(1, 3, False, 7, Content("x", "k", b"\0\0", content))
        frames = sent(connection)
        assert [value.name for _, value in frames[:2]] == ["Basic.QosOk", "Basic.GetOk"]
        assert b"".join(value.value for _, value in frames[3:]) == content
        assert all(len(value.value) <= 4088 for _, value in frames[3:])
    assert connection.pending_bytes() == 0
    assert connection.data_to_send() == b""


def test_a_message_that_returns_says_why() -> None:
    """A text is cut to what a short string holds."""
    connection = opened()
    connection.return_(1, 312, "NO_ROUTE" + "é" * 200, CONTENT)
    [(_, returned), (_, head), (_, content)] = sent(connection)
    assert (returned.reply_code, returned.exchange, head.body_size, content.value) == (312, "x", 4, b"body")
    assert len(returned.reply_text.encode()) == 254


def test_blocked_is_told_to_those_who_can_take_it() -> None:
    """And heartbeats to all, from the login on."""
    capable, other = opened(capabilities=["connection.blocked"]), opened()
    for connection in (capable, other):
        connection.blocked("low on memory")
        connection.unblocked()
        connection.heartbeat()
    assert [value.name for _, value in sent(capable)] == ["Connection.Blocked", "Connection.Unblocked", "Heartbeat"]
    assert [value.name for _, value in sent(other)] == ["Heartbeat"]
    assert events(other, heartbeat.Heartbeat().marshal()) == []
    starting = Connection()
    starting.heartbeat()
    assert starting.data_to_send() == b""


def test_names_of_any_alphabet_are_sent() -> None:
    """Queues are named as RabbitMQ lets them be; more than 255 bytes have no place in a frame."""
    connection = opened()
    connection.send(1, unchecked(commands.Queue.DeclareOk, "очередь!", 1, 2))
    connection.deliver(1, "t", 1, False, Content("обмен", "ключ*", b"\0\0", b""))
    connection.get_ok(1, 1, False, 2**40, Content("обмен", "ключ*", b"\0\0", b""))
    connection.return_(1, 312, "NO_ROUTE", Content("обмен", "ключ*", b"\0\0", b""))
    data = connection.data_to_send()
    assert data.count(b"\x0a" + "обмен".encode() + b"\x09" + "ключ*".encode()) == 3
    connection.send(1, unchecked(commands.Queue.DeclareOk, "очередь!", 1, 2))
    connection.deliver(1, "t", 1, False, Content("обмен", "ключ*", b"\0\0", b""))
    [(_, declared), (_, delivered), _] = sent(connection)
    assert (declared.queue, delivered.exchange, delivered.routing_key) == ("очередь!", "обмен", "ключ*")
    with pytest.raises(ValueError, match="256"):
        connection.deliver(1, "t", 1, False, Content("x" * 256, "k", b"\0\0", b""))


def test_other_methods_are_events() -> None:
    """Deprecated ones, too, and that of the connection which brings a new secret."""
    connection = opened()
    came = events(
        connection,
        method(1, commands.Queue.Declare(0, "q", durable=True, arguments={"x-max-length": 5})),
        raw(1, 1, struct.pack(">HHB", 60, 100, 1)),
        method(0, Connections.UpdateSecret("new", "expired")),
    )
    assert [(event.channel, event.method.name) for event in came if isinstance(event, Method)] == [
        (1, "Queue.Declare"),
        (1, "Basic.RecoverAsync"),
        (0, "Connection.UpdateSecret"),
    ]
    first = came[0]
    assert isinstance(first, Method)
    assert isinstance(first.method, commands.Queue.Declare)
    assert first.method.arguments == {"x-max-length": 5}


def test_every_state_of_a_connection_can_end_and_none_comes_again() -> None:
    """The table has a row for each."""
    assert set(NEXT) == set(State)
    assert all(State.OVER in following for state, following in NEXT.items() if state is not State.OVER)
    assert all(after > state for state, following in NEXT.items() for after in following)


def test_an_error_knows_whether_the_connection_ends() -> None:
    """As AMQP 0-9-1 has it, unless it is said otherwise."""
    soft = {code for code in ReplyCode if not AmqpError(code, "").hard}
    assert soft == {311, 312, 313, 403, 404, 405, 406}
    assert AmqpError(403, "login", hard=True).hard
    assert str(AmqpError(404, "no queue 'q'")) == "404 NOT_FOUND - no queue 'q'"


def test_the_machine_imports_neither_asyncio_nor_the_engine() -> None:
    """It is bytes and values only."""
    script = "import sys, qflow.amqp.wire.connection; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {"asyncio", "socket", "lmdb", "qflow.broker", "qflow.queues", "qflow.storage"} & set(said) == set()
