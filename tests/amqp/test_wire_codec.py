"""What this package encodes and decodes itself, held equal to pamqp."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import body, commands, decode, encode, frame, header

from amqp_client import Basic, Channels, Connections, events, message, method, opened
from qflow.amqp.errors import AmqpError
from qflow.amqp.wire.events import Method, Published
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.limits import Limits
from qflow.amqp.wire.methods import decode_method, decode_properties, encode_method, unchecked
from qflow.amqp.wire.properties import changed
from qflow.amqp.wire.tables import check_properties, check_table, decode_table
from thorough import examples

LIMITS = Limits()
Queue = commands.Queue
ALPHABET = "abcXYZ019-_.:@#,/"
"""What any version of pamqp takes in names."""
FEW = settings(max_examples=60, deadline=None, database=None)
NAMES = st.text(ALPHABET, max_size=40)
STRINGS = st.text(max_size=30)
TIMES = st.integers(0, 2**32 - 1).map(lambda second: datetime.datetime.fromtimestamp(second, datetime.UTC))
PLAIN_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | STRINGS
    | st.binary(max_size=20).map(bytearray)
    | st.decimals(0, 1000, places=2)
    | TIMES
)
VALUES = st.recursive(
    PLAIN_VALUES, lambda value: st.lists(value, max_size=3) | st.dictionaries(STRINGS, value, max_size=3), max_leaves=4
)
TABLES = st.dictionaries(STRINGS, VALUES, max_size=4)
PROPERTIES = st.builds(
    Basic.Properties,
    content_type=st.none() | NAMES,
    headers=st.none() | TABLES,
    delivery_mode=st.none() | st.sampled_from([1, 2]),
    priority=st.none() | st.integers(0, 255),
    correlation_id=st.none() | STRINGS,
    reply_to=st.none() | NAMES,
    expiration=st.none() | NAMES,
    message_id=st.none() | STRINGS,
    timestamp=st.none() | TIMES,
    app_id=st.none() | NAMES,
)
BODIES = st.binary(max_size=300)


def by_pamqp(channel: int, first: Any, properties: Any, content: bytes, most: int) -> bytes:
    parts = [frame.marshal(first, channel), frame.marshal(header.ContentHeader(0, len(content), properties), channel)]
    parts += [frame.marshal(body.ContentBody(content[at : at + most]), channel) for at in range(0, len(content), most)]
    return b"".join(parts)


@FEW
@given(
    NAMES, NAMES, NAMES, st.integers(0, 2**63 - 1), st.booleans(), PROPERTIES, st.sampled_from([0, 1, 4088, 4089, 9000])
)
def test_deliveries_are_those_of_pamqp(
    tag: str, exchange: str, key: str, number: int, redelivered: bool, properties: Basic.Properties, size: int
) -> None:
    """Deliver, get-ok and return, with their content."""
    connection = opened(frame_max=4096)
    content = Content(exchange, key, properties.marshal(), bytes(size))
    connection.deliver(1, tag, number, redelivered, content)
    deliver = Basic.Deliver(tag, number, redelivered, exchange, key)
    assert connection.data_to_send() == by_pamqp(1, deliver, properties, content.body, 4088)
    connection.get_ok(1, number, redelivered, 5, content)
    assert connection.data_to_send() == by_pamqp(
        1, Basic.GetOk(number, redelivered, exchange, key, 5), properties, content.body, 4088
    )
    connection.return_(1, 312, "NO_ROUTE", content)
    returned = Basic.Return(312, "NO_ROUTE", exchange, key)
    assert connection.data_to_send() == by_pamqp(1, returned, properties, content.body, 4088)


@FEW
@given(st.integers(0, 2**63 - 1), st.booleans(), st.integers(1, 2047))
def test_acks_are_those_of_pamqp_both_ways(number: int, multiple: bool, channel: int) -> None:
    """Also the nack of a publish."""
    connection = opened(channels=(channel,))
    connection.confirm(channel, number, multiple, True)
    ack = method(channel, Basic.Ack(number, multiple))
    assert connection.data_to_send() == ack
    connection.confirm(channel, number, multiple, False)
    assert connection.data_to_send() == method(channel, Basic.Nack(number, multiple, False))
    [event] = events(connection, ack)
    assert isinstance(event, Method)
    assert isinstance(event.method, Basic.Ack)
    assert (event.channel, event.method.delivery_tag, event.method.multiple) == (channel, number, multiple)


@FEW
@given(NAMES, STRINGS, st.booleans(), st.booleans(), PROPERTIES, BODIES, st.lists(st.integers(0, 600), max_size=4))
def test_publishes_are_read_as_pamqp_writes_them(
    exchange: str, key: str, mandatory: bool, immediate: bool, properties: Any, content: bytes, cuts: list[int]
) -> None:
    """Whole, and torn anywhere: the short way and the long one tell the same."""
    data = by_pamqp(1, Basic.Publish(0, exchange, key, mandatory, immediate), properties, content, 4088)
    expected = [Published(1, exchange, key, mandatory, immediate, properties.marshal(), content)] * 2
    assert events(opened(), data + data) == expected
    torn, at = [], 0
    for cut in [*sorted(cuts), 2 * len(data)]:
        torn.append((data + data)[at:cut])
        at = cut
    assert events(opened(), *torn) == expected


@FEW
@given(PROPERTIES)
def test_properties_that_pamqp_writes_are_well_formed(properties: Basic.Properties) -> None:
    """And are told as they were; cut by a byte, or longer by one, they are not."""
    encoded = properties.marshal()
    check_properties(encoded, LIMITS)
    for name, value in decode_properties(encoded):
        was = getattr(properties, name)
        assert name == "headers" or value == was or (value, was) in {("", None), (None, "")}
    for wrong in (encoded[:-1], encoded + b"\0"):
        with pytest.raises(AmqpError):
            check_properties(wrong, LIMITS)


@settings(max_examples=examples(200), deadline=None, database=None)
@given(st.data())
def test_what_passes_the_check_of_a_table_is_decoded_by_pamqp(data: st.DataObject) -> None:
    """To its end, with bytes changed at random."""
    table = bytearray(encode.field_table(data.draw(TABLES)))
    for _ in range(data.draw(st.integers(0, 3))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    encoded = bytes(table)
    try:
        end = check_table(encoded, 0, len(encoded), LIMITS)
    except AmqpError:
        return
    assert decode.field_table(encoded)[0] == end


def nested(levels: int, kind: bytes) -> bytes:
    """A table within `levels` others, in front of which a key stands, or arrays."""
    inner = b""
    for _ in range(levels):
        inner = (b"\x01k" if kind == b"F" else b"") + kind + len(inner).to_bytes(4) + inner
    if kind == b"A" and inner:
        inner = b"\x01k" + inner
    return len(inner).to_bytes(4) + inner


@pytest.mark.parametrize("kind", [b"F", b"A"])
def test_a_table_of_many_levels_is_refused_without_recursion(kind: bytes) -> None:
    """31 within each other pass, 32 and 10,000 do not."""
    fine = nested(31, kind)
    assert check_table(fine, 0, len(fine), LIMITS) == len(fine) == decode.field_table(fine)[0]
    for levels in (32, 10_000):
        deep = nested(levels, kind)
        with pytest.raises(AmqpError, match="deep"):
            check_table(deep, 0, len(deep), LIMITS)


def test_a_table_of_too_many_fields_is_refused() -> None:
    """Of 10,000 headers it is not."""
    for fields, is_fine in ((10_000, True), (16_384, True), (16_385, False)):
        inner = b"\0V" * fields
        table = len(inner).to_bytes(4) + inner
        if is_fine:
            check_table(table, 0, len(table), LIMITS)
        else:
            with pytest.raises(AmqpError, match="fields"):
                check_table(table, 0, len(table), LIMITS)


@pytest.mark.parametrize(
    "properties",
    [
        b"",
        b"\0",
        b"\0\1",
        b"\0\2",
        b"\x80\0",
        b"\x80\0\x02a",
        b"\x80\0\x01\xff",
        b"\x20\0\0\0\0\x09",
        b"\x20\0\0\0\0\x03\x01kZ",
        b"\x20\0\0\0\0\x02\x01k",
        b"\x20\0\xff\xff\xff\xff",
        b"\x20\0\0\0\0\x0b\x01kT\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\0\x40\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x10\0",
    ],
)
def test_property_lists_that_are_malformed_are_refused(properties: bytes) -> None:
    """Cut short, of unknown flags or types, no UTF-8, or after the year 9999."""
    with pytest.raises(AmqpError) as raised:
        check_properties(properties, LIMITS)
    assert raised.value.code == 502


@pytest.mark.parametrize(
    "value",
    [
        commands.Queue.Declare(0, "q", False, True, False, True, False, {"x-max-length": 3}),
        commands.Exchange.Declare(0, "x", "topic", False, True, False, True, False, {}),
        commands.Queue.Bind(0, "q", "x", "k", True, {"a": [1, "b", None]}),
        Basic.Consume(0, "q", "tag", False, True, False, True, {"x-priority": 5}),
        Basic.Nack(77, True, False),
        Basic.Qos(0, 10, True),
        Connections.StartOk({"product": "p"}, "PLAIN", "\0a\0b"),
        Connections.Close(320, "bye", 10, 40),
        Channels.Flow(True),
        commands.Confirm.Select(True),
    ],
)
def test_methods_are_those_of_pamqp_both_ways(value: Any) -> None:
    """Any that clients send; cut short or longer by a byte they are malformed."""
    payload = frame.marshal(value, 1)[7:-1]
    assert encode_method(value) == payload
    assert dict(decode_method(payload, LIMITS)) == dict(value)
    assert encode_method(unchecked(type(value), *(part for _, part in value))) == payload
    for wrong in (payload[:-1], payload + b"\0"):
        with pytest.raises(AmqpError) as raised:
            decode_method(wrong, LIMITS)
        assert raised.value.code == 502
        assert (raised.value.class_id, raised.value.method_id) == (value.index >> 16, value.index & 0xFFFF)


@pytest.mark.parametrize("index", sorted(commands.INDEX_MAPPING))
def test_every_method_this_side_sends_is_encoded_as_pamqp_does(index: int) -> None:
    """With the values it has by itself."""
    if commands.INDEX_MAPPING[index] is Basic.RecoverAsync:
        return
    value = commands.INDEX_MAPPING[index]()
    for name in value.attributes():
        if getattr(value, name) is None:
            setattr(value, name, {"table": {}, "shortstr": "", "longstr": ""}.get(value.amqp_type(name), 0))
    assert encode_method(value) == value.index.to_bytes(4) + value.marshal()


def test_the_properties_of_the_message_before_are_not_taken_for_those_of_the_next() -> None:
    """Only the same bytes are not checked again."""
    connection = opened()
    plain, other = Basic.Properties(delivery_mode=2), Basic.Properties(message_id="other")
    came = events(connection, message(1, b"a", properties=plain), message(1, b"b", properties=other))
    assert [event.properties for event in came if isinstance(event, Published)] == [
        plain.marshal(),
        other.marshal(),
    ]


@FEW
@given(TABLES)
def test_a_table_is_decoded_as_pamqp_does(table: dict[str, Any]) -> None:
    encoded = encode.field_table(table)
    assert decode_table(encoded) == decode.field_table(encoded)[1]


def test_no_field_of_a_table_costs_more_for_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """pamqp copies all that follows: 16,000 fields, and so many again within one, took 0.1 s each."""
    copied = 0
    embedded = decode.embedded_value

    def noted(value: bytes) -> tuple[int, Any]:
        nonlocal copied
        copied += len(value)
        return embedded(value)

    many = {str(number): True for number in range(1000)}
    properties = Basic.Properties(headers={**many, "within": many, "list": [*many.values()]}, priority=3)
    raw = properties.marshal()
    declare = method(1, Queue.Declare(queue="q", arguments=properties.headers))
    monkeypatch.setattr(decode, "embedded_value", noted)
    assert decode_properties(raw).headers == properties.headers
    assert decode_properties(raw).priority == 3
    assert decode_method(declare[7:-1], LIMITS).arguments == properties.headers  # type: ignore[attr-defined]
    assert changed(raw, {}) == raw
    assert copied <= 4 * len(raw)
