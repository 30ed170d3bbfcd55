"""Virtual hosts: what is declared, bound and deleted, what is refused, where messages go, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from amqp_model import ME, OTHER, FakeLog, Host
from qflow.amqp.errors import AmqpError
from qflow.amqp.model import routing
from qflow.amqp.model.queues import engine_name
from qflow.amqp.model.routing import MOST_ROUTES


@pytest.fixture
def host() -> Host:
    return Host()


def refused(code: int, text: str, call: Callable[[], object]) -> None:
    with pytest.raises(AmqpError) as caught:
        call()
    assert (caught.value.code, text in caught.value.text) == (code, True), caught.value.text


# Routing -------------------------------------------------------------------------------------------------------------


def test_every_queue_is_bound_to_the_default_exchange(host: Host) -> None:
    """By its name, and to no other."""
    host.queue("jobs")
    assert host.route("", "jobs") == ["jobs"]
    assert host.route("", "other") == host.route("", "") == []
    host.delete_queue("jobs")
    assert host.route("", "jobs") == []


def test_a_message_goes_to_each_queue_once_in_the_order_of_bindings(host: Host) -> None:
    """Whatever ways lead there."""
    for name in "cab":
        host.queue(name)
        host.bind(name, "amq.topic", "x.*")
    host.bind("a", "amq.topic", "#")
    host.bind("b", "amq.topic", "x.y")
    assert host.route("amq.topic", "x.y") == ["c", "a", "b"]
    assert host.route("amq.topic", "z") == ["a"]


def test_exchanges_bound_in_a_circle_are_visited_once(host: Host) -> None:
    """With two queues on the way."""
    for name in ("one", "two", "three"):
        host.exchange(name, "fanout")
        host.queue(f"of {name}")
        host.bind(f"of {name}", name)
    for source, destination in (("one", "two"), ("two", "three"), ("three", "one"), ("one", "one")):
        host.link(destination, source)
    for name in ("one", "two", "three"):
        assert sorted(host.route(name)) == ["of one", "of three", "of two"]


def test_what_matches_nothing_goes_to_the_alternate_exchange(host: Host) -> None:
    """Also to one after the other, in a circle, to the default one, and to one that is not there."""
    host.exchange("a", "direct", {"alternate-exchange": "b"})
    host.exchange("b", "direct", {"alternate-exchange": "a"})
    host.queue("q")
    host.bind("q", "b", "k")
    assert host.route("a", "k") == ["q"]
    assert host.route("a", "other") == []
    host.exchange("c", "fanout", {"alternate-exchange": ""})
    assert host.route("c", "q") == ["q"]
    assert host.route("c", "later") == []
    host.queue("later")
    assert host.route("c", "later") == ["later"]
    host.exchange("d", "fanout", {"alternate-exchange": "nowhere"})
    assert host.route("d", "q") == []


def test_what_matches_a_binding_does_not_go_to_the_alternate_exchange(host: Host) -> None:
    """Even if the exchange it is bound to has nowhere to go."""
    host.exchange("dead end", "fanout")
    host.exchange("a", "fanout", {"alternate-exchange": "amq.fanout"})
    host.queue("q")
    host.bind("q", "amq.fanout")
    host.link("dead end", "a")
    assert host.route("a", "k") == []


def test_headers_are_decoded_only_where_an_exchange_needs_them(host: Host) -> None:
    """A headers exchange behind others is asked for each message."""
    host.queue("q")
    host.bind("q", "amq.headers", "", {"kind": "a"})
    asked: list[int] = []

    def headers() -> dict[str, Any]:
        asked.append(1)
        return {"kind": "a"}

    assert host.vhost.route("amq.fanout", "", headers) == ()
    assert not asked
    host.link("amq.headers", "amq.fanout")
    assert host.vhost.route("amq.fanout", "", headers) == ("q",)
    assert host.route("amq.fanout", "", {"kind": "b"}) == []
    assert len(asked) == 1


def test_a_route_is_remembered_until_something_changes(host: Host) -> None:
    """And only so many are."""
    host.queue("q")
    host.queue("r")
    host.bind("q", "amq.direct", "k")
    first = host.vhost.route("amq.direct", "k")
    assert host.vhost.route("amq.direct", "k") is first
    host.bind("r", "amq.direct", "k")
    assert host.route("amq.direct", "k") == ["q", "r"]
    host.unbind("q", "amq.direct", "k")
    assert host.route("amq.direct", "k") == ["r"]
    for number in range(MOST_ROUTES + 10):
        host.route("amq.direct", str(number))
    assert len(host.vhost._routing._routes) <= MOST_ROUTES


def test_routes_to_many_queues_take_no_more_memory_than_others(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many names are remembered as may be, however many queues a message goes to."""
    monkeypatch.setattr(routing, "MOST_NAMES", 10)
    for name in "abcd":
        host.queue(name)
        host.bind(name, "amq.fanout")
    remembered = host.vhost._routing._routes
    for number in range(20):
        key = str(number)
        assert host.vhost.route("amq.fanout", key) is host.vhost.route("amq.fanout", key)
        assert sum(map(len, remembered.values())) <= 10
    host.bind("a", "amq.direct", "k")
    assert host.vhost.route("amq.fanout", "0") == tuple("abcd")
    assert host.vhost._routing._names == 4


def test_a_delayed_exchange_routes_as_the_type_it_names(host: Host) -> None:
    """`x-delayed-type`, which must be there."""
    plan = host.exchange("later", "x-delayed-message", {"x-delayed-type": "topic"})
    assert plan.exchange is not None
    assert plan.exchange.is_delayed
    host.queue("q")
    host.bind("q", "later", "a.*")
    assert host.route("later", "a.b") == ["q"]
    for arguments in ({}, {"x-delayed-type": "x-delayed-message"}, {"x-delayed-type": 1}, {"x-delayed-type": []}):
        refused(406, "'x-delayed-type'", lambda: host.exchange("bad", "x-delayed-message", arguments))  # noqa: B023


def test_an_internal_exchange_is_not_published_to(host: Host) -> None:
    """But by others; one that is not there is not found."""
    host.exchange("inside", "fanout", internal=True)
    host.queue("q")
    host.bind("q", "inside")
    host.link("inside", "amq.fanout")
    assert host.route("amq.fanout") == ["q"]
    refused(403, "cannot publish to internal exchange 'inside'", lambda: host.vhost.publishing("inside"))
    refused(404, "no exchange 'x' in vhost '/'", lambda: host.vhost.publishing("x"))
    assert host.vhost.publishing("").name == ""


# Exchanges -----------------------------------------------------------------------------------------------------------


def test_an_exchange_is_declared_again_as_it_is(host: Host) -> None:
    """Anything else is refused, and what differs is named."""
    host.exchange("x", "topic", {"alternate-exchange": "a"})
    assert not host.exchange("x", "topic", {"alternate-exchange": "a", "other": 1}).is_new
    assert host.log.commits == 1
    for text, kind, arguments, flags in (
        ("inequivalent arg 'type' for exchange 'x' in vhost '/': received 'direct' but current is 'topic'", "direct", {}, {}),
        ("inequivalent arg 'durable' for exchange 'x' in vhost '/': received 'false' but", "topic", {}, {"durable": False}),
        ("arg 'auto_delete'", "topic", {}, {"auto_delete": True}),
        ("arg 'internal'", "topic", {}, {"internal": True}),
        ("'alternate-exchange' for exchange 'x' in vhost '/': received none but current is the value 'a' of type 'longstr'", "topic", {}, {}),
    ):  # fmt: skip
        refused(406, text, lambda: host.exchange("x", kind, arguments, **flags))  # noqa: B023


def test_names_that_are_reserved_are_refused(host: Host) -> None:
    """Those that are there may be declared as they are, and not deleted."""
    refused(403, "exchange name 'amq.mine' contains reserved prefix 'amq.*'", lambda: host.exchange("amq.mine"))
    assert not host.exchange("amq.topic", "topic").is_new
    refused(403, "operation not permitted on the default exchange", lambda: host.exchange(""))
    refused(403, "default exchange", lambda: host.vhost.check_exchange(""))
    refused(403, "default exchange", lambda: host.vhost.plan_delete_exchange(""))
    refused(403, "deletion of system exchange 'amq.topic'", lambda: host.vhost.plan_delete_exchange("amq.topic"))
    refused(406, "unknown exchange type 'odd'", lambda: host.exchange("x", "odd"))
    federated = "x-federation-upstream"  # its link goes on with fanout after a 503 alone
    refused(503, f"unknown exchange type '{federated}'", lambda: host.exchange("x", federated))
    refused(404, "no exchange 'x' in vhost '/'", lambda: host.vhost.check_exchange("x"))
    refused(
        406,
        "invalid type 'signedint' for arg 'alternate-exchange'",
        lambda: host.exchange("x", "direct", {"alternate-exchange": 1}),
    )
    refused(403, "queue name 'amq.q' contains reserved", lambda: host.queue("amq.q"))
    refused(403, "queue name 'amqp:q' contains reserved", lambda: host.queue("amqp:q"))


def test_an_exchange_goes_with_its_bindings(host: Host) -> None:
    """Those from it and those to it; if it is in use, only if that is no matter."""
    host.exchange("x", "fanout")
    host.queue("q")
    host.bind("q", "x")
    host.link("x", "amq.fanout")
    refused(406, "exchange 'x' in vhost '/' in use", lambda: host.vhost.plan_delete_exchange("x", if_unused=True))
    host.do(host.vhost.plan_delete_exchange("x"))
    assert host.route("amq.fanout") == []
    assert host.vhost.bindings == {}
    refused(404, "no exchange 'x'", lambda: host.route("x"))
    assert host.vhost.plan_delete_exchange("x").facts == {}


def test_an_auto_delete_exchange_goes_with_its_last_binding(host: Host) -> None:
    """And those that were bound to it only, one after the other."""
    for name in "abc":
        host.exchange(name, "fanout", auto_delete=True)
    host.link("b", "a")
    host.link("c", "b")
    host.queue("q")
    host.queue("r")
    host.bind("q", "c")
    host.bind("r", "c")
    host.unbind("q", "c")
    assert {"a", "b", "c"} <= set(host.vhost.exchanges)
    host.delete_queue("r")
    assert not {"a", "b", "c"} & set(host.vhost.exchanges)
    assert host.again().vhost.exchanges.keys() == host.vhost.exchanges.keys()


def test_an_auto_delete_exchange_bound_to_itself_goes_with_the_last(host: Host) -> None:
    """Twice to one queue counts twice."""
    host.exchange("x", "direct", auto_delete=True)
    host.queue("q")
    for key in "ab":
        host.bind("q", "x", key)
    host.link("x", "x", "c")
    host.delete_queue("q")
    assert "x" in host.vhost.exchanges
    host.do(host.vhost.plan_unbind_exchange("x", "x", "c", {}))
    assert "x" not in host.vhost.exchanges


# Queues --------------------------------------------------------------------------------------------------------------


def test_a_queue_is_declared_again_as_it_is(host: Host) -> None:
    """Anything else is refused, and what differs is named; unknown arguments do not matter."""
    host.queue("q", {"x-message-ttl": 1000})
    assert not host.queue("q", {"x-message-ttl": 1000, "x-queue-type": "classic", "mine": 1}).is_new
    for text, arguments, flags in (
        ("inequivalent arg 'durable' for queue 'q' in vhost '/': received 'false' but current is 'true'", {}, {"durable": False}),
        ("arg 'auto_delete'", {}, {"auto_delete": True}),
        ("'x-message-ttl' for queue 'q' in vhost '/': received none but current is the value '1000' of type 'signedint'", {}, {}),
        ("received the value '5' of type 'signedint' but current is none", {"x-message-ttl": 1000, "x-max-length": 5}, {}),
        ("arg 'x-queue-type'", {"x-message-ttl": 1000, "x-queue-type": "quorum"}, {}),
    ):  # fmt: skip
        refused(406, text, lambda: host.queue("q", arguments, **flags))  # noqa: B023


def test_an_exclusive_queue_is_of_one_connection(host: Host) -> None:
    """Others are told 405 whatever they ask; it is never durable, and known by its connection."""
    plan = host.queue("q", exclusive=True)
    assert plan.queue is not None
    assert (plan.queue.durable, plan.facts) == (False, {})
    assert not host.queue("q", exclusive=True).is_new
    locked = "cannot obtain exclusive access to locked queue 'q' in vhost '/'"
    refused(405, locked, lambda: host.queue("q", exclusive=True, connection=OTHER))
    refused(405, locked, lambda: host.queue("q", exclusive=False))
    refused(405, locked, lambda: host.vhost.queue("q", OTHER))
    refused(405, locked, lambda: host.vhost.plan_bind_queue("q", "amq.direct", "", {}, OTHER))
    refused(405, locked, lambda: host.vhost.plan_unbind_queue("q", "amq.direct", "", {}, OTHER))
    refused(405, locked, lambda: host.vhost.plan_delete_queue("q", OTHER))
    assert host.vhost.exclusive_queues(ME) == ["q"]
    host.engine.clear()
    host.do(host.vhost.plan_forget_queues(host.vhost.exclusive_queues(ME)))
    assert (host.vhost.exclusive_queues(ME), host.route("", "q")) == ([], [])
    host.queue("plain")
    refused(405, "locked queue 'plain'", lambda: host.queue("plain", exclusive=True))


def test_the_server_names_queues(host: Host) -> None:
    """Each otherwise."""
    first, second = (host.queue("", exclusive=True).queue for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.name.startswith("amq.gen-")
    assert first.name != second.name
    assert first.server_named


def test_quorum_queues_and_streams_are_durable(host: Host) -> None:
    """Nothing else can be declared."""
    for kind in ("quorum", "stream"):
        arguments = {"x-queue-type": kind}
        assert host.queue(kind, arguments).is_new
        refused(406, "invalid property 'non-durable' for queue 'q'", lambda: host.queue("q", arguments, durable=False))  # noqa: B023
        refused(406, "'exclusive-owner'", lambda: host.queue("q", arguments, exclusive=True))  # noqa: B023
        refused(406, "'auto-delete'", lambda: host.queue("q", arguments, auto_delete=True))  # noqa: B023
        refused(406, "server-named queue for type", lambda: host.queue("", arguments))  # noqa: B023


def test_a_queue_is_deleted_if_unused_and_empty(host: Host) -> None:
    """One that is not there is deleted; where there is none, nothing else can be done with it."""
    host.queue("q")
    delete = host.vhost.plan_delete_queue
    refused(406, "queue 'q' in vhost '/' in use", lambda: delete("q", ME, if_unused=True, consumers=1))
    refused(406, "queue 'q' in vhost '/' not empty", lambda: delete("q", ME, if_empty=True, messages=1))
    plan = delete("q", ME, if_unused=True, if_empty=True)
    assert plan.queue is not None
    host.engine.clear()
    host.do(plan)
    assert delete("q", ME).queue is None
    refused(404, "no queue 'q' in vhost '/'", lambda: host.vhost.queue("q", ME))
    refused(404, "no queue 'q' in vhost '/'", lambda: host.bind("q", "amq.direct"))


def test_a_queue_of_a_program_is_one_of_the_root_virtual_host(host: Host) -> None:
    """It can be bound, declared as it is, and deleted; those of other virtual hosts are not seen there."""
    host.engine.update({"jobs": True, "brief": False, "amqp:other:q": True})
    assert host.route("", "jobs") == ["jobs"]
    assert host.route("", "amqp:other:q") == []
    assert not host.queue("jobs").is_new
    assert not host.queue("brief", durable=False).is_new
    refused(406, "arg 'durable'", lambda: host.queue("brief"))
    refused(406, "arg 'x-max-length'", lambda: host.queue("jobs", {"x-max-length": 1}))
    assert host.bind("jobs", "amq.direct", "k").facts
    assert not host.bind("brief", "amq.direct", "k").facts
    assert host.again().route("amq.direct", "k") == ["jobs"]
    assert host.topology.vhost("other").route("", "jobs") == ()
    plan = host.vhost.plan_delete_queue("jobs", ME)
    assert plan.queue is not None
    assert plan.queue.name == "jobs"
    host.do(plan)
    assert host.route("amq.direct", "k") == ["brief"]


def test_names_in_the_engine_are_of_one_virtual_host() -> None:
    """In the root they are the same."""
    assert engine_name("/", "q") == "q"
    assert engine_name("a/b:c", "q:1") == "amqp:a%2Fb%3Ac:q:1"


# Bindings ------------------------------------------------------------------------------------------------------------


def test_the_default_exchange_has_no_other_bindings(host: Host) -> None:
    """At neither end."""
    host.queue("q")
    text = "operation not permitted on the default exchange"
    refused(403, text, lambda: host.bind("q", ""))
    refused(403, text, lambda: host.unbind("q", ""))
    refused(403, text, lambda: host.link("", "amq.direct"))
    refused(403, text, lambda: host.link("amq.direct", ""))


def test_both_ends_of_a_binding_must_be_there_to_bind(host: Host) -> None:
    """And need not to unbind."""
    host.queue("q")
    refused(404, "no exchange 'x'", lambda: host.bind("q", "x"))
    refused(404, "no exchange 'x'", lambda: host.link("x", "amq.direct"))
    refused(404, "no exchange 'x'", lambda: host.link("amq.direct", "x"))
    refused(406, "Invalid x-match", lambda: host.bind("q", "amq.headers", "", {"x-match": "odd"}))
    host.unbind("q", "x")
    host.unbind("nobody", "amq.direct")
    host.do(host.vhost.plan_unbind_exchange("x", "y", "", {}))


def test_bindings_differ_by_their_arguments(host: Host) -> None:
    """Each is bound once and unbound once."""
    host.queue("q")
    assert host.bind("q", "amq.direct", "k", {"a": 1, "b": 2}).is_new
    assert not host.bind("q", "amq.direct", "k", {"b": 2, "a": 1}).is_new
    assert host.bind("q", "amq.direct", "k").is_new
    host.unbind("q", "amq.direct", "k")
    assert host.route("amq.direct", "k") == ["q"]
    host.unbind("q", "amq.direct", "k", {"a": 1, "b": 2})
    assert host.route("amq.direct", "k") == []


# Kept ----------------------------------------------------------------------------------------------------------------


def test_what_is_durable_is_there_after_a_restart(host: Host) -> None:
    """Exchanges, queues, and bindings between durable ones, in the same order; each change is one commit at most."""
    host.exchange("x", "headers", {"alternate-exchange": "amq.fanout", "f": 0.1})
    host.exchange("brief", "fanout", durable=False)
    host.exchange("later", "x-delayed-message", {"x-delayed-type": "direct"}, auto_delete=True)
    host.queue("b", {"x-message-ttl": 10, "raw": bytearray(b"\xff")})
    host.queue("a", auto_delete=True)
    host.queue("brief", durable=False)
    for queue in ("b", "a", "brief"):
        host.bind(queue, "amq.fanout")
        host.bind(queue, "brief")
        host.bind(queue, "x", "", {"n": 0.1})
    host.link("later", "x", "k")
    assert host.log.commits == 9
    after = host.again()
    assert after.route("amq.fanout") == ["b", "a"]
    assert after.route("x", "", {"n": 0.1}) == ["b", "a"]
    assert after.route("x", "", {"n": 0.2}) == []
    refused(404, "no exchange 'brief'", lambda: after.route("brief"))
    assert not after.exchange("x", "headers", {"alternate-exchange": "amq.fanout"}).is_new
    assert not after.exchange("later", "x-delayed-message", {"x-delayed-type": "direct"}, auto_delete=True).is_new
    queue = after.vhost.queue("b", ME)
    assert (queue.arguments, queue.settled.message_ttl_ms) == ({"x-message-ttl": 10, "raw": bytearray(b"\xff")}, 10)
    assert after.vhost.queue("a", ME).auto_delete
    host.queue("c")
    host.bind("c", "amq.fanout")
    assert host.again().route("amq.fanout") == ["b", "a", "c"]


def test_nothing_is_left_of_what_was_deleted(host: Host) -> None:
    """Neither in the log nor in memory."""
    host.exchange("x", "topic")
    host.queue("q")
    host.bind("q", "x", "a.*")
    host.bind("q", "amq.direct", "a", {"n": 1})
    host.delete_queue("q")
    host.do(host.vhost.plan_delete_exchange("x"))
    assert host.log.kept == {}
    assert (host.vhost.bindings, host.vhost._routing._to, host.vhost.queues) == ({}, {}, {})


def test_records_of_queues_that_the_engine_does_not_have_are_dropped() -> None:
    """With their bindings, in one commit: a crash came between record and queue, or a program deleted it."""
    host = Host("other")
    for name in ("gone", "there"):
        host.queue(name)
        host.bind(name, "amq.direct", "k")
    del host.engine["amqp:other:gone"]
    commits = host.log.commits
    after = host.again()
    assert after.route("amq.direct", "k") == ["there"]
    assert after.log.commits == commits + 1
    assert len(after.log.kept) == 2
    assert after.again().log.commits == commits + 1


def test_what_a_later_version_kept_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """And so is what may belong to it; the rest is served."""
    log = FakeLog()
    host = Host(log=log)
    host.queue("q")
    host.exchange("x")
    host.bind("q", "x", "k")
    host.bind("q", "amq.direct", "k")
    key = '["x","/","x"]'
    log.kept[key] = b"later"
    log.kept['["y","/","x"]'] = b"later"
    before = dict(log.kept)
    after = host.again()
    assert after.route("amq.direct", "k") == ["q"]
    assert log.kept == before
    assert caplog.text.count("it was left as it is") == 2
    for number in range(20):
        log.kept[f'["b","/","","{number}"]'] = b""
    assert "12 records more cannot be served" not in caplog.text
    host.again()
    assert "12 records more cannot be served" in caplog.text


def test_a_plan_changes_nothing_until_it_is_applied(host: Host) -> None:
    """So that its records can be committed first; those of one that came to nothing are forgotten again."""
    plan = host.vhost.plan_declare_queue("q", ME, durable=True, exclusive=False, auto_delete=False, arguments={})
    assert host.route("", "q") == []
    host.topology.keep(plan)
    assert host.log.kept.keys() == plan.undoing.keys() == {'["q","/","q"]'}
    plan.apply()
    assert host.route("", "q") == ["q"]
    removal = host.vhost.plan_delete_queue("q", ME)
    assert host.route("", "q") == ["q"]
    removal.apply()
    assert removal.undoing == {}
