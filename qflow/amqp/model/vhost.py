"""A virtual host: its exchanges, queues and bindings, what may be changed in them, and where messages go.

Nothing here waits or writes. What changes something returns a `Plan`, whose records the caller commits before it
applies it; one plan at a time. Refusals are those of RabbitMQ 4, in its words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

from qflow.amqp.errors import AmqpError
from qflow.amqp.model import records
from qflow.amqp.model.bindings import EXCHANGE, QUEUE, Binding, Identity, Target, identity_of
from qflow.amqp.model.exchanges import DEFAULT, Exchange, check_kind
from qflow.amqp.model.matching import Headers
from qflow.amqp.model.plans import Plan
from qflow.amqp.model.queues import (
    BRIDGE_QUEUE,
    ENGINE_PREFIX,
    RESERVED_PREFIX,
    ROOT,
    Queue,
    engine_name,
    is_hidden,
    new_name,
    new_queue,
)
from qflow.amqp.model.routing import Removal, Routing
from qflow.amqp.model.tables import Table

EngineQueues: TypeAlias = Callable[[str, bool], bool | None]
"""Given a name in the engine, and whether a stream is meant: whether it is durable; None if there is none."""
_LINE_ENDS = str.maketrans("", "", "\r\n")


def declared_name(name: str) -> str:
    """Return the name that is meant by one in a declaration: line ends are taken out, as RabbitMQ does."""
    return name.translate(_LINE_ENDS)


class VirtualHost:
    """See the module. For one thread."""

    def __init__(self, name: str, engine: EngineQueues) -> None:
        self.name = name
        self._engine = engine
        self._routing = Routing(self._takes_by_name)
        self.exchanges = self._routing.exchanges
        self.bindings = self._routing.bindings
        self.add_exchange = self._routing.add_exchange
        self.add_binding = self._routing.add_binding
        self.queues: dict[str, Queue] = {}
        """Those that AMQP declared; see `find_queue`."""
        self._owned: dict[int, dict[str, None]] = {}
        """Exclusive queues by connection."""

    # Looking ---------------------------------------------------------------------------------------------------------

    def where(self, kind: str, name: str) -> str:
        """Return how texts name a queue or exchange."""
        return f"{kind} '{name}' in vhost '{self.name}'"

    def engine_name(self, queue: str) -> str:
        """Return the name that the engine has for a queue."""
        return engine_name(self.name, queue)

    def find_queue(self, name: str) -> Queue | None:
        """Return a queue, one that a program declared in the engine included; None if there is none."""
        queue = self.queues.get(name)
        if queue is None and (durable := self._foreign(name)) is not None:
            return Queue(name=name, durable=durable)
        return queue

    def has_queue(self, name: str) -> bool:
        """Tell whether there is a queue; see `find_queue`."""
        return name in self.queues or self._foreign(name) is not None

    def _takes_by_name(self, name: str) -> bool:
        """Tell whether the default exchange has such a queue. What is for MQTT comes by `amq.topic` alone."""
        return name != BRIDGE_QUEUE and self.has_queue(name)

    def _foreign(self, name: str) -> bool | None:
        """Tell whether a queue is durable that a program declared; None if there is none."""
        return self._engine(name, False) if self.name == ROOT and name and not is_hidden(name) else None

    def queue(self, name: str, connection: int) -> Queue:
        """Return a queue that a connection may use. Raises AmqpError: 404; 405 if it is exclusive to another one."""
        queue = self.find_queue(name)
        if queue is None:
            raise self._missing(QUEUE, name)
        queue.check_access(connection, self.where(QUEUE, name))
        return queue

    def exclusive_queues(self, connection: int) -> list[str]:
        """Return the names of the queues that end with a connection."""
        return list(self._owned.get(connection, ()))

    def exchange(self, name: str) -> Exchange:
        """Return an exchange. Raises AmqpError: 404."""
        found = self.exchanges.get(name)
        if found is None:
            raise self._missing(EXCHANGE, name)
        return found

    def publishing(self, name: str) -> Exchange:
        """Return an exchange to publish to. Cost: 0.1 µs. Raises AmqpError: 404; 403 if it is internal."""
        found = self.exchange(name)
        if found.internal:
            raise AmqpError(403, f"cannot publish to internal {self.where(EXCHANGE, name)}")
        return found

    def _missing(self, kind: str, name: str) -> AmqpError:
        return AmqpError(404, f"no {self.where(kind, name)}")

    # Routing ---------------------------------------------------------------------------------------------------------

    def route(
        self, exchange: str, routing_key: str, headers: Headers = dict, copies: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return the names of the queues that a message goes to, each once, in the order of their bindings.

        Args:
            headers: returns the table `headers` of the message; called only if an exchange of that kind is on the way.
            copies: further routing keys, each as good as the first at every exchange on the way.

        Raises:
            AmqpError: 404; there is no such exchange.
        Cost: 0.2 µs where the same was asked since the last change of exchanges or bindings.
        """
        return self._routing.route(self.exchange(exchange), routing_key, headers, copies)

    # Exchanges -------------------------------------------------------------------------------------------------------

    def check_exchange(self, name: str) -> Exchange:
        """Return an exchange that is declared passively. Raises AmqpError: 403 for the default one, 404."""
        self._check_not_default(name)
        return self.exchange(name)

    def plan_declare_exchange(
        self, name: str, kind: str, *, durable: bool, auto_delete: bool, internal: bool, arguments: Table
    ) -> Plan:
        """Plan to have an exchange.

        Raises:
            AmqpError: 403 for reserved names, 406 if it is there and differs, an argument is wrong, or there is no such
                kind.
        """
        where = self.where(EXCHANGE, name)
        check_kind(kind, arguments, where)
        self._check_not_default(name)
        new = Exchange(name, kind, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments)
        found = self.exchanges.get(name)
        if found is not None:
            found.check_same(new, where)
            return Plan(exchange=found)
        _check_not_reserved(EXCHANGE, name, RESERVED_PREFIX)
        key = records.key_of(records.OF_EXCHANGE, self.name, name)
        facts: dict[str, bytes | None] = {key: records.exchange_value(new)} if durable else {}
        return Plan(facts=facts, changes=[lambda: self._routing.add_exchange(new)], exchange=new, adds=key)

    def plan_delete_exchange(self, name: str, *, if_unused: bool = False) -> Plan:
        """Plan to delete an exchange with the bindings from and to it; one that is not there is deleted.

        Raises:
            AmqpError: 403 for those that every virtual host has, 406 if it is used and must not be.
        """
        self._check_not_default(name)
        if name.startswith(RESERVED_PREFIX):
            raise AmqpError(403, f"deletion of system {self.where(EXCHANGE, name)} not allowed")
        found = self.exchanges.get(name)
        if found is None:
            return Plan()
        if if_unused and found.bindings:
            raise AmqpError(406, f"{self.where(EXCHANGE, name)} in use")
        plan = self._plan_removal(self._routing.removal(exchanges=[found]))
        plan.exchange = found
        return plan

    def _check_not_default(self, name: str) -> None:
        if name == DEFAULT:
            raise AmqpError(403, "operation not permitted on the default exchange")

    # Queues ----------------------------------------------------------------------------------------------------------

    def plan_declare_queue(
        self,
        name: str,
        connection: int,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Table,
    ) -> Plan:
        """Plan to have a queue; the server names it if `name` is empty.

        Its record is committed first, then the engine declares it, then the plan is applied.

        Raises:
            AmqpError: 403 for reserved names, 405 if it is another connection's, 406 if it is there and differs or an
                argument is wrong.
        """
        server_named = not name
        name = name or new_name()
        if not server_named:
            _check_not_reserved(QUEUE, name, RESERVED_PREFIX)
            _check_not_reserved(QUEUE, name, ENGINE_PREFIX)
        where = self.where(QUEUE, name)
        new = new_queue(
            name,
            where,
            arguments,
            durable=durable,
            auto_delete=auto_delete,
            owner=connection if exclusive else None,
            server_named=server_named,
        )
        found = self.find_queue(name)
        if found is not None:
            found.check_same(new, where)
            return Plan(queue=found)
        key = records.key_of(records.OF_QUEUE, self.name, name)
        facts: dict[str, bytes | None] = {key: records.queue_value(new)} if new.durable else {}
        return Plan(facts=facts, changes=[lambda: self.add_queue(new)], queue=new, adds=key)

    def plan_delete_queue(
        self,
        name: str,
        connection: int,
        *,
        if_unused: bool = False,
        if_empty: bool = False,
        consumers: int = 0,
        messages: int = 0,
    ) -> Plan:
        """Plan to delete a queue with its bindings; one that is not there is deleted, and the plan has no `queue`.

        The engine deletes it first: what a crash leaves of its records is dropped when they are loaded.

        Args:
            consumers, messages: how many it has, for `if_unused` and `if_empty`.

        Raises:
            AmqpError: 405 if it is another connection's, 406 if it is used or not empty and must be.
        """
        found = self.find_queue(name)
        if found is None:
            return Plan()
        where = self.where(QUEUE, name)
        found.check_access(connection, where)
        if if_unused and consumers:
            raise AmqpError(406, f"{where} in use")
        if if_empty and messages:
            raise AmqpError(406, f"{where} not empty")
        plan = self.plan_forget_queues([name])
        plan.queue = found
        return plan

    def plan_forget_queues(self, names: Iterable[str]) -> Plan:
        """Plan to forget queues that have ended, with their bindings; whether they are known or not.

        Cost: 5 µs for each binding.
        """
        gone = list(dict.fromkeys(names))
        known = [self.queues[name] for name in gone if name in self.queues]
        return self._plan_removal(self._routing.removal(queues=gone), known)

    # Bindings --------------------------------------------------------------------------------------------------------

    def plan_bind_queue(self, queue: str, exchange: str, routing_key: str, arguments: Table, connection: int) -> Plan:
        """Plan to have a binding to a queue. Cost: 10 µs, however many there are.

        Raises:
            AmqpError: 403 for the default exchange, 404, 405 if the queue is another connection's, 406 if an argument
                is wrong.
        """
        self._check_not_default(exchange)
        source = self.exchange(exchange)
        durable = self.queue(queue, connection).durable
        return self._plan_bind(source, Target(QUEUE, queue), routing_key, arguments, durable)

    def plan_bind_exchange(self, destination: str, source: str, routing_key: str, arguments: Table) -> Plan:
        """Plan to have a binding to an exchange; circles are fine.

        Raises:
            AmqpError: 403 for the default exchange at either end, 404, 406 if an argument is wrong.
        """
        self._check_not_default(destination)
        self._check_not_default(source)
        start = self.exchange(source)
        durable = self.exchange(destination).durable
        return self._plan_bind(start, Target(EXCHANGE, destination), routing_key, arguments, durable)

    def plan_unbind_queue(self, queue: str, exchange: str, routing_key: str, arguments: Table, connection: int) -> Plan:
        """Plan to have a binding to a queue no more; one that is not there is gone.

        Raises:
            AmqpError: 403 for the default exchange, 405 if the queue is another connection's.
        """
        self._check_not_default(exchange)
        found = self.find_queue(queue)
        if found is not None:
            found.check_access(connection, self.where(QUEUE, queue))
        return self._plan_unbind(identity_of(exchange, Target(QUEUE, queue), routing_key, arguments))

    def plan_unbind_exchange(self, destination: str, source: str, routing_key: str, arguments: Table) -> Plan:
        """Plan to end a binding to an exchange, if there is one. Raises AmqpError: 403 for the default exchange."""
        self._check_not_default(destination)
        self._check_not_default(source)
        return self._plan_unbind(identity_of(source, Target(EXCHANGE, destination), routing_key, arguments))

    def _plan_bind(
        self, source: Exchange, target: Target, routing_key: str, arguments: Table, is_durable: bool
    ) -> Plan:
        source.check_binding(arguments)
        if identity_of(source.name, target, routing_key, arguments) in self.bindings:
            return Plan()
        durable = source.durable and is_durable
        new = Binding(source.name, target, routing_key, arguments, self._routing.take_number(), is_durable=durable)
        key = records.binding_key(self.name, new)
        facts: dict[str, bytes | None] = {key: records.binding_value(new)} if durable else {}
        return Plan(facts=facts, changes=[lambda: self._routing.add_binding(new)], adds=key)

    def _plan_unbind(self, identity: Identity) -> Plan:
        found = self.bindings.get(identity)
        return Plan() if found is None else self._plan_removal(self._routing.removal(bindings=[found]))

    # Changes ---------------------------------------------------------------------------------------------------------

    def _plan_removal(self, removal: Removal, queues: Iterable[Queue] = ()) -> Plan:
        facts: dict[str, bytes | None] = {}
        facts |= {records.binding_key(self.name, one): None for one in removal.bindings if one.is_durable}
        facts |= {
            records.key_of(records.OF_EXCHANGE, self.name, one.name): None
            for one in removal.exchanges.values()
            if one.durable
        }
        facts |= {records.key_of(records.OF_QUEUE, self.name, one.name): None for one in queues if one.durable}
        changes: list[Callable[[], object]] = [partial(self._routing.remove, removal)]
        return Plan(facts=facts, changes=[*changes, *(partial(self._remove_queue, one) for one in queues)])

    def add_queue(self, queue: Queue) -> None:
        """Have a queue; for plans, and what is loaded."""
        self.queues[queue.name] = queue
        if queue.owner is not None:
            self._owned.setdefault(queue.owner, {})[queue.name] = None

    def _remove_queue(self, queue: Queue) -> None:
        del self.queues[queue.name]
        if queue.owner is not None:
            owned = self._owned[queue.owner]
            del owned[queue.name]
            if not owned:
                del self._owned[queue.owner]


def _check_not_reserved(kind: str, name: str, prefix: str) -> None:
    if name.startswith(prefix):
        raise AmqpError(403, f"{kind} name '{name}' contains reserved prefix '{prefix}*'")
