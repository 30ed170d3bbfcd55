"""Queues as clients declare, use and delete them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, UnroutableError

from amqp_clients import PATIENCE_S, bodies, count, refused, serving, unique, wait_until

Connect = Callable[..., pika.BlockingConnection]


def exists(connection: pika.BlockingConnection, queue: str) -> bool:
    """Tell whether there is such a queue, by a channel of its own."""
    channel = connection.channel()
    try:
        channel.queue_declare(queue, passive=True)
    except ChannelClosedByBroker as error:
        if error.reply_code != 404:
            raise
        return False
    channel.close()
    return True


def test_a_queue_without_a_name_gets_one(channel: BlockingChannel) -> None:
    """It begins with `amq.gen-`, and is another one each time."""
    name = channel.queue_declare("", exclusive=True).method.queue
    assert name.startswith("amq.gen-")
    assert channel.queue_declare("", exclusive=True).method.queue != name


def test_an_empty_name_is_the_queue_declared_last_on_the_channel(channel: BlockingChannel, queue: str) -> None:
    """For binding, purging and getting; 404 on a channel that declared none."""
    channel.confirm_delivery()
    channel.queue_bind("", "amq.direct", "some key of " + queue)
    channel.basic_publish("amq.direct", "some key of " + queue, b"body")
    assert channel.queue_purge("").method.message_count == 1
    other = channel.connection.channel()
    assert refused(lambda: other.basic_get("")) == 404


def test_declaring_again_is_fine_if_all_is_equal(channel: BlockingChannel) -> None:
    """It tells what there is."""
    name = unique()
    channel.queue_declare(name, exclusive=True, arguments={"x-max-length": 5})
    channel.confirm_delivery()
    channel.basic_publish("", name, b"body")
    told = channel.queue_declare(name, exclusive=True, arguments={"x-max-length": 5}).method
    assert (told.queue, told.message_count, told.consumer_count) == (name, 1, 0)
    channel.basic_consume(name, lambda *_: None)
    assert channel.queue_declare(name, passive=True).method.consumer_count == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"durable": True},
        {"auto_delete": True},
        {"arguments": {"x-max-length": 6}},
        {"arguments": {"x-message-ttl": 6}},
        {"arguments": {}},
    ],
    ids=str,
)
def test_declaring_it_otherwise_is_refused(channel: BlockingChannel, settings: dict[str, object]) -> None:
    """406, with what differs."""
    name = unique()
    first = {"arguments": {"x-max-length": 5}}
    channel.queue_declare(name, **first)
    assert refused(lambda: channel.connection.channel().queue_declare(name, **(first | settings))) == 406
    channel.queue_delete(name)


def test_passive_asks_only(channel: BlockingChannel) -> None:
    """404 if there is none; arguments do not matter if there is."""
    assert refused(lambda: channel.queue_declare(unique(), passive=True)) == 404


def test_an_exclusive_queue_is_its_connections(connect: Connect, channel: BlockingChannel, queue: str) -> None:
    """Others get 405, whatever they do with it, and it goes with the connection."""
    other = connect()
    assert refused(lambda: other.channel().queue_declare(queue, exclusive=True)) == 405
    assert refused(lambda: other.channel().queue_declare(queue, passive=True)) == 405
    assert refused(lambda: other.channel().basic_get(queue)) == 405
    assert refused(lambda: other.channel().basic_consume(queue, lambda *_: None)) == 405
    assert refused(lambda: other.channel().queue_bind(queue, "amq.fanout")) == 405
    assert refused(lambda: other.channel().queue_purge(queue)) == 405
    assert refused(lambda: other.channel().queue_delete(queue)) == 405
    channel.connection.close()
    wait_until(other, lambda: not exists(other, queue))


def test_an_auto_delete_queue_goes_with_its_last_consumer(connect: Connect, channel: BlockingChannel) -> None:
    """Not before it had one."""
    name = unique()
    other = connect()
    channel.queue_declare(name, auto_delete=True)
    first = channel.basic_consume(name, lambda *_: None)
    second = other.channel().basic_consume(name, lambda *_: None)
    assert second != first
    channel.basic_cancel(first)
    assert exists(channel.connection, name)
    other.close()
    wait_until(channel.connection, lambda: not exists(channel.connection, name))


def test_deleting_tells_how_many_messages_went(channel: BlockingChannel) -> None:
    """Also for a queue that is not there: none."""
    name = unique()
    channel.queue_declare(name)
    channel.confirm_delivery()
    for _ in range(3):
        channel.basic_publish("", name, b"body")
    assert channel.queue_delete(name).method.message_count == 3
    assert channel.queue_delete(name).method.message_count == 0


def test_a_queue_is_deleted_only_if_it_is_empty_or_unused_where_that_is_asked(channel: BlockingChannel) -> None:
    """406 if it is not."""
    name = unique()
    channel.queue_declare(name, exclusive=True)
    channel.confirm_delivery()
    channel.basic_publish("", name, b"body")
    side = channel.connection.channel
    assert refused(lambda: side().queue_delete(name, if_empty=True)) == 406
    tag = channel.basic_consume(name, lambda *_: None)
    assert refused(lambda: side().queue_delete(name, if_unused=True)) == 406
    channel.basic_cancel(tag)
    assert side().queue_delete(name, if_unused=True).method.message_count == 1


def test_names_that_begin_with_amq_are_the_brokers(channel: BlockingChannel) -> None:
    """403 for who declares one that is not there; 404 for who asks for it."""
    side = channel.connection.channel
    assert refused(lambda: side().queue_declare("amq." + unique())) == 403
    assert refused(lambda: side().queue_declare("amq." + unique(), passive=True)) == 404


@pytest.mark.parametrize(
    "name", ["ein Wort", "näme/with:all?sorts&of#things", "..", "/", "a\x01b", "\N{SNOWMAN}" * 85], ids=repr
)
def test_a_name_may_be_anything_of_255_bytes(channel: BlockingChannel, name: str) -> None:
    """Messages find it, and it is told as it is."""
    name = name if len(name) > 80 else name + unique()
    assert channel.queue_declare(name, exclusive=True).method.queue == name
    channel.basic_publish("", name, b"body")
    assert bodies(channel, name, 1) == [b"body"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-message-ttl": -1},
        {"x-message-ttl": "soon"},
        {"x-expires": 0},
        {"x-expires": -5},
        {"x-max-length": -1},
        {"x-max-length-bytes": -1},
        {"x-max-length": "five"},
        {"x-overflow": "explode"},
        {"x-overflow": 7},
        {"x-max-priority": -1},
        {"x-max-priority": 256},
        {"x-dead-letter-exchange": 7},
        {"x-dead-letter-routing-key": "without an exchange"},
        {"x-single-active-consumer": "yes"},
        {"x-queue-type": "no such type"},
        {"x-queue-mode": "no such mode"},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(channel: BlockingChannel, arguments: dict[str, object]) -> None:
    """406, and no queue is there."""
    name = unique()
    assert refused(lambda: channel.queue_declare(name, durable=True, arguments=arguments)) == 406
    assert not exists(channel.connection, name)


@pytest.mark.parametrize("settings", [{}, {"durable": True, "exclusive": True}, {"durable": True, "auto_delete": True}])
@pytest.mark.parametrize("kind", ["quorum", "stream"])
def test_quorum_queues_and_streams_are_durable_and_shared(
    channel: BlockingChannel, kind: str, settings: dict[str, object]
) -> None:
    """406 for one that is exclusive, goes by itself, or is not durable."""
    call = lambda: channel.queue_declare(unique(), arguments={"x-queue-type": kind}, **settings)  # noqa: E731
    assert refused(call) == 406


@pytest.mark.parametrize("arguments", [{"x-queue-mode": "lazy"}, {"x-queue-type": "classic"}, {"mine": "anything"}])
def test_arguments_that_change_nothing_are_accepted(channel: BlockingChannel, arguments: dict[str, object]) -> None:
    """Also those that only the client knows."""
    name = unique()
    channel.queue_declare(name, exclusive=True, arguments=arguments)
    channel.basic_publish("", name, b"body")
    assert bodies(channel, name, 1) == [b"body"]


def test_a_queue_that_nobody_uses_expires(connect: Connect, channel: BlockingChannel) -> None:
    """`x-expires` in milliseconds; a consumer keeps one that is older than one that expires."""
    name, kept = unique(), unique()
    channel.confirm_delivery()

    def is_there(queue: str) -> bool:
        """Tell by what is no use of it."""
        try:
            channel.basic_publish("", queue, b"", mandatory=True)
        except UnroutableError:
            return False
        return True

    channel.queue_declare(kept, arguments={"x-expires": 2000})
    tag = channel.basic_consume(kept, lambda *_: None)
    channel.queue_declare(name, arguments={"x-expires": 2000})
    wait_until(channel.connection, lambda: not is_there(name))
    assert is_there(kept)
    channel.basic_cancel(tag)
    wait_until(channel.connection, lambda: not is_there(kept))


def test_binding_needs_both_ends(channel: BlockingChannel, queue: str) -> None:
    """404 for either that is not there; unbinding is fine whatever is not there."""
    side = channel.connection.channel
    assert refused(lambda: side().queue_bind(queue, unique())) == 404
    assert refused(lambda: side().queue_bind(unique(), "amq.direct")) == 404
    channel.queue_unbind(queue, "amq.direct", "never bound")
    channel.queue_unbind(unique(), "amq.direct", "key")
    channel.queue_unbind(queue, unique(), "key")


def test_durable_things_are_there_after_a_restart(tmp_path: object, only_qflow: None) -> None:
    """Queues, exchanges, bindings, and persistent messages; what is not durable is not."""
    spool = tmp_path / "spool"  # type: ignore[operator]
    with serving(spool) as (server, _), pika.BlockingConnection(server.parameters()) as connection:
        channel = connection.channel()
        channel.queue_declare("kept", durable=True, arguments={"x-max-length": 10})
        channel.queue_declare("gone")
        channel.exchange_declare("changes", "topic", durable=True)
        channel.exchange_declare("passing", "topic")
        channel.queue_bind("kept", "changes", "a.#")
        channel.confirm_delivery()
        channel.basic_publish("changes", "a.b", b"persistent", pika.BasicProperties(delivery_mode=2, app_id="app"))
        channel.basic_publish("changes", "a.b", b"transient")
    with serving(spool) as (server, _), pika.BlockingConnection(server.parameters()) as connection:
        channel = connection.channel()
        assert not exists(connection, "gone")
        assert refused(lambda: connection.channel().exchange_declare("passing", passive=True)) == 404
        channel.queue_declare("kept", durable=True, arguments={"x-max-length": 10})
        assert count(channel, "kept") == 1
        method, properties, body = next(channel.consume("kept", inactivity_timeout=PATIENCE_S))
        assert (body, properties.app_id, properties.delivery_mode) == (b"persistent", "app", 2)
        assert (method.exchange, method.routing_key, method.redelivered) == ("changes", "a.b", False)
        channel.basic_ack(method.delivery_tag)
        channel.cancel()
        channel.confirm_delivery()
        channel.basic_publish("changes", "a.c", b"new", mandatory=True)
        assert bodies(channel, "kept", 1) == [b"new"]
