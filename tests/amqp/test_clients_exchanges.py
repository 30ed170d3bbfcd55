"""Exchanges of each kind as clients declare and bind them, and where messages go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import UnroutableError

from amqp_clients import bodies, count, refused, unique, wait_until

Declare = Callable[..., str]
Exchange = Callable[..., str]


@pytest.fixture
def exchange(channel: BlockingChannel) -> Iterator[Exchange]:
    """Declare an exchange of a kind that is deleted when the test ends; returns its name."""
    declared: list[str] = []

    def declare(kind: str, **settings: object) -> str:
        declared.append(unique("exchange"))
        channel.exchange_declare(declared[-1], kind, **settings)
        return declared[-1]

    yield declare
    if channel.connection.is_open:
        with channel.connection.channel() as other:
            for name in declared:
                other.exchange_delete(name)


@pytest.fixture(autouse=True)
def confirmed(channel: BlockingChannel) -> None:
    """Publishes are in their queues, or returned, when they return."""
    channel.confirm_delivery()


def reaches(channel: BlockingChannel, exchange: str, key: str, **properties: object) -> bool:
    """Publish a message; tell whether it went to any queue."""
    try:
        channel.basic_publish(exchange, key, key.encode(), pika.BasicProperties(**properties), mandatory=True)
    except UnroutableError:
        return False
    return True


def test_the_predeclared_exchanges_are_there(channel: BlockingChannel) -> None:
    """Each kind has one or two; they can't be declared otherwise or deleted."""
    for name in ("direct", "fanout", "topic", "headers", "match"):
        kind = "headers" if name == "match" else name
        channel.exchange_declare(f"amq.{name}", kind, passive=True)
        channel.exchange_declare(f"amq.{name}", kind, durable=True)
        assert refused(lambda name=name: channel.connection.channel().exchange_delete(f"amq.{name}")) == 403


def test_the_default_exchange_can_be_published_to_only(channel: BlockingChannel, queue: str) -> None:
    """Each queue is bound to it by its name; 403 for all else."""
    side = channel.connection.channel
    assert refused(lambda: side().queue_bind(queue, "", "key")) == 403
    assert refused(lambda: side().queue_unbind(queue, "", queue)) == 403
    assert refused(lambda: side().exchange_delete("")) == 403
    assert refused(lambda: side().exchange_declare("", "direct")) == 403
    assert reaches(channel, "", queue)


def test_a_direct_exchange_goes_by_equal_keys(channel: BlockingChannel, exchange: Exchange, declare: Declare) -> None:
    """A queue has a message once, however many of its bindings match; two queues have it both."""
    name, one, two = exchange("direct"), declare(), declare()
    channel.queue_bind(one, name, "a")
    channel.queue_bind(one, name, "b")
    channel.queue_bind(two, name, "b")
    assert reaches(channel, name, "a")
    assert reaches(channel, name, "b")
    assert not reaches(channel, name, "A")
    assert bodies(channel, one, 2) == [b"a", b"b"]
    assert bodies(channel, two, 1) == [b"b"]
    channel.queue_unbind(one, name, "b")
    assert reaches(channel, name, "b")
    assert (count(channel, one), count(channel, two)) == (0, 1)


def test_a_fanout_exchange_goes_to_all(channel: BlockingChannel, exchange: Exchange, declare: Declare) -> None:
    """Keys do not matter, and twice bound is once delivered."""
    name, one, two = exchange("fanout"), declare(), declare()
    for queue, key in ((one, ""), (one, "x"), (two, "y")):
        channel.queue_bind(queue, name, key)
    assert reaches(channel, name, "anything")
    assert (count(channel, one), count(channel, two)) == (1, 1)


TOPICS = {
    "a.b.c": ("a.b.c",),
    "a.*.c": ("a.b.c", "a.x.c", "a..c"),
    "a.#": ("a", "a.b", "a.b.c", "a.x.c", "a..c", "a.b.b"),
    "#": ("a", "a.b", "a.b.c", "a.x.c", "a..c", "a.b.b", "", "b", "x.a"),
    "*": ("a", "b"),
    "#.a": ("a", "x.a"),
    "*.#": ("a", "a.b", "a.b.c", "a.x.c", "a..c", "a.b.b", "b", "x.a"),
    "a.#.b": ("a.b", "a.b.b"),
    "": ("",),
}
"""By each pattern, the keys that match it."""


def test_a_topic_exchange_goes_by_words(channel: BlockingChannel, exchange: Exchange, declare: Declare) -> None:
    """`*` is one word, also an empty one; `#` any number; all else is itself."""
    name = exchange("topic")
    queues = {pattern: declare() for pattern in TOPICS}
    for pattern, queue in queues.items():
        channel.queue_bind(queue, name, pattern)
    for key in TOPICS["#"]:
        assert reaches(channel, name, key)
    for pattern, queue in queues.items():
        expected = [key.encode() for key in TOPICS["#"] if key in TOPICS[pattern]]
        assert bodies(channel, queue, len(expected)) == expected, pattern
        assert count(channel, queue) == 0, pattern


def test_a_headers_exchange_goes_by_values(channel: BlockingChannel, exchange: Exchange, declare: Declare) -> None:
    """All or any of them; a binding's value that is void asks for the header only; those with `x-` do not count."""
    name = exchange("headers")
    bindings = {
        "all": {"x-match": "all", "a": 1, "b": "two"},
        "any": {"x-match": "any", "a": 1, "b": "two"},
        "there": {"a": None},
        "default": {"a": 1, "b": "two"},
        "all with x": {"x-match": "all-with-x", "a": 1, "x-c": 3},
        "all, x beside": {"x-match": "all", "a": 1, "x-c": 4},
    }
    queues = {word: declare() for word in bindings}
    for word, arguments in bindings.items():
        channel.queue_bind(queues[word], name, arguments=arguments)

    def went(headers: dict[str, object] | None) -> set[str]:
        reaches(channel, name, "ignored", headers=headers)
        return {word for word, queue in queues.items() if channel.queue_purge(queue).method.message_count}

    assert went({"a": 1, "b": "two", "c": True}) == {"all", "any", "there", "default", "all, x beside"}
    assert went({"a": 1}) == {"any", "there", "all, x beside"}
    assert went({"a": "1"}) == {"there"}
    assert went({"b": "two"}) == {"any"}
    assert went({"b": "Two"}) == set()
    assert went({"a": 1, "x-c": 3}) == {"any", "there", "all with x", "all, x beside"}
    assert went(None) == set()


@pytest.mark.parametrize("arguments", [{"x-match": "some"}, {"x-match": 1}], ids=str)
def test_a_headers_binding_matches_all_or_any(
    channel: BlockingChannel, queue: str, arguments: dict[str, object]
) -> None:
    """406 for other words."""
    assert refused(lambda: channel.queue_bind(queue, "amq.headers", arguments=arguments)) == 406


def test_exchanges_are_bound_to_exchanges(channel: BlockingChannel, exchange: Exchange, declare: Declare) -> None:
    """Through each other, also in a circle: a queue has a message once."""
    first, second, third, queue = exchange("topic"), exchange("direct"), exchange("fanout"), declare()
    channel.exchange_bind(second, first, "a.*")
    channel.exchange_bind(third, second, "a.b")
    channel.exchange_bind(first, third)
    channel.queue_bind(queue, third)
    channel.queue_bind(queue, second, "a.b")
    assert reaches(channel, first, "a.b")
    assert not reaches(channel, first, "a.c")
    assert count(channel, queue) == 1
    channel.exchange_unbind(second, first, "a.*")
    assert not reaches(channel, first, "a.b")


def test_an_alternate_exchange_has_what_goes_nowhere(
    channel: BlockingChannel, exchange: Exchange, declare: Declare
) -> None:
    """Only that; a mandatory message is not returned then."""
    rest = exchange("fanout")
    name, queue, others = exchange("direct", arguments={"alternate-exchange": rest}), declare(), declare()
    channel.queue_bind(queue, name, "known")
    assert not reaches(channel, name, "unknown")
    channel.queue_bind(others, rest)
    assert reaches(channel, name, "known")
    assert reaches(channel, name, "unknown")
    assert bodies(channel, queue, 1) == [b"known"]
    assert bodies(channel, others, 1) == [b"unknown"]
    assert (count(channel, queue), count(channel, others)) == (0, 0)


def test_a_message_of_several_keys_is_routed_by_all_of_them_everywhere(
    channel: BlockingChannel, exchange: Exchange, declare: Declare
) -> None:
    """Behind another exchange; and to the alternate one if none of them leads anywhere."""
    rest, behind = exchange("fanout"), exchange("topic")
    name, queue, others = exchange("direct", arguments={"alternate-exchange": rest}), declare(), declare()
    channel.exchange_bind(behind, name, "first")
    channel.queue_bind(queue, behind, "second")
    channel.queue_bind(others, rest)
    for number, copies in enumerate(
        ({"CC": ["first", "second"]}, {"CC": ["first"], "BCC": ["second"]}, {"CC": ["no"]})
    ):
        channel.basic_publish(name, "nowhere", str(number).encode(), pika.BasicProperties(headers=copies))
    assert bodies(channel, queue, 2) == [b"0", b"1"]
    assert bodies(channel, others, 1) == [b"2"]
    assert (count(channel, queue), count(channel, others)) == (0, 0)


def test_an_internal_exchange_is_for_exchanges_only(
    channel: BlockingChannel, exchange: Exchange, declare: Declare
) -> None:
    """403 for who publishes to it."""
    inside, name, queue = exchange("fanout", internal=True), exchange("fanout"), declare()
    channel.exchange_bind(inside, name)
    channel.queue_bind(queue, inside)
    assert reaches(channel, name, "key")
    assert refused(lambda: reaches(channel, inside, "key")) == 403


def test_an_auto_delete_exchange_goes_with_its_last_binding(channel: BlockingChannel, declare: Declare) -> None:
    """Not before it had one."""
    name, queue = unique(), declare()
    channel.exchange_declare(name, "fanout", auto_delete=True)
    channel.exchange_declare(name, passive=True)
    channel.queue_bind(queue, name)
    channel.queue_unbind(queue, name)
    assert refused(lambda: channel.exchange_declare(name, passive=True)) == 404


def test_bindings_go_with_their_queue(channel: BlockingChannel, declare: Declare) -> None:
    """An auto-delete exchange that had no other goes, too."""
    name, queue = unique(), declare()
    channel.exchange_declare(name, "direct", auto_delete=True)
    channel.queue_bind(queue, name, "key")
    channel.queue_delete(queue)
    assert refused(lambda: channel.exchange_declare(name, passive=True)) == 404


def test_an_exchange_is_deleted_only_if_it_is_unused_where_that_is_asked(
    channel: BlockingChannel, exchange: Exchange, queue: str
) -> None:
    """406 if it has bindings; one that is not there is deleted already."""
    name = exchange("direct")
    channel.queue_bind(queue, name, "key")
    assert refused(lambda: channel.connection.channel().exchange_delete(name, if_unused=True)) == 406
    channel.queue_unbind(queue, name, "key")
    channel.exchange_delete(name, if_unused=True)
    channel.exchange_delete(name)
    assert refused(lambda: reaches(channel, name, "key")) == 404


@pytest.mark.parametrize(
    "settings",
    [
        {"exchange_type": "fanout"},
        {"durable": True},
        {"auto_delete": True},
        {"internal": True},
        {"arguments": {"alternate-exchange": "other"}},
    ],
    ids=str,
)
def test_declaring_it_otherwise_is_refused(
    channel: BlockingChannel, exchange: Exchange, settings: dict[str, object]
) -> None:
    """406, with what differs; declaring it as it is, is fine."""
    name = exchange("direct")
    channel.exchange_declare(name, "direct")
    side = channel.connection.channel()
    assert refused(lambda: side.exchange_declare(name, **({"exchange_type": "direct"} | settings))) == 406


def test_names_that_begin_with_amq_are_the_brokers(channel: BlockingChannel) -> None:
    """403 for who declares one that is not there; 404 for one that is not there at all."""
    side = channel.connection.channel
    assert refused(lambda: side().exchange_declare("amq." + unique(), "direct")) == 403
    assert refused(lambda: side().exchange_declare(unique(), "direct", passive=True)) == 404


def test_an_unknown_kind_closes_the_channel(channel: BlockingChannel, only_qflow: None) -> None:
    """406, as RabbitMQ 4 does; 3.10 closes the connection with 503."""
    assert refused(lambda: channel.exchange_declare(unique(), "x-no-such-kind")) == 406


def test_binding_exchanges_needs_both(channel: BlockingChannel) -> None:
    """404 for either that is not there; unbinding is fine whatever is not there."""
    side = channel.connection.channel
    assert refused(lambda: side().exchange_bind("amq.fanout", unique())) == 404
    assert refused(lambda: side().exchange_bind(unique(), "amq.fanout")) == 404
    channel.exchange_unbind("amq.fanout", unique())
    channel.exchange_unbind(unique(), "amq.fanout")


def test_a_delayed_exchange_lets_messages_wait(
    channel: BlockingChannel, exchange: Exchange, declare: Declare, only_qflow: None
) -> None:
    """`x-delay` in milliseconds; the shorter one comes first, and routing is that of the kind it has inside."""
    name = exchange("x-delayed-message", arguments={"x-delayed-type": "topic"})
    queue = declare()
    channel.queue_bind(queue, name, "a.*")
    for delay_ms, key in ((300, "a.late"), (100, "a.early"), (None, "a.now"), (10, "b.elsewhere")):
        headers = {"x-delay": delay_ms} if delay_ms else {}
        channel.basic_publish(name, key, key.encode(), pika.BasicProperties(headers=headers))
    assert count(channel, queue) <= 1
    assert bodies(channel, queue, 3) == [b"a.now", b"a.early", b"a.late"]
    assert count(channel, queue) == 0


@pytest.mark.parametrize("arguments", [None, {"x-delayed-type": "no such kind"}, {"x-delayed-type": 5}], ids=str)
def test_a_delayed_exchange_has_a_kind_inside(
    channel: BlockingChannel, arguments: dict[str, object] | None, only_qflow: None
) -> None:
    """406 without one."""
    assert refused(lambda: channel.exchange_declare(unique(), "x-delayed-message", arguments=arguments)) == 406


def test_a_queue_that_is_deleted_is_routed_to_no_more(
    channel: BlockingChannel, exchange: Exchange, declare: Declare
) -> None:
    """Nor is one that is declared again under its name, until it is bound."""
    name, queue = exchange("fanout"), declare()
    channel.queue_bind(queue, name)
    assert reaches(channel, name, "key")
    channel.queue_delete(queue)
    channel.queue_declare(queue, exclusive=True)
    assert not reaches(channel, name, "key")
    channel.queue_bind(queue, name)
    assert reaches(channel, name, "key")


def test_a_connection_that_ends_takes_the_bindings_of_its_queues(
    connect: Callable[..., pika.BlockingConnection], channel: BlockingChannel, exchange: Exchange
) -> None:
    """Their exclusive queues are gone, and routes with them."""
    name, other = exchange("fanout"), connect()
    with other.channel() as declaring:
        queue = declaring.queue_declare("", exclusive=True).method.queue
        declaring.queue_bind(queue, name)
    assert reaches(channel, name, "key")
    other.close()
    wait_until(channel.connection, lambda: not reaches(channel, name, "key"))


def test_many_queues_of_all_kinds_take_a_message(channel: BlockingChannel, exchange: Exchange) -> None:
    """Those that say nothing of their own share it; each has it once, with what it was published with."""
    name = exchange("fanout")
    kinds: list[dict[str, Any]] = [{} for _ in range(12)]
    kinds += [{"x-max-length": 1}, {"x-message-ttl": 60_000}, {"x-max-priority": 3}, {"x-queue-type": "quorum"}]
    queues = [(unique("queue"), arguments) for arguments in kinds]
    for queue, arguments in queues:
        channel.queue_declare(queue, durable=True, arguments=arguments)
        channel.queue_bind(queue, name)
    passing = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(passing, name)
    try:
        channel.confirm_delivery()
        for body, mode in ((b"1", 2), (b"2", 1), (b"3", 2)):
            channel.basic_publish(name, "key", body, pika.BasicProperties(delivery_mode=mode, app_id="app"))
        for queue, arguments in [*queues, (passing, {})]:
            found = [channel.basic_get(queue, auto_ack=True) for _ in range(4)]
            expected = [b"3"] if "x-max-length" in arguments else [b"1", b"2", b"3"]
            assert [body for method, _, body in found if method is not None] == expected
            assert found[0][0].exchange == name
            assert (found[0][1].app_id, found[0][0].routing_key) == ("app", "key")
    finally:
        for queue, _ in queues:
            channel.queue_delete(queue)
