"""The codec and paho's make the same of the same values, in both directions and both versions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode as PahoCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from mqtt_wire import VERSIONS, WILL, Writer, as_paho, decoded, divided, events, from_paho, opened
from qflow.errors import InvalidArgument
from qflow.mqtt.errors import RETURN_CODES, ReasonCode
from qflow.mqtt.wire import Connection, Limits, State, encode_publish
from qflow.mqtt.wire.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)
from thorough import examples

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
TOPIC = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), min_size=1, max_size=20)
PLAIN_TOPIC = TOPIC.filter(lambda text: not text.startswith("$share"))
FILTER = st.one_of(
    PLAIN_TOPIC,
    st.just("#"),
    PLAIN_TOPIC.map(lambda text: f"{text}/+/#"),
    st.tuples(st.text("abc", min_size=1), PLAIN_TOPIC).map(lambda two: f"$share/{two[0]}/{two[1]}"),
)
BINARY = st.binary(max_size=40)
ID = st.integers(1, 65_535)
FLAG = st.integers(0, 1)
TWO, NATURAL_TWO, FOUR = st.integers(0, 0xFFFF), st.integers(1, 0xFFFF), st.integers(0, 0xFFFFFFFF)
NATURAL = st.integers(1, 268_435_455)
PAIRS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)

USER = {"user_properties": PAIRS}
ON_MESSAGE = USER | {
    "payload_format": FLAG,
    "message_expiry_s": FOUR,
    "content_type": TEXT,
    "response_topic": TOPIC,
    "correlation_data": BINARY,
}
ON_WILL = ON_MESSAGE | {"will_delay_s": FOUR}
ON_CONNECT = USER | {
    "session_expiry_s": FOUR,
    "receive_maximum": NATURAL_TWO,
    "maximum_packet_bytes": NATURAL,
    "topic_alias_maximum": TWO,
    "request_response_information": FLAG,
    "request_problem_information": FLAG,
    "authentication_method": TEXT,
}
ON_CONNACK = USER | {
    "session_expiry_s": FOUR,
    "maximum_qos": FLAG,
    "retain_available": FLAG,
    "assigned_client_id": TEXT,
    "reason_string": TEXT,
    "wildcard_subscription_available": FLAG,
    "subscription_identifiers_available": FLAG,
    "shared_subscription_available": FLAG,
    "server_keep_alive_s": TWO,
    "response_information": TEXT,
    "server_reference": TEXT,
    "authentication_method": TEXT,
    "authentication_data": BINARY,
}
WITH_REASON = USER | {"reason_string": TEXT}
ACKS = ((Puback, 0x40), (Pubrec, 0x50), (Pubrel, 0x62), (Pubcomp, 0x70))
ACK_CODES = {
    Puback: (0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99),
    Pubrec: (0, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99),
    Pubrel: (0, 0x92),
    Pubcomp: (0, 0x92),
}


def some(of: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any of these properties."""
    return st.fixed_dictionaries({}, optional=of)


SETTINGS = settings(deadline=None, database=None, max_examples=examples(150))


# From a client.


@SETTINGS
@given(st.data(), st.sampled_from(VERSIONS))
def test_connect(data: st.DataObject, version: int) -> None:
    """With all that it may carry; a password without a user name is something of version 5 that paho does not send."""
    has_properties = version == 5
    properties = data.draw(some(ON_CONNECT)) if has_properties else {}
    if "authentication_method" in properties and data.draw(st.booleans()):
        properties["authentication_data"] = data.draw(BINARY)
    client_id = data.draw(st.text("abcé/$", min_size=1, max_size=23))
    clean_start, keep_alive_s = data.draw(st.booleans()), data.draw(TWO)
    writer = Writer(version, client_id, clean_session=None if has_properties else clean_start)
    will, username, password = None, None, None
    if data.draw(st.booleans()):
        qos, retain = data.draw(st.integers(0, 2)), data.draw(st.booleans())
        of_will = data.draw(some(ON_WILL)) if has_properties else {}
        will = Will(data.draw(TOPIC), data.draw(BINARY), qos, retain, of_will)
        writer.will_set(will.topic, will.payload, qos, retain, as_paho(WILL, of_will) if has_properties else None)
    if data.draw(st.booleans()):
        username, password = data.draw(TEXT), data.draw(st.none() | TEXT)
        writer.username_pw_set(username, password)
    sent = writer.connect_bytes(
        keep_alive_s, clean_start, as_paho(PacketTypes.CONNECT, properties) if properties else None
    )
    connection = Connection()
    said = password.encode() if password is not None else None
    expected = Connect(version, client_id, clean_start, keep_alive_s, username, said, will, properties)
    assert events(connection, sent) == [expected]
    assert connection.connect == expected
    assert connection.version == version


@SETTINGS
@given(st.data(), st.sampled_from(VERSIONS))
def test_publish_of_a_client(data: st.DataObject, version: int) -> None:
    """QoS 0 has no packet id, and never DUP."""
    topic, payload = data.draw(TOPIC), data.draw(BINARY)
    qos, retain = data.draw(st.integers(0, 2)), data.draw(st.booleans())
    dup = bool(qos) and data.draw(st.booleans())
    packet_id = data.draw(ID) if qos else 0
    properties = data.draw(some(ON_MESSAGE)) if version == 5 else {}
    having = as_paho(PacketTypes.PUBLISH, properties) if properties else None
    sent = Writer(version).publish_bytes(packet_id, topic, payload, (qos, retain, dup), having)
    assert events(opened(version), sent) == [Publish(topic, payload, qos, retain, dup, packet_id, properties)]


@SETTINGS
@given(
    st.lists(
        st.tuples(FILTER, st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 2)), min_size=1, max_size=5
    ),
    some(USER | {"subscription_identifiers": NATURAL.map(lambda one: [one])}),
    st.sampled_from(VERSIONS),
)
def test_subscribe(asked: list[tuple[str, int, bool, bool, int]], properties: dict[str, Any], version: int) -> None:
    """A shared subscription has no no-local."""
    if version == 4:
        topics: list[tuple[bytes, Any]] = [(name.encode(), qos) for name, qos, *_ in asked]
        sent = Writer(version).subscribe_bytes(topics, None)
        expected = Subscribe(1, [Subscription(name, qos) for name, qos, *_ in asked])
    else:
        asked = [
            (name, qos, local and not name.startswith("$share/"), kept, how) for name, qos, local, kept, how in asked
        ]
        topics = [(name.encode(), SubscribeOptions(qos, local, kept, how)) for name, qos, local, kept, how in asked]
        sent = Writer(version).subscribe_bytes(topics, as_paho(PacketTypes.SUBSCRIBE, properties))
        expected = Subscribe(1, [Subscription(*one) for one in asked], properties)
    assert events(opened(version), sent) == [expected]


@SETTINGS
@given(st.lists(FILTER, min_size=1, max_size=5), some(USER), st.sampled_from(VERSIONS))
def test_unsubscribe(filters: list[str], properties: dict[str, Any], version: int) -> None:
    having = as_paho(PacketTypes.UNSUBSCRIBE, properties) if version == 5 else None
    sent = Writer(version).unsubscribe_bytes([name.encode() for name in filters], having)
    assert events(opened(version), sent) == [Unsubscribe(1, filters, properties if version == 5 else {})]


@SETTINGS
@given(st.sampled_from([0, 4, 0x80, 0x81, 0x82, 0x83, 0x90, 0x93, 0x95, 0x96, 0x97, 0x98, 0x99]), some(WITH_REASON))
def test_disconnect_of_a_client(code: int, properties: dict[str, Any]) -> None:
    """A client of 3.1.1 says nothing with it."""
    paho_code = PahoCode(PacketTypes.DISCONNECT, identifier=code)
    having = as_paho(PacketTypes.DISCONNECT, properties) if properties else None
    connection = opened(5)
    assert events(connection, Writer(5).disconnect_bytes(paho_code, having)) == [Disconnect(code, properties)]
    assert connection.state is State.CLOSED
    assert connection.data_to_send() == b""
    assert events(opened(4), Writer(4).disconnect_bytes(None, None)) == [Disconnect()]


@SETTINGS
@given(st.sampled_from(ACKS), ID, st.sampled_from(VERSIONS), st.data())
def test_acknowledgements_of_a_client(ack: tuple[Any, int], packet_id: int, version: int, data: st.DataObject) -> None:
    """In version 5 also as long as they may be: paho sends the short form alone, with codes and properties of its own."""
    kind, first = ack
    assert events(opened(version), Writer(version).ack_bytes(first, packet_id)) == [kind(packet_id)]
    if version == 5:
        code = data.draw(st.sampled_from(ACK_CODES[kind]))
        properties = data.draw(some(WITH_REASON))
        behind = packet_id.to_bytes(2) + bytes((code,)) + as_paho(first >> 4, properties).pack()
        if len(behind) < 128:
            assert events(opened(5), bytes((first, len(behind))) + behind) == [kind(packet_id, code, properties)]
        assert events(opened(5), bytes((first, 3)) + behind[:3]) == [kind(packet_id, code)]


# To a client.


@SETTINGS
@given(st.data(), st.sampled_from(VERSIONS), st.integers(0, 2), st.booleans(), st.booleans())
def test_publish_to_a_client(data: st.DataObject, version: int, qos: int, retain: bool, dup: bool) -> None:
    """Encoded once, with the packet id put between; properties are for version 5."""
    topic, payload = data.draw(TOPIC), data.draw(st.binary(max_size=200))
    packet_id = data.draw(ID) if qos else 0
    ids = {"subscription_identifiers": st.lists(NATURAL, min_size=1, max_size=3)}
    properties = data.draw(some(ON_MESSAGE | ids))
    encoded = encode_publish(version, topic, payload, qos, retain, dup and qos > 0, properties)  # type: ignore[arg-type]
    assert qos or not encoded[1]
    connection = opened(version)
    assert connection.publish(encoded, packet_id)
    pending = connection.pending_bytes
    sent = connection.data_to_send()
    assert pending == len(sent)
    assert connection.pending_bytes == 0
    ((_, made),) = decoded(sent, version)
    assert made[:5] == (dup and qos > 0, qos, retain, topic.encode(), packet_id)
    assert made.payload == payload
    assert from_paho(made.properties) == (properties if version == 5 else {})


@SETTINGS
@given(st.sampled_from(list(RETURN_CODES)), st.booleans(), some(ON_CONNACK), st.sampled_from(VERSIONS))
def test_connack(code: ReasonCode, is_present: bool, properties: dict[str, Any], version: int) -> None:
    """In version 5 one that accepts tells the limits, too; a session is present only where the client is accepted."""
    connection = Connection(Limits(receive_maximum=7, maximum_packet_bytes=999, topic_alias_maximum=5))
    events(connection, Writer(version).connect_bytes(60, True, None))
    assert connection.send(Connack(code, is_present, properties))  # type: ignore[arg-type]
    assert connection.state is (State.CLOSED if code else State.OPEN)
    ((_, made),) = decoded(connection.data_to_send(), version)
    assert made.flags == (is_present and not code)
    if version == 4:
        assert made.rc == RETURN_CODES[code]
        return
    told = {"receive_maximum": 7, "maximum_packet_bytes": 999, "topic_alias_maximum": 5}
    mapped = ReasonCode.SERVER_UNAVAILABLE if code == ReasonCode.SERVER_SHUTTING_DOWN else code
    assert made.rc == mapped
    assert from_paho(made.properties) == (properties if code else properties | told)


@SETTINGS
@given(
    ID,
    st.lists(st.sampled_from([0, 1, 2, 0x80, 0x87, 0x8F]), min_size=1, max_size=5),
    some(WITH_REASON),
    st.sampled_from(VERSIONS),
)
def test_suback(packet_id: int, codes: list[int], properties: dict[str, Any], version: int) -> None:
    """3.1.1 has one code for all that is refused."""
    connection = opened(version)
    connection.send(Suback(packet_id, codes, properties))  # type: ignore[arg-type]
    ((_, made),) = decoded(connection.data_to_send(), version)
    assert made.mid == packet_id
    assert [code.value for code in made.reason_codes] == [code if version == 5 else min(code, 0x80) for code in codes]
    assert from_paho(made.properties) == (properties if version == 5 else {})


@SETTINGS
@given(
    ID,
    st.lists(st.sampled_from([0, 0x11, 0x80, 0x87, 0x8F]), min_size=1, max_size=5),
    some(WITH_REASON),
    st.sampled_from(VERSIONS),
)
def test_unsuback(packet_id: int, codes: list[int], properties: dict[str, Any], version: int) -> None:
    """3.1.1 has no codes in it."""
    connection = opened(version)
    connection.send(Unsuback(packet_id, codes, properties))  # type: ignore[arg-type]
    ((_, made),) = decoded(connection.data_to_send(), version)
    assert made.mid == packet_id
    assert [code.value for code in made.reason_codes] == (codes if version == 5 else [])
    assert from_paho(made.properties) == (properties if version == 5 else {})


@SETTINGS
@given(st.sampled_from(ACKS), ID, some(WITH_REASON), st.sampled_from(VERSIONS), st.data())
def test_acknowledgements(
    ack: tuple[Any, int], packet_id: int, properties: dict[str, Any], version: int, data: st.DataObject
) -> None:
    kind, first = ack
    code = data.draw(st.sampled_from(ACK_CODES[kind]))
    connection = opened(version)
    connection.send(kind(packet_id, code, properties))
    ((sent_first, made),) = decoded(connection.data_to_send(), version)
    assert (sent_first, made.mid) == (first, packet_id)
    if version == 5:
        assert made.reason.value == code
        assert from_paho(made.properties) == properties


@SETTINGS
@given(
    st.sampled_from([0, 0x80, 0x81, 0x82, 0x87, 0x8B, 0x8D, 0x8E, 0x93, 0x95, 0x9C]),
    some(WITH_REASON | {"server_reference": TEXT}),
)
def test_disconnect(code: int, properties: dict[str, Any]) -> None:
    """A client of 3.1.1 is told nothing."""
    connection = opened(5)
    assert connection.send(Disconnect(code, properties))  # type: ignore[arg-type]
    assert connection.state is State.CLOSED
    ((_, made),) = decoded(connection.data_to_send(), 5)
    assert (made.reason.value if made.reason else 0) == code
    assert from_paho(made.properties) == properties
    connection = opened(4)
    assert not connection.send(Disconnect(code, properties))  # type: ignore[arg-type]
    assert connection.state is State.CLOSED
    assert connection.data_to_send() == b""


def test_auth() -> None:
    """By hand: paho has no AUTH. Version 3.1.1 has none either."""
    connection = opened(5, having=b"\x15\0\4SCRM")
    connection.send(
        Auth(ReasonCode.CONTINUE_AUTHENTICATION, {"authentication_method": "SCRM", "authentication_data": b"x"})
    )
    assert connection.data_to_send() == b"\xf0\x0d\x18\x0b\x15\0\4SCRM\x16\0\1x"
    assert events(connection, b"\xf0\x0d\x19\x0b\x15\0\4SCRM\x16\0\1x") == [
        Auth(ReasonCode.RE_AUTHENTICATE, {"authentication_method": "SCRM", "authentication_data": b"x"})
    ]
    assert not opened(4).send(Auth(ReasonCode.CONTINUE_AUTHENTICATION))


# What has no place.


@pytest.mark.parametrize("size", [0, 126, 127, 128, 16_382, 16_383, 16_384, 2_097_151, 2_097_152])
@pytest.mark.parametrize("version", VERSIONS)
def test_lengths_of_one_to_four_bytes(version: int, size: int) -> None:
    """To a client, and from paho."""
    payload = bytes(size)
    connection = opened(version, Limits(maximum_packet_bytes=4_000_000))
    connection.publish(encode_publish(version, "t", payload))
    sent = connection.data_to_send()
    assert sent == Writer(version).publish_bytes(0, "t", payload, (0, False, False), None)
    assert events(connection, sent) == [Publish("t", payload)]
    assert [len(body) for _, body in divided(sent)] == [size + 3 + (version == 5)]


@pytest.mark.parametrize("number", [1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 268_435_455])
def test_integers_of_one_to_four_bytes(number: int) -> None:
    """From paho, and to it."""
    properties: Properties = {"subscription_identifiers": [number]}
    sent = Writer(5).subscribe_bytes([(b"t", SubscribeOptions())], as_paho(PacketTypes.SUBSCRIBE, properties))
    assert events(opened(5), sent) == [Subscribe(1, [Subscription("t")], properties)]
    ((_, made),) = decoded(encode_publish(5, "t", b"", properties=properties)[0], 5)
    assert from_paho(made.properties) == properties


@pytest.mark.parametrize(
    ("properties", "named"),
    [
        ({"content_type": "x" * 65_536}, "content_type"),
        ({"content_type": "a\0b"}, "content_type"),
        ({"content_type": "\ud800"}, "content_type"),
        ({"correlation_data": bytes(65_536)}, "correlation_data"),
        ({"message_expiry_s": 1 << 32}, "message_expiry_s"),
        ({"message_expiry_s": -1}, "message_expiry_s"),
        ({"user_properties": [("a", "x" * 65_536)]}, "user_properties"),
    ],
)
def test_what_mqtt_has_no_place_for_is_named(properties: Any, named: str) -> None:
    """Nothing of it is sent."""
    with pytest.raises(InvalidArgument, match=named):
        encode_publish(5, "t", b"", properties=properties)
    assert encode_publish(4, "t", b"", properties=properties) == (b"\x30\x03\0\1t", b"")


def test_a_topic_of_64_kib_and_a_payload_of_256_mib_have_no_place() -> None:
    """The first is named."""
    with pytest.raises(InvalidArgument, match="topic"):
        encode_publish(4, "t" * 65_536, b"")
    with pytest.raises(InvalidArgument, match="268,435,455"):
        encode_publish(4, "t", bytes(268_435_453))
