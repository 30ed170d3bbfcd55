"""Exchanges: their kinds, what is declared of them, and the checks of that."""

from __future__ import annotations

from collections.abc import Sequence

from qflow.amqp.errors import AmqpError
from qflow.amqp.model.bindings import Binding
from qflow.amqp.model.matching import MATCHERS, check_headers_binding, new_matcher
from qflow.amqp.model.tables import Table, comparable, type_name

DELAYED = "x-delayed-message"
DELAYED_TYPE = "x-delayed-type"
FEDERATION = "x-federation-upstream"
"""What a federation link of RabbitMQ asks for first; by 503, and nothing else, it learns that `fanout` has to do."""
ALTERNATE = "alternate-exchange"
DEFAULT = ""
"""The exchange to which every queue is bound by its name."""
PREDECLARED = {
    DEFAULT: "direct",
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
}
"""Exchanges that every virtual host has, with their kinds: durable, and never deleted."""


class Exchange:
    """One exchange, with the bindings of which it is the source."""

    __slots__ = ("arguments", "auto_delete", "bindings", "durable", "internal", "kind", "matcher", "name")

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Table | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.arguments = arguments or {}
        self.matcher = new_matcher(self.routes_as)
        self.bindings: dict[Binding, None] = {}

    @property
    def is_delayed(self) -> bool:
        """Messages wait as long as their header `x-delay` says."""
        return self.kind == DELAYED

    @property
    def routes_as(self) -> str:
        """The kind by which it finds bindings."""
        return str(self.arguments[DELAYED_TYPE]) if self.is_delayed else self.kind

    @property
    def alternate(self) -> str | None:
        """The exchange that gets what matches no binding."""
        return self.arguments.get(ALTERNATE)

    def add(self, binding: Binding) -> None:
        self.matcher.add(binding)
        self.bindings[binding] = None

    def remove(self, binding: Binding) -> None:
        self.matcher.remove(binding)
        del self.bindings[binding]

    def check_binding(self, arguments: Table) -> None:
        """Refuse arguments that a binding of this exchange may not have. Raises AmqpError: 406."""
        if self.routes_as == "headers":
            check_headers_binding(arguments)

    def check_same(self, other: Exchange, where: str) -> None:
        """Refuse to declare an exchange again that is not the same. Raises AmqpError: 406; it names what differs."""
        for argument, mine, theirs in (
            ("type", self.kind, other.kind),
            ("durable", self.durable, other.durable),
            ("auto_delete", self.auto_delete, other.auto_delete),
            ("internal", self.internal, other.internal),
        ):
            check_same_field(argument, mine, theirs, where)
        check_same_arguments((ALTERNATE, DELAYED_TYPE), self.arguments, other.arguments, where)


def check_kind(kind: str, arguments: Table, where: str) -> None:
    """Refuse kinds that are not there, and arguments of a wrong type.

    Raises:
        AmqpError: 406 for the kind, or the arguments; 503 for the kind of a federation link.
    """
    if kind != DELAYED and kind not in MATCHERS:
        raise AmqpError(503 if kind == FEDERATION else 406, f"unknown exchange type '{kind}'")
    alternate = arguments.get(ALTERNATE, "")
    if not isinstance(alternate, str):
        raise AmqpError(406, f"invalid type '{type_name(alternate)}' for arg '{ALTERNATE}' in {where}")
    if kind == DELAYED and arguments.get(DELAYED_TYPE) not in tuple(MATCHERS):
        raise AmqpError(406, f"Invalid argument, '{DELAYED_TYPE}' must be an existing exchange type")


def check_same_field(argument: str, current: str | bool, received: str | bool, where: str) -> None:
    """Refuse to declare something again with another value of a field. Raises AmqpError: 406."""
    if current != received:
        raise AmqpError(
            406,
            f"inequivalent arg '{argument}' for {where}: "
            f"received '{_word(received)}' but current is '{_word(current)}'",
        )


def check_same_arguments(names: Sequence[str], current: Table, received: Table, where: str) -> None:
    """Refuse to declare something again with other values of some arguments. Raises AmqpError: 406."""
    for name in names:
        mine, theirs = current.get(name), received.get(name)
        if comparable(mine) != comparable(theirs):
            raise AmqpError(
                406,
                f"inequivalent arg '{name}' for {where}: received {_valued(theirs)} but current is {_valued(mine)}",
            )


def _word(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value


def _valued(value: object) -> str:
    return "none" if value is None else f"the value '{value}' of type '{type_name(value)}'"
