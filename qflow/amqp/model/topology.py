"""All virtual hosts of a spool, loaded from their records in the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from qflow.amqp.errors import AmqpError
from qflow.amqp.model import records
from qflow.amqp.model.bindings import QUEUE, Binding
from qflow.amqp.model.plans import Plan
from qflow.amqp.model.queues import engine_name
from qflow.amqp.model.records import OF_BINDING, OF_EXCHANGE, ROOM
from qflow.amqp.model.vhost import EngineQueues, VirtualHost
from qflow.loggers import get_logger

MOST_TOLD = 10
"""Records that cannot be read are told one by one up to here, and counted then."""
FORGOTTEN_AT_ONCE = 20
"""So few records are dropped in one commit that it needs no room: a server begins on a full disk, too."""

_logger = get_logger("qflow.amqp")


class Log(Protocol):
    """Keeps records: `TransactionLog`."""

    def keep_facts(self, room: str, facts: Mapping[str, bytes | None]) -> None: ...
    def facts(self, room: str, report: Callable[[str], object] | None = None) -> dict[str, bytes]: ...


class Topology:
    """See the module. What is changed by plans of a virtual host is kept by `keep` first."""

    def __init__(self, log: Log, engine: EngineQueues) -> None:
        """Load what the log keeps.

        Records of queues that the engine does not have are dropped, with their bindings: it deleted them, or a crash
        came between record and queue. Records that are damaged or of a later version are told in the log of the process
        and the rest is served: then no record is dropped, because a binding may belong to what could not be read.

        Args:
            engine: is asked for queues and streams by their names in the engine; it must also know those that it cannot
                serve.

        Raises:
            BrokerClosed, BrokerFailed: the log cannot be read.
        Cost: 20 µs a record, and a commit for each twenty that are dropped.
        """
        self._log = log
        self._engine = engine
        self._vhosts: dict[str, VirtualHost] = {}
        self._unread = 0
        """Records that could not be read."""
        stale = self._load(log.facts(ROOM, self._note))
        if self._unread > MOST_TOLD:
            _logger.error("%d records more cannot be served", self._unread - MOST_TOLD)
        if not self._unread:
            for first in range(0, len(stale), FORGOTTEN_AT_ONCE):
                log.keep_facts(ROOM, dict.fromkeys(stale[first : first + FORGOTTEN_AT_ONCE]))

    def vhost(self, name: str) -> VirtualHost:
        """Return a virtual host, which begins to be there when it is asked for. Who may use it is not asked here."""
        if name not in self._vhosts:
            self._vhosts[name] = VirtualHost(name, self._engine)
        return self._vhosts[name]

    @property
    def vhosts(self) -> list[VirtualHost]:
        """Those that were asked for, or have records."""
        return list(self._vhosts.values())

    def keep(self, plan: Plan) -> None:
        """Commit the records of a plan, if it has any; blocks until they are synced. For any thread.

        Raises:
            DiskFull: there is no room for them; nothing was written.
            BrokerClosed, BrokerFailed: they are not written; of a failed broker, perhaps they are.
        """
        if plan.facts:
            self._log.keep_facts(ROOM, plan.facts)

    def _note(self, problem: str) -> None:
        self._unread += 1
        if self._unread <= MOST_TOLD:
            _logger.error("%s; it was left as it is", problem)

    def _load(self, facts: dict[str, bytes]) -> list[str]:
        """Take over records; return the keys of those that are to be dropped."""
        stale: list[str] = []
        bindings: list[tuple[str, VirtualHost, Binding]] = []
        for key, value in facts.items():
            try:
                parts = records.parts_of(key)
                kind, vhost, name = parts[0], self.vhost(parts[1]), parts[2]
                if kind == OF_BINDING:
                    bindings.append((key, vhost, records.binding_of(parts, value)))
                elif kind == OF_EXCHANGE:
                    vhost.add_exchange(records.exchange_of(name, value))
                else:
                    queue = records.queue_of(name, value)
                    if self._engine(engine_name(vhost.name, name), queue.settled.is_stream):
                        vhost.add_queue(queue)
                    else:
                        stale.append(key)
            except (ValueError, LookupError, TypeError, AmqpError) as error:
                self._note(f"the record {key} cannot be served: {error}")
        for key, vhost, binding in bindings:
            if _has_both_ends(vhost, binding):
                vhost.add_binding(binding)
            else:
                stale.append(key)
        return stale


def _has_both_ends(vhost: VirtualHost, binding: Binding) -> bool:
    kind, name = binding.target
    if binding.source not in vhost.exchanges:
        return False
    return vhost.find_queue(name) is not None if kind == QUEUE else name in vhost.exchanges
