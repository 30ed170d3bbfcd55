"""A process that is killed: many tasks or threads that share a connection, or an owner that closes beside its clients.

    python door_crowd.py SPOOL REPORTS ROLE SEED NUMBER

It tells what `door_client` tells. What is published without a number is told as put into the stream.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import qflow
import qflow.aio
from crash.door_client import AGAIN_S, BACKLOG, GONE, GROUP, STREAM, Client, lane_of, own
from crash.worker import body_of, token_of

TASKS = 40
THREADS = 8
CANCELLED = 0.2
"""Of all that tasks do, each of which is two calls or more."""
TURNS = (0, 1, 2, 3, 5, 8, 13, 21, 50, 100, 300)
"""Of the loop, before one is cancelled."""
HOUSE_S = 1.5
"""An owner closes after so long, at most."""
NOTHING: Any = object()
"""What a call has returned that was cancelled."""


class Crowd(Client):
    """See the module."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kinds = itertools.count()
        self.tokens = map(f"{self.role}-{self.number}-{{}}".format, itertools.count())  # which threads may share

    def run(self) -> None:
        """Work until the process is killed."""
        if self.role != "owner":
            super().run()
            return
        try:
            while True:
                self.keep_house()
        except BaseException as error:
            self.report.tell("wrong", type(error).__name__, error)
            raise

    def keep_house(self) -> None:
        """Own the spool for a while, see whether everything agrees, and close it beside the clients."""
        with own(self.spool) as broker:
            problems = broker.recovery.problems or broker.check()
            threading.Event().wait(self.chance.random() * HOUSE_S)
            for problem in problems or broker.check():
                self.report.tell("wrong", problem)
        threading.Event().wait(self.chance.random() * 10 * AGAIN_S)

    # Threads -----------------------------------------------------------------------------------------------------

    def herd(self, broker: Any) -> None:
        """Have threads work on one connection until that has ended; it is told of as of one."""
        errors: list[BaseException] = []

        def work(act: Callable[[Any], None]) -> None:
            try:
                act(broker)
            except BaseException as error:
                errors.append(error)

        acts = itertools.cycle((self.putter, self.taker, self.mover, self.reader))
        threads = [threading.Thread(target=work, args=(act,)) for act in itertools.islice(acts, THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raise next((error for error in errors if not isinstance(error, GONE)), errors[0])

    # Tasks -------------------------------------------------------------------------------------------------------

    async def crowd(self, broker: Any) -> None:
        """Have tasks work on one connection; a tenth of what they do is cancelled somewhere."""
        putting = (self.puts, self.puts_many, self.submits, self.publishes, self.publishes_in_transactions)
        taking = self.takes, self.takes, self.iterates, self.consumes, self.moves, self.reads, self.reads, self.follows
        acts = itertools.cycle((*putting, *taking, self.looks))
        async with asyncio.TaskGroup() as group:
            for act, number in zip(acts, range(TASKS), strict=False):
                group.create_task(self.again_and_again(act, broker, number))

    async def again_and_again(self, act: Callable[..., Coroutine[Any, Any, Any]], broker: Any, number: int) -> None:
        """Act; after a call that was cancelled with tokens of another kind, for that may be done behind what follows."""
        while True:
            tokens = map(f"{self.role}-{self.number}.{number}.{next(self.kinds)}-{{}}".format, itertools.count())
            while await self.perhaps(act(broker, tokens)) is not NOTHING:
                await asyncio.sleep(0)

    async def perhaps(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await something; some of it is cancelled somewhere."""
        task = quiet(asyncio.ensure_future(work))
        try:
            if self.chance.random() < CANCELLED:
                for _ in range(self.chance.choice(TURNS)):
                    await asyncio.sleep(0)
                task.cancel()
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                task.cancel()  # this one may have been between two turns
                await asyncio.wait([task])
                raise
            return NOTHING

    async def choose(self, broker: Any) -> tuple[str, Any]:
        """Return a queue that has room for more."""
        name = self.chance.choice(("left", "right"))
        queue = broker.queue(name)
        while await queue.length() > BACKLOG:
            await asyncio.sleep(AGAIN_S)
        return name, queue

    async def puts(self, broker: Any, tokens: Any) -> None:
        name, queue = await self.choose(broker)
        token = next(tokens)
        self.report.tell("try", name, token)
        self.report.tell("put", name, await queue.put(body_of(token)), token)

    async def puts_many(self, broker: Any, tokens: Any) -> None:
        name, queue = await self.choose(broker)
        group = list(itertools.islice(tokens, self.chance.randrange(1, 12)))
        self.report.tell("try", name, *group)
        placed = await queue.put_many(list(map(body_of, group)))
        self.report.tell("put", name, placed[0], *group)

    async def submits(self, broker: Any, tokens: Any) -> None:
        name, queue = await self.choose(broker)
        futures = {}
        for token in itertools.islice(tokens, self.chance.randrange(1, 20)):
            self.report.tell("try", name, token)
            futures[token] = quiet(queue.submit(body_of(token)))
        for token, future in futures.items():
            self.report.tell("put", name, await future, token)

    async def takes(self, broker: Any, _: Any) -> None:
        began = time.monotonic_ns()
        batch = await broker.queue("left").get_many(self.chance.randrange(1, 20), timeout_s=5)
        numbers = self.report.got("left", batch, began)
        await self.settle(batch, ["left"] * len(numbers), numbers)

    async def settle(self, held: Any, lanes: list[str], numbers: list[int]) -> None:
        """Give a delivery, or a batch, back, or ack it, with and without waiting."""
        kind = self.chance.random()
        if kind < 0.2:
            await held.nack()
            return
        for lane, number in zip(lanes, numbers, strict=True):
            self.report.tell("ack", lane, number)
        await held.ack(wait=kind < 0.6)
        if kind < 0.6:
            for lane, number in zip(lanes, numbers, strict=True):
                self.report.tell("acked", lane, number)

    async def iterates(self, broker: Any, _: Any) -> None:
        began = time.monotonic_ns()
        left = self.chance.randrange(1, 30)
        async with aclosing(broker.queue("left").iterate(prefetch=10)) as deliveries:
            async for delivery in deliveries:
                numbers = self.report.got("left", [delivery], began)
                await self.settle(delivery, ["left"], numbers)
                if not (left := left - 1):
                    return

    async def consumes(self, broker: Any, _: Any) -> None:
        began = time.monotonic_ns()
        enough = asyncio.Event()
        left = self.chance.randrange(1, 30)

        async def handle(delivery: qflow.aio.AsyncDelivery) -> None:
            nonlocal left
            self.report.got("left", [delivery], began)
            await asyncio.sleep(0)
            if self.chance.random() < 0.1:
                raise ValueError
            self.report.tell("ack", "left", delivery.sequence)
            left -= 1
            if left <= 0:
                enough.set()

        async with broker.queue("left").consume(handle, prefetch=5, concurrency=3):
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await enough.wait()

    async def moves(self, broker: Any, tokens: Any) -> None:
        """As `mover`, and what follows from it is published."""
        began = time.monotonic_ns()
        batch = await broker.queue("right").get_many(self.chance.randrange(1, 10), timeout_s=5)
        if not len(batch):
            return
        numbers = self.report.got("right", batch, began)
        moved = [token_of(delivery.body) for delivery in batch]
        token = next(tokens)
        self.report.tell("ack", "right", *numbers)
        self.report.tell("try", "out", *moved)
        self.report.tell("try", STREAM, token)

        async with broker.transaction() as tx:
            await tx.put_many("out", list(batch.bodies))
            await tx.publish(f"s/{key_of(token)}", body_of(token), key=key_of(token))
            await tx.ack_many(batch)
        self.report.tell("acked", "right", *numbers)
        self.report.tell("put", "out", tx.result[0][0], *moved)
        self.tell_published(token, tx.result[1])

    async def publishes(self, broker: Any, tokens: Any) -> None:
        token = next(tokens)
        self.report.tell("try", STREAM, token)
        result = await broker.publish(f"s/{key_of(token)}", body_of(token), key=key_of(token))
        self.tell_published(token, result)
        await asyncio.sleep(AGAIN_S)

    async def publishes_in_transactions(self, broker: Any, tokens: Any) -> None:
        """All of them, or none."""
        group = list(itertools.islice(tokens, self.chance.randrange(1, 5)))
        self.report.tell("try", STREAM, *group)
        async with broker.transaction() as tx:
            for token in group:
                await tx.publish(f"s/{key_of(token)}", body_of(token), key=key_of(token))
        for token, result in zip(group, tx.result, strict=True):
            self.tell_published(token, result)
        await asyncio.sleep(AGAIN_S)

    def tell_published(self, token: str, result: qflow.PublishResult) -> None:
        self.report.tell("put", lane_of(result.partitions[STREAM]), result.offsets[STREAM], token)

    async def reads(self, broker: Any, _: Any) -> None:
        """Some of the stream, as a member of the group."""
        async with broker.subscribe(STREAM, group=GROUP, start="earliest") as subscription:
            for _ in range(self.chance.randrange(1, 20)):
                began = time.monotonic_ns()
                batch = await subscription.get_many(self.chance.randrange(1, 20), timeout_s=5)
                self.report.got(STREAM, batch, began)
                lanes = [lane_of(one.partition) for one in batch]
                await self.settle(batch, lanes, [one.offset for one in batch])

    async def follows(self, broker: Any, _: Any) -> None:
        """All that is published from now on, in order, in a loop without a name."""
        last: dict[int, int] = {}
        left = self.chance.randrange(1, 200)
        async with broker.subscribe(STREAM) as subscription, aclosing(subscription.iterate()) as deliveries:
            async for delivery in deliveries:
                if delivery.offset != last.setdefault(delivery.partition, delivery.offset - 1) + 1:
                    self.report.tell("wrong", f"{delivery!r} came after {last[delivery.partition]}")
                last[delivery.partition] = delivery.offset
                if not (left := left - 1):
                    return

    async def looks(self, broker: Any, _: Any) -> None:
        """Ask for figures, and go through what waits and what is retained."""
        await broker.stats()
        await self.go_through(broker.queue("left").browse())
        await self.go_through(broker.stream(STREAM).query(newest=300))
        await asyncio.sleep(AGAIN_S)

    async def go_through(self, found: Any) -> None:
        async with aclosing(found):
            async for _ in found:
                pass


def quiet(future: Any) -> Any:
    """Have nobody told of what a future raises, where nobody waits for it any more."""
    future.add_done_callback(lambda future: future.cancelled() or future.exception())
    return future


def key_of(token: str) -> str:
    """Return what publishes of one task have in common: they keep their order."""
    return token.rpartition("-")[0]


if __name__ == "__main__":
    logging.getLogger("qflow").setLevel(logging.CRITICAL)  # consumers tell what their callbacks raise
    spool, reports, role, seed, number = sys.argv[1:]
    Crowd(spool, reports, role, int(seed), int(number)).run()
