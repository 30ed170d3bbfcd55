"""Consuming as pika does it: acks and nacks, prefetch, cancels, and who gets what."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker

from amqp_clients import PATIENCE_S, bodies, count, messages, refused, unique, wait_until

Connect = Callable[..., pika.BlockingConnection]
Declare = Callable[..., str]


class Taker:
    """A consumer that keeps what it is given, and settles nothing by itself."""

    def __init__(self, channel: BlockingChannel, queue: str, **settings: object) -> None:
        self.channel = channel
        self.tags: list[int] = []
        self.bodies: list[bytes] = []
        self.redelivered: list[bool] = []
        self.name = channel.basic_consume(queue, self._take, **settings)

    def _take(
        self, _: BlockingChannel, method: pika.spec.Basic.Deliver, properties: pika.BasicProperties, body: bytes
    ) -> None:
        self.tags.append(method.delivery_tag)
        self.bodies.append(body)
        self.redelivered.append(method.redelivered)

    def wait(self, number: int) -> None:
        """Wait until so many have come in all."""
        wait_until(self.channel.connection, lambda: len(self.tags) >= number)
        assert len(self.tags) == number

    def nothing_more_comes(self) -> None:
        """Have the broker answer on this channel, after all it sent before."""
        before = len(self.tags)
        self.channel.basic_qos(prefetch_count=0, global_qos=False)
        self.channel.connection.process_data_events(time_limit=0)
        assert len(self.tags) == before


def fill(channel: BlockingChannel, queue: str, number: int) -> list[bytes]:
    """Put so many messages, confirmed, by a channel of their own."""
    found = [str(one).encode() for one in range(number)]
    publisher = channel.connection.channel()
    publisher.confirm_delivery()
    for body in found:
        publisher.basic_publish("", queue, body)
    publisher.close()
    return found


def test_an_ack_of_multiple_settles_all_up_to_it(channel: BlockingChannel, queue: str) -> None:
    """Tags count from 1 on each channel; what is not acked comes again when the channel closes."""
    whole = fill(channel, queue, 10)
    consumer = Taker(channel.connection.channel(), queue)
    consumer.wait(10)
    assert consumer.tags == list(range(1, 11))
    consumer.channel.basic_ack(7, multiple=True)
    consumer.channel.close()
    found = messages(channel, queue, 3)
    assert [message.body for message in found] == whole[7:]
    assert all(message.method.redelivered for message in found)


def test_an_ack_of_tag_0_settles_everything(channel: BlockingChannel, queue: str) -> None:
    """With `multiple`, as the specification has it."""
    fill(channel, queue, 5)
    consumer = Taker(channel.connection.channel(), queue)
    consumer.wait(5)
    consumer.channel.basic_ack(0, multiple=True)
    consumer.channel.close()
    assert count(channel, queue) == 0


@pytest.mark.parametrize("how", ["nack", "reject"])
def test_a_message_that_is_requeued_comes_again_marked(channel: BlockingChannel, queue: str, how: str) -> None:
    """At the head, where it was."""
    fill(channel, queue, 3)
    method, _, body = channel.basic_get(queue)
    assert (body, method.redelivered, method.message_count) == (b"0", False, 2)
    if how == "nack":
        channel.basic_nack(method.delivery_tag, requeue=True)
    else:
        channel.basic_reject(method.delivery_tag, requeue=True)
    found = messages(channel, queue, 3)
    assert [message.body for message in found] == [b"0", b"1", b"2"]
    assert [message.method.redelivered for message in found] == [True, False, False]


def test_a_nack_of_multiple_requeues_all_in_their_order(channel: BlockingChannel, queue: str) -> None:
    """Those above it are still unsettled."""
    fill(channel, queue, 6)
    consumer = Taker(channel.connection.channel(), queue)
    consumer.wait(6)
    consumer.channel.basic_cancel(consumer.name)
    consumer.channel.basic_nack(4, multiple=True, requeue=True)
    assert bodies(channel, queue, 4) == [b"0", b"1", b"2", b"3"]
    assert count(channel, queue) == 0
    consumer.channel.close()
    assert bodies(channel, queue, 2) == [b"4", b"5"]


@pytest.mark.parametrize("how", ["nack", "reject"])
def test_a_message_that_is_refused_is_gone(channel: BlockingChannel, queue: str, how: str) -> None:
    """Without a dead letter exchange there is no other place for it."""
    fill(channel, queue, 2)
    method, _, _ = channel.basic_get(queue)
    getattr(channel, f"basic_{how}")(method.delivery_tag, requeue=False)
    assert bodies(channel, queue, 1) == [b"1"]
    assert count(channel, queue) == 0


def test_a_prefetch_is_each_consumers_own(channel: BlockingChannel, queue: str) -> None:
    """Two consumers of a channel hold three each; an ack lets the next one come."""
    fill(channel, queue, 10)
    consuming = channel.connection.channel()
    consuming.basic_qos(prefetch_count=3)
    first, second = Taker(consuming, queue), Taker(consuming, queue)
    first.wait(3)
    second.wait(3)
    assert {*first.bodies, *second.bodies} == {b"0", b"1", b"2", b"3", b"4", b"5"}
    assert count(channel, queue) == 4
    consuming.basic_ack(first.tags[0])
    wait_until(channel.connection, lambda: len(first.tags) == 4)
    assert len(second.tags) == 3
    assert count(channel, queue) == 3


def test_a_global_prefetch_is_the_channels(channel: BlockingChannel, queue: str) -> None:
    """Both consumers together hold three."""
    fill(channel, queue, 10)
    consuming = channel.connection.channel()
    consuming.basic_qos(prefetch_count=3, global_qos=True)
    takers = Taker(consuming, queue), Taker(consuming, queue)
    wait_until(channel.connection, lambda: sum(len(taker.tags) for taker in takers) == 3)
    assert count(channel, queue) == 7
    consuming.basic_ack(3, multiple=True)
    wait_until(channel.connection, lambda: sum(len(taker.tags) for taker in takers) == 6)
    assert count(channel, queue) == 4


def test_a_prefetch_of_consumers_ends_that_of_the_channel(channel: BlockingChannel, queue: str) -> None:
    """Also for one that is there, and that had none of its own."""
    fill(channel, queue, 20)
    consuming = channel.connection.channel()
    consuming.basic_qos(prefetch_count=3, global_qos=True)
    taker = Taker(consuming, queue)
    taker.wait(3)
    consuming.basic_qos(prefetch_count=10)
    taker.wait(20)


def test_a_prefetch_does_not_hold_back_who_needs_no_acks(channel: BlockingChannel, queue: str) -> None:
    """With `no_ack` all come, and they are settled as they are sent."""
    fill(channel, queue, 20)
    consuming = channel.connection.channel()
    consuming.basic_qos(prefetch_count=1)
    Taker(consuming, queue, auto_ack=True).wait(20)
    consuming.close()
    assert count(channel, queue) == 0


def test_get_tells_how_many_remain(channel: BlockingChannel, queue: str) -> None:
    """And that there is none."""
    fill(channel, queue, 2)
    found = [channel.basic_get(queue, auto_ack=True) for _ in range(3)]
    assert [body for _, _, body in found] == [b"0", b"1", None]
    assert [method.message_count for method, _, _ in found[:2]] == [1, 0]
    assert (found[0][0].exchange, found[0][0].routing_key) == ("", queue)


def test_recover_brings_back_what_is_unsettled(channel: BlockingChannel, queue: str) -> None:
    """To the queue, from where it comes again, marked."""
    fill(channel, queue, 3)
    for _ in range(3):
        channel.basic_get(queue)
    assert count(channel, queue) == 0
    channel.basic_recover(requeue=True)
    found = messages(channel, queue, 3)
    assert [(message.body, message.method.redelivered) for message in found] == [
        (b"0", True),
        (b"1", True),
        (b"2", True),
    ]


def test_a_connection_that_breaks_gives_back_what_it_held(connect: Connect, channel: BlockingChannel) -> None:
    """Without a word of its own: the socket is just closed."""
    queue = unique("queue")
    channel.queue_declare(queue)
    try:
        fill(channel, queue, 5)
        broken = connect()
        Taker(broken.channel(), queue).wait(5)
        broken._impl._transport._sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(AMQPConnectionError):
            broken.process_data_events(time_limit=PATIENCE_S)
        found = messages(channel, queue, 5)
        assert [message.body for message in found] == [b"0", b"1", b"2", b"3", b"4"]
        assert all(message.method.redelivered for message in found)
    finally:
        channel.queue_delete(queue)


def test_a_cancelled_consumer_gets_nothing_more_and_may_still_ack(channel: BlockingChannel, queue: str) -> None:
    """What it holds is its own until it settles it."""
    fill(channel, queue, 2)
    consumer = Taker(channel.connection.channel(), queue)
    consumer.wait(2)
    consumer.channel.basic_cancel(consumer.name)
    fill(channel, queue, 1)
    consumer.nothing_more_comes()
    consumer.channel.basic_ack(2, multiple=True)
    consumer.channel.close()
    assert count(channel, queue) == 1


def test_who_deletes_a_queue_is_answered_before_its_own_consumers_are_told(
    channel: BlockingChannel, queue: str
) -> None:
    """A client may close its channel as it is told, which leaves no answer out that it waits for."""
    told: list[str] = []
    channel.basic_consume(queue, lambda *_: None)
    channel._impl.add_on_cancel_callback(lambda _: told.append("cancelled"))
    channel._impl.queue_delete(queue, callback=lambda _: told.append("deleted"))
    wait_until(channel.connection, lambda: len(told) == 2)
    assert told == ["deleted", "cancelled"]


def test_a_consumer_is_told_when_its_queue_is_deleted(channel: BlockingChannel, queue: str) -> None:
    """`basic.cancel` of the broker, for clients that understand it."""
    told: list[str] = []
    consuming = channel.connection.channel()
    consuming.add_on_cancel_callback(lambda frame: told.append(frame.method.consumer_tag))
    consumer = Taker(consuming, queue)
    channel.queue_delete(queue)
    wait_until(channel.connection, lambda: told)
    assert told == [consumer.name]
    assert consuming.is_open


def test_a_global_prefetch_leaves_out_what_was_got(channel: BlockingChannel, declare: Declare) -> None:
    """Only what consumers were sent counts for it."""
    queue, other = declare(), declare()
    fill(channel, queue, 1)
    fill(channel, other, 1)
    channel.basic_qos(prefetch_count=1, global_qos=True)
    assert channel.basic_get(queue)[2] == b"0"
    Taker(channel, other).wait(1)


def test_a_global_prefetch_counts_what_a_transaction_has_not_acked_yet(channel: BlockingChannel, queue: str) -> None:
    """Its ack may be rolled back; another consumer of the channel gets nothing meanwhile."""
    fill(channel, queue, 2)
    channel.basic_qos(prefetch_count=1, global_qos=True)
    channel.tx_select()
    first = Taker(channel, queue)
    first.wait(1)
    channel.basic_ack(first.tags[0])
    second = Taker(channel, queue)
    assert count(channel, queue) == 1
    assert not second.tags
    channel.tx_commit()
    wait_until(channel.connection, lambda: len(first.tags) + len(second.tags) == 2)


def test_consumers_that_share_a_prefetch_have_their_turns(channel: BlockingChannel, declare: Declare) -> None:
    """One whose queue is long does not keep others of its channel from theirs."""
    queues = [declare() for _ in range(3)]
    for queue in queues:
        fill(channel, queue, 9)
    channel.basic_qos(prefetch_count=1, global_qos=True)
    takers = [Taker(channel, queue) for queue in queues]
    for number in range(1, 10):
        wait_until(channel.connection, lambda number=number: sum(len(taker.tags) for taker in takers) == number)
        channel.basic_ack(number)
    assert min(len(taker.tags) for taker in takers) >= 2


def test_an_exclusive_consumer_is_the_only_one(channel: BlockingChannel, queue: str) -> None:
    """Another one is refused with 403, before it or after it."""
    consumer = Taker(channel, queue, exclusive=True)
    with pytest.raises(ChannelClosedByBroker) as raised:
        Taker(channel.connection.channel(), queue)
    assert raised.value.reply_code == 403
    channel.basic_cancel(consumer.name)
    Taker(channel, queue)
    with pytest.raises(ChannelClosedByBroker) as raised:
        Taker(channel.connection.channel(), queue, exclusive=True)
    assert raised.value.reply_code == 403


def test_a_get_goes_beside_an_exclusive_consumer(channel: BlockingChannel, queue: str) -> None:
    """Only consumers are kept away by one."""
    channel.basic_qos(prefetch_count=1)
    consumer = Taker(channel, queue, exclusive=True)
    fill(channel, queue, 2)
    consumer.wait(1)
    assert channel.connection.channel().basic_get(queue, auto_ack=True)[2] == b"1"


def test_where_one_consumer_is_active_none_is_exclusive(channel: BlockingChannel, declare: Declare) -> None:
    """403."""
    queue = declare(x_single_active_consumer=True)
    assert refused(lambda: Taker(channel, queue, exclusive=True)) == 403


def test_a_quorum_queue_with_one_active_consumer_takes_no_get(channel: BlockingChannel) -> None:
    """405; a classic one does."""
    queue, arguments = unique("queue"), {"x-queue-type": "quorum", "x-single-active-consumer": True}
    channel.queue_declare(queue, durable=True, arguments=arguments)
    other = channel.connection.channel()
    assert refused(lambda: channel.basic_get(queue)) == 405
    other.queue_delete(queue)
    other.queue_declare(queue, durable=True, arguments=arguments | {"x-queue-type": "classic"})
    assert other.basic_get(queue) == (None, None, None)
    other.queue_delete(queue)


def test_a_single_active_consumer_is_followed_by_the_next(channel: BlockingChannel, declare: Declare) -> None:
    """The second one waits until the first is cancelled; order is kept."""
    queue = declare(x_single_active_consumer=True)
    first = Taker(channel.connection.channel(), queue)
    second = Taker(channel.connection.channel(), queue)
    fill(channel, queue, 3)
    first.wait(3)
    second.nothing_more_comes()
    first.channel.basic_ack(2, multiple=True)
    first.channel.basic_cancel(first.name)
    fill(channel, queue, 1)
    second.wait(1)
    assert second.bodies == [b"0"]
    first.channel.close()
    second.wait(2)
    assert (second.bodies[1], second.redelivered[1]) == (b"2", True)


def test_messages_go_to_consumers_in_turn(channel: BlockingChannel, queue: str) -> None:
    """None has all of them while others wait."""
    takers = [Taker(channel.connection.channel(), queue) for _ in range(3)]
    fill(channel, queue, 9)
    wait_until(channel.connection, lambda: sum(len(taker.tags) for taker in takers) == 9)
    assert [len(taker.tags) for taker in takers] == [3, 3, 3]


@pytest.mark.parametrize(("lower", "higher"), [({}, {"x-priority": 10}), ({"x-priority": -5}, {})])
def test_a_consumer_of_higher_priority_comes_first(
    channel: BlockingChannel, queue: str, lower: dict[str, int], higher: dict[str, int]
) -> None:
    """Others get what it has no room for. One that says nothing has 0."""
    low, high = channel.connection.channel(), channel.connection.channel()
    high.basic_qos(prefetch_count=2)
    below = Taker(low, queue, arguments=lower)
    above = Taker(high, queue, arguments=higher)
    fill(channel, queue, 5)
    above.wait(2)
    below.wait(3)
    assert above.bodies == [b"0", b"1"]
    assert below.bodies == [b"2", b"3", b"4"]


def test_those_of_the_lowest_priority_have_their_turn_when_all_above_have_left(
    channel: BlockingChannel, queue: str
) -> None:
    """One that is left alone, and several that are of the same priority then."""
    above = Taker(channel, queue, arguments={"x-priority": 1})
    below = [Taker(channel, queue) for _ in range(2)]
    channel.basic_cancel(above.name)
    fill(channel, queue, 4)
    wait_until(channel.connection, lambda: sum(len(taker.tags) for taker in below) == 4)
    last = Taker(channel, queue, arguments={"x-priority": -1})
    for taker in below:
        channel.basic_cancel(taker.name)
    fill(channel, queue, 2)
    last.wait(2)


def test_the_client_may_name_its_consumer_or_have_it_named(channel: BlockingChannel, queue: str) -> None:
    """A name of the broker's begins with `amq.ctag-`."""
    assert channel.basic_consume(queue, lambda *_: None, consumer_tag="mine") == "mine"
    answers: list[str] = []
    channel._impl._rpc(
        pika.spec.Basic.Consume(queue=queue, consumer_tag=""),
        lambda frame: answers.append(frame.method.consumer_tag),
        [pika.spec.Basic.ConsumeOk],
    )
    wait_until(channel.connection, lambda: answers)
    assert answers[0].startswith("amq.ctag-")


def test_a_channel_flow_is_answered(channel: BlockingChannel, queue: str) -> None:
    """With what was asked; a client sends `active` only, as RabbitMQ refuses the other."""
    answers: list[bool] = []
    channel._impl.flow(True, lambda active: answers.append(active))
    wait_until(channel.connection, lambda: answers)
    assert answers == [True]


def test_purge_removes_what_is_ready_only(channel: BlockingChannel, queue: str) -> None:
    """It tells how many; what is unsettled stays."""
    fill(channel, queue, 5)
    method, _, _ = channel.basic_get(queue)
    assert channel.queue_purge(queue).method.message_count == 4
    channel.basic_nack(method.delivery_tag)
    assert bodies(channel, queue, 1) == [b"0"]


def test_a_consumer_is_served_as_messages_come(channel: BlockingChannel, queue: str) -> None:
    """One message after the other, each acked."""
    for number in range(50):
        channel.basic_publish("", queue, str(number).encode())
        method, _, body = next(channel.consume(queue, inactivity_timeout=PATIENCE_S))
        channel.basic_ack(method.delivery_tag)
        assert body == str(number).encode()
    channel.cancel()
