"""How what tasks put comes into a queue: at once if there is room, else when it has found some.

What was submitted and waits for room has its place in a line of its loop: what that puts into the queue later goes
behind it, though it might find room sooner, as where a thread has just made some. At a limit it stands in the line of
the queue as well, with threads and other loops. Elsewhere it asks for room when its turn has come, and not before: what
it had, those before it might need.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from typing import Any

from qflow.aio.home import Home, Log
from qflow.aio.loops import Homes, Worker, attend
from qflow.config import parse_timeout
from qflow.durations import Duration
from qflow.errors import QflowError
from qflow.memory.waiting import in_place
from qflow.message import Record, is_logged
from qflow.queues.envelope import Envelope
from qflow.queues.overflow import Decision
from qflow.queues.puts import Puts
from qflow.queues.putting import Putting, TurnedAway

Turn = asyncio.Future[None]
Line = OrderedDict[Turn, Putting | None]
"""The turns of those that wait, that of the first has come; and who of them stands in the line of the queue."""


class AsyncPutting:
    """See the module. One for each `AsyncQueue`."""

    def __init__(self, puts: Puts, log: Log, homes: Homes, worker: Worker) -> None:
        self._puts = puts
        self._log = log
        self._homes = homes
        self._worker = worker

    def is_behind(self) -> bool:
        """Tell whether something waits for room that the running loop has submitted before."""
        lines = self._homes.lines
        return bool(lines) and (self._homes.here().loop, self._puts) in lines

    def submit(
        self, records: list[Record], plain: bool, envelope: Envelope, timeout_s: Duration | None
    ) -> asyncio.Future[Any]:
        """Put messages: hand them over if there is room and nothing waits before them, else in a task."""
        home, timeout_s = self._homes.here(), parse_timeout(timeout_s)
        line = self._homes.lines.get((home.loop, self._puts))
        put = None if line else _put_if_room(self._puts, self._log, records, plain, envelope)
        if put is not None:
            return home.resolved(put) if isinstance(put, int) else home.confirmed(put)
        standing = None
        if not line or line[next(reversed(line))] is not None:
            standing = self._stand_at_limit(records, plain, envelope, timeout_s)
        turn = self._stand(home, standing)
        try:
            task = home.loop.create_task(self._put_in_turn(turn, standing, records, plain, envelope, timeout_s))
            task.add_done_callback(lambda _: self._end(home, turn, standing))  # also where it has not begun
        except BaseException:
            self._end(home, turn, standing)
            raise
        return task

    async def put(
        self, records: list[Record], plain: bool, envelope: Envelope, timeout_s: Duration | None
    ) -> int | None:
        """Put messages, and return the first sequence once they are confirmed; None if they were turned away."""
        if self.is_behind():
            first: int | None = await self.submit(records, plain, envelope, timeout_s)
            return first
        return await self._put(records, plain, envelope, timeout_s)

    async def _put(
        self,
        records: list[Record],
        plain: bool,
        envelope: Envelope,
        timeout_s: Duration | None,
        turn: Turn | None = None,
    ) -> int | None:
        """`put` of what is first, or passes those before it."""
        home = self._homes.here()  # first: without one, nothing is done
        put = _put_if_room(self._puts, self._log, records, plain, envelope)
        if put is None:
            drafts = [self._puts.draft(records, plain, envelope.number)]
            return await self.wait_for_room(self._puts.begin(drafts, timeout_s), turn)
        self._leave(turn)
        if isinstance(put, int):
            return put
        home.has_room()
        await home.confirmed(put)
        return put.first  # type: ignore[no-any-return]

    async def wait_for_room(self, putting: Putting, turn: Turn | None = None) -> int | None:
        """Put messages that have to wait, or that a limit turns away."""
        queue, home = self._puts, self._homes.here()
        put = putting.puts[0]
        try:
            await attend(home, self._worker, putting)
            if turn is not None and not turn.done():
                await turn
            _enter(queue, self._log, put)
        except TurnedAway as turned:
            if turned.decision is Decision.DROP:
                queue.turn_away(put.records, turned.decision)
            else:
                await self._worker.run(home, partial(queue.turn_away, put.records, turned.decision))
            return None
        except BaseException:
            home.undo(putting.give_up)  # again, where a handler that raises came when it had its room
            raise
        self._leave(turn)
        home.has_room()
        if put.lane.is_logged:
            await home.confirmed(put)
        if queue.exceeds:
            self._worker.spill(queue.spiller)
        return put.first

    async def _put_in_turn(
        self,
        turn: Turn,
        standing: Putting | None,
        records: list[Record],
        plain: bool,
        envelope: Envelope,
        timeout_s: float | None,
    ) -> int | None:
        """Put messages once those before them have their room, or the time is over that they may wait."""
        if turn not in self._homes.lines.get((self._homes.here().loop, self._puts), ()):
            raise asyncio.CancelledError  # a handler struck `submit` when it had made this task
        if standing is not None:
            return await self.wait_for_room(standing, turn)
        if timeout_s is None:
            await turn
        else:
            now = self._homes.here().loop.time
            ends = now() + timeout_s
            await asyncio.wait([turn], timeout=timeout_s)
            timeout_s = max(0.0, ends - now())
            turn.cancel()  # unless it has come: whoever passes those before it does not wait for them, with its room
        return await self._put(records, plain, envelope, timeout_s, turn)

    def _stand_at_limit(
        self, records: list[Record], plain: bool, envelope: Envelope, timeout_s: float | None
    ) -> Putting | None:
        """Take a place among all that wait at a limit of the queue, threads and other loops, too.

        Returns what stands there, or has its room by now. None: no limit is in the way, or one turns it away.
        """
        putting = self._puts.begin([self._puts.draft(records, plain, envelope.number)], timeout_s)
        try:
            in_place(partial(putting.step, _look_again_soon, False))
        except (QflowError, TurnedAway):  # the task finds that, too, and tells it
            in_place(putting.give_up)
            return None
        except BaseException:
            in_place(putting.give_up)
            raise
        if putting.done or putting in self._puts.admission.line:
            return putting
        in_place(putting.give_up)
        return None

    def _stand(self, home: Home, standing: Putting | None) -> Turn:
        if standing is not None:
            home.begin(standing.give_up)
        line: Line = self._homes.lines.setdefault((home.loop, self._puts), OrderedDict())
        turn: Turn = home.loop.create_future()
        if not line:
            turn.set_result(None)
        line[turn] = standing
        return turn

    def _end(self, home: Home, turn: Turn, standing: Putting | None) -> None:
        try:
            self._leave(turn)
        finally:
            if standing is not None:
                home.end(standing.give_up)

    def _leave(self, turn: Turn | None) -> None:
        """Have the next one go on; twice is fine, and is done, as a handler may strike in the middle. In the loop."""
        place = self._homes.here().loop, self._puts
        line = self._homes.lines.get(place) if turn is not None else None
        if line is None:
            return
        line.pop(turn, None)
        if not line:
            self._homes.lines.pop(place, None)
        elif not (following := next(iter(line))).done():
            following.set_result(None)


def _look_again_soon() -> None:
    """A wake-up of what looks again as soon as its task runs."""


def _put_if_room(puts: Puts, log: Log, records: list[Record], plain: bool, envelope: Envelope) -> Any:
    """Put messages if there is room, also room that the queue must borrow first; None if there is none.

    Returns the put that is to be confirmed, or where nothing is, the first sequence.
    """
    if puts.settings.durable and not is_logged(records[0]):
        first = in_place(partial(puts.put_unlogged, records, envelope.number))
        if first is not None:
            return first
    put = puts.draft(records, plain, envelope.number)
    put.expires_ms = envelope.expires_ms
    if not puts.enter_at_once(put) and not in_place(partial(_borrow_and_enter, puts, log, put)):
        return None
    return put if put.lane.is_logged else put.first


def _borrow_and_enter(puts: Puts, log: Log, put: Any) -> bool:
    put.refused = True  # until it has its room
    try:
        if not puts.reserve_at_once(put):
            return False
        _enter(puts, log, put)
    except BaseException:
        if not put.joined:
            puts.refused(put)  # what came between was a handler that raises
        raise
    return True


def _enter(puts: Puts, log: Log, put: Any) -> None:
    """Hand a put whose room is reserved to the log, or make it visible if it is not logged."""
    if not put.lane.is_logged:
        puts.publish_transient(put)
        return
    try:
        log.put(put, soon=False)
    except BaseException:
        if not put.joined:
            puts.refused(put)
        raise
