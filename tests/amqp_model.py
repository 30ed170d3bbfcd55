"""What tests of the AMQP model share: a log in memory, an engine that is a dict, and a virtual host on both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qflow.amqp.model.plans import Plan
from qflow.amqp.model.topology import Topology
from qflow.amqp.model.vhost import VirtualHost

ME, OTHER = 1, 2
"""Connections."""


class FakeLog:
    """Keeps records in memory, and counts commits."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.commits = 0

    def keep_facts(self, room: str, facts: Mapping[str, bytes | None]) -> None:
        assert room == "amqp"
        assert facts
        self.commits += 1
        for key, value in facts.items():
            if value is None:
                del self.kept[key]
            else:
                self.kept[key] = value

    def facts(self, room: str, report: Callable[[str], object] | None = None) -> dict[str, bytes]:
        return dict(self.kept)


class Host:
    """A virtual host, changed by one call for each step."""

    def __init__(self, name: str = "/", log: Any = None, engine: dict[str, bool] | None = None) -> None:
        self.log = FakeLog() if log is None else log
        self.engine = {} if engine is None else engine
        self.topology = Topology(self.log, lambda name, is_stream: self.engine.get(name))
        self.vhost: VirtualHost = self.topology.vhost(name)

    def again(self) -> Host:
        """Load everything anew, as after a restart: what is not durable is gone."""
        for name in [name for name, durable in self.engine.items() if not durable]:
            del self.engine[name]
        return Host(self.vhost.name, self.log, self.engine)

    def do(self, plan: Plan) -> Plan:
        self.topology.keep(plan)
        plan.apply()
        return plan

    def exchange(self, name: str, kind: str = "direct", arguments: dict[str, Any] | None = None, **flags: bool) -> Plan:
        flags = {"durable": True, "auto_delete": False, "internal": False} | flags
        return self.do(self.vhost.plan_declare_exchange(name, kind, arguments=arguments or {}, **flags))

    def queue(self, name: str, arguments: dict[str, Any] | None = None, connection: int = ME, **flags: bool) -> Plan:
        flags = {"durable": True, "auto_delete": False, "exclusive": False} | flags
        plan = self.do(self.vhost.plan_declare_queue(name, connection, arguments=arguments or {}, **flags))
        assert plan.queue is not None
        if plan.is_new:
            self.engine[self.vhost.engine_name(plan.queue.name)] = plan.queue.durable
        return plan

    def bind(self, queue: str, exchange: str, key: str = "", arguments: dict[str, Any] | None = None) -> Plan:
        return self.do(self.vhost.plan_bind_queue(queue, exchange, key, arguments or {}, ME))

    def unbind(self, queue: str, exchange: str, key: str = "", arguments: dict[str, Any] | None = None) -> Plan:
        return self.do(self.vhost.plan_unbind_queue(queue, exchange, key, arguments or {}, ME))

    def link(self, destination: str, source: str, key: str = "") -> Plan:
        return self.do(self.vhost.plan_bind_exchange(destination, source, key, {}))

    def delete_queue(self, name: str) -> Plan:
        self.engine.pop(self.vhost.engine_name(name), None)
        return self.do(self.vhost.plan_forget_queues([name]))

    def route(self, exchange: str, key: str = "", headers: dict[str, Any] | None = None) -> list[str]:
        return list(self.vhost.route(exchange, key, lambda: headers or {}))
