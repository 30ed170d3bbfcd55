"""Bindings: what is told to an exchange of where matching messages go."""

from __future__ import annotations

from qflow.amqp.model.tables import Table, encode_table
from qflow.named_tuples import NamedTuple

QUEUE, EXCHANGE = "queue", "exchange"


class Target(NamedTuple):
    """Where a binding leads to."""

    kind: str
    """QUEUE or EXCHANGE."""
    name: str


class Identity(NamedTuple):
    """What no two bindings of a virtual host have the same."""

    source: str
    target: Target
    routing_key: str
    arguments: bytes
    """The table, encoded."""


class Binding:
    """One binding. Two are the same only if they are one object; see `Identity`."""

    __slots__ = ("arguments", "identity", "is_durable", "number", "routing_key", "source", "target")

    def __init__(
        self, source: str, target: Target, routing_key: str, arguments: Table, number: int, *, is_durable: bool
    ) -> None:
        self.source = source
        self.target = target
        self.routing_key = routing_key
        self.arguments = arguments
        self.number = number
        """It grows from one binding to the next: messages go in this order."""
        self.is_durable = is_durable
        """Both its ends are."""
        self.identity = identity_of(source, target, routing_key, arguments)


def identity_of(source: str, target: Target, routing_key: str, arguments: Table) -> Identity:
    """Return the identity of a binding. Cost: 1 µs, and 1 µs for each argument."""
    return Identity(source, target, routing_key, encode_table(arguments) if arguments else b"")
