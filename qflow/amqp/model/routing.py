"""The exchanges of a virtual host and the bindings between them and its queues: where a message goes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from qflow.amqp.model.bindings import EXCHANGE, QUEUE, Binding, Identity, Target
from qflow.amqp.model.exchanges import DEFAULT, PREDECLARED, Exchange
from qflow.amqp.model.matching import Headers
from qflow.named_tuples import NamedTuple

MOST_ROUTES = 8192
"""Routes that are remembered, for each virtual host;"""
MOST_NAMES = 2**17
"""and names in them, of 8 bytes each."""


class Removal(NamedTuple):
    """What goes together."""

    exchanges: dict[str, Exchange]
    bindings: dict[Binding, None]


class Routing:
    """See the module. Names of queues that bindings lead to are taken as they are."""

    def __init__(self, has_queue: Callable[[str], bool]) -> None:
        """`has_queue`: whether there is a queue, for the default exchange."""
        self._has_queue = has_queue
        self.exchanges = {name: Exchange(name, kind) for name, kind in PREDECLARED.items()}
        self.bindings: dict[Identity, Binding] = {}
        self._next_number = 1
        self._to: dict[Target, dict[Binding, None]] = {}
        self._routes: dict[tuple[str, str], tuple[str, ...]] = {}
        self._names = 0
        """In all of these."""

    # Changing --------------------------------------------------------------------------------------------------------

    def take_number(self) -> int:
        """Return the number of a new binding, above all others; one that is not added after all leaves a gap."""
        self._next_number += 1
        return self._next_number - 1

    def add_exchange(self, exchange: Exchange) -> None:
        self.exchanges[exchange.name] = exchange
        self._forget()

    def add_binding(self, binding: Binding) -> None:
        self.exchanges[binding.source].add(binding)
        self.bindings[binding.identity] = binding
        self._to.setdefault(binding.target, {})[binding] = None
        self._next_number = max(self._next_number, binding.number + 1)
        self._forget()

    def removal(
        self, exchanges: Iterable[Exchange] = (), queues: Iterable[str] = (), bindings: Iterable[Binding] = ()
    ) -> Removal:
        """Return what goes if all that goes: bindings to and from it, and auto-delete exchanges with their last one.

        Cost: 1 µs for each binding that goes.
        """
        gone: dict[str, Exchange] = {}
        removed: dict[Binding, None] = {}
        lost: Counter[str] = Counter()
        waiting = list(exchanges)

        def remove(some: Iterable[Binding]) -> None:
            for binding in some:
                if binding not in removed:
                    removed[binding] = None
                    source = self.exchanges[binding.source]
                    lost[source.name] += 1
                    if source.auto_delete and lost[source.name] == len(source.bindings):
                        waiting.append(source)

        remove(bindings)
        for name in queues:
            remove(self._to.get(Target(QUEUE, name), ()))
        while waiting:
            exchange = waiting.pop()
            if exchange.name not in gone:
                gone[exchange.name] = exchange
                remove(exchange.bindings)
                remove(self._to.get(Target(EXCHANGE, exchange.name), ()))
        return Removal(gone, removed)

    def remove(self, removal: Removal) -> None:
        for binding in removal.bindings:
            self.exchanges[binding.source].remove(binding)
            del self.bindings[binding.identity]
            group = self._to[binding.target]
            del group[binding]
            if not group:
                del self._to[binding.target]
        for name in removal.exchanges:
            del self.exchanges[name]
        self._forget()

    # Routing ---------------------------------------------------------------------------------------------------------

    def route(
        self, exchange: Exchange, routing_key: str, headers: Headers, copies: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return the queues that a message goes to; see `VirtualHost.route`."""
        if copies:
            return self._find(exchange, [routing_key, *copies], headers)[0]
        if exchange.name == DEFAULT:
            return (routing_key,) if self._has_queue(routing_key) else ()
        route = self._routes.get((exchange.name, routing_key))
        if route is None:
            route, may_keep = self._find(exchange, [routing_key], headers)
            if may_keep:
                if len(self._routes) >= MOST_ROUTES or self._names + len(route) > MOST_NAMES:
                    self._forget()
                self._routes[exchange.name, routing_key] = route
                self._names += len(route)
        return route

    def _forget(self) -> None:
        """Look routes up anew."""
        self._routes.clear()
        self._names = 0

    def _find(self, first: Exchange, keys: Sequence[str], headers: Headers) -> tuple[tuple[str, ...], bool]:
        """Return the queues, and whether they are the same for any headers and as long as the bindings are."""
        queues: dict[str, None] = {}
        seen = {first.name}
        waiting = deque([first])
        may_keep = True
        while waiting:
            exchange = waiting.popleft()
            if exchange.name == DEFAULT:
                may_keep = False  # it depends on which queues there are
                queues |= dict.fromkeys(key for key in keys if self._has_queue(key))
                continue
            may_keep = may_keep and not exchange.matcher.needs_headers
            for kind, name in _targets(exchange, keys, headers):
                if kind == QUEUE:
                    queues[name] = None
                elif name not in seen and name in self.exchanges:
                    seen.add(name)
                    waiting.append(self.exchanges[name])
        return tuple(queues), may_keep


def _targets(exchange: Exchange, keys: Sequence[str], headers: Headers) -> list[Target]:
    """Return where an exchange sends a message, in the order of its bindings; to the alternate one if none matches."""
    found = {binding.number: binding for key in keys for binding in exchange.matcher.match(key, headers)}
    if not found and exchange.alternate is not None:
        return [Target(EXCHANGE, exchange.alternate)]
    return [found[number].target for number in sorted(found)]
