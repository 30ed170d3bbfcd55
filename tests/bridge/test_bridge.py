"""What is published by MQTT, clients of AMQP get, and the other way round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pamqp import body, header
from pamqp.commands import Basic, Channel, Confirm, Queue

import amqp_loop
import mqtt_loop
import qflow
import qflow.aio
from doors.event_loop import run, until
from inside import copy_as_killed
from qflow import amqp, bridge, mqtt
from qflow.aio import AsyncTransaction
from qflow.amqp.model.arguments import LONGEST_MS
from qflow.amqp.server.content import NO_PROPERTIES, headers_of, read_properties
from qflow.amqp.server.stores import DEAD_LETTERS
from qflow.bridge import translation
from qflow.bridge.bridge import AT_ONCE, MOST_BYTES, QUEUE, Bridge
from qflow.bridge.translation import key_of, topic_of
from qflow.errors import InvalidArgument, MessageTooLarge


class Doors:
    """Both servers of a broker, and the bridge between them."""

    def __init__(self, broker: qflow.aio.AsyncBroker, amqp_server: amqp.Server, mqtt_server: mqtt.Server) -> None:
        self.broker = broker
        self.amqp = amqp_server
        self.mqtt = mqtt_server
        self.bridge: Bridge

    async def rabbit(self, *bound: str, queue: str = "q") -> amqp_loop.Raw:
        """Return a client of AMQP that confirms, with a queue bound to `amq.topic`."""
        client = await amqp_loop.connected(self.amqp)
        await client.ask(Queue.Declare(0, queue, durable=True), Queue.DeclareOk)
        for key in bound:
            await client.ask(Queue.Bind(0, queue, "amq.topic", key), Queue.BindOk)
        await client.ask(Confirm.Select(), Confirm.SelectOk)
        return client

    async def depth(self, queue: str, number: int) -> None:
        """Return when a queue has so many messages."""
        await until(lambda: len(self.broker.broker.queue(queue)) == number)


@asynccontextmanager
async def doors(spool: Path, **options: Any) -> AsyncIterator[Doors]:
    async with (
        qflow.aio.open(spool, **options) as broker,
        await amqp.serve(broker, port=0) as amqp_server,
        await mqtt.serve(broker, port=0) as mqtt_server,
        await bridge.join(broker) as joined,
    ):
        made = Doors(broker, amqp_server, mqtt_server)
        made.bridge = joined
        with amqp_loop.ending_clients():
            try:
                yield made
            finally:
                await mqtt_loop.cut_all()


def headers_for(key: str) -> dict[str, str]:
    """Return the headers of a message that came by AMQP with a routing key."""
    return dict(headers_of(read_properties(NO_PROPERTIES), "amq.topic", key))


def publish(client: amqp_loop.Raw, key: str, content: bytes, **properties: Any) -> None:
    said = Basic.Properties(**{"delivery_mode": 2, **properties})
    client.send(Basic.Publish(0, "amq.topic", key), header.ContentHeader(0, len(content), said))
    client.send(body.ContentBody(content))


async def got(client: amqp_loop.Raw, queue: str) -> tuple[Basic.GetOk, Basic.Properties, bytes]:
    client.send(Basic.Get(0, queue, True))
    method = await client.expect(Basic.GetOk)
    return method, (await client.expect(header.ContentHeader)).properties, (await client.expect(body.ContentBody)).value


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_what_mqtt_publishes_is_in_the_queues_of_amq_topic(qos: int, spool: Path) -> None:
    async def scenario() -> None:
        async with doors(spool) as there:
            rabbit = await there.rabbit("plant.*.heat")
            sensor = await mqtt_loop.client(there.mqtt, "sensor")
            properties = {"ContentType": "text/plain", "CorrelationData": b"17", "UserProperty": [("unit", "C")]}
            if qos == 0:
                sensor.publish("plant/1/heat", b"21.5", qos=0, **properties)
            else:
                publishes = sensor.released if qos == 2 else sensor.published
                await publishes("plant/1/heat", b"21.5", **properties)
            await there.depth("q", 1)
            method, given, content = await got(rabbit, "q")
            assert (method.exchange, method.routing_key, content) == ("amq.topic", "plant.1.heat", b"21.5")
            assert (given.content_type, given.correlation_id) == ("text/plain", "17")
            assert given.headers == {"unit": "C", "x-mqtt-publish-qos": qos}
            assert given.delivery_mode == (2 if qos else 1)

    run(scenario())


def test_what_amqp_publishes_to_amq_topic_clients_of_mqtt_get(spool: Path) -> None:
    async def scenario() -> None:
        async with doors(spool) as there:
            panel = await mqtt_loop.client(there.mqtt, "panel")
            await panel.subscribe("plant/+/heat", qos=1)
            rabbit = await there.rabbit()
            said = {"content_type": "text/plain", "correlation_id": "17", "headers": {"unit": "C", "n": 3}}
            publish(rabbit, "plant.1.heat", b"21.5", **said)
            await rabbit.expect(Basic.Ack)
            message = await panel.message()
            assert (message.topic, message.payload, message.qos) == ("plant/1/heat", b"21.5", 1)
            assert message.properties["ContentType"] == "text/plain"
            assert message.properties["CorrelationData"] == b"17"
            assert sorted(message.properties["UserProperty"]) == [("n", "3"), ("unit", "C")]

    run(scenario())


def test_nothing_comes_to_mqtt_but_through_amq_topic(spool: Path) -> None:
    """The queue of the bridge has no name for publishes: who may write to another exchange would write to all topics."""

    def send(client: amqp_loop.Raw, exchange: str, key: str, copies: list[str]) -> None:
        client.send(Basic.Publish(0, exchange, key))
        client.send(header.ContentHeader(0, 1, Basic.Properties(headers={"CC": copies})))
        client.send(body.ContentBody(b"x"))

    async def scenario() -> None:
        async with doors(spool) as there:
            panel = await mqtt_loop.client(there.mqtt, "panel")
            await panel.subscribe("#", qos=1)
            rabbit = await there.rabbit()
            send(rabbit, "", "secret.topic", [QUEUE])
            send(rabbit, "", QUEUE, ["secret.topic"])
            send(rabbit, "", QUEUE, [])
            dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": QUEUE, "x-message-ttl": 0}
            await rabbit.ask(Queue.Declare(0, "dying", arguments=dead), Queue.DeclareOk)
            send(rabbit, "", "dying", [])
            publish(rabbit, "open", b"yes")
            while (await rabbit.expect(Basic.Ack)).delivery_tag < 5:
                pass
            await until(lambda: not len(there.broker.broker.queue("dying")))
            assert (await panel.message()).payload == b"yes"
            publish(rabbit, "open", b"too")
            assert (await panel.message()).payload == b"too"

    run(scenario())


def test_nothing_goes_back_where_it_came_from(spool: Path) -> None:
    async def scenario() -> None:
        async with doors(spool) as there:
            rabbit = await there.rabbit("#")
            client = await mqtt_loop.client(there.mqtt, "both")
            await client.subscribe("#", qos=1)
            publish(rabbit, "from.amqp", b"1")
            await rabbit.expect(Basic.Ack)
            assert (await client.message()).payload == b"1"
            await client.published("from/mqtt", b"2", qos=1)
            assert (await client.message()).payload == b"2"
            await there.depth("q", 2)
            publish(rabbit, "from.amqp", b"3")
            await rabbit.expect(Basic.Ack)
            assert (await client.message()).payload == b"3"
            await there.depth("q", 3)
            assert there.broker.broker.stream("mqtt").stats().messages == 3

    run(scenario())


def test_what_has_no_place_on_the_other_side_is_dropped_and_counted(spool: Path) -> None:
    async def scenario() -> None:
        async with doors(spool) as there:
            rabbit = await there.rabbit("#")
            client = await mqtt_loop.client(there.mqtt, "c")
            await client.subscribe("#", qos=1)
            for key in ("", "a.#", "b.+", "$SYS.x"):
                publish(rabbit, key, b"no")
            publish(rabbit, "last", b"yes")
            assert (await client.message()).payload == b"yes"
            await there.depth("q", 5)
            await client.published("t" * 300, b"no", qos=1)
            assert (await client.message()).payload == b"no"
            await client.published("last", b"yes", qos=1)
            await there.depth("q", 6)
            assert there.bridge.dropped == 5

    run(scenario())


def test_what_waits_is_carried_by_the_next_one(spool: Path, tmp_path: Path) -> None:
    """Of both directions, each once, also after a kill."""

    async def first() -> None:
        async with doors(spool) as there:
            await there.rabbit("#")
            await there.bridge.close()
            await there.broker.queue(QUEUE).put(b"unroutable: it has no routing key of MQTT's", headers={"a": 1})
            client = await mqtt_loop.client(there.mqtt, "c")
            for number in range(5):
                await client.published("a/b", b"%d" % number, qos=1)
            copy_as_killed(there.broker.broker, tmp_path / "copy")

    async def second() -> None:
        async with doors(tmp_path / "copy") as there:
            await there.depth("q", 5)
            await there.depth(QUEUE, 0)
            rabbit = await there.rabbit()
            assert [(await got(rabbit, "q"))[2] for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]

    run(first())
    run(second())


def test_a_full_queue_holds_up_no_other(spool: Path) -> None:
    """One that refuses has what it takes; one that drops its head has the last."""

    async def scenario() -> None:
        async with doors(spool) as there:
            rabbit = await there.rabbit("#", queue="all")
            for queue, overflow in (("refuses", "reject-publish"), ("drops", "drop-head")):
                arguments = {"x-max-length": 2, "x-overflow": overflow}
                await rabbit.ask(Queue.Declare(0, queue, durable=True, arguments=arguments), Queue.DeclareOk)
                await rabbit.ask(Queue.Bind(0, queue, "amq.topic", "#"), Queue.BindOk)
            client = await mqtt_loop.client(there.mqtt, "c")
            for number in range(6):
                await client.published("a", b"%d" % number, qos=1)
            await there.depth("all", 6)
            await there.depth("refuses", 2)
            await there.depth("drops", 2)
            assert (await got(rabbit, "refuses"))[2] == b"0"
            assert (await got(rabbit, "drops"))[2] == b"4"

    run(scenario())


def test_qos_0_waits_a_little_for_room_and_is_dropped_then(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflow.bridge.bridge.MOST_WAITING_BYTES", 1)

    async def scenario() -> None:
        async with doors(spool) as there:
            await there.broker.declare_queue("small", limit_messages=2, on_overflow="block")
            rabbit = await there.rabbit()
            await rabbit.ask(Queue.Bind(0, "small", "amq.topic", "#"), Queue.BindOk)
            client = await mqtt_loop.client(there.mqtt, "c")
            for number in range(2):
                client.publish("a", b"%d" % number, qos=0)
                await there.depth("small", number + 1)
                await until(lambda: not there.bridge._waiting_bytes)  # the bridge is told that it is there
            for number in range(2, 6):
                client.publish("a", b"%d" % number, qos=0)
            await until(lambda: there.bridge.dropped == 3)
            assert [(await got(rabbit, "small"))[2] for _ in range(2)] == [b"0", b"1"]
            await there.depth("small", 1)
            assert (await got(rabbit, "small"))[2] == b"2"

    run(scenario())


REFUSED = [
    Queue.Delete(0, QUEUE),
    Queue.Unbind(0, QUEUE, "amq.topic", "#"),
    Queue.Bind(0, QUEUE, "amq.fanout", ""),
    Queue.Purge(0, QUEUE),
    Basic.Consume(0, QUEUE),
    Basic.Get(0, QUEUE),
]


def test_clients_do_not_use_the_queue_of_the_bridge(spool: Path) -> None:
    """They may look how much waits in it; all else is refused, and what is published is carried."""

    async def scenario() -> None:
        async with doors(spool) as there:
            client = await mqtt_loop.client(there.mqtt, "c")
            await client.subscribe("#", qos=1)
            rabbit = await there.rabbit()
            for number, method in enumerate(REFUSED, start=2):
                await rabbit.open_channel(number)
                assert (await rabbit.ask(method, Channel.Close, number)).reply_code == 403
                rabbit.send(Channel.CloseOk(), channel=number)
            await rabbit.ask(Queue.Declare(0, QUEUE, passive=True), Queue.DeclareOk)
            publish(rabbit, "a", b"x")
            await rabbit.expect(Basic.Ack)
            assert (await client.message()).payload == b"x"

    run(scenario())


def test_what_doors_use_is_not_deleted_while_they_do(spool: Path) -> None:
    """The stream of MQTT, the queue of the bridge, and its place in the stream; each of them when its door has gone."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            deletions = [
                (partial(broker.delete_queue, QUEUE), "the bridge"),
                (partial(broker.delete_subscription, "mqtt", "amq.topic"), "the bridge"),
                (partial(broker.delete_stream, "mqtt"), "the server for MQTT"),
                (partial(broker.delete_queue, DEAD_LETTERS), "the server for AMQP"),
                (partial(broker.alter_stream, "mqtt", topics=["a/#"]), "the server for MQTT"),
            ]
            async with await mqtt.serve(broker, port=0), await amqp.serve(broker, port=0):
                async with await bridge.join(broker):
                    await until(lambda: broker.broker.stream("mqtt").stats().subscriptions)
                    await until(lambda: DEAD_LETTERS in broker.queues())
                    for delete, door in deletions:
                        with pytest.raises(InvalidArgument, match=f"used by {door}"):
                            await delete()
                await broker.check()  # what threads have begun is done
                for delete, _ in deletions[:2]:
                    await delete()
                with pytest.raises(InvalidArgument, match="used by the server for MQTT"):
                    await broker.delete_stream("mqtt")
                await broker.alter_stream("mqtt", topics=["#", "a/#"])
            await broker.delete_stream("mqtt")
            assert QUEUE not in broker.queues()
            assert not broker.streams()

    run(scenario())


@pytest.mark.parametrize("turns", range(1, 6))
def test_a_start_that_is_cancelled_leaves_nothing_in_use(spool: Path, turns: int) -> None:
    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            await broker.declare_stream("mqtt", topics=["#"])
            task = asyncio.create_task(mqtt.serve(broker, port=0))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await broker.check()  # what threads have begun is done
            await broker.delete_stream("mqtt")

    run(scenario())


@pytest.mark.parametrize(("topic", "key"), [("a/b", "a.b"), ("a.b/c", "a/b.c"), ("/", "."), ("ä/", "ä.")])
def test_names_are_translated_without_loss(topic: str, key: str) -> None:
    assert key_of(topic) == key
    assert topic_of(key) == topic


def test_a_message_that_lives_longer_than_amqp_allows_lives_as_long_as_it_does(spool: Path) -> None:
    async def scenario() -> None:
        async with doors(spool) as there:
            rabbit = await there.rabbit("#")
            client = await mqtt_loop.client(there.mqtt, "c")
            await client.published("a", b"lives long", MessageExpiryInterval=2**32 - 1)
            await client.published("a", b"next")
            await there.depth("q", 2)
            _, given, content = await got(rabbit, "q")
            assert (given.expiration, content) == (str(LONGEST_MS), b"lives long")

    run(scenario())


def test_a_message_that_is_too_much_for_one_commit_holds_up_no_other(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qflow.bridge.bridge.AGAIN_S", 0.01)

    async def scenario() -> None:
        async with doors(spool, max_transaction_bytes="64KiB") as there:
            await there.rabbit("#")
            await there.rabbit("#", queue="another")
            client = await mqtt_loop.client(there.mqtt, "c")
            await client.published("a", bytes(40_000))
            await client.published("a", b"next")
            for queue in ("q", "another"):
                await there.depth(queue, 2)

    run(scenario())


def test_closed_while_it_publishes_one_by_one_it_holds_nothing(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came by AMQP and was not published waits for the next one."""

    async def scenario() -> None:
        async with doors(spool) as there:
            await there.bridge.close()
            queue = there.broker.queue(QUEUE)
            reached = asyncio.Event()
            publish = AsyncTransaction.publish

            async def publishing(transaction: AsyncTransaction, topic: str, *given: Any, **options: Any) -> None:
                if topic == "too/large":
                    refused.append(topic)
                    raise MessageTooLarge("it is")
                if topic == "waits" and refused:
                    reached.set()
                    await asyncio.Event().wait()
                await publish(transaction, topic, *given, **options)

            refused: list[str] = []
            monkeypatch.setattr(AsyncTransaction, "publish", publishing)
            for key in ("waits", "too.large", "behind"):
                await queue.put(b"x", headers=headers_for(key))
            joined = await bridge.join(there.broker)
            await reached.wait()
            await joined.close()
            stats = await queue.stats()
            assert (stats.lag_messages, stats.acquired_messages) == (3, 0)

    run(scenario())


def test_a_broker_has_one_bridge(spool: Path) -> None:
    """A second one would carry what has QoS 0 twice; once the first is closed, there may be another."""

    async def scenario() -> None:
        async with doors(spool) as there:
            with pytest.raises(qflow.InvalidArgument, match="has a bridge"):
                await bridge.join(there.broker)
            await there.bridge.close()
            async with await bridge.join(there.broker):
                pass

    run(scenario())


@pytest.mark.parametrize("fault", [RuntimeError("a fault"), qflow.CorruptionError("damaged")], ids=repr)
def test_a_fault_is_told_and_what_met_it_is_carried_later(
    fault: Exception, spool: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has a line at once, and one in some seconds, which are many here, or at the end, for all others."""
    monkeypatch.setattr("qflow.bridge.bridge.AGAIN_S", 0.001)
    monkeypatch.setattr("qflow.serving.telling.TOLD_EACH_S", 3600)
    faults = [fault] * 20
    to_amqp, to_mqtt = translation.parcel_of, translation.message_of

    def failing(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if faults:
                raise faults.pop()
            return function(*arguments)

        return call

    monkeypatch.setattr("qflow.bridge.bridge.parcel_of", failing(to_amqp))
    monkeypatch.setattr("qflow.bridge.bridge.message_of", failing(to_mqtt))

    async def scenario() -> None:
        async with doors(spool) as there:
            rabbit = await there.rabbit("a")
            client = await mqtt_loop.client(there.mqtt, "c")
            await client.subscribe("b", qos=1)
            await client.published("a", b"1")
            await there.depth("q", 1)
            faults.extend([fault] * 20)
            publish(rabbit, "b", b"2")
            assert (await client.message()).payload == b"2"

    run(scenario())
    told = [record for record in caplog.records if "waits on its way" in record.message]
    assert ["and 18 more since" in record.message for record in told] == [False, False, True, True]
    assert all((record.exc_info is None) == isinstance(fault, qflow.QflowError) for record in told)


def test_a_stream_of_amqp_gets_each_message_once(spool: Path) -> None:
    """Bound to all that there is, it gets nothing of its own again."""
    run(_into_a_stream(spool))


async def _into_a_stream(spool: Path) -> None:
    async with doors(spool) as there:
        rabbit = await amqp_loop.connected(there.amqp)
        await rabbit.ask(Queue.Declare(0, "s", durable=True, arguments={"x-queue-type": "stream"}), Queue.DeclareOk)
        await rabbit.ask(Queue.Bind(0, "s", "amq.topic", "#"), Queue.BindOk)
    async with doors(spool) as there:
        rabbit, client = await there.rabbit(), await mqtt_loop.client(there.mqtt)
        await client.subscribe("#")
        stream = there.broker.broker.stream("s")
        await client.published("plant/1", b"1")
        rabbit.publish("s", b"2")
        await rabbit.expect(Basic.Ack)
        rabbit.publish("amqp-stream.s", b"3", exchange="amq.topic")
        await rabbit.expect(Basic.Ack)
        rabbit.publish("plant.2", b"4", exchange="amq.topic")
        await rabbit.expect(Basic.Ack)
        assert {(await client.message()).topic for _ in range(2)} == {"plant/1", "plant/2"}
        await client.nothing()
        await until(lambda: stream.stats().messages == 4)
        await client.published("end", b"5")
        await client.message()
        await until(lambda: stream.stats().messages == 5)
        assert sorted(message.body for message in stream.query("#")) == [b"1", b"2", b"3", b"4", b"5"]


def test_messages_with_qos_0_do_not_pass_the_length_of_a_queue(spool: Path) -> None:
    """Those on their way count; the others are dropped, and counted."""
    run(_limited(spool))


async def _limited(spool: Path) -> None:
    async with doors(spool) as there:
        rabbit, client = await there.rabbit(), await mqtt_loop.client(there.mqtt)
        arguments = {"x-max-length": 10, "x-overflow": "reject-publish"}
        await rabbit.ask(Queue.Declare(0, "few", durable=True, arguments=arguments), Queue.DeclareOk)
        await rabbit.ask(Queue.Bind(0, "few", "amq.topic", "a"), Queue.BindOk)
        for _ in range(300):
            client.publish("a", qos=0)
        await client.nothing()
        await until(lambda: there.bridge._waiting_bytes == 0)
        await there.depth("few", 10)
        assert there.bridge.dropped == 290


def test_each_key_of_a_message_is_a_topic(spool: Path) -> None:
    """Those in its header `CC`, each once, in one commit; what is no topic is dropped."""
    run(_copies(spool))


async def _copies(spool: Path) -> None:
    async with doors(spool) as there:
        rabbit, client = await there.rabbit(), await mqtt_loop.client(there.mqtt)
        await client.subscribe("#")
        properties = Basic.Properties(headers={"CC": ["c.d", "a.b", "no#topic"]}, delivery_mode=2)
        rabbit.send(
            Basic.Publish(0, "amq.topic", "a.b"), header.ContentHeader(0, 1, properties), body.ContentBody(b"1")
        )
        await rabbit.expect(Basic.Ack)
        assert [(await client.message()).topic for _ in range(2)] == ["a/b", "c/d"]
        await client.nothing()
        await until(lambda: there.bridge.dropped)  # it is told of the commit a moment after the client
        assert there.bridge.dropped == 1


def test_large_messages_are_carried_a_few_at_once(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them than a commit is to have; small ones many at once."""
    run(_few(spool, monkeypatch))


async def _few(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Bridge._publish
    taken: list[list[int]] = []

    async def noting(self: Bridge, deliveries: Any) -> None:
        taken.append([len(delivery.body) for delivery in deliveries])
        await publish(self, deliveries)

    monkeypatch.setattr(Bridge, "_publish", noting)
    async with qflow.aio.open(spool) as broker:
        queue = await broker.declare_queue(QUEUE)
        for _ in range(10):
            await queue.put(bytes(MOST_BYTES // 3), headers=headers_for("a"))
    async with doors(spool) as there:
        await until(lambda: there.broker.broker.stream("mqtt").stats().messages == 10)
    assert max(map(len, taken)) <= 3
    taken.clear()
    async with qflow.aio.open(spool) as broker:
        await broker.queue(QUEUE).put_many([b"x"] * AT_ONCE, headers=headers_for("a"))
    async with doors(spool) as there:
        await until(lambda: there.broker.broker.stream("mqtt").stats().messages == 10 + AT_ONCE)
    assert taken[0] == [1] * AT_ONCE


@pytest.mark.parametrize("turns", range(1, 8))
def test_a_close_that_is_cancelled_leaves_nothing_in_use(spool: Path, turns: int) -> None:
    """Its tasks went on, and the stream of MQTT could not be deleted as long as the broker was open."""

    async def scenario() -> None:
        async with qflow.aio.open(spool) as broker:
            before = asyncio.all_tasks()
            joined = await bridge.join(broker)
            closing = asyncio.create_task(joined.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            closing.cancel()
            with suppress(asyncio.CancelledError):
                await closing
            await joined.close()
            assert asyncio.all_tasks() == before
            await broker.delete_stream("mqtt")

    run(scenario())


def test_a_bridge_is_closed_after_its_broker(spool: Path) -> None:
    """As the doors are: nothing is raised, and none of its tasks is left."""

    async def scenario() -> None:
        before = asyncio.all_tasks()
        async with qflow.aio.open(spool) as broker:
            joined = await bridge.join(broker)
        await joined.close()
        assert asyncio.all_tasks() == before

    run(scenario())
