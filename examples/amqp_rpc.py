"""Remote calls with aio-pika: a server takes questions from a queue, and answers each to who asked.

python examples/amqp_rpc.py SPOOL      SPOOL may be the URL of a broker that runs: amqp://guest:guest@127.0.0.1
"""

import asyncio
from uuid import uuid4

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractQueue
from amqp_server import serving
from usage import spool_of


async def serve(channel: AbstractChannel) -> AbstractQueue:
    """Answer with the square of what is asked; the question is acked when its answer is confirmed."""
    await channel.set_qos(prefetch_count=10)
    questions = await channel.declare_queue(f"squares-{uuid4().hex}", exclusive=True)

    async def answer(question: AbstractIncomingMessage) -> None:
        async with question.process():
            square = str(int(question.body) ** 2).encode()
            message = aio_pika.Message(square, correlation_id=question.correlation_id)
            assert question.reply_to is not None
            await channel.default_exchange.publish(message, question.reply_to)

    await questions.consume(answer)
    return questions


class Client:
    """Asks, and gives each answer to the call that it belongs to."""

    def __init__(self, channel: AbstractChannel, questions: str) -> None:
        self.channel, self.questions = channel, questions
        self.waiting: dict[str, asyncio.Future[int]] = {}
        self.answers = ""

    async def start(self) -> None:
        queue = await self.channel.declare_queue(exclusive=True)  # the broker names it
        await queue.consume(self.take, no_ack=True)
        self.answers = queue.name

    async def take(self, answer: AbstractIncomingMessage) -> None:
        assert answer.correlation_id is not None
        self.waiting.pop(answer.correlation_id).set_result(int(answer.body))

    async def ask(self, number: int) -> int:
        word = uuid4().hex
        future = self.waiting[word] = asyncio.get_running_loop().create_future()
        question = aio_pika.Message(str(number).encode(), correlation_id=word, reply_to=self.answers)
        await self.channel.default_exchange.publish(question, self.questions)
        return await future


async def talk(url: str) -> None:
    async with await aio_pika.connect(url) as serving_one, await aio_pika.connect(url) as asking_one:
        questions = await serve(await serving_one.channel())
        client = Client(await asking_one.channel(), questions.name)
        await client.start()
        squares = await asyncio.gather(*(client.ask(number) for number in range(100)))
        assert squares == [number**2 for number in range(100)]
        print("squares:", squares[:5], "...", squares[-1])


def main(spool: str) -> None:
    with serving(spool) as url:
        asyncio.run(talk(url))


if __name__ == "__main__":
    main(spool_of(__doc__))
