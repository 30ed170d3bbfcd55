"""Messages that came by AMQP, for commands that run without a server: in words, and where dead letters came from."""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

from pamqp.commands import Basic

from qflow.amqp.errors import AmqpError
from qflow.amqp.model.queues import engine_name, place_of
from qflow.amqp.server.content import EXCHANGE, PROPERTIES, ROUTING_KEY
from qflow.amqp.wire.limits import DEFAULT_LIMITS
from qflow.amqp.wire.methods import decode_properties
from qflow.amqp.wire.tables import check_properties
from qflow.message import HeaderValue, Message, Record, body_of, encode_headers
from qflow.queues.dead_letters import headers_of, revived


def described(headers: Mapping[str, HeaderValue]) -> dict[str, Any] | None:
    """Return `exchange`, `routing_key` and `properties` of a message, as JSON has them; None if it is none of AMQP.

    Bytes that are no text are in base64; times are in ISO 8601, decimals are text.
    """
    properties = _properties(headers)
    if properties is None:
        return None
    present = ((name, getattr(properties, name)) for name in Basic.Properties.attributes())
    named = {name: _plain(value) for name, value in present if value is not None and value != ""}
    return {"exchange": headers[EXCHANGE], "routing_key": headers[ROUTING_KEY], "properties": named}


def reviving(dead_letter_queue: str) -> Callable[[Record], tuple[str | None, Record]]:
    """Return what tells where a dead letter of a queue came from, and what is put there; see `revived`.

    One of AMQP goes to the queue in which it died first, as `x-first-death-queue` says, under the exchange and the
    routing key it had there; it keeps `x-death`.
    """
    vhost = place_of(dead_letter_queue)[0]

    def revive(record: Record) -> tuple[str | None, Record]:
        name, alive = revived(record)
        if name is not None:
            return name, alive
        headers = headers_of(record)
        properties = _properties(headers)
        table = {} if properties is None else properties.headers or {}
        first, deaths = table.get("x-first-death-queue"), table.get("x-death")
        if not isinstance(first, str):
            return None, record
        for death in deaths if isinstance(deaths, list) else []:
            if isinstance(death, dict) and death.get("queue") == first:
                headers[EXCHANGE] = str(death.get("exchange", ""))
                headers[ROUTING_KEY] = _first(death.get("routing-keys"), first)
        topic = record.topic if isinstance(record, Message) else ""
        return engine_name(vhost, first), Message(body_of(record), encode_headers(headers), topic=topic)

    return revive


def _properties(headers: Mapping[str, HeaderValue]) -> Basic.Properties | None:
    """Return the properties of a message; None if it has none that can be read."""
    encoded = headers.get(PROPERTIES)
    if not isinstance(encoded, str) or EXCHANGE not in headers or ROUTING_KEY not in headers:
        return None
    try:
        raw = b64decode(encoded, validate=True)
        check_properties(raw, DEFAULT_LIMITS)
    except (Error, AmqpError):
        return None
    return decode_properties(raw)


def _first(keys: Any, otherwise: str) -> str:
    return keys[0] if isinstance(keys, list) and keys and isinstance(keys[0], str) else otherwise


def _plain(value: Any) -> Any:
    """Return a value of a property as JSON has it."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return b64encode(value).decode()
    return str(value) if isinstance(value, Decimal) else value
