"""What the specification forbids, packet by packet: the code that the client is told, and how it is told."""

from __future__ import annotations

import pytest

from mqtt_wire import connect, decoded, events, opened, packet, properties, publish, string, subscribe, variable
from qflow.mqtt.errors import ReasonCode
from qflow.mqtt.wire import Connection, Limits, State
from qflow.mqtt.wire.packets import Failed, Publish

MALFORMED, PROTOCOL = 0x81, 0x82
SMALL = Limits(
    maximum_packet_bytes=2000,
    connect_bytes=1000,
    topic_bytes=100,
    topic_levels=5,
    filters=3,
    user_properties_bytes=60,
    client_id_bytes=10,
    topic_alias_maximum=4,
    receive_maximum=2,
)
SURROGATE, OVERLONG, CUT = b"\xed\xa0\x80", b"\xc0\xaf", b"\xe2\x82"
WILL_FLAGS = 0x06


def head(name: str | bytes, level: int, flags: int = 2) -> bytes:
    """What a CONNECT begins with, up to its keep-alive."""
    return string(name) + bytes((level, flags)) + b"\0\x3c"


def user(size: int) -> bytes:
    """A user property of `size` bytes beside its number."""
    return b"\x26" + string("") + string("x" * (size - 4))


def failure(connection: Connection, data: bytes) -> Failed:
    """The one event of bytes that end the connection; nothing is read after it, and the bytes were not in vain."""
    (event,) = events(connection, data)
    assert isinstance(event, Failed)
    assert connection.state is State.CLOSED
    assert events(connection, data, connect(5)) == []
    return event


NO_MQTT = {
    "another first packet": packet(0xC0),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "one byte of TLS": b"\x16",
    "flags of CONNECT": b"\x11\x00",
    "length of five bytes": b"\x10\xff\xff\xff\xff\x01",
    "empty": packet(0x10),
    "ends in the name": packet(0x10, b"\0\4MQ"),
    "ends before the level": packet(0x10, string("MQTT")),
    "another name": packet(0x10, head("MQTX", 5), b"\0", string("c")),
    "lower case": packet(0x10, head("mqtt", 4), string("c")),
    "too large": b"\x10" + variable(998),
}
"""What is answered with nothing, since its version is unknown."""
CONNECTS: dict[str, tuple[int, bytes, int]] = {
    # Version, packet, reason code.
    "level 3 of MQTT": (4, packet(0x10, head("MQTT", 3), string("c")), 0x84),
    "MQTT 3.1": (4, packet(0x10, head("MQIsdp", 3), string("c")), 0x84),
    "level 6": (5, packet(0x10, head("MQTT", 6), b"\0", string("c")), 0x84),
    "a bridge that tries an extension": (4, packet(0x10, head("MQTT", 0x84), string("c")), 0x84),
    "a bridge of MQTT 5": (5, packet(0x10, head("MQTT", 0x85), b"\0", string("c")), 0x84),
    "a bridge of MQTT 3.1": (4, packet(0x10, head("MQIsdp", 0x83), string("c")), 0x84),
    "reserved flag": (5, connect(5, flags=3), MALFORMED),
    "reserved flag in 3.1.1": (4, connect(4, flags=3), MALFORMED),
    "will with QoS 3": (5, connect(5, flags=0x1E, rest=properties() + string("t") + string("")), MALFORMED),
    "QoS of no will": (5, connect(5, flags=0x0A), MALFORMED),
    "retain of no will": (5, connect(5, flags=0x22), MALFORMED),
    "password without a user in 3.1.1": (4, connect(4, flags=0x42, rest=string("p")), MALFORMED),
    "ends before the keep-alive": (5, packet(0x10, string("MQTT"), b"\5\2\0"), MALFORMED),
    "ends before the properties": (5, packet(0x10, head("MQTT", 5)), MALFORMED),
    "ends before the client id": (4, packet(0x10, head("MQTT", 4)), MALFORMED),
    "ends in the client id": (4, packet(0x10, head("MQTT", 4), b"\0\5abc"), MALFORMED),
    "ends before the will": (4, connect(4, flags=WILL_FLAGS), MALFORMED),
    "ends before the will's message": (4, connect(4, flags=WILL_FLAGS, rest=string("t")), MALFORMED),
    "ends before the user name": (4, connect(4, flags=0x82), MALFORMED),
    "ends before the password": (4, connect(4, flags=0xC2, rest=string("u")), MALFORMED),
    "goes on": (4, connect(4, rest=b"x"), MALFORMED),
    "client id with NUL": (4, connect(4, client_id="a\0"), MALFORMED),
    "client id with a surrogate": (5, connect(5, client_id=SURROGATE), MALFORMED),
    "user name that is no UTF-8": (5, connect(5, flags=0x82, rest=string(CUT)), MALFORMED),
    "client id above the limit": (5, connect(5, client_id="x" * 11), 0x85),
    "client id above the limit in 3.1.1": (4, connect(4, client_id="x" * 11), 0x85),
    "no client id for a session that stays": (4, connect(4, client_id="", flags=0), 0x85),
    "will to a filter": (4, connect(4, flags=WILL_FLAGS, rest=string("a/#") + string("")), MALFORMED),
    "will to nothing": (4, connect(4, flags=WILL_FLAGS, rest=string("") + string("")), MALFORMED),
    "will to a topic with NUL": (5, connect(5, flags=WILL_FLAGS, rest=b"\0" + string("\0") + string("")), MALFORMED),
    "will to a topic above the limit": (4, connect(4, flags=WILL_FLAGS, rest=string("x" * 101) + string("")), 0x90),
    "will with a property of CONNECT": (5, connect(5, flags=WILL_FLAGS, rest=properties(b"\x21\0\1")), MALFORMED),
    "properties that are cut short": (5, packet(0x10, head("MQTT", 5), b"\x05\x11"), MALFORMED),
    "a property that is cut short": (5, connect(5, having=b"\x11\0\0"), MALFORMED),
    "a property that does not exist": (5, connect(5, having=b"\x7f\0"), MALFORMED),
    "a property of PUBLISH": (5, connect(5, having=b"\x01\0"), MALFORMED),
    "a property of CONNACK": (5, connect(5, having=b"\x24\0"), MALFORMED),
    "delay of a will on CONNECT": (5, connect(5, having=b"\x18\0\0\0\1"), MALFORMED),
    "a property twice": (5, connect(5, having=b"\x21\0\1\x21\0\1"), PROTOCOL),
    "receive maximum 0": (5, connect(5, having=b"\x21\0\0"), PROTOCOL),
    "maximum packet size 0": (5, connect(5, having=b"\x27\0\0\0\0"), PROTOCOL),
    "problem information 2": (5, connect(5, having=b"\x17\2"), PROTOCOL),
    "response information 2": (5, connect(5, having=b"\x19\2"), PROTOCOL),
    "authentication data without a method": (5, connect(5, having=b"\x16\0\1x"), PROTOCOL),
    "user properties above the limit": (5, connect(5, having=user(61)), 0x97),
    "user properties above the limit together": (5, connect(5, having=user(31) + user(30)), 0x97),
    "length of properties that is too long": (5, packet(0x10, head("MQTT", 5), b"\x80\0", string("c")), MALFORMED),
}
BOTH: dict[str, tuple[bytes, bytes, int]] = {
    # The packet in 3.1.1, and in 5.
    "packet type 0": (packet(0x00), packet(0x00), MALFORMED),
    "second CONNECT": (connect(4), connect(5), PROTOCOL),
    "CONNACK": (packet(0x20, b"\0\0"), packet(0x20, b"\0\0\0"), PROTOCOL),
    "SUBACK": (packet(0x90, b"\0\1\0"), packet(0x90, b"\0\1\0\0"), PROTOCOL),
    "UNSUBACK": (packet(0xB0, b"\0\1"), packet(0xB0, b"\0\1\0\0"), PROTOCOL),
    "PINGRESP": (packet(0xD0), packet(0xD0), PROTOCOL),
    "flags of PUBACK": (packet(0x42, b"\0\1"), packet(0x42, b"\0\1"), MALFORMED),
    "flags of PUBREL": (packet(0x60, b"\0\1"), packet(0x60, b"\0\1"), MALFORMED),
    "flags of SUBSCRIBE": (b"\x80" + subscribe(4, ("a", 0))[1:], b"\x80" + subscribe(5, ("a", 0))[1:], MALFORMED),
    "flags of UNSUBSCRIBE": (packet(0xA0, b"\0\1\0\1a"), packet(0xA0, b"\0\1\0\0\1a"), MALFORMED),
    "flags of PINGREQ": (packet(0xC1), packet(0xC1), MALFORMED),
    "flags of DISCONNECT": (packet(0xE1), packet(0xE1), MALFORMED),
    "length of five bytes": (b"\x30\x80\x80\x80\x80\x01", b"\x30\x80\x80\x80\x80\x01", MALFORMED),
    "too large": (b"\x30" + variable(1998), b"\x30" + variable(1998), 0x95),
    "far too large": (b"\x30\xff\xff\xff\x7f", b"\x30\xff\xff\xff\x7f", 0x95),
    "PINGREQ that goes on": (packet(0xC0, b"x"), packet(0xC0, b"x"), MALFORMED),
    "QoS 3": (publish(4, "t", first=0x36, packet_id=1), publish(5, "t", first=0x36, packet_id=1), MALFORMED),
    "DUP of QoS 0": (publish(4, "t", first=0x38), publish(5, "t", first=0x38), MALFORMED),
    "empty PUBLISH": (packet(0x30), packet(0x30), MALFORMED),
    "topic that is cut short": (packet(0x30, b"\0\5abc"), packet(0x30, b"\0\5abc"), MALFORMED),
    "ends before the packet id": (packet(0x32, string("t"), b"\0"), packet(0x32, string("t"), b"\0"), MALFORMED),
    "packet id 0": (publish(4, "t", first=0x32), publish(5, "t", first=0x32), PROTOCOL),
    "publish to #": (publish(4, "#"), publish(5, "#"), MALFORMED),
    "publish to a/+": (publish(4, "a/+"), publish(5, "a/+"), MALFORMED),
    "topic with NUL": (publish(4, "a\0b"), publish(5, "a\0b"), MALFORMED),
    "topic with a surrogate": (publish(4, SURROGATE), publish(5, SURROGATE), MALFORMED),
    "overlong UTF-8": (publish(4, OVERLONG), publish(5, OVERLONG), MALFORMED),
    "UTF-8 that is cut short": (publish(4, CUT), publish(5, CUT), MALFORMED),
    "topic above the limit": (publish(4, "x" * 101), publish(5, "x" * 101), 0x90),
    "too many levels": (publish(4, "a/b/c/d/e/f"), publish(5, "a/b/c/d/e/f"), 0x90),
    "PUBACK of packet id 0": (packet(0x40, b"\0\0"), packet(0x40, b"\0\0"), PROTOCOL),
    "PUBREL without a packet id": (packet(0x62, b"\0"), packet(0x62, b"\0"), MALFORMED),
    "SUBSCRIBE with packet id 0": (subscribe(4, ("a", 0), packet_id=0), subscribe(5, ("a", 0), packet_id=0), PROTOCOL),
    "SUBSCRIBE to nothing": (subscribe(4), subscribe(5), PROTOCOL),
    "SUBSCRIBE that ends before its options": (packet(0x82, b"\0\1\0\1a"), packet(0x82, b"\0\1\0\0\1a"), MALFORMED),
    "filter a/#/b": (subscribe(4, ("a/#/b", 0)), subscribe(5, ("a/#/b", 0)), MALFORMED),
    "filter a+": (subscribe(4, ("x", 0), ("a+", 0)), subscribe(5, ("x", 0), ("a+", 0)), MALFORMED),
    "filter without characters": (subscribe(4, ("", 0)), subscribe(5, ("", 0)), MALFORMED),
    "filter with NUL": (subscribe(4, ("a\0", 0)), subscribe(5, ("a\0", 0)), MALFORMED),
    "filter that is no UTF-8": (subscribe(4, (CUT, 0)), subscribe(5, (CUT, 0)), MALFORMED),
    "filter above the limit": (subscribe(4, ("x" * 101, 0)), subscribe(5, ("x" * 101, 0)), 0x8F),
    "filter with too many levels": (subscribe(4, ("a/b/c/d/e/#", 0)), subscribe(5, ("a/b/c/d/e/#", 0)), 0x8F),
    "too many filters": (subscribe(4, *[("a", 0)] * 4), subscribe(5, *[("a", 0)] * 4), 0x97),
    "a group without a name": (subscribe(4, ("$share//a", 0)), subscribe(5, ("$share//a", 0)), MALFORMED),
    "a group without a filter": (subscribe(4, ("$share/g", 0)), subscribe(5, ("$share/g", 0)), MALFORMED),
    "a group with an empty filter": (subscribe(4, ("$share/g/", 0)), subscribe(5, ("$share/g/", 0)), MALFORMED),
    "a group that is a wildcard": (subscribe(4, ("$share/+/a", 0)), subscribe(5, ("$share/+/a", 0)), MALFORMED),
    "a wrong filter of a group": (subscribe(4, ("$share/g/a#", 0)), subscribe(5, ("$share/g/a#", 0)), MALFORMED),
    "UNSUBSCRIBE of nothing": (packet(0xA2, b"\0\1"), packet(0xA2, b"\0\1\0"), PROTOCOL),
    "UNSUBSCRIBE of a wrong filter": (packet(0xA2, b"\0\1\0\2##"), packet(0xA2, b"\0\1\0\0\2##"), MALFORMED),
}
ONLY_3: dict[str, tuple[bytes, int]] = {
    "topic without characters": (publish(4, ""), MALFORMED),
    "QoS 3 asked for": (subscribe(4, ("a", 3)), MALFORMED),
    "options of version 5": (subscribe(4, ("a", 4)), MALFORMED),
    "PUBACK that goes on": (packet(0x40, b"\0\1\0"), MALFORMED),
    "DISCONNECT that goes on": (packet(0xE0, b"\0"), MALFORMED),
    "AUTH": (packet(0xF0), MALFORMED),
}
ALIAS = b"\x23\0"
ONLY_5: dict[str, tuple[bytes, int]] = {
    "length that is too long": (b"\x30\x86\x00\0\1t\0\0\0", MALFORMED),
    "no topic and no alias": (publish(5, ""), PROTOCOL),
    "no topic and other properties": (publish(5, "", having=b"\1\1"), PROTOCOL),
    "an alias that stands for nothing": (publish(5, "", having=ALIAS + b"\1"), PROTOCOL),
    "alias 0": (publish(5, "t", having=ALIAS + b"\0"), 0x94),
    "alias above the limit": (publish(5, "t", having=ALIAS + b"\5"), 0x94),
    "alias of a wrong topic": (publish(5, "+", having=ALIAS + b"\1"), MALFORMED),
    "ends before the properties": (packet(0x30, string("t")), MALFORMED),
    "properties longer than the packet": (packet(0x30, string("t"), b"\x05\1\1"), MALFORMED),
    "a property beyond the properties": (packet(0x30, string("t"), b"\x02\x02\0\0\0\1"), MALFORMED),
    "a property twice": (publish(5, "t", having=b"\1\1\1\1"), PROTOCOL),
    "payload format 2": (publish(5, "t", having=b"\1\2"), PROTOCOL),
    "a subscription identifier": (publish(5, "t", having=b"\x0b\1"), PROTOCOL),
    "a property of CONNECT": (publish(5, "t", having=b"\x11\0\0\0\1"), MALFORMED),
    "a property of a will": (publish(5, "t", having=b"\x18\0\0\0\1"), MALFORMED),
    "a response topic with a wildcard": (publish(5, "t", having=b"\x08" + string("a/#")), MALFORMED),
    "a content type with NUL": (publish(5, "t", having=b"\x03" + string("\0")), MALFORMED),
    "user properties above the limit": (publish(5, "t", having=user(61)), 0x97),
    "subscription identifier 0": (subscribe(5, ("a", 0), having=b"\x0b\0"), PROTOCOL),
    "two subscription identifiers": (subscribe(5, ("a", 0), having=b"\x0b\1\x0b\2"), PROTOCOL),
    "QoS 3 asked for": (subscribe(5, ("a", 3)), PROTOCOL),
    "retain handling 3": (subscribe(5, ("a", 0x30)), PROTOCOL),
    "reserved options": (subscribe(5, ("a", 0x40)), MALFORMED),
    "no-local of a group": (subscribe(5, ("$share/g/a", 4)), PROTOCOL),
    "subscription identifier of UNSUBSCRIBE": (packet(0xA2, b"\0\1\2\x0b\1\0\1a"), MALFORMED),
    "a reason code of PUBACK": (packet(0x40, b"\0\1\x92"), PROTOCOL),
    "a reason code of PUBCOMP": (packet(0x70, b"\0\1\x10"), PROTOCOL),
    "PUBREC that goes on": (packet(0x50, b"\0\1\0\0x"), MALFORMED),
    "PUBREL with another's property": (packet(0x62, b"\0\1\0\2\1\1"), MALFORMED),
    "DISCONNECT with a server's code": (packet(0xE0, b"\x8b"), PROTOCOL),
    "DISCONNECT that goes on": (packet(0xE0, b"\0\0x"), MALFORMED),
    "DISCONNECT with a server's property": (packet(0xE0, b"\0\4\x1c\0\1x"), PROTOCOL),
    "expiry of a session that has none": (packet(0xE0, b"\0\5\x11\0\0\0\1"), PROTOCOL),
    "empty AUTH": (packet(0xF0), PROTOCOL),
    "AUTH with success": (packet(0xF0, b"\0", properties(b"\x15", string("m"))), PROTOCOL),
    "AUTH that ends before its properties": (packet(0xF0, b"\x18"), MALFORMED),
    "AUTH without a method": (packet(0xF0, b"\x18\0"), PROTOCOL),
    "AUTH that nobody began": (packet(0xF0, b"\x18", properties(b"\x15", string("m"))), PROTOCOL),
}
CASES = [
    *((f"3: {name}", 4, three, code) for name, (three, _, code) in BOTH.items()),
    *((f"5: {name}", 5, five, code) for name, (_, five, code) in BOTH.items()),
    *((f"3: {name}", 4, data, code) for name, (data, code) in ONLY_3.items()),
    *((f"5: {name}", 5, data, code) for name, (data, code) in ONLY_5.items()),
]


@pytest.mark.parametrize("data", NO_MQTT.values(), ids=NO_MQTT)
def test_what_is_no_connect_is_closed_without_an_answer(data: bytes) -> None:
    """At once: neither the rest of a header nor the rest of a packet is waited for."""
    connection = Connection(SMALL)
    failure(connection, data)
    assert connection.data_to_send() == b""
    assert connection.connect is None


@pytest.mark.parametrize(("version", "data", "code"), CONNECTS.values(), ids=CONNECTS)
def test_a_wrong_connect_gets_a_connack(version: int, data: bytes, code: int) -> None:
    """With the code and the text in version 5; in 3.1.1 with one of its own, or none if it has none."""
    connection = Connection(SMALL)
    event = failure(connection, data)
    assert event.code == code
    sent = connection.data_to_send()
    if version == 4:
        assert sent == {0x84: b"\x20\2\0\1", 0x85: b"\x20\2\0\2"}.get(code, b"")
        return
    ((_, connack),) = decoded(sent, 5)
    assert (connack.flags, connack.rc) == (0, code)
    assert connack.properties.ReasonString == event.text


@pytest.mark.parametrize(("version", "data", "code"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_wrong_packet_gets_a_disconnect(version: int, data: bytes, code: int) -> None:
    """With the code and the text in version 5; 3.1.1 has none from a server."""
    connection = opened(version, SMALL)
    event = failure(connection, data)
    assert event.code == code
    sent = connection.data_to_send()
    if version == 4:
        assert sent == b""
        return
    ((_, disconnect),) = decoded(sent, 5)
    assert disconnect.reason.value == code
    assert disconnect.properties.ReasonString == event.text


@pytest.mark.parametrize(
    ("name", "level", "said"),
    [
        ("MQTT", 0x84, "a bridge of mosquitto tries MQTT 3.1.1 as bridges speak it (level 132): it comes again without that, "
         "and at once with `try_private false` in mosquitto.conf"),
        ("MQTT", 0x85, "a bridge of mosquitto tries MQTT 5 as bridges speak it (level 133): it comes again without that, "
         "and at once with `try_private false` in mosquitto.conf"),
        ("MQIsdp", 0x83, "a bridge speaks MQTT 3.1: say `bridge_protocol_version mqttv311` in mosquitto.conf"),
        ("MQIsdp", 3, "the client speaks MQTT 3.1: have it speak 3.1.1 or 5"),
        ("MQTT", 6, "the client speaks MQTT of level 6: have it speak 3.1.1 (level 4) or 5 (level 5)"),
        ("MQTX", 5, "the client speaks 'MQTX' of level 5, which is no MQTT: have it speak MQTT 3.1.1 or 5"),
    ],
)  # fmt: skip
def test_who_speaks_another_version_is_told_what_to_do(name: str, level: int, said: str) -> None:
    """In the log, too."""
    event = failure(Connection(SMALL), packet(0x10, head(name, level), string("c")))
    assert (event.code, event.text) == (ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, said)


def test_who_sends_too_many_user_properties_is_told_how_many_are_taken() -> None:
    """And where else they have a place."""
    event = failure(opened(5), publish(5, "t", having=user(40_000) * 2))
    assert (
        event.text == "user properties of more than 65,536 bytes in a packet: send fewer, or put them into the payload"
    )


def test_a_packet_may_be_as_large_as_the_limit() -> None:
    """CONNECT has one of its own."""
    connection = Connection(SMALL)
    rest = string("t") + string(bytes(979))
    data = connect(4, flags=WILL_FLAGS, rest=rest)
    assert len(data) == SMALL.connect_bytes
    events(connection, data)
    assert connection.state is State.CONNECTING
    for version, size in ((4, 1994), (5, 1993)):
        (event,) = events(opened(version, SMALL), publish(version, "t", bytes(size)))
        assert isinstance(event, Publish)
        failure(opened(version, SMALL), publish(version, "t", bytes(size + 1)))


def test_what_came_before_the_fault_is_told() -> None:
    """Byte by byte as well as in one piece."""
    data = publish(5, "a") + publish(5, "b") + publish(5, "#") + publish(5, "c")
    whole = events(opened(5), data)
    assert [type(event).__name__ for event in whole] == ["Publish", "Publish", "Failed"]
    assert events(opened(5), *(data[at : at + 1] for at in range(len(data)))) == whole


def test_a_length_that_is_too_long_is_taken_from_clients_of_3_1_1() -> None:
    """Its specification does not ask for the shortest, and small devices reserve bytes for it."""
    connection = opened(4)
    (event,) = events(connection, b"\x30\x85\x00\0\1txy")
    assert event == type(event)("t", b"xy")


def test_a_text_of_the_client_is_told_back_in_part() -> None:
    """The error names what was wrong, and is no copy of it."""
    event = failure(opened(5), publish(5, "x" * 4000 + "#"))
    assert event.code is ReasonCode.MALFORMED_PACKET
    assert len(event.text) < 300
    assert "'#'" in event.text
