"""Properties and header tables: each comes as it went, whatever types it has."""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal

import pika
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from amqp_clients import Server, messages, unique

Declare = Callable[..., str]

HEADERS = 1 << 13
"""The bit of the property `headers`."""


class Raw(pika.BasicProperties):
    """Properties of a headers table in these bytes, for types that pika does not write."""

    def __init__(self, table: bytes) -> None:
        super().__init__()
        self.table = table

    def encode(self) -> list[bytes]:
        return [struct.pack(">HI", HEADERS, len(self.table)), self.table]


def field(value: bytes, name: bytes = b"x") -> bytes:
    """Return a table with one field whose type and value have these bytes."""
    return struct.pack("B", len(name)) + name + value


FIELDS = {
    b"t\x01": True,
    b"b\x85": -123,
    b"B\xfe": 254,
    b"s\x80\x01": -32767,
    b"u\xff\xfe": 65534,
    b"I\x80\x00\x00\x01": -(2**31) + 1,
    b"i\xff\xff\xff\xff": 2**32 - 1,
    b"l\x80\x00\x00\x00\x00\x00\x00\x01": -(2**63) + 1,
    b"f" + struct.pack(">f", 4.0): 4.0,
    b"d" + struct.pack(">d", -(2.0**60)): -(2.0**60),
    b"D\x02\x00\x00\x01\x3a": Decimal("3.14"),
    b"S\x00\x00\x00\x04w\xc3\xb6r": "wör",
    b"S\x00\x00\x00\x00": "",
    b"x\x00\x00\x00\x02\x00\xff": b"\x00\xff",
    b"T" + struct.pack(">Q", 1_700_000_000): datetime.fromtimestamp(1_700_000_000, UTC).replace(tzinfo=None),
    b"A\x00\x00\x00\x07I\x00\x00\x00\x01t\x00": [1, False],
    b"A\x00\x00\x00\x00": [],
    b"F\x00\x00\x00\x04\x01yt\x01": {"y": True},
    b"F\x00\x00\x00\x00": {},
    b"V": None,
}
"""By the bytes of each type of field, what pika reads: whole numbers, also of floats."""


@pytest.mark.parametrize(("written", "read"), FIELDS.items(), ids=lambda value: repr(value)[:20])
def test_a_header_of_any_type_comes_as_it_went(
    channel: BlockingChannel, queue: str, written: bytes, read: object
) -> None:
    """As RabbitMQ's clients write them."""
    channel.confirm_delivery()
    channel.basic_publish("", queue, b"body", Raw(field(written)))
    found = messages(channel, queue, 1)[0].properties.headers["x"]
    if isinstance(read, datetime):
        found = found.replace(tzinfo=None)
    assert found == read
    assert isinstance(found, bool) == isinstance(read, bool)


def test_all_properties_come_as_they_went(amqp_server: Server, channel: BlockingChannel, queue: str) -> None:
    """Each of the fourteen, and no other than those that were set."""
    whole = {
        "content_type": "application/json",
        "content_encoding": "zstd",
        "headers": {"a": 1, "nested": {"list": [1, "two", {"three": 3}]}},
        "delivery_mode": 2,
        "priority": 255,
        "correlation_id": "5 äöü",
        "reply_to": "amq.rabbitmq.x",
        "expiration": "3600000",
        "message_id": "m" * 255,
        "timestamp": 1_700_000_000,
        "type": "kind",
        "user_id": amqp_server.user,
        "app_id": "app",
        "cluster_id": "cluster",
    }
    names = [*whole]
    for some in (names, [], names[::2], names[1::2], ["delivery_mode"]):
        channel.basic_publish("", queue, b"body", pika.BasicProperties(**{name: whole[name] for name in some}))
        [message] = messages(channel, queue, 1)
        found = {name: getattr(message.properties, name) for name in names}
        assert found == {name: whole[name] if name in some else None for name in names}


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.decimals(-(10**6), 10**6, places=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers=st.dictionaries(st.text(max_size=30).map(lambda word: "x" + word), VALUES, max_size=5))
def test_headers_come_as_they_went(channel: BlockingChannel, queue: str, headers: dict[str, object]) -> None:
    """Whatever pika can write."""
    channel.basic_publish("", queue, b"body", pika.BasicProperties(headers=headers))
    _, properties, _ = next(channel.consume(queue, auto_ack=True))
    assert properties.headers == headers


def test_integers_that_the_server_sets_have_64_bits(
    channel: BlockingChannel, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of Java and Go take them for that, whatever they are, and older ones know no unsigned types."""
    encoded: list[bytes] = []
    decode = pika.BasicProperties.decode

    def seen(properties: pika.BasicProperties, data: bytes, offset: int = 0) -> pika.BasicProperties:
        encoded.append(data)
        return decode(properties, data, offset)

    monkeypatch.setattr(pika.BasicProperties, "decode", seen)
    dead, quorum, stream = declare(), unique("queue"), unique("stream")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead, "x-queue-type": "quorum"}
    channel.queue_declare(quorum, durable=True, arguments=arguments)
    channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    channel.basic_qos(prefetch_count=1)
    channel.basic_publish("", quorum, b"body")
    channel.basic_nack(next(channel.consume(quorum))[0].delivery_tag, requeue=True)
    channel.basic_nack(next(channel.consume(quorum))[0].delivery_tag, requeue=False)
    channel.cancel()
    messages(channel, dead, 1)
    channel.basic_publish("", stream, b"body")
    messages(channel, stream, 1, arguments={"x-stream-offset": "first"})
    for name in (quorum, stream):
        channel.queue_delete(name)
    for field_name in (b"\x05count", b"\x10x-delivery-count", b"\x0fx-stream-offset"):
        kinds = {data.partition(field_name)[2][:1] for data in encoded if field_name in data}
        assert kinds == {b"l"}, field_name


DAMAGED = {
    "a length beyond the table": field(b"S\x00\x00\x10\x00short"),
    "an unknown type": field(b"?\x00"),
    "a field cut short": field(b"l\x00\x00"),
    "a name beyond the table": b"\xff" + b"name",
}


@pytest.mark.parametrize("table", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_header_ends_its_connection_only(
    amqp_server: Server, channel: BlockingChannel, queue: str, table: bytes, only_qflow: None
) -> None:
    """501, 502 or the like; others go on, and the message is nowhere. RabbitMQ 3.10 says 541."""
    connection = pika.BlockingConnection(amqp_server.parameters())
    damaging = connection.channel()
    damaging.confirm_delivery()
    with pytest.raises(AMQPError) as raised:
        damaging.basic_publish("", queue, b"body", Raw(table))
    assert raised.value.args[0] in (501, 502, 505)
    channel.basic_publish("", queue, b"other")
    assert messages(channel, queue, 1)[0].body == b"other"
