"""Random histories of a virtual host: where messages go, by a plain search; and the same again after a restart."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from amqp_model import ME, Host
from qflow.amqp.errors import AmqpError
from qflow.amqp.model.bindings import QUEUE

EXCHANGES, QUEUES, KEYS = ("x", "y", "z"), ("q", "r", "s"), ("a", "b", "")
exchange, queue, key = st.sampled_from([*EXCHANGES, "amq.direct"]), st.sampled_from(QUEUES), st.sampled_from(KEYS)
kinds = st.sampled_from(["direct", "fanout"])
flags = st.fixed_dictionaries({"durable": st.booleans(), "auto_delete": st.booleans()})
alternates = st.none() | exchange
steps = st.lists(
    st.one_of(
        st.tuples(st.just("exchange"), exchange, kinds, flags, alternates),
        st.tuples(st.just("queue"), queue, flags),
        st.tuples(st.just("bind"), queue, exchange, key),
        st.tuples(st.just("unbind"), queue, exchange, key),
        st.tuples(st.just("link"), exchange, exchange, key),
        st.tuples(st.just("unlink"), exchange, exchange, key),
        st.tuples(st.just("delete exchange"), exchange),
        st.tuples(st.just("delete queue"), queue),
    ),
    max_size=40,
)


def take(host: Host, step: tuple) -> None:
    """Take a step, which may be refused."""
    what, *given = step
    match what:
        case "exchange":
            name, kind, its_flags, alternate = given
            host.exchange(name, kind, {} if alternate is None else {"alternate-exchange": alternate}, **its_flags)
        case "queue":
            host.queue(given[0], **given[1])
        case "bind":
            host.bind(*given)
        case "unbind":
            host.unbind(*given)
        case "link":
            host.link(*given)
        case "unlink":
            host.do(host.vhost.plan_unbind_exchange(*given, {}))
        case "delete exchange":
            host.do(host.vhost.plan_delete_exchange(given[0]))
        case "delete queue":
            host.delete_queue(given[0])


def plain_route(host: Host, name: str, routing_key: str, seen: set[str]) -> set[str]:
    """Find where a message goes by looking at every binding."""
    found = host.vhost.exchanges.get(name)
    if found is None or name in seen:
        return set()
    seen.add(name)
    matched = [
        one.target
        for one in host.vhost.bindings.values()
        if one.source == name and (found.kind == "fanout" or one.routing_key == routing_key)
    ]
    queues = {target.name for target in matched if target.kind == QUEUE}
    following = [target.name for target in matched if target.kind != QUEUE]
    if not matched and found.alternate is not None:
        following = [found.alternate]
    for other in following:
        queues |= plain_route(host, other, routing_key, seen)
    return queues


def check(host: Host) -> None:
    vhost = host.vhost
    for name in vhost.exchanges:
        for routing_key in KEYS if name else ():
            assert set(host.route(name, routing_key)) == plain_route(host, name, routing_key, set())
    ends = {(one.source, one.target.kind, one.target.name) for one in vhost.bindings.values()}
    assert all(source in vhost.exchanges for source, _, _ in ends)
    assert all(name in (vhost.queues if kind == QUEUE else vhost.exchanges) for _, kind, name in ends)


@given(history=steps)
def test_routes_and_records_agree_with_what_was_declared(history: list[tuple]) -> None:
    """After each step; after a restart the durable part is as before, and the log keeps nothing else."""
    host = Host("v")
    for step in history:
        with suppress(AmqpError):
            take(host, step)
        check(host)
    again = host.again()
    check(again)
    for name in QUEUES:
        before = host.vhost.queues.get(name)
        assert (name in again.vhost.queues) is (before is not None and before.durable)
    durable = {name for name, one in host.vhost.exchanges.items() if one.durable}
    assert set(again.vhost.exchanges) == durable
    assert set(again.vhost.bindings) == {key for key, one in host.vhost.bindings.items() if one.is_durable}
    predeclared = 6
    kept = len(again.vhost.queues) + len(durable) - predeclared + len(again.vhost.bindings)
    assert len(host.log.kept) == kept
    assert host.vhost.exclusive_queues(ME) == []
