"""Libraries on top of AMQP, as their users have them: aio-pika, kombu, Celery, dramatiq, and amqplib of Node."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import aio_pika
import kombu
import pytest
from aio_pika.exceptions import ChannelPreconditionFailed, DeliveryError, PublishError
from pika.adapters.blocking_connection import BlockingChannel

from amqp_clients import PATIENCE_S, Server, unique, wait_until
from amqp_workers import WATCHDOG_S, end, worker

TASKS = 100


def with_aio_pika(
    server: Server, test: Callable[[aio_pika.abc.AbstractChannel], Coroutine[Any, Any, None]], **settings: bool
) -> None:
    """Run a test with a channel of aio-pika's."""

    async def run() -> None:
        async with await aio_pika.connect(server.url) as connection:
            await test(await connection.channel(**settings))

    asyncio.run(asyncio.wait_for(run(), WATCHDOG_S))


def test_aio_pika_publishes_many_at_once(amqp_server: Server) -> None:
    """A window of 500 publishes, each confirmed; they come in order."""

    async def test(channel: aio_pika.abc.AbstractChannel) -> None:
        queue = await channel.declare_queue(exclusive=True)
        whole = [str(number).encode() for number in range(500)]
        await asyncio.gather(*(_publish(channel, queue.name, body) for body in whole))
        found = []
        async with queue.iterator(timeout=PATIENCE_S) as messages:
            async for message in messages:
                found.append(message.body)
                if len(found) == 500:
                    await message.ack(multiple=True)
                    break
        assert found == whole

    with_aio_pika(amqp_server, test)


def test_aio_pika_is_told_what_goes_nowhere_or_is_rejected(amqp_server: Server) -> None:
    """A return and a nack fail the publish, among others that do not."""

    async def test(channel: aio_pika.abc.AbstractChannel) -> None:
        arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
        queue = await channel.declare_queue(exclusive=True, arguments=arguments)
        await _publish(channel, queue.name, b"1")
        with pytest.raises(DeliveryError):
            await _publish(channel, queue.name, b"2")
        with pytest.raises(PublishError):
            await _publish(channel, unique(), b"3")
        message = await queue.get(timeout=PATIENCE_S)
        assert message.body == b"1"
        await message.ack()

    with_aio_pika(amqp_server, test, on_return_raises=True)


def test_aio_pika_has_all_types_of_headers_back(amqp_server: Server) -> None:
    """Also floats, which pika reads as whole numbers."""
    headers = {
        "float": 0.25,
        "int": 2**40,
        "negative": -5,
        "bool": True,
        "none": None,
        "text": "wör",
        "bytes": bytearray(b"\0\xff"),
        "decimal": Decimal("3.14"),
        "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "list": [1, "two", {"three": [3.5]}],
        "table": {"a": {"b": {"c": 1}}},
    }

    async def test(channel: aio_pika.abc.AbstractChannel) -> None:
        queue = await channel.declare_queue(exclusive=True)
        message = aio_pika.Message(b"body", headers=headers, timestamp=headers["time"], expiration=3600)
        await channel.default_exchange.publish(message, queue.name)
        found = await queue.get(timeout=PATIENCE_S, no_ack=True)
        assert found.headers == headers
        assert (found.timestamp, found.expiration) == (headers["time"], 3600)

    with_aio_pika(amqp_server, test)


def test_aio_pika_commits_and_rolls_back(amqp_server: Server) -> None:
    """A transaction as a context."""

    async def test(channel: aio_pika.abc.AbstractChannel) -> None:
        queue = await channel.declare_queue(exclusive=True)
        async with channel.transaction():
            await _publish(channel, queue.name, b"committed")
        with pytest.raises(ZeroDivisionError):
            async with channel.transaction():
                await _publish(channel, queue.name, b"rolled back")
                raise ZeroDivisionError
        assert (await queue.get(timeout=PATIENCE_S, no_ack=True)).body == b"committed"
        assert await queue.get(fail=False, no_ack=True) is None

    with_aio_pika(amqp_server, test, publisher_confirms=False)


def test_aio_pika_calls_another_and_has_its_answer(amqp_server: Server) -> None:
    """Its patterns of remote calls, with an exclusive queue for the answers."""

    async def test(channel: aio_pika.abc.AbstractChannel) -> None:
        rpc = await aio_pika.patterns.JsonRPC.create(channel)
        name = unique("add")

        async def add(*, one: int, two: int) -> int:
            return one + two

        await rpc.register(name, add, auto_delete=True)
        answers = await asyncio.gather(*(rpc.call(name, {"one": number, "two": 1}) for number in range(20)))
        assert answers == list(range(1, 21))
        await rpc.close()

    with_aio_pika(amqp_server, test)


def test_aio_pika_is_told_of_an_error_on_its_channel(amqp_server: Server) -> None:
    """The exception has the kind of the code; the connection goes on."""

    async def test(channel: aio_pika.abc.AbstractChannel) -> None:
        name = unique()
        await channel.declare_queue(name, exclusive=True)
        with pytest.raises(ChannelPreconditionFailed):
            await channel.declare_queue(name, exclusive=True, arguments={"x-max-length": 1})

    with_aio_pika(amqp_server, test)


async def _publish(channel: aio_pika.abc.AbstractChannel, queue: str, body: bytes) -> None:
    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, queue)


def test_kombu_publishes_and_consumes(amqp_server: Server) -> None:
    """By its own entities, with priorities and a topic exchange; confirmed."""
    exchange = kombu.Exchange(unique("exchange"), "topic", durable=False, auto_delete=True)
    queue = kombu.Queue(unique("queue"), exchange, "a.#", exclusive=True, max_priority=9, message_ttl=3600)
    found: list[tuple[object, object]] = []

    def take(body: object, message: kombu.Message) -> None:
        found.append((body, message.headers["number"]))
        message.ack()

    with kombu.Connection(amqp_server.url, transport_options={"confirm_publish": True}) as connection:
        connection.connect()
        with connection.channel() as channel:
            queue(channel).declare()
            producer = kombu.Producer(channel, exchange)
            for number in range(10):
                producer.publish({"n": number}, "a.b", priority=number, headers={"number": number}, retry=False)
            with kombu.Consumer(channel, [queue(channel)], callbacks=[take]):
                while len(found) < 10:
                    connection.drain_events(timeout=PATIENCE_S)
    assert found == [({"n": number}, number) for number in reversed(range(10))]


@pytest.mark.usefixtures("only_qflow")
def test_a_prefetch_that_kombu_raises_is_that_of_its_consumers(amqp_server: Server) -> None:
    """By which Celery's worker has a task to do while it holds those that are for later; a lower one holds, too."""
    with kombu.Connection(amqp_server.url) as connection, connection.channel() as channel:
        queue = kombu.Queue(unique("queue"), exclusive=True, durable=False)(channel)
        taken: list[kombu.Message] = []

        def take(count: int) -> None:
            while len(taken) < count:
                connection.drain_events(timeout=PATIENCE_S)
            assert queue.queue_declare(passive=True).message_count == 10 - count

        with kombu.Consumer(channel, [queue], on_message=taken.append, prefetch_count=1) as consumer:
            for number in range(10):
                kombu.Producer(channel).publish(number, routing_key=queue.name)
            take(1)
            consumer.qos(prefetch_count=3)
            take(3)
            consumer.qos(prefetch_count=2)
            taken[0].ack()
            take(3)
            taken[1].ack()
            take(4)
            assert [message.decode() for message in taken] == [0, 1, 2, 3]


def test_kombus_simple_queue_is_a_queue(amqp_server: Server) -> None:
    """Put, size, get, ack."""
    with kombu.Connection(amqp_server.url) as connection, connection.SimpleQueue(unique("simple")) as queue:
        for number in range(5):
            queue.put({"number": number})
        found = [queue.get(timeout=PATIENCE_S) for _ in range(5)]
        for message in found:
            message.ack()
        assert [message.payload for message in found] == [{"number": number} for number in range(5)]
        assert queue.qsize() == 0
        queue.consumer.cancel()
        queue.queue.delete()
        queue.queue.exchange.delete()


def finished(directory: Path, *command: str) -> str:
    """Run a script to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, capture_output=True, text=True, timeout=WATCHDOG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


CELERY_APP = """
from celery import Celery, chain, group

app = Celery("tasks", broker={url!r}, backend="rpc://")
app.conf.task_default_queue = {queue!r}
app.conf.task_acks_late = True
app.conf.broker_transport_options = {{"confirm_publish": True}}
app.conf.worker_enable_remote_control = False

@app.task(name="add")
def add(one, two):
    return one + two

@app.task(name="stubborn", bind=True, max_retries=3)
def stubborn(self, number):
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return [number, self.request.retries]

if __name__ == "__main__":
    print([found.get(timeout={patience}) for found in [add.delay(number, 1) for number in range({tasks})]])
    print(chain(add.s(1, 2), add.s(4), add.s(8))().get(timeout={patience}))
    print(sorted(group(add.s(number, number) for number in range(5))().get(timeout={patience})))
    print(stubborn.delay(7).get(timeout={patience}))
"""


def test_celery_runs_tasks(amqp_server: Server, channel: BlockingChannel, tmp_path: Path) -> None:
    """A worker and its results by `rpc://`: single tasks, a chain, a group, and one that is tried again."""
    text = CELERY_APP.format(url=amqp_server.url, queue=(queue := unique("celery")), patience=WATCHDOG_S, tasks=TASKS)
    (tmp_path / "tasks_of_celery.py").write_text(text)
    options = ("--pool=solo", "--loglevel=INFO", "--without-mingle", "--without-gossip")
    with worker(tmp_path, " ready.", "-m", "celery", "-A", "tasks_of_celery", "worker", *options) as process:
        lines = finished(tmp_path, "tasks_of_celery.py").splitlines()
        end(process)
    assert json.loads(lines[0]) == list(range(1, TASKS + 1))
    assert lines[1:] == ["15", "[0, 2, 4, 6, 8]", "[7, 2]"]
    channel.queue_delete(queue)
    channel.exchange_delete(queue)


DRAMATIQ_APP = """
import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker

broker = RabbitmqBroker(url={url!r}, confirm_delivery=True)
dramatiq.set_broker(broker)
failed = set()

@dramatiq.actor(queue_name={queue!r}, min_backoff=1, max_backoff=5, max_retries=5)
def write(number):
    if number % 10 == 0 and number not in failed:
        failed.add(number)
        raise ValueError("once")
    with open({path!r}, "a") as file:
        file.write(f"{{number}}\\n")

if __name__ == "__main__":
    for number in range({tasks}):
        write.send(number)
    write.send_with_options(args=(1001,), delay=20)
"""


def test_dramatiq_runs_actors(amqp_server: Server, channel: BlockingChannel, tmp_path: Path) -> None:
    """Each once; a tenth fails first and comes by the delayed queue, as one that was sent with a delay does."""
    told = tmp_path / "told"
    told.touch()
    queue = unique("dramatiq")
    text = DRAMATIQ_APP.format(url=amqp_server.url, queue=queue, path=str(told), tasks=TASKS)
    (tmp_path / "actors_of_dramatiq.py").write_text(text)
    options = ("--processes", "1", "--threads", "2")
    with worker(tmp_path, "ready for action", "-m", "dramatiq", "actors_of_dramatiq", *options) as process:
        finished(tmp_path, "actors_of_dramatiq.py")
        wait_until(channel.connection, lambda: len(told.read_text().split()) > TASKS)
        end(process)
    assert sorted(map(int, told.read_text().split())) == [*range(TASKS), 1001]
    for name in (queue, f"{queue}.DQ", f"{queue}.XQ"):
        channel.queue_delete(name)


NODE = """
const amqp = require('amqplib');
(async () => {
  const connection = await amqp.connect(process.argv[2]);
  const channel = await connection.createConfirmChannel();
  const {queue} = await channel.assertQueue('', {exclusive: true, maxPriority: 5});
  const headers = {float: 0.5, int: 7, text: 'wör', list: [1, 'two'], table: {a: true}, none: null};
  for (let number = 0; number < 100; number++)
    channel.sendToQueue(queue, Buffer.from(String(number)), {persistent: true, headers});
  await channel.waitForConfirms();
  let returned = null;
  channel.on('return', (message) => { returned = message.fields.replyCode; });
  channel.publish('', 'no such queue', Buffer.from('x'), {mandatory: true});
  await channel.waitForConfirms();
  await channel.prefetch(10);
  const found = [];
  let seen = null;
  await new Promise((done) => channel.consume(queue, (message) => {
    found.push(Number(message.content.toString()));
    seen = message.properties.headers;
    channel.ack(message);
    if (found.length === 100) done();
  }));
  await channel.close();
  await connection.close();
  console.log(JSON.stringify({found, seen, returned}));
})().catch((error) => { console.error(error); process.exit(1); });
"""


def test_amqplib_of_node_publishes_and_consumes(amqp_server: Server, tmp_path: Path) -> None:
    """Confirms, a return, prefetch, acks, and headers; NODE_PATH has amqplib."""
    if not (node := shutil.which("node")):
        pytest.skip("there is no node")
    found = subprocess.run([node, "-e", "require('amqplib')"], cwd=tmp_path, capture_output=True, check=False)
    if found.returncode:
        pytest.skip("node finds no amqplib: npm install amqplib, and name its node_modules in NODE_PATH")
    script = tmp_path / "client.js"
    script.write_text(NODE)
    done = subprocess.run(
        [node, str(script), amqp_server.url], capture_output=True, text=True, timeout=WATCHDOG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["found"] == list(range(100))
    assert told["returned"] == 312
    assert told["seen"] == {
        "float": 0.5,
        "int": 7,
        "text": "wör",
        "list": [1, "two"],
        "table": {"a": True},
        "none": None,
    }
