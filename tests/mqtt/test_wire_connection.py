"""The machine: which state follows which, what it answers by itself, and what it counts."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtt_wire import (
    VERSIONS,
    connect,
    decoded,
    events,
    from_paho,
    opened,
    packet,
    properties,
    publish,
    string,
    subscribe,
)
from qflow.errors import BrokerClosed, DiskFull, InvalidArgument, QflowError
from qflow.mqtt.errors import MqttError, ReasonCode, as_mqtt_error
from qflow.mqtt.wire import Connection, Limits, State, WrongState, encode_publish, split_shared
from qflow.mqtt.wire.packets import (
    NEVER_EXPIRES_S,
    Connack,
    Connect,
    Disconnect,
    Failed,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
)
from qflow.mqtt.wire.states import NEXT
from thorough import examples

PING = packet(0xC0)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_sent_behind_a_connect_waits_for_the_answer(version: int) -> None:
    """MQTT allows a client to go on at once; the server decides first."""
    connection = Connection()
    (event,) = events(connection, connect(version) + PING, publish(version, "t", b"1"))
    assert isinstance(event, Connect)
    assert connection.state is State.CONNECTING
    assert connection.data_to_send() == b""
    assert events(connection, b"") == []
    connection.send(Connack())
    connection.data_to_send()
    assert events(connection, b"") == [Publish("t", b"1")]
    assert connection.data_to_send() == b"\xd0\0"
    assert events(connection, publish(version, "t", b"2")) == [Publish("t", b"2")]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_ping_is_answered_and_is_no_event(version: int) -> None:
    connection = opened(version)
    assert events(connection, PING * 2) == []
    assert connection.pending_bytes == 4
    assert connection.data_to_send() == b"\xd0\0" * 2


@pytest.mark.parametrize("version", VERSIONS)
def test_an_event_is_decoded_when_it_is_asked_for(version: int) -> None:
    """What is not asked for waits for the next call."""
    connection = opened(version)
    arriving = connection.receive(publish(version, "t", b"1") + publish(version, "t", b"2"))
    assert next(arriving) == Publish("t", b"1")
    assert events(connection, publish(version, "t", b"3")) == [Publish("t", b"2"), Publish("t", b"3")]


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_read_after_a_disconnect(version: int) -> None:
    """Nor sent, but for what was written before."""
    connection = opened(version)
    assert events(connection, PING + packet(0xE0) + PING + publish(version, "t")) == [Disconnect()]
    assert connection.state is State.CLOSED
    assert events(connection, PING, connect(version)) == []
    assert not connection.send(Puback(1))
    assert not connection.send(Connack())
    assert not connection.publish(encode_publish(version, "t", b""))
    connection.fail(MqttError(0x8B, "the server ends"))
    connection.close()
    assert connection.data_to_send() == b"\xd0\0"
    assert connection.data_to_send() == b""


@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_read_after_a_connack_that_refuses(version: int) -> None:
    connection = Connection()
    events(connection, connect(version))
    assert connection.send(Connack(ReasonCode.NOT_AUTHORIZED))
    assert connection.state is State.CLOSED
    assert events(connection, PING, connect(version)) == []
    assert connection.data_to_send() == (b"\x20\3\0\x87\0" if version == 5 else b"\x20\2\0\5")


def test_a_refusal_that_3_1_1_has_no_code_for_is_not_told() -> None:
    """Its section 3.2.2.3: the connection is closed without a CONNACK."""
    connection = Connection()
    events(connection, connect(4))
    assert not connection.send(Connack(ReasonCode.IMPLEMENTATION_SPECIFIC))
    assert connection.state is State.CLOSED
    assert connection.data_to_send() == b""


@pytest.mark.parametrize("answer", [Puback(1), Suback(1, [0]), Disconnect()])
def test_an_answer_before_connack_is_the_callers_fault(answer: Puback | Suback | Disconnect) -> None:
    """Nothing is sent."""
    connection = Connection()
    with pytest.raises(WrongState, match="WAITING"):
        connection.send(answer)
    events(connection, connect(5))
    with pytest.raises(WrongState, match="CONNECTING"):
        connection.send(answer)
    with pytest.raises(WrongState, match="CONNECTING"):
        connection.publish(encode_publish(5, "t", b""))
    assert connection.data_to_send() == b""


def test_a_connack_that_nobody_waits_for_is_the_callers_fault() -> None:
    """Before CONNECT, and a second time."""
    for connection in (Connection(), opened(5)):
        with pytest.raises(WrongState, match="Connack"):
            connection.send(Connack())


def test_the_states() -> None:
    """Each can end, and none goes back."""
    assert all(State.CLOSED in following for state, following in NEXT.items() if state is not State.CLOSED)
    assert all(after > state for state, following in NEXT.items() for after in following)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("code", list(ReasonCode))
def test_any_error_closes_with_a_code_that_the_packet_may_have(version: int, code: ReasonCode) -> None:
    """In each state; paho knows which codes a CONNACK and a DISCONNECT may have, but for one of a CONNACK."""
    connection = Connection()
    connection.fail(MqttError(code, "too slow"))
    assert (connection.state, connection.data_to_send()) == (State.CLOSED, b"")
    if code < 0x80:
        return
    for connection, name in ((Connection(), "connack"), (opened(version), "disconnect")):
        if name == "connack":
            events(connection, connect(version))
        connection.fail(MqttError(code, "a reason\0 \ud800"), {"user_properties": [("a", "b")]})
        assert connection.state is State.CLOSED
        sent = connection.data_to_send()
        if version == 5 and name == "connack" and code == ReasonCode.PAYLOAD_FORMAT_INVALID:
            assert sent[3] == code, "MQTT 5.0, section 3.2.2.2"
        elif version == 5:
            ((_, made),) = decoded(sent, 5)
            assert made.reason.value >= 0x80
            assert from_paho(made.properties) == {"reason_string": "a reason\ufffd ?", "user_properties": [("a", "b")]}
        else:
            assert (len(sent) == 4) is (name == "connack" and len(sent) > 0)


def test_the_text_of_a_reason_is_cut() -> None:
    """Of a long one the client gets what helps."""
    connection = opened(5)
    connection.fail(MqttError(0x80, "é" * 100_000))
    ((_, made),) = decoded(connection.data_to_send(), 5)
    assert made.properties.ReasonString == "é" * 1000


# What the client says of itself.


def test_what_a_connect_says_is_known() -> None:
    """Without it what MQTT 5.0 says in section 3.1.2.11."""
    connection = opened(5, having=b"\x21\0\7" + b"\x22\0\3" + b"\x27\0\0\1\0" + b"\x11\0\0\0\x3c")
    assert (connection.receive_maximum, connection.topic_alias_maximum) == (7, 3)
    assert connection.maximum_packet_bytes == 256
    assert connection.connect is not None
    assert connection.connect.session_expiry_s == 60
    plain = opened(5)
    assert (plain.receive_maximum, plain.topic_alias_maximum) == (65_535, 0)
    assert plain.maximum_packet_bytes == 268_435_460
    assert plain.connect is not None
    assert plain.connect.session_expiry_s == 0


@pytest.mark.parametrize(("clean", "expiry_s"), [(True, 0), (False, NEVER_EXPIRES_S)])
def test_a_session_of_3_1_1_ends_with_its_connection_or_never(clean: bool, expiry_s: int) -> None:
    (event,) = events(Connection(), connect(4, flags=2 if clean else 0))
    assert isinstance(event, Connect)
    assert event.session_expiry_s == expiry_s


def test_a_password_is_not_in_the_text_of_a_connect() -> None:
    """Logs have such texts."""
    (event,) = events(Connection(), connect(4, flags=0xC2, rest=string("user") + string("secret")))
    assert isinstance(event, Connect)
    assert event.password == b"secret"
    assert "secret" not in repr(event)


def test_a_session_may_be_given_another_expiry_with_disconnect_unless_it_had_none() -> None:
    """MQTT 5.0, section 3.14.2.2.2; the other case is among the malformed packets."""
    data = packet(0xE0, b"\0", properties(b"\x11\0\0\0\1"))
    (event,) = events(opened(5, having=b"\x11\0\0\0\2"), data)
    assert event == Disconnect(0, {"session_expiry_s": 1})
    none = packet(0xE0, b"\0", properties(b"\x11\0\0\0\0"))
    assert events(opened(5), none) == [Disconnect(0, {"session_expiry_s": 0})]


# How much the client takes.


def test_a_publish_that_is_too_large_for_the_client_is_not_sent() -> None:
    """One byte less is."""
    connection = opened(5, having=b"\x27\0\0\0\x14")  # 20 bytes
    for qos, most in ((0, 14), (1, 12)):
        packet_id = 7 if qos else 0
        fits, large = encode_publish(5, "t", bytes(most), qos), encode_publish(5, "t", bytes(most + 1), qos)
        assert connection.takes(fits)
        assert not connection.takes(large)
        assert not connection.publish(large, packet_id)
        assert connection.pending_bytes == 0
        assert connection.publish(fits, packet_id)
        assert connection.pending_bytes == len(connection.data_to_send()) == 20


def test_reasons_are_left_out_where_they_are_too_large() -> None:
    """The rest is told."""
    connection = opened(5, having=b"\x27\0\0\0\x20")
    assert connection.send(Puback(1, 0x97, {"reason_string": "short"}))
    assert connection.send(Puback(2, 0x97, {"reason_string": "x" * 40}))
    assert connection.send(Puback(3, 0x97, {"user_properties": [("a", "x" * 40)]}))
    sent = decoded(connection.data_to_send(), 5)
    assert [(made.mid, made.reason.value) for _, made in sent] == [(1, 0x97), (2, 0x97), (3, 0x97)]
    assert [from_paho(made.properties) for _, made in sent] == [{"reason_string": "short"}, {}, {}]


def test_reasons_are_left_out_where_the_client_does_not_want_them() -> None:
    """But for CONNACK and DISCONNECT: MQTT 5.0, section 3.1.2.11.7."""
    connection = Connection()
    events(connection, connect(5, having=b"\x17\0"))
    told = {"reason_string": "why", "user_properties": [("a", "b")]}
    connection.send(Connack(0, False, {"reason_string": "why"}))
    connection.send(Suback(1, [0x80], {"reason_string": "why", "user_properties": [("a", "b")]}))
    connection.send(Disconnect(0x80, {"reason_string": "why", "user_properties": [("a", "b")]}))
    connack, suback, disconnect = (from_paho(made.properties) for _, made in decoded(connection.data_to_send(), 5))
    assert connack["reason_string"] == "why"
    assert suback == {}
    assert disconnect == told


def test_an_answer_that_is_too_large_without_its_reasons_is_not_sent() -> None:
    """The server goes on as if it were; a CONNACK that cannot be sent is the end."""
    connection = opened(5, having=b"\x27\0\0\0\x14")
    assert not connection.send(Suback(1, [0] * 20))
    assert connection.data_to_send() == b""
    assert connection.state is State.OPEN
    connection = Connection()
    events(connection, connect(5, having=b"\x27\0\0\0\x05"))
    assert not connection.send(Connack())
    assert connection.state is State.CLOSED


@pytest.mark.parametrize(("qos", "packet_id"), [(0, 1), (1, 0), (2, 0), (1, 65_536)])
def test_a_packet_id_goes_with_qos_alone(qos: int, packet_id: int) -> None:
    """Else the client would read something else."""
    connection = opened(4)
    with pytest.raises(InvalidArgument, match="packet id"):
        connection.publish(encode_publish(4, "t", b"", qos), packet_id)
    assert connection.data_to_send() == b""


# Flow control.


def test_more_than_the_receive_maximum_is_refused_in_version_5() -> None:
    """PUBACK and PUBCOMP make room, and PUBREC with an error."""
    connection = opened(5, Limits(receive_maximum=2))
    one, two = publish(5, "t", first=0x32, packet_id=1), publish(5, "t", first=0x34, packet_id=2)
    events(connection, one, two)
    assert connection.unacknowledged == 2
    assert len(events(connection, publish(5, "t"))) == 1, "QoS 0 is not counted"
    connection.send(Pubrec(2))
    assert connection.unacknowledged == 2
    connection.send(Puback(1))
    assert connection.unacknowledged == 1
    events(connection, packet(0x62, b"\0\2"))
    connection.send(Pubcomp(2))
    assert connection.unacknowledged == 0
    events(connection, two)
    connection.send(Pubrec(2, ReasonCode.QUOTA_EXCEEDED))
    assert connection.unacknowledged == 0
    connection.send(Puback(1))
    connection.send(Pubcomp(2, ReasonCode.PACKET_ID_NOT_FOUND))
    assert connection.unacknowledged == 0, "what was never counted frees nothing"
    assert not any(isinstance(event, Failed) for event in events(connection, one, two))
    (event,) = events(connection, publish(5, "t", first=0x34, packet_id=3))
    assert isinstance(event, Failed)
    assert event.code is ReasonCode.RECEIVE_MAXIMUM_EXCEEDED


def test_a_publish_that_is_sent_again_counts_once() -> None:
    """QoS 2 with the same packet id."""
    connection = opened(5, Limits(receive_maximum=1))
    again = publish(5, "t", first=0x3C, packet_id=9)
    assert [type(event) for event in events(connection, again, again)] == [Publish, Publish]
    assert connection.unacknowledged == 1


def test_3_1_1_has_no_receive_maximum() -> None:
    connection = opened(4, Limits(receive_maximum=2))
    assert len(events(connection, *(publish(4, "t", first=0x32, packet_id=one) for one in range(1, 11)))) == 10
    assert connection.unacknowledged == 10


# Topics.


def test_an_alias_stands_for_its_topic() -> None:
    """Until it is given to another; the event has the topic, and no alias."""
    connection = opened(5)
    alias = b"\x23\0\1"
    sent = [
        publish(5, "a", b"1", having=alias),
        publish(5, "", b"2", having=alias),
        publish(5, "b", b"3", having=b"\x01\1" + alias),
        publish(5, "", b"4", having=alias),
        publish(5, "c", b"5", having=b"\x23\0\x40"),
    ]
    assert events(connection, *sent) == [
        Publish("a", b"1"),
        Publish("a", b"2"),
        Publish("b", b"3", properties={"payload_format": 1}),
        Publish("b", b"4"),
        Publish("c", b"5"),
    ]
    (event,) = events(opened(5), sent[1])
    assert isinstance(event, Failed), "aliases are those of one connection"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["short", "a/topic/1", "a/topic/2", "a/topic/3", "é" * 20, "x" * 40]),
            st.sampled_from([b"", b"\0", b"x" * 30, b"y" * 60]),
            st.integers(0, 2),
            st.sampled_from([{}, {"content_type": "t" * 30}, {"user_properties": [("a", "b" * 50)]}]),
        ),
        max_size=20,
    ),
    st.integers(1, 4),
)
@settings(deadline=None, database=None, max_examples=examples(200))
def test_a_client_that_takes_aliases_gets_them(messages: list[tuple[str, bytes, int, Properties]], most: int) -> None:
    """No more of them than it takes, none for what it knows; and no packet is larger than it takes."""
    connection = opened(5, having=b"\x22\0" + bytes((most,)) + b"\x27\0\0\0\x60")
    known: dict[int, str] = {}
    for number, (topic, payload, qos, having) in enumerate(messages, 1):
        encoded = encode_publish(5, topic, payload, qos, properties=having)
        if not connection.publish(encoded, number if qos else 0):
            assert not connection.takes(encoded)
            continue
        pending = connection.pending_bytes
        sent = connection.data_to_send()
        assert len(sent) == pending <= 0x60
        ((_, made),) = decoded(sent, 5)
        told = from_paho(made.properties)
        alias = told.pop("topic_alias", 0)
        if alias and made.topic:
            assert alias not in known
            known[alias] = made.topic.decode()
        assert (known[alias] if alias else made.topic.decode()) == topic
        assert alias or topic not in known.values()
        assert (made.payload, made.qos, made.mid, told) == (payload, qos, number if qos else 0, having)
    assert len(known) <= most
    assert known.keys() <= set(range(1, most + 1))


def test_an_alias_takes_the_place_of_its_topic() -> None:
    """From the second publish on; a third topic has none where two may have one."""
    connection = opened(5, having=b"\x22\0\2")
    for topic in ("plant/1", "plant/2", "plant/3", "plant/1", "plant/2", "plant/3"):
        connection.publish(encode_publish(5, topic, b""))
    sent = [(made.topic, from_paho(made.properties)) for _, made in decoded(connection.data_to_send(), 5)]
    assert sent == [
        (b"plant/1", {"topic_alias": 1}),
        (b"plant/2", {"topic_alias": 2}),
        (b"plant/3", {}),
        (b"", {"topic_alias": 1}),
        (b"", {"topic_alias": 2}),
        (b"plant/3", {}),
    ]


def test_a_payload_is_taken_as_it_is() -> None:
    """Also where it looks like properties, or like the next packet."""
    for version in VERSIONS:
        for payload in (b"", b"\0", b"\x05\1", PING, bytes(range(256))):
            assert events(opened(version), publish(version, "t", payload)) == [Publish("t", payload)]


def test_a_shared_filter_is_divided() -> None:
    """Into its group and what it asks for; a filter that only looks so is none."""
    (event,) = events(opened(4), subscribe(4, ("$share/g/a/#", 1), ("$share", 0), ("$SYS/#", 0), ("a/$share/b", 2)))
    assert isinstance(event, Subscribe)
    divided = [split_shared(one.filter) for one in event.subscriptions]
    assert divided == [("g", "a/#"), ("", "$share"), ("", "$SYS/#"), ("", "a/$share/b")]


# Errors of the broker.


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokerClosed("closed"), ReasonCode.SERVER_SHUTTING_DOWN),
        (DiskFull("full"), ReasonCode.QUOTA_EXCEEDED),
        (InvalidArgument("wrong"), ReasonCode.IMPLEMENTATION_SPECIFIC),
        (QflowError("other"), ReasonCode.UNSPECIFIED),
        (MqttError(0x87, "not allowed"), ReasonCode.NOT_AUTHORIZED),
    ],
)
def test_an_error_of_the_broker_has_a_reason_code(error: QflowError, code: ReasonCode) -> None:
    """The text stays."""
    told = as_mqtt_error(error)
    assert (told.code, told.text) == (code, getattr(error, "text", str(error)))
    assert str(MqttError(0x87, "not allowed")) == "0x87 NOT_AUTHORIZED: not allowed"


# Memory.


def test_a_packet_that_drips_in_is_held_once() -> None:
    """In pieces of 100 bytes, and no copy of it for each."""
    connection = opened(4)
    whole = publish(4, "t", bytes(500_000))
    tracemalloc.start()
    try:
        for at in range(0, len(whole) - 100, 100):
            assert events(connection, whole[at : at + 100]) == []
        held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 600_000
    assert most < 1_300_000
    (event,) = events(connection, whole[len(whole) - len(whole) % 100 - 100 * (len(whole) % 100 == 0) :])
    assert event == Publish("t", bytes(500_000))


def test_acknowledgements_in_both_directions_are_four_bytes() -> None:
    for version in VERSIONS:
        connection = opened(version)
        for kind, first in ((Puback, b"\x40"), (Pubrec, b"\x50"), (Pubrel, b"\x62"), (Pubcomp, b"\x70")):
            assert connection.send(kind(0x1234))
            sent = connection.data_to_send()
            assert sent == first + b"\2\x12\x34"
            assert events(connection, sent) == [kind(0x1234)]
