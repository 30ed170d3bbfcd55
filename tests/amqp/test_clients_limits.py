"""Time to live, lengths, priorities, and dead letters with their `x-death`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, NackError

from amqp_clients import Message, bodies, count, messages, unique, wait_until

Declare = Callable[..., str]


@pytest.fixture(autouse=True)
def confirmed(channel: BlockingChannel) -> None:
    """Publishes are in their queues when they return."""
    channel.confirm_delivery()


def publish(channel: BlockingChannel, queue: str, *found: bytes, **properties: object) -> None:
    for body in found:
        channel.basic_publish("", queue, body, pika.BasicProperties(**properties))


def deaths(message: Message) -> list[dict[str, object]]:
    """Return the deaths of a message without their times, which are checked."""
    found = [dict(death) for death in message.properties.headers["x-death"]]
    for death in found:
        assert isinstance(death.pop("time"), datetime)
    return found


def test_messages_of_a_queue_expire(channel: BlockingChannel, declare: Declare) -> None:
    """`x-message-ttl` in milliseconds; they go to the dead letter exchange, and say why."""
    dead = declare()
    queue = declare(x_message_ttl=5, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    publish(channel, queue, b"1", b"2")
    first, second = messages(channel, dead, 2)
    assert (first.body, second.body) == (b"1", b"2")
    assert deaths(first) == [
        {"count": 1, "reason": "expired", "queue": queue, "exchange": "", "routing-keys": [queue]},
    ]
    assert first.properties.headers["x-first-death-reason"] == "expired"
    assert first.properties.headers["x-first-death-queue"] == queue
    assert first.properties.headers["x-first-death-exchange"] == ""
    assert count(channel, queue) == 0


def test_a_message_may_expire_by_itself(channel: BlockingChannel, declare: Declare) -> None:
    """`expiration` in milliseconds, as a string; it is taken off, and stands in `x-death`."""
    dead = declare()
    queue = declare(x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    publish(channel, queue, b"body", expiration="3", priority=2, headers={"mine": 1})
    [message] = messages(channel, dead, 1)
    assert message.properties.expiration is None
    assert message.properties.priority == 2
    assert message.properties.headers["mine"] == 1
    [death] = deaths(message)
    assert (death["reason"], death["original-expiration"]) == ("expired", "3")


def test_the_shorter_time_to_live_counts(channel: BlockingChannel, declare: Declare) -> None:
    """The queue's or the message's own."""
    dead = declare()
    letters = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": dead}
    long, short = declare(x_message_ttl=3_600_000, **letters), declare(x_message_ttl=3, **letters)
    publish(channel, long, b"own", expiration="3")
    publish(channel, short, b"the queue's", expiration="3600000")
    assert sorted(bodies(channel, dead, 2)) == [b"own", b"the queue's"]


def test_no_time_to_live_means_at_once_or_never(channel: BlockingChannel, declare: Declare) -> None:
    """0 expires what no consumer takes at once: who waits has it."""
    dead = declare()
    queue = declare(x_message_ttl=0, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    publish(channel, queue, b"nobody waits")
    assert bodies(channel, dead, 1) == [b"nobody waits"]
    taken: list[bytes] = []
    channel.basic_consume(queue, lambda *arguments: taken.append(arguments[3]), auto_ack=True)
    publish(channel, queue, b"somebody waits")
    wait_until(channel.connection, lambda: taken)
    assert taken == [b"somebody waits"]


@pytest.mark.parametrize("of_the_queue", [False, True])
def test_what_lives_no_time_is_never_for_a_get(channel: BlockingChannel, declare: Declare, of_the_queue: bool) -> None:
    """Not even right behind the publish: it has expired by then."""
    queue = declare(x_message_ttl=0) if of_the_queue else declare()
    for _ in range(50):
        publish(channel, queue, b"nobody waits", **{} if of_the_queue else {"expiration": "0"})
        assert channel.basic_get(queue)[0] is None


def in_a_transaction(channel: BlockingChannel, declare: Declare, queue: str) -> None:
    transaction = channel.connection.channel()
    transaction.tx_select()
    publish(transaction, queue, b"body")
    transaction.tx_commit()
    transaction.close()


def with_many_others(channel: BlockingChannel, declare: Declare, queue: str) -> None:
    exchange, others = unique("exchange"), [unique("queue") for _ in range(20)]
    channel.exchange_declare(exchange, "fanout")
    for other in others:
        channel.queue_declare(other, durable=True)
    for other in (*others, queue):
        channel.queue_bind(other, exchange)
    channel.basic_publish(exchange, "", b"body", pika.BasicProperties(delivery_mode=2))
    channel.exchange_delete(exchange)
    for other in others:
        channel.queue_delete(other)


def as_a_dead_letter(channel: BlockingChannel, declare: Declare, queue: str) -> None:
    rejecting = declare(x_dead_letter_exchange="", x_dead_letter_routing_key=queue)
    publish(channel, rejecting, b"body")
    channel.basic_reject(channel.basic_get(rejecting)[0].delivery_tag, requeue=False)


@pytest.mark.parametrize("comes", [in_a_transaction, with_many_others, as_a_dead_letter])
def test_no_time_to_live_holds_however_a_message_comes(
    channel: BlockingChannel, declare: Declare, comes: Callable[..., None]
) -> None:
    """A consumer that waits has it; else it is a dead letter."""
    dead, queue = declare(), unique("queue")
    arguments = {"x-message-ttl": 0, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead}
    channel.queue_declare(queue, durable=True, arguments=arguments)
    comes(channel, declare, queue)
    assert bodies(channel, dead, 1) == [b"body"]
    taken: list[bytes] = []
    channel.basic_consume(queue, lambda *arguments: taken.append(arguments[3]), auto_ack=True)
    comes(channel, declare, queue)
    wait_until(channel.connection, lambda: taken)
    assert (taken, count(channel, dead)) == ([b"body"], 0)
    channel.queue_delete(queue)


@pytest.mark.parametrize("expiration", ["soon", "-1", "1.5", ""])
def test_an_expiration_is_a_number(channel: BlockingChannel, queue: str, expiration: str) -> None:
    """406 for anything else."""
    with pytest.raises(ChannelClosedByBroker) as raised:
        publish(channel, queue, b"body", expiration=expiration)
    assert raised.value.reply_code == 406


@pytest.mark.parametrize("how", ["nack", "reject"])
def test_what_is_refused_goes_to_the_dead_letters(channel: BlockingChannel, declare: Declare, how: str) -> None:
    """With its own routing key where the queue names none."""
    exchange = unique("exchange")
    channel.exchange_declare(exchange, "topic", auto_delete=True)
    dead, queue = declare(), declare(x_dead_letter_exchange=exchange)
    channel.queue_bind(dead, exchange, "queue.#")
    publish(channel, queue, b"body", delivery_mode=2, content_type="text/plain", message_id="7")
    method, _, _ = channel.basic_get(queue)
    getattr(channel, f"basic_{how}")(method.delivery_tag, requeue=False)
    [message] = messages(channel, dead, 1)
    assert (message.method.exchange, message.method.routing_key) == (exchange, queue)
    assert (message.properties.content_type, message.properties.message_id) == ("text/plain", "7")
    assert message.properties.delivery_mode == 2
    assert not message.method.redelivered
    assert deaths(message) == [
        {"count": 1, "reason": "rejected", "queue": queue, "exchange": "", "routing-keys": [queue]}
    ]


def test_deaths_are_counted_by_queue_and_reason(channel: BlockingChannel, declare: Declare) -> None:
    """The last one stands first; the first one is told in headers of its own."""
    parking = declare()
    retry_name = unique("queue")
    work = declare(x_dead_letter_exchange="", x_dead_letter_routing_key=retry_name)
    channel.queue_declare(
        retry_name,
        exclusive=True,
        arguments={"x-message-ttl": 2, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": work},
    )
    publish(channel, work, b"body")
    for _ in range(3):
        method, properties, _ = next(channel.consume(work))
        channel.basic_reject(method.delivery_tag, requeue=False)
    method, properties, body = next(channel.consume(work))
    channel.basic_publish("", parking, body, properties)
    channel.basic_ack(method.delivery_tag)
    channel.cancel()
    [message] = messages(channel, parking, 1)
    assert [(death["queue"], death["reason"], death["count"]) for death in deaths(message)] == [
        (retry_name, "expired", 3),
        (work, "rejected", 3),
    ]
    headers = message.properties.headers
    assert (headers["x-first-death-queue"], headers["x-first-death-reason"]) == (work, "rejected")


def test_a_circle_of_expiries_ends(channel: BlockingChannel, declare: Declare) -> None:
    """A message that would come to a queue again by expiring alone is dropped."""
    first, second = unique("queue"), unique("queue")
    for name, other in ((first, second), (second, first)):
        arguments = {"x-message-ttl": 1, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": other}
        channel.queue_declare(name, exclusive=True, arguments=arguments)
    publish(channel, first, b"body")
    wait_until(channel.connection, lambda: count(channel, first) + count(channel, second) == 0)


def test_a_dead_letter_exchange_that_is_not_there_takes_nothing(channel: BlockingChannel, declare: Declare) -> None:
    """What is refused is dropped; the queue goes on."""
    queue = declare(x_dead_letter_exchange=unique("exchange"))
    publish(channel, queue, b"1", b"2")
    method, _, _ = channel.basic_get(queue)
    channel.basic_nack(method.delivery_tag, requeue=False)
    assert bodies(channel, queue, 1) == [b"2"]


def test_a_death_that_comes_again_counts_and_stays_as_it_was_first(channel: BlockingChannel, declare: Declare) -> None:
    """Its time and keys are those of the first, so that a client can tell how long a message has gone round."""
    dead = declare()
    queue = declare(x_message_ttl=1, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    first = {
        "reason": "expired",
        "queue": queue,
        "time": datetime(2026, 1, 2, tzinfo=UTC),
        "exchange": "before",
        "routing-keys": ["key", "copy"],
        "original-expiration": "7",
    }
    other = {"count": 3, "reason": "rejected", "queue": queue}
    publish(channel, queue, b"body", headers={"x-death": [other, {**first, "count": 1}]})
    [message] = messages(channel, dead, 1)
    [again, unchanged] = message.properties.headers["x-death"]
    again["time"] = again["time"].replace(tzinfo=UTC)
    assert (again, unchanged) == ({**first, "count": 2}, other)


def test_an_x_death_that_is_nonsense_harms_nobody(channel: BlockingChannel, declare: Declare) -> None:
    """The client wrote it; the message dies as others do."""
    dead = declare()
    queue = declare(x_message_ttl=1, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    counted = {"queue": queue, "count": 2**62 - 1, "reason": "expired"}
    for poison in ([], [{}], [{"queue": 5, "count": "many", "reason": None}], [counted, counted, counted]):
        publish(channel, queue, b"body", headers={"x-death": poison})
        [message] = messages(channel, dead, 1)
        assert message.properties.headers["x-death"][0]["queue"] == queue


def test_a_queue_that_is_full_drops_its_head(channel: BlockingChannel, declare: Declare) -> None:
    """`x-max-length`; it goes to the dead letters with `maxlen`."""
    dead = declare()
    queue = declare(x_max_length=3, x_dead_letter_exchange="", x_dead_letter_routing_key=dead)
    publish(channel, queue, b"1", b"2", b"3", b"4", b"5")
    assert bodies(channel, queue, 3) == [b"3", b"4", b"5"]
    found = messages(channel, dead, 2)
    assert [message.body for message in found] == [b"1", b"2"]
    assert [death["reason"] for message in found for death in deaths(message)] == ["maxlen", "maxlen"]


def test_what_is_unsettled_does_not_count_for_the_length(channel: BlockingChannel, declare: Declare) -> None:
    """Only what is ready does."""
    queue = declare(x_max_length=2)
    publish(channel, queue, b"1", b"2")
    held = [channel.basic_get(queue)[0].delivery_tag for _ in range(2)]
    publish(channel, queue, b"3", b"4")
    assert count(channel, queue) == 2
    channel.basic_ack(held[-1], multiple=True)
    assert bodies(channel, queue, 2) == [b"3", b"4"]


def test_a_queue_is_full_by_bytes_too(channel: BlockingChannel, declare: Declare) -> None:
    """`x-max-length-bytes` counts bodies, and in qflow what else is kept of a message."""
    queue = declare(x_max_length_bytes=25_000)
    publish(channel, queue, b"1" * 10_000, b"2" * 10_000, b"3" * 10_000)
    assert bodies(channel, queue, 2) == [b"2" * 10_000, b"3" * 10_000]
    assert count(channel, queue) == 0


def test_a_length_of_0_keeps_nothing(channel: BlockingChannel, declare: Declare) -> None:
    """But who waits has what comes."""
    queue = declare(x_max_length=0)
    publish(channel, queue, b"nobody waits")
    assert count(channel, queue) == 0


def test_what_a_full_queue_rejects_may_go_to_the_dead_letters(channel: BlockingChannel, declare: Declare) -> None:
    """`reject-publish-dlx`: the publisher is told no, and the message is there with `maxlen`."""
    dead = declare()
    queue = declare(
        x_max_length=1, x_overflow="reject-publish-dlx", x_dead_letter_exchange="", x_dead_letter_routing_key=dead
    )
    publish(channel, queue, b"1")
    with pytest.raises(NackError):
        publish(channel, queue, b"2")
    [message] = messages(channel, dead, 1)
    assert message.body == b"2"
    assert [death["reason"] for death in deaths(message)] == ["maxlen"]
    assert bodies(channel, queue, 1) == [b"1"]


def test_higher_priorities_come_first(channel: BlockingChannel, declare: Declare) -> None:
    """None is 0, above the maximum is the maximum; FIFO within one."""
    queue = declare(x_max_priority=5)
    for number, priority in enumerate((None, 1, 5, 0, 200, 1, 3)):
        publish(channel, queue, f"{number}:{priority}".encode(), priority=priority)
    assert bodies(channel, queue, 7) == [b"2:5", b"4:200", b"6:3", b"1:1", b"5:1", b"0:None", b"3:0"]


def test_a_queue_without_priorities_is_first_in_first_out(channel: BlockingChannel, queue: str) -> None:
    """The property is kept all the same."""
    publish(channel, queue, b"1", priority=1)
    publish(channel, queue, b"2", priority=9)
    assert [(message.body, message.properties.priority) for message in messages(channel, queue, 2)] == [
        (b"1", 1),
        (b"2", 9),
    ]


def test_a_message_that_comes_too_often_is_a_dead_letter(channel: BlockingChannel, declare: Declare) -> None:
    """`x-delivery-limit` of a quorum queue; `x-delivery-count` has how often it was returned before."""
    dead, name = declare(), unique("queue")
    arguments = {
        "x-queue-type": "quorum",
        "x-delivery-limit": 2,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead,
    }
    channel.queue_declare(name, durable=True, arguments=arguments)
    try:
        publish(channel, name, b"poison", delivery_mode=2)
        counts = []
        for _ in range(3):
            method, properties, _ = next(channel.consume(name))
            counts.append((properties.headers or {}).get("x-delivery-count", 0))
            channel.basic_nack(method.delivery_tag, requeue=True)
        channel.cancel()
        assert counts == [0, 1, 2]
        [message] = messages(channel, dead, 1)
        assert (message.body, deaths(message)[0]["reason"]) == (b"poison", "delivery_limit")
    finally:
        channel.queue_delete(name)
