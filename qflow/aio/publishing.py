"""Publishing for tasks: messages for streams alone join a batch at once, if there is room."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from qflow.aio.loops import Home, Homes, Waiter, Worker, attend
from qflow.aio.transaction import AsyncTogether
from qflow.errors import QueueDeleted, StreamDeleted
from qflow.memory.waiting import in_place
from qflow.message import Headers
from qflow.publishing import Publisher
from qflow.routing import Claimed, Lots, PublishResult, duplicate_result
from qflow.streams.producers import Answer, Claim
from qflow.streams.publishing import Sending, Sent
from qflow.streams.room import Asking


class AsyncPublishing:
    """See the module. One for each broker."""

    def __init__(self, publisher: Publisher, together: AsyncTogether, homes: Homes, worker: Worker) -> None:
        self._publisher = publisher
        self._together = together
        self._homes = homes
        self._worker = worker

    async def publish(
        self, messages: list[Any], headers: Headers | None, producer: str | None, number: int | None
    ) -> Sequence[PublishResult]:
        """Publish (topic, body) or (topic, body, key) in one commit; see `Broker.publish_many`.

        Cancelled while it waits for room, or for another call with its number, nothing was done; while it waits for the
        commit, it is done all the same, or refused.
        """
        claim = self._publisher.claim_of(producer, number)
        if claim is None:
            return await self._publish(messages, headers, None)
        try:
            if not await self._take(claim):
                return [duplicate_result() for _ in messages]
            return await self._publish(messages, headers, claim)
        except BaseException:
            in_place(claim.give_up)
            raise

    async def publish_one(
        self, message: tuple[Any, ...], headers: Headers | None, producer: str | None, number: int | None
    ) -> PublishResult:
        """`publish` of one message."""
        if producer is None and number is None:
            lots = self._publisher.lots_of([message], headers)
            if lots is not None:
                if not lots.lots:
                    return lots.results(None)[0]
                sent = self._send_at_once(lots)
                if sent is not None:
                    await self._homes.here().confirmed(sent.request)
                    return lots.results(sent)[0]
        return (await self.publish([message], headers, producer, number))[0]

    def submit(
        self, message: tuple[Any, ...], headers: Headers | None, producer: str | None, number: int | None
    ) -> asyncio.Future[PublishResult]:
        """`publish_one` that returns a future; without a task if the message can join a batch at once."""
        home = self._homes.here()
        if producer is None and number is None:
            lots = self._publisher.lots_of([message], headers)
            if lots is not None:
                if not lots.lots:
                    future: asyncio.Future[PublishResult] = home.loop.create_future()
                    future.set_result(lots.results(None)[0])
                    return future
                sent = self._send_at_once(lots)
                if sent is not None:
                    return home.confirmed(sent.request, lambda: lots.results(sent)[0])
        return home.loop.create_task(self.publish_one(message, headers, producer, number))

    def _send_at_once(self, lots: Lots) -> Sent | None:
        """Join lots to a batch if there is room; None if not."""
        sending = Sending(lots.lots, None)
        room = sending.room
        if room is None or not in_place(partial(room.reserve_at_once, sending.amount)):
            return None
        try:
            return in_place(partial(sending.enter, self._publisher.log, soon=False))
        except StreamDeleted:
            return None

    async def _take(self, claim: Claim) -> bool:
        """Take a producer's number, waiting while another claim has it; False if it is stored."""
        home = self._homes.here()
        while True:
            if not claim.is_known:
                await self._worker.run(home, claim.learn)
            waiter = Waiter(home)
            answer = claim.try_take(waiter.wake)
            if answer is not Answer.PENDING:
                return answer is Answer.NEW
            await waiter.wait()

    async def _publish(
        self, messages: list[Any], headers: Headers | None, claim: Claim | None
    ) -> Sequence[PublishResult]:
        publisher, home = self._publisher, self._homes.here()
        while (lots := publisher.lots_of(messages, headers)) is not None:
            sending = Sending(lots.lots, claim)
            try:
                await self._reserve(home, sending)
                sent = in_place(partial(sending.enter, publisher.log, soon=False))
            except StreamDeleted:
                await asyncio.sleep(0)
                continue  # a stream was deleted meanwhile: route anew
            if sent is not None:
                await home.confirmed(sent.request)
            return lots.results(sent)
        while True:
            out = publisher.outgoing_of(messages, headers)
            leavings: list[Any] = [] if claim is None else [Claimed(claim)]
            try:
                receipts = await self._together.commit(out.inserts, leavings, puts=out.puts)
            except (QueueDeleted, StreamDeleted):
                await asyncio.sleep(0)
                continue
            return out.results(receipts)

    async def _reserve(self, home: Home, sending: Sending) -> None:
        room = sending.room
        if room is None or room.reserve_at_once(sending.amount):
            return
        asking = Asking(sending.amount)
        await attend(home, self._worker, partial(room.try_reserve, asking), partial(room.give_up, asking))
