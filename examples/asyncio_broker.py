"""A tiny message broker: a JSON object a line over TCP, one event loop, one spool.

python examples/asyncio_broker.py SPOOL                 serves on a free port, sends some clients through, and ends
python examples/asyncio_broker.py SPOOL --serve PORT    serves until it is interrupted

Requests: put, get, ack, nack, publish, bind, subscribe. Answers carry the request's "id"; what is got, or pushed to a
subscriber, has a "delivery" to ack or nack. A client that leaves gives back what it holds.
"""

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any

from usage import spool_of

import qflow
import qflow.aio

IN_FLIGHT = 100  # requests of one client; with more, nobody reads what it sends, and TCP holds it back
LIMIT = 1_000  # messages in a queue; at the limit a put waits, and with it, soon, its client


class Connection:
    """One client."""

    def __init__(self, broker: qflow.aio.AsyncBroker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.broker, self.reader, self.writer = broker, reader, writer
        self.held: dict[int, tuple[qflow.aio.AsyncDelivery, asyncio.Event]] = {}
        self.consumers: list[qflow.aio.AsyncConsumer] = []
        self.deliveries = 0
        self.room = asyncio.Semaphore(IN_FLIGHT)

    async def serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while line := await self.reader.readline():
                await self.room.acquire()
                task = asyncio.create_task(self.answer(line))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            for task in tasks:
                task.cancel()
            _ = [consumer.stop() for consumer in self.consumers]
            for number in list(self.held):
                with suppress(qflow.QflowError):
                    await self.on_nack(number)
            self.writer.close()

    async def answer(self, line: bytes) -> None:
        try:
            await self.send(await self.answered(line))
        finally:
            self.room.release()  # not before it is sent, or a client that does not read has tasks without end

    async def answered(self, line: bytes) -> dict[str, Any]:
        number = None
        try:
            request = json.loads(line)
            number = request.pop("id", None)
            answer = await getattr(self, f"on_{request.pop('op')}")(**request)
        except (qflow.QflowError, ValueError, TypeError, KeyError, AttributeError) as error:
            answer = {"error": type(error).__name__, "why": str(error)}
        return {"id": number, **(answer or {})}

    async def send(self, answer: dict[str, Any]) -> None:
        self.writer.write(json.dumps(answer).encode() + b"\n")
        await self.writer.drain()  # a client that does not read holds up its own tasks, and nobody else

    async def queue(self, name: str) -> qflow.aio.AsyncQueue:
        return await self.broker.declare_queue(name, limit_messages=LIMIT)

    def hold(self, delivery: qflow.aio.AsyncDelivery, settled: asyncio.Event) -> dict[str, Any]:
        self.deliveries += 1
        self.held[self.deliveries] = delivery, settled
        return {"delivery": self.deliveries, "body": delivery.body.decode(), "count": delivery.delivery_count}

    async def push(self, delivery: qflow.aio.AsyncDelivery) -> None:
        await self.send(self.hold(delivery, settled := asyncio.Event()))
        await settled.wait()

    async def on_put(self, queue: str, body: str) -> dict[str, Any]:
        return {"sequence": await (await self.queue(queue)).put(body.encode())}

    async def on_get(self, queue: str, timeout_s: float = 0) -> dict[str, Any]:
        return self.hold(await (await self.queue(queue)).get(timeout_s), asyncio.Event())

    async def on_ack(self, delivery: int, ack: bool = True) -> None:
        held, settled = self.held.pop(delivery)
        await (held.ack() if ack else held.nack())
        settled.set()

    async def on_nack(self, delivery: int) -> None:
        await self.on_ack(delivery, ack=False)

    async def on_publish(self, topic: str, body: str) -> dict[str, Any]:
        return {"sequences": (await self.broker.publish(topic, body.encode())).sequences}

    async def on_bind(self, queue: str, topic_filter: str) -> None:
        await self.broker.bind((await self.queue(queue)).name, topic_filter)

    async def on_subscribe(self, queue: str, credit: int = 10) -> None:
        """Push messages, at most `credit` of them not settled yet, until the client leaves."""
        self.consumers.append((await self.queue(queue)).consume(self.push, prefetch=credit, concurrency=credit))


async def main(spool: str, port: int | None) -> None:
    clients: set[asyncio.Task[Any]] = set()
    async with qflow.aio.open(spool) as broker:

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            clients.add(task := asyncio.ensure_future(Connection(broker, reader, writer).serve()))
            await asyncio.wait([task])
            clients.discard(task)

        async with await asyncio.start_server(connected, "127.0.0.1", port or 0) as server:
            try:
                await (server.serve_forever() if port else script(server.sockets[0].getsockname()[1]))
            finally:
                for task in clients:
                    task.cancel()
                await asyncio.gather(*clients, return_exceptions=True)


async def script(port: int) -> None:
    """A producer that does not wait for answers, one who takes a message and leaves, and a subscriber."""

    async def client(*requests: dict[str, Any], answers: int) -> list[dict[str, Any]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(json.dumps(request).encode() + b"\n" for request in requests))
        got = []
        for _ in range(answers):
            got.append(json.loads(await reader.readline()))
            if "body" in got[-1] and requests[0]["op"] == "subscribe":
                writer.write(json.dumps({"op": "ack", "delivery": got[-1]["delivery"]}).encode() + b"\n")
        writer.close()
        return got

    await client({"op": "bind", "queue": "jobs", "topic_filter": "work/#"}, answers=1)
    puts = [{"op": "publish", "topic": "work/now", "body": str(number), "id": number} for number in range(300)]
    print(len([one for one in await client(*puts, answers=300) if one["sequences"]]), "published and synced")
    left = (await client({"op": "get", "queue": "jobs"}, answers=1))[0]
    pushed = await client({"op": "subscribe", "queue": "jobs", "credit": 5}, answers=200)
    counts = {one["body"]: one["count"] for one in pushed if "body" in one}
    print("one took", left["body"], "and left; the subscriber got it as delivery", counts[left["body"]])


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main(spool_of(__doc__), int(sys.argv[3]) if sys.argv[2:3] == ["--serve"] else None))
