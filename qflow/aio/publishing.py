"""Publishing for tasks: messages join a batch at once where there is room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from qflow.aio.home import Home, Request
from qflow.aio.loops import Homes, Steps, Waiter, Worker, attend
from qflow.aio.transaction import AsyncTogether
from qflow.config import parse_timeout
from qflow.durations import Duration
from qflow.errors import QflowError, QueueDeleted, StreamDeleted
from qflow.memory.line import FOREVER
from qflow.memory.waiting import in_place
from qflow.message import Headers
from qflow.publishing import Claimed, Kept, Publisher, Rooms
from qflow.routing import Lots
from qflow.routing.results import PublishResult, duplicate_result
from qflow.streams.producers import Answer, Claim
from qflow.streams.publishing import Sending, Sent
from qflow.streams.room import Asking

T = TypeVar("T")
Begun = tuple[Request | None, Callable[[], Sequence[PublishResult]]]
"""What is to be confirmed, if anything is; and what gives the results then."""


class AsyncPublishing:
    """See the module. One for each broker."""

    def __init__(self, publisher: Publisher, together: AsyncTogether, homes: Homes, worker: Worker) -> None:
        self._publisher = publisher
        self._together = together
        self._homes = homes
        self._worker = worker

    async def publish(
        self,
        messages: list[Any],
        headers: Headers | None,
        producer: str | None,
        number: int | None,
        timeout_s: Duration | None,
    ) -> Sequence[PublishResult]:
        """Publish (topic, body) or (topic, body, key) in one commit; see `Broker.publish_many`.

        Cancelled while it waits for room, or for another call with its number, nothing was done; while it waits for the
        commit, it is done all the same, or refused.
        """
        claim, timeout = self._publisher.claim_of(producer, number), parse_timeout(timeout_s)
        if claim is None:
            return await self._publish(messages, headers, None, timeout_s=timeout)
        home = self._homes.here()
        now = home.loop.time
        ends = None if timeout is None else now() + timeout
        try:
            home.begin(claim.give_up)
            if not await self._take(claim, timeout):
                return [duplicate_result() for _ in messages]
            left = None if ends is None else max(0.0, ends - now())
            return await self._publish(messages, headers, claim, timeout_s=left)
        except BaseException:
            home.undo(claim.give_up)
            raise
        finally:
            home.unfinished.pop(claim.give_up, None)

    def submit_many(self, messages: list[tuple[str, bytes]]) -> asyncio.Future[Sequence[PublishResult]]:
        """`publish` without headers and producer that returns a future; without a task if there is room at once."""
        home = self._homes.here()
        begun = self._begin(messages, None)
        return home.loop.create_task(self._publish(messages, None, None)) if begun is None else _confirmed(home, *begun)

    def keep(self, rooms: Rooms) -> asyncio.Future[Any]:
        """Keep facts, all in one commit; the future is done when they are synced."""
        log = self._publisher.log
        return self._homes.here().confirmed(in_place(partial(log.join_facts, Kept(rooms).facts, soon=False)))

    def forget_unchanged(self, room: str, values: Mapping[str, bytes]) -> asyncio.Future[Any]:
        """Forget facts that still have these values; the future is done when that is synced."""
        log = self._publisher.log
        return self._homes.here().confirmed(in_place(partial(log.join_forgetting, room, values, soon=False)))

    def submit_and_keep(
        self, message: tuple[Any, ...], headers: Headers | None, rooms: Rooms
    ) -> asyncio.Future[PublishResult]:
        """`submit` of a message with facts that are kept in its commit, also where nobody wants the message."""
        kept = Kept(rooms)
        home = self._homes.here()
        begun = self._begin([message], headers, kept)
        if begun is None:
            return home.loop.create_task(self._publish_and_keep(message, headers, kept))
        return _first_confirmed(home, *begun)

    async def _publish_and_keep(self, message: tuple[Any, ...], headers: Headers | None, kept: Kept) -> PublishResult:
        return (await self._publish([message], headers, None, kept))[0]

    async def publish_one(
        self,
        message: tuple[Any, ...],
        headers: Headers | None,
        producer: str | None,
        number: int | None,
        timeout_s: Duration | None,
    ) -> PublishResult:
        """`publish` of one message."""
        timeout_s, home = parse_timeout(timeout_s), self._homes.here()
        if producer is None and number is None and (begun := self._begin([message], headers)) is not None:
            home.has_room()
            return await _first_confirmed(home, *begun)
        return (await self.publish([message], headers, producer, number, timeout_s))[0]

    def submit(
        self,
        message: tuple[Any, ...],
        headers: Headers | None,
        producer: str | None,
        number: int | None,
        timeout_s: Duration | None,
    ) -> asyncio.Future[PublishResult]:
        """`publish_one` that returns a future; without a task if the message can join a batch at once."""
        home, timeout = self._homes.here(), parse_timeout(timeout_s)
        if producer is None and number is None and (begun := self._begin([message], headers)) is not None:
            return _first_confirmed(home, *begun)
        return home.loop.create_task(self.publish_one(message, headers, producer, number, timeout))

    def _begin(self, messages: list[Any], headers: Headers | None, kept: Kept | None = None) -> Begun | None:
        """Hand messages to the log if there is room at once; None if there is none, or what goes to queues is refused:
        the task finds that, too, and tells it.
        """
        lots = self._publisher.lots_of(messages, headers)
        if lots is not None:
            if kept is None and not lots.lots:
                return None, partial(lots.results, None)
            sent = self._send_at_once(lots, kept)
            return None if sent is None else (sent.request, partial(lots.results, sent))
        riders: list[Any] = [] if kept is None else [kept]
        try:
            out = self._publisher.outgoing_of(messages, headers)
            begun = self._together.begin(out.inserts(), riders, out.puts)
        except QflowError:
            return None
        return None if begun is None else (begun.unit, partial(out.results, begun.receipts))

    def _send_at_once(self, lots: Lots, kept: Kept | None = None) -> Sent | None:
        """Join lots to a batch if there is room; None if not."""
        sending = Sending(lots.lots, None, None if kept is None else kept.facts)
        if sending.room is None and kept is None:
            return None
        try:
            if not in_place(sending.reserve_at_once):
                return None
            return in_place(partial(sending.enter, self._publisher.log, soon=False))
        except StreamDeleted:
            return None
        except BaseException:
            _withdraw(sending)
            raise

    async def _take(self, claim: Claim, timeout_s: float | None) -> bool:
        """Take a producer's number, waiting while another claim has it; False if it is stored."""
        home = self._homes.here()
        ends = None if timeout_s is None else home.loop.time() + timeout_s
        while True:
            if not claim.is_known:
                await self._worker.run(home, claim.learn)
            waiter = Waiter(home)
            answer = claim.try_take(waiter)
            if answer is not Answer.PENDING:
                return answer is Answer.NEW
            left = FOREVER if ends is None else ends - home.loop.time()
            if left <= 0:
                raise claim.busy(timeout_s)
            await waiter.wait(left)

    async def _publish(
        self,
        messages: list[Any],
        headers: Headers | None,
        claim: Claim | None,
        kept: Kept | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Sequence[PublishResult]:
        publisher, home = self._publisher, self._homes.here()
        while (lots := publisher.lots_of(messages, headers)) is not None:
            sending = Sending(lots.lots, claim, None if kept is None else kept.facts)
            try:
                await self._reserve(home, sending)
                sent = in_place(partial(sending.enter, publisher.log, soon=False))
            except StreamDeleted:
                await asyncio.sleep(0)
                continue  # a stream was deleted meanwhile: route anew
            except BaseException:
                _withdraw(sending)
                raise
            if sent is not None:
                home.has_room()
                await home.confirmed(sent.request)
            return lots.results(sent)
        while True:
            out = publisher.outgoing_of(messages, headers)
            leavings: list[Any] = [] if claim is None else [Claimed(claim)]
            if kept is not None:
                leavings.append(kept)
            try:
                receipts = await self._together.commit(out.inserts(), leavings, timeout_s, puts=out.puts)
            except (QueueDeleted, StreamDeleted):
                await asyncio.sleep(0)
                continue
            return out.results(receipts)

    async def _reserve(self, home: Home, sending: Sending) -> None:
        room = sending.room
        if in_place(sending.reserve_at_once) or room is None:
            return
        asking = Asking(sending.amount)
        await attend(home, self._worker, Steps(partial(room.try_reserve, asking), partial(room.give_up, asking)))
        sending.has_room = True


def _withdraw(sending: Sending) -> None:
    """Give back what was reserved and joined no batch: a handler that raises came between. Twice is fine."""
    if sending.has_room:
        in_place(sending.withdraw)


def _confirmed(home: Home, request: Request | None, results: Callable[[], T]) -> asyncio.Future[T]:
    """Return a future of what was begun."""
    return home.resolved(results()) if request is None else home.confirmed(request, results)


def _first_confirmed(
    home: Home, request: Request | None, results: Callable[[], Sequence[PublishResult]]
) -> asyncio.Future[PublishResult]:
    """The same of the first message."""
    return _confirmed(home, request, lambda: results()[0])
