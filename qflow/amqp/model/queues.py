"""Queues as AMQP declares them: their names here and in the engine, their properties, and the checks of those."""

from __future__ import annotations

import secrets
from urllib.parse import quote, unquote

import attrs

from qflow.amqp.errors import AmqpError
from qflow.amqp.model.arguments import CLASSIC, KNOWN, QUORUM, STREAM, QueueArguments, parse
from qflow.amqp.model.exchanges import check_same_arguments, check_same_field
from qflow.amqp.model.tables import Table
from qflow.config import Overflow
from qflow.options import QueueOptions

ROOT = "/"
"""The virtual host whose queues have the same names in the engine."""
ENGINE_PREFIX = "amqp:"
"""How names in the engine begin of what is in other virtual hosts, or is for the server itself."""
RESERVED_PREFIX = "amq."
BRIDGE_QUEUE = "amq.mqtt-bridge"
"""What the bridge to MQTT takes from; clients may look how much is there, and nothing else."""
_PROPERTIES = {"x-queue-type": CLASSIC}


@attrs.frozen(kw_only=True, eq=False)
class Queue:
    """One queue. `owner` is the number of the only connection that may use it, None for an ordinary one."""

    name: str
    durable: bool
    auto_delete: bool = False
    owner: int | None = None
    arguments: Table = attrs.field(factory=dict)
    settled: QueueArguments = attrs.field(factory=QueueArguments)
    """What the arguments say."""
    server_named: bool = False

    def settings(self, *, dead_letter: str | None = None) -> QueueOptions[Overflow]:
        """Return the keyword arguments of `Broker.declare_queue`; see `QueueArguments.settings`."""
        return {**self.settled.settings(dead_letter=dead_letter), "durable": self.durable}

    def check_access(self, connection: int, where: str) -> None:
        """Refuse an exclusive queue to other connections. Raises AmqpError: 405."""
        if self.owner not in (None, connection):
            raise locked(where)

    def check_same(self, other: Queue, where: str) -> None:
        """Refuse to declare a queue again that is not the same.

        Raises:
            AmqpError: 405 where it is exclusive and the other is not, or another's; 406 else, naming what differs.
        """
        if self.owner != other.owner:
            raise locked(where)
        check_same_field("durable", self.durable, other.durable, where)
        check_same_field("auto_delete", self.auto_delete, other.auto_delete, where)
        check_same_arguments(KNOWN, _PROPERTIES | self.arguments, _PROPERTIES | other.arguments, where)


def locked(where: str) -> AmqpError:
    return AmqpError(
        405,
        f"cannot obtain exclusive access to locked {where}. It could be originally declared on another connection or "
        "the exclusive property value does not match that of the original declaration.",
    )


def new_queue(
    name: str, where: str, arguments: Table, *, durable: bool, auto_delete: bool, owner: int | None, server_named: bool
) -> Queue:
    """Return a queue as it is declared. An exclusive one is never durable.

    Raises:
        AmqpError: 406; its arguments are wrong, or its type does not go with the rest.
    """
    settled = parse(arguments, where)
    if settled.queue_type in (QUORUM, STREAM):
        if server_named:
            raise AmqpError(406, f"Cannot declare a server-named queue for type {settled.queue_type}")
        for is_wrong, text in (
            (auto_delete, "auto-delete"),
            (owner is not None, "exclusive-owner"),
            (not durable, "non-durable"),
        ):
            if is_wrong:
                raise AmqpError(406, f"invalid property '{text}' for {where}")
    return Queue(
        name=name,
        durable=durable and owner is None,
        auto_delete=auto_delete,
        owner=owner,
        arguments=arguments,
        settled=settled,
        server_named=server_named,
    )


def check_not_the_servers(name: str) -> None:
    """Refuse a queue that the server has for itself. Raises AmqpError: 403."""
    if name == BRIDGE_QUEUE:
        raise AmqpError(403, f"queue '{name}' is the server's own: clients do not use it")


def new_name() -> str:
    """Return a name that the server gives to a queue."""
    return f"amq.gen-{secrets.token_urlsafe(16)}"


def is_hidden(name: str) -> bool:
    """Tell whether a queue of the engine is none of the root virtual host."""
    return name.startswith(ENGINE_PREFIX)


def engine_name(vhost: str, name: str) -> str:
    """Return the name that the engine has for a queue of a virtual host."""
    return name if vhost == ROOT else f"{ENGINE_PREFIX}{quote(vhost, safe='')}:{name}"


def place_of(name: str) -> tuple[str, str]:
    """Return the virtual host of a queue, and its name there, given the name that the engine has for it."""
    if not is_hidden(name):
        return ROOT, name
    quoted, _, rest = name.removeprefix(ENGINE_PREFIX).partition(":")
    return unquote(quoted), rest
