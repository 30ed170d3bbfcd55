"""What AMQP declares, in the log of a broker: there after a reopen, a kill and a snapshot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import qflow
from amqp_model import ME, Host
from inside import copy_as_killed
from qflow.amqp.model.topology import Topology

Open = Callable[..., qflow.Broker]


class BrokerHost(Host):
    """A virtual host on a broker: what it declares, the broker has."""

    def __init__(self, broker: qflow.Broker, name: str = "/") -> None:
        self.broker = broker
        self.topology = Topology(broker.engine.spool.log, self._durable)
        self.vhost = self.topology.vhost(name)

    def _durable(self, name: str, is_stream: bool) -> bool | None:
        try:
            return self.broker.queue(name).settings.durable
        except qflow.NotFound:
            return None

    def declare(self, name: str, **flags: bool) -> None:
        options = {"durable": True, "auto_delete": False, "exclusive": False} | flags
        plan = self.vhost.plan_declare_queue(name, ME, arguments={}, **options)
        self.topology.keep(plan)
        assert plan.queue is not None
        self.broker.declare_queue(self.vhost.engine_name(name), **plan.queue.settings())
        plan.apply()


def declare_some(broker: qflow.Broker) -> None:
    """Queues `a` to `c`, of which the engine loses the last, bound to a topic exchange."""
    for name in ("/", "other"):
        host = BrokerHost(broker, name)
        host.exchange("x", "topic")
        for queue in "abc":
            host.declare(queue)
            host.bind(queue, "x", f"{queue}.#")
            host.bind(queue, "amq.fanout")
        host.declare("brief", durable=False)
        host.bind("brief", "x", "#")
        broker.delete_queue(host.vhost.engine_name("c"))


def check(broker: qflow.Broker) -> None:
    """What is durable is there, and nothing of what the engine has not."""
    for name in ("/", "other"):
        host = BrokerHost(broker, name)
        assert host.route("x", "a.k") == ["a"]
        assert host.route("x", "c.k") == []
        assert host.route("amq.fanout") == ["a", "b"]
        assert host.route("", "c") == host.route("", "brief") == []
    facts = broker.engine.spool.log.facts("amqp")
    assert len(facts) == 14, "two of an exchange, four of queues, eight of bindings"
    assert broker.check() == []


@pytest.mark.parametrize("journal", ["auto", "off"])
def test_what_is_declared_is_there_after_a_reopen_a_kill_and_a_snapshot(
    journal: str, open_spool: Open, tmp_path: Path
) -> None:
    """In every virtual host; whatever the log had of it, and the journal."""
    broker = open_spool(journal=journal)
    declare_some(broker)
    killed = copy_as_killed(broker, tmp_path / "killed")
    broker.snapshot(tmp_path / "copy")
    broker.close()
    for path in (killed, tmp_path / "copy"):
        with qflow.open(path) as again:
            check(again)
    check(open_spool(journal=journal))


def test_a_queue_of_a_program_and_one_of_a_client_are_one(open_spool: Open) -> None:
    """The name is the same in the root virtual host; elsewhere it has a name of its own."""
    broker = open_spool()
    broker.declare_queue("jobs", durable=False)
    host, other = BrokerHost(broker), BrokerHost(broker, "o/o")
    assert host.route("", "jobs") == ["jobs"]
    assert other.route("", "jobs") == []
    other.declare("jobs")
    assert set(broker.queues()) == {"jobs", "amqp:o%2Fo:jobs"}
    assert host.route("", "amqp:o%2Fo:jobs") == []
