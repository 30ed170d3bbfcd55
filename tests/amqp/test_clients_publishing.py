"""Publishing as pika does it: confirms, returns, transactions, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, NackError, UnroutableError

from amqp_clients import PATIENCE_S, Server, bodies, count, messages, unique, wait_until

PERSISTENT = pika.BasicProperties(delivery_mode=2)
Connect = Callable[..., pika.BlockingConnection]
Declare = Callable[..., str]


def test_a_confirmed_publish_is_in_the_queue(channel: BlockingChannel, queue: str) -> None:
    """pika's confirming publish returns when the broker has it; messages come in the order of publishes."""
    channel.confirm_delivery()
    for number in range(20):
        channel.basic_publish("", queue, str(number).encode(), PERSISTENT)
    assert count(channel, queue) == 20
    assert bodies(channel, queue, 20) == [str(number).encode() for number in range(20)]


@pytest.mark.parametrize("size", [0, 1, 4096, 131_064, 131_065, 5_000_000])
def test_a_body_of_any_length_comes_as_it_went(channel: BlockingChannel, queue: str, size: int) -> None:
    """Also an empty one, one that just fills a frame, and one of many frames."""
    body = bytes(number % 251 for number in range(1000)) * (size // 1000 + 1)
    channel.confirm_delivery()
    channel.basic_publish("", queue, body[:size])
    assert bodies(channel, queue, 1) == [body[:size]]


def test_an_unroutable_mandatory_publish_is_returned_and_then_confirmed(channel: BlockingChannel) -> None:
    """The return has 312 NO_ROUTE, the whole message, and comes before the ack."""
    channel.confirm_delivery()
    with pytest.raises(UnroutableError) as raised:
        channel.basic_publish("amq.direct", "nowhere", b"body", pika.BasicProperties(message_id="7"), mandatory=True)
    [returned] = raised.value.messages
    assert (returned.method.reply_code, returned.method.reply_text) == (312, "NO_ROUTE")
    assert (returned.method.exchange, returned.method.routing_key) == ("amq.direct", "nowhere")
    assert (returned.properties.message_id, returned.body) == ("7", b"body")


def test_an_unroutable_publish_that_is_not_mandatory_is_confirmed(channel: BlockingChannel) -> None:
    """It is dropped, and that is no failure."""
    channel.confirm_delivery()
    channel.basic_publish("amq.direct", "nowhere", b"body")


def test_a_mandatory_publish_is_returned_without_confirms_too(
    connection: pika.BlockingConnection, channel: BlockingChannel
) -> None:
    """The callback for returns has it."""
    returned: list[bytes] = []
    channel.add_on_return_callback(lambda *arguments: returned.append(arguments[3]))
    channel.basic_publish("", "no such queue", b"body", mandatory=True)
    wait_until(connection, lambda: returned)
    assert returned == [b"body"]


def test_a_full_queue_that_rejects_nacks_the_publish(channel: BlockingChannel, declare: Declare) -> None:
    """`x-overflow: reject-publish` keeps what is there."""
    queue = declare(x_max_length=2, x_overflow="reject-publish")
    channel.confirm_delivery()
    channel.basic_publish("", queue, b"1")
    channel.basic_publish("", queue, b"2")
    with pytest.raises(NackError):
        channel.basic_publish("", queue, b"3")
    assert bodies(channel, queue, 2) == [b"1", b"2"]


def test_a_publish_to_no_exchange_closes_the_channel(channel: BlockingChannel) -> None:
    """404, and the connection goes on."""
    channel.confirm_delivery()
    with pytest.raises(ChannelClosedByBroker) as raised:
        channel.basic_publish(unique("exchange"), "key", b"body")
    assert raised.value.reply_code == 404
    assert "no exchange 'exchange." in raised.value.reply_text
    assert channel.connection.channel().is_open


def test_immediate_is_not_implemented(amqp_server: Server, queue: str) -> None:
    """540 ends the connection, as the specification has it for what a server does not know."""
    connection = pika.BlockingConnection(amqp_server.parameters())
    implementation = connection.channel()
    implementation._impl._send_method(
        pika.spec.Basic.Publish(exchange="", routing_key=queue, immediate=True), (pika.BasicProperties(), b"body")
    )
    with pytest.raises(ConnectionClosedByBroker) as raised:
        connection.process_data_events(time_limit=PATIENCE_S)
    assert raised.value.reply_code == 540


def test_a_commit_publishes_and_acks_all_at_once(connect: Connect, channel: BlockingChannel, declare: Declare) -> None:
    """Before it nobody sees them, and what is acked is not gone."""
    source, target = declare(), declare()
    for body in (b"a", b"b", b"c"):
        channel.basic_publish("", source, body)
    transaction = channel.connection.channel()
    transaction.tx_select()
    for _ in range(3):
        method, _, body = _get(transaction, source)
        transaction.basic_publish("", target, body)
        transaction.basic_ack(method.delivery_tag)
    assert count(channel, target) == 0
    transaction.tx_commit()
    assert count(channel, target) == 3
    transaction.close()
    assert count(channel, source) == 0
    assert bodies(channel, target, 3) == [b"a", b"b", b"c"]


def test_a_commit_leaves_out_queues_that_are_deleted(channel: BlockingChannel, declare: Declare) -> None:
    """Of somebody else, perhaps: what was published into them, and what was acked there, is gone with them."""
    source, gone, other = declare(), declare(), declare()
    channel.basic_publish("", source, b"a")
    channel.basic_publish("", gone, b"b")
    transaction = channel.connection.channel()
    transaction.tx_select()
    for queue in (source, gone):
        method, _, _ = _get(transaction, queue)
        transaction.basic_ack(method.delivery_tag)
        transaction.basic_publish("", queue, b"c")
        transaction.basic_publish("", other, b"d")
    channel.queue_delete(gone)
    transaction.tx_commit()
    transaction.close()
    assert (count(channel, source), count(channel, other)) == (1, 2)


def test_a_commit_returns_what_is_mandatory_and_whose_queues_are_all_deleted(
    channel: BlockingChannel, declare: Declare
) -> None:
    """One that has another queue left is kept there; one that is not mandatory is gone with its queue."""
    gone, left = declare(), declare()
    transaction = channel.connection.channel()
    returned: list[bytes] = []
    transaction.add_on_return_callback(lambda *told: returned.append(told[3]))
    transaction.tx_select()
    transaction.basic_publish("", gone, b"returned", mandatory=True)
    transaction.basic_publish("", gone, b"gone")
    transaction.basic_publish("", gone, b"kept", pika.BasicProperties(headers={"CC": [left]}), mandatory=True)
    transaction.queue_delete(gone)
    transaction.tx_commit()
    assert bodies(channel, left, 1) == [b"kept"]
    wait_until(channel.connection, lambda: returned)
    assert returned == [b"returned"]


def test_a_rollback_undoes_publishes_and_acks(channel: BlockingChannel, queue: str) -> None:
    """The delivery is still the client's, who may ack it again; nothing is requeued by itself."""
    channel.basic_publish("", queue, b"first")
    transaction = channel.connection.channel()
    transaction.tx_select()
    method, _, _ = _get(transaction, queue)
    transaction.basic_publish("", queue, b"second")
    transaction.basic_ack(method.delivery_tag)
    transaction.tx_rollback()
    assert count(channel, queue) == 0
    transaction.basic_ack(method.delivery_tag)
    transaction.tx_commit()
    transaction.close()
    assert count(channel, queue) == 0


def test_what_a_transaction_did_not_commit_goes_with_its_channel(channel: BlockingChannel, queue: str) -> None:
    """The publish never happened, and the message comes again."""
    channel.basic_publish("", queue, b"first")
    transaction = channel.connection.channel()
    transaction.tx_select()
    method, _, _ = _get(transaction, queue)
    transaction.basic_publish("", queue, b"second")
    transaction.basic_ack(method.delivery_tag)
    transaction.close()
    [message] = messages(channel, queue, 1)
    assert (message.body, message.method.redelivered) == (b"first", True)
    assert count(channel, queue) == 0


@pytest.mark.parametrize("first", ["confirm", "tx"])
def test_a_channel_confirms_or_has_transactions_never_both(channel: BlockingChannel, first: str) -> None:
    """The second of the two is refused with 406."""
    calls = {"confirm": channel.confirm_delivery, "tx": channel.tx_select}
    calls.pop(first)()
    [second] = calls.values()
    with pytest.raises(ChannelClosedByBroker) as raised:
        second()
    assert raised.value.reply_code == 406


@pytest.mark.parametrize("method", ["tx_commit", "tx_rollback"])
def test_a_commit_without_a_transaction_is_refused(channel: BlockingChannel, method: str) -> None:
    """406 closes the channel."""
    with pytest.raises(ChannelClosedByBroker) as raised:
        getattr(channel, method)()
    assert raised.value.reply_code == 406


def test_cc_and_bcc_add_routing_keys(channel: BlockingChannel, declare: Declare) -> None:
    """Each queue has the message once; BCC is taken off, CC stays."""
    to, cc, bcc = declare(), declare(), declare()
    headers = {"CC": [cc, to], "BCC": [bcc], "kept": 1}
    channel.basic_publish("", to, b"body", pika.BasicProperties(headers=headers))
    for queue in (to, cc, bcc):
        [message] = messages(channel, queue, 1)
        assert message.properties.headers == {"CC": [cc, to], "kept": 1}
        assert message.method.routing_key == to
        assert count(channel, queue) == 0


def test_cc_that_is_no_list_is_refused(channel: BlockingChannel, queue: str) -> None:
    """406 closes the channel."""
    channel.confirm_delivery()
    with pytest.raises(ChannelClosedByBroker) as raised:
        channel.basic_publish("", queue, b"body", pika.BasicProperties(headers={"CC": "a string"}))
    assert raised.value.reply_code == 406


def test_a_user_id_must_be_that_of_the_connection(amqp_server: Server, channel: BlockingChannel, queue: str) -> None:
    """The right one is delivered, a wrong one is refused with 406."""
    channel.confirm_delivery()
    channel.basic_publish("", queue, b"right", pika.BasicProperties(user_id=amqp_server.user))
    with pytest.raises(ChannelClosedByBroker) as raised:
        channel.basic_publish("", queue, b"wrong", pika.BasicProperties(user_id="somebody"))
    assert raised.value.reply_code == 406
    other = channel.connection.channel()
    assert messages(other, queue, 1)[0].properties.user_id == amqp_server.user


def _get(channel: BlockingChannel, queue: str) -> tuple[pika.spec.Basic.GetOk, pika.BasicProperties, bytes]:
    found = channel.basic_get(queue)
    assert found[0] is not None, "the queue is empty"
    return found
