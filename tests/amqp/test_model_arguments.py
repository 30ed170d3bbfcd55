"""The arguments of `queue.declare`, and field tables as they are kept."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qflow
from qflow.amqp.errors import AmqpError
from qflow.amqp.model.arguments import parse
from qflow.amqp.model.tables import Table, decode_table, encode_table
from qflow.amqp.server.parcels import Parcel
from qflow.config import QueueSettings, StreamSettings

WHERE = "queue 'q' in vhost '/'"

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=8).filter(lambda value: not _is_text(value))
    | st.binary(max_size=8).map(bytearray)
    | st.decimals(0, 2**31 - 1, places=0)
    | st.datetimes(datetime(1970, 1, 1), datetime(2100, 1, 1)).map(lambda at: at.replace(microsecond=0, tzinfo=UTC))
)
names = st.text(st.characters(codec="utf-8"), max_size=60)
tables = st.recursive(
    st.dictionaries(names, plain, max_size=5),
    lambda inner: st.dictionaries(names, plain | inner | st.lists(plain | inner, max_size=3), max_size=3),
    max_leaves=8,
)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(table=tables)
def test_a_table_keeps_the_type_and_value_of_every_field(table: Table) -> None:
    """Also floats of 64 bits, long strings that are not UTF-8, and names of more than 128 bytes."""
    encoded = encode_table(table)
    decoded = decode_table(encoded)
    assert repr(decoded) == repr(dict(sorted(table.items()))) or decoded == table
    assert encode_table(decoded) == encoded


def test_decimals_and_float_limits_keep_their_values() -> None:
    """A decimal has a scale; infinity is a double."""
    table = {"a": Decimal("3.14"), "b": math.inf, "c": 1e300}
    assert decode_table(encode_table(table)) == table


@pytest.mark.parametrize("cut", [b"", b"\0", b"\0\0\0\1", b"\0\0\0\3\1a"])
def test_what_is_no_table_is_refused(cut: bytes) -> None:
    """With ValueError, whatever is wrong."""
    with pytest.raises(ValueError, match="."):
        decode_table(cut)


RIGHT: list[tuple[Table, dict[str, Any]]] = [
    ({}, {}),
    ({"x-unknown": [1]}, {}),
    ({"x-message-ttl": 0}, {"message_ttl_ms": 0}),
    ({"x-message-ttl": 1500, "x-expires": 1}, {"message_ttl_ms": 1500, "expires_ms": 1}),
    ({"x-max-length": 0, "x-max-length-bytes": 7}, {"max_length": 0, "max_length_bytes": 7}),
    ({"x-overflow": "reject-publish-dlx"}, {"overflow": "reject-publish-dlx"}),
    (
        {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "k"},
        {"dead_letter_exchange": "", "dead_letter_routing_key": "k"},
    ),
    ({"x-max-priority": 255}, {"max_priority": 255}),
    ({"x-delivery-limit": 3}, {"delivery_limit": 3}),
    ({"x-queue-type": "quorum"}, {"queue_type": "quorum", "delivery_limit": 20}),
    ({"x-queue-type": "quorum", "x-delivery-limit": -1}, {"queue_type": "quorum"}),
    ({"x-single-active-consumer": True}, {"single_active_consumer": True}),
    ({"x-consumer-timeout": 60_000}, {"consumer_timeout_ms": 60_000}),
    ({"x-queue-mode": "lazy", "x-queue-version": 2, "x-queue-leader-locator": "balanced"}, {}),
    ({"x-queue-type": "stream", "x-max-age": "7D"}, {"queue_type": "stream", "max_age_s": 7 * 86_400}),
    ({"x-queue-type": "stream", "x-max-age": "90s"}, {"queue_type": "stream", "max_age_s": 90}),
    (
        {"x-queue-type": "stream", "x-max-length-bytes": 9, "x-stream-max-segment-size-bytes": 1000},
        {"queue_type": "stream", "max_length_bytes": 9},
    ),
]


@pytest.mark.parametrize(("table", "expected"), RIGHT)
def test_arguments_are_read_as_rabbitmq_does(table: Table, expected: dict[str, Any]) -> None:
    """What they do not say is as it is without them; unknown ones are ignored."""
    found, bare = parse(table, WHERE), parse({}, WHERE)
    for field in bare.__attrs_attrs__:
        assert getattr(found, field.name) == expected.get(field.name, getattr(bare, field.name)), field.name


WRONG: list[tuple[Table, str]] = [
    ({"x-message-ttl": -1}, "invalid arg 'x-message-ttl' for queue 'q' in vhost '/': {value_negative,-1}"),
    ({"x-message-ttl": "60000"}, "{unacceptable_type,longstr}"),
    ({"x-message-ttl": True}, "{unacceptable_type,bool}"),
    ({"x-message-ttl": 315_360_000_001}, "{value_too_big,315360000001}"),
    ({"x-expires": 0}, "{value_zero,0}"),
    ({"x-max-length": 1.5}, "{unacceptable_type,double}"),
    ({"x-max-length-bytes": None}, "{unacceptable_type,void}"),
    ({"x-max-priority": 256}, "{max_value_exceeded,256}"),
    ({"x-overflow": "drop-tail"}, "invalid_overflow"),
    ({"x-queue-mode": "quick"}, "invalid_queue_mode"),
    ({"x-queue-type": "other"}, "unsupported queue type 'other'"),
    ({"x-dead-letter-exchange": 1}, "{unacceptable_type,signedint}"),
    ({"x-dead-letter-routing-key": "k"}, "routing_key_but_no_dlx_defined"),
    ({"x-single-active-consumer": "yes"}, "{unacceptable_type,longstr}"),
    ({"x-delivery-limit": "3"}, "{unacceptable_type,longstr}"),
    ({"x-consumer-timeout": 0}, "{value_zero,0}"),
    ({"x-queue-type": "stream", "x-max-age": "7 days"}, "invalid_max_age"),
    ({"x-queue-type": "stream", "x-max-age": "9" * 5000 + "D"}, "invalid_max_age"),
    ({"x-queue-type": "stream", "x-max-age": 7}, "{unacceptable_type,signedint}"),
    ({"x-queue-type": "stream", "x-stream-filter-size-bytes": 8}, "value_out_of_range"),
    ({"x-queue-type": "stream", "x-message-ttl": 1}, "of queue type stream"),
    ({"x-queue-type": "quorum", "x-max-priority": 5}, "of queue type quorum"),
    ({"x-max-age": "7D"}, "of queue type classic"),
]


@pytest.mark.parametrize(("table", "text"), WRONG)
def test_arguments_of_a_wrong_type_or_value_are_refused(table: Table, text: str) -> None:
    """With 406, and a text that names the argument and the queue."""
    with pytest.raises(AmqpError) as caught:
        parse(table, WHERE)
    assert caught.value.code == 406
    assert text in caught.value.text
    assert caught.value.text.startswith("invalid arg 'x-")
    assert WHERE in caught.value.text


def settings(table: Table, dead_letter: str | None = None) -> QueueSettings:
    return QueueSettings(**parse(table, WHERE).settings(dead_letter=dead_letter))


def test_arguments_become_settings_of_a_queue() -> None:
    """Milliseconds become seconds, a limit of redeliveries one of deliveries, a maximum a number of priorities."""
    found = settings(
        {
            "x-message-ttl": 1500,
            "x-max-length": 10,
            "x-max-length-bytes": 1000,
            "x-delivery-limit": 0,
            "x-consumer-timeout": 2000,
            "x-max-priority": 4,
        }
    )
    assert found == QueueSettings(
        ttl_s=1.5,
        limit_messages=10,
        limit_bytes=1000,
        on_overflow=qflow.Overflow.DROP_OLDEST,
        max_deliveries=1,
        ack_timeout_s=2.0,
        priorities=5,
    )
    assert settings({}) == QueueSettings(on_overflow=qflow.Overflow.DROP_OLDEST)
    assert settings({"x-max-length": 0}).limit_messages == 1


def test_what_is_rejected_goes_to_the_dead_letter_exchange_only_if_there_is_one() -> None:
    """`reject-publish-dlx` without one is `reject-publish`."""
    overflow = {"x-overflow": "reject-publish-dlx"}
    assert settings(overflow, "dead").on_overflow is qflow.Overflow.REJECT
    assert settings(overflow, "dead").dead_letter is None
    with_exchange = settings(overflow | {"x-dead-letter-exchange": "x"}, "dead")
    assert (with_exchange.on_overflow, with_exchange.dead_letter) == (qflow.Overflow.DEAD_LETTER, "dead")
    assert settings({"x-overflow": "reject-publish"}).on_overflow is qflow.Overflow.REJECT


def test_priorities_above_the_highest_are_the_highest() -> None:
    """Of 256 priorities, those from 9 on are one."""

    def got(most: int | None, *asked: int) -> list[int]:
        priorities = parse({} if most is None else {"x-max-priority": most}, WHERE).priorities
        settings = QueueSettings(priorities=priorities)
        parcels = [Parcel(b"", {}, True, priority, None, None) for priority in asked]
        return [parcel.options(settings).get("priority", 0) for parcel in parcels]

    assert got(255, 0, 8, 9, 10, 255) == [0, 8, 9, 9, 9]
    assert got(3, 3, 4) == [3, 3]
    assert (got(0, 5), got(None, 5)) == ([0], [0])


def test_arguments_become_settings_of_a_stream() -> None:
    """An age beyond all others is the longest span there is."""
    found = parse({"x-queue-type": "stream", "x-max-age": "1h", "x-max-length-bytes": 5000}, WHERE).retention()
    assert StreamSettings(topics=["a"], **found).retention_s == 3600
    assert found["retention_bytes"] == 5000
    StreamSettings(topics=["a"], **parse({"x-queue-type": "stream", "x-max-age": "9" * 20 + "Y"}, WHERE).retention())
