"""The records of exchanges, queues and bindings in the log.

A key is a list in JSON: what it is of, the virtual host, and what it is known by there. Values are field tables, so
that arguments keep the type of each value; that of a binding has its number before (8 bytes, big-endian), and no table
if it has no arguments.

    ["x", vhost, name]                                             kind, auto_delete, internal, arguments
    ["q", vhost, name]                                             auto_delete, server_named, arguments
    ["b", vhost, source, "queue" or "exchange", name, key, digest] the arguments, of which the digest is

Only what is durable has a record.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from qflow.amqp.model.arguments import parse
from qflow.amqp.model.bindings import EXCHANGE, QUEUE, Binding, Target
from qflow.amqp.model.exchanges import Exchange, check_kind
from qflow.amqp.model.queues import Queue
from qflow.amqp.model.tables import Table, decode_table, encode_table

ROOM = "amqp"
"""Under which the log keeps them."""
OF_EXCHANGE, OF_QUEUE, OF_BINDING = "x", "q", "b"
_DIGEST_BYTES = 16
_NUMBER_BYTES = 8


def key_of(*parts: str) -> str:
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def parts_of(key: str) -> list[str]:
    """Return what a key was made of. Raises ValueError: it is none of ours."""
    parts: Any = json.loads(key)
    lengths = {OF_EXCHANGE: 3, OF_QUEUE: 3, OF_BINDING: 7}
    if not isinstance(parts, list) or lengths.get(parts[0]) != len(parts):
        raise ValueError(f"a record of an unknown kind: {key}")
    return parts


def exchange_value(exchange: Exchange) -> bytes:
    return encode_table(
        {
            "kind": exchange.kind,
            "auto_delete": exchange.auto_delete,
            "internal": exchange.internal,
            "arguments": exchange.arguments,
        }
    )


def exchange_of(name: str, value: bytes) -> Exchange:
    """Return the exchange of a record. Raises ValueError, KeyError, AmqpError: it is of a later version."""
    fields = decode_table(value)
    check_kind(fields["kind"], fields["arguments"], f"exchange '{name}'")
    return Exchange(
        name,
        fields["kind"],
        auto_delete=fields["auto_delete"],
        internal=fields["internal"],
        arguments=fields["arguments"],
    )


def queue_value(queue: Queue) -> bytes:
    return encode_table(
        {"auto_delete": queue.auto_delete, "server_named": queue.server_named, "arguments": queue.arguments}
    )


def queue_of(name: str, value: bytes) -> Queue:
    """Return the queue of a record. Raises ValueError, KeyError, AmqpError: it is of a later version."""
    fields = decode_table(value)
    return Queue(
        name=name,
        durable=True,
        auto_delete=fields["auto_delete"],
        arguments=fields["arguments"],
        settled=parse(fields["arguments"], f"queue '{name}'"),
        server_named=fields["server_named"],
    )


def binding_key(vhost: str, binding: Binding) -> str:
    source, target, routing_key, encoded = binding.identity
    digest = blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest() if encoded else ""
    return key_of(OF_BINDING, vhost, source, target.kind, target.name, routing_key, digest)


def binding_value(binding: Binding) -> bytes:
    arguments = encode_table(binding.arguments) if binding.arguments else b""
    return binding.number.to_bytes(_NUMBER_BYTES, "big") + arguments


def binding_of(parts: list[str], value: bytes) -> Binding:
    """Return the binding of a record. Raises ValueError: it is of a later version."""
    _, _, source, kind, name, routing_key, _ = parts
    if len(value) < _NUMBER_BYTES or kind not in (QUEUE, EXCHANGE):
        raise ValueError(f"{len(value)} bytes of a binding to a {kind}")
    number, encoded = int.from_bytes(value[:_NUMBER_BYTES], "big"), value[_NUMBER_BYTES:]
    arguments: Table = decode_table(encoded) if encoded else {}
    return Binding(source, Target(kind, name), routing_key, arguments, number, is_durable=True)
