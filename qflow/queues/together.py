"""Puts into several queues, and what leaves others for them, in one commit: publish, transactions, dead letters.

Room is reserved queue by queue, in the order of their numbers, so that two who want the same queues never wait for one
another. Then all of it enters one batch of the log as a unit. Queues that are not durable take part: their messages
become visible when the commit holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from qflow.delivery import Segment
from qflow.message import Record, is_plain
from qflow.queues.dead_letters import dead_letters
from qflow.queues.intake import TurnedAway, again
from qflow.queues.outlet import Leaving
from qflow.queues.overflow import Decision
from qflow.queues.queue import Queue
from qflow.storage.transaction_log import Put, TransactionLog, Unit


class Step(NamedTuple):
    """Messages for one lane of one queue."""

    queue: Queue
    number: int
    records: list[Record]


class Together:
    """Commits steps. One a broker; thread-safe."""

    def __init__(
        self,
        log: TransactionLog,
        dead_letter_queue: Callable[[Queue], Queue],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._log = log
        self._dead_letter_queue = dead_letter_queue
        self._clock = clock
        self._monotonic = monotonic

    def commit(
        self,
        steps: Iterable[Step],
        leavings: Iterable[Leaving] = (),
        *,
        timeout: float | None = None,
        wait: bool = True,
        future: Future[Any] | None = None,
        dead: bool = False,
    ) -> list[Put | None]:
        """Put all steps, and let go of what is leaving, in one commit.

        Args:
            timeout: seconds to wait for room, in all queues together; None = without end.
            wait: return when it holds; else the flusher leads it, and `future` has None then.
            dead: they are dead letters: no limit holds them back.

        Returns:
            The put of each step, with its sequence once it is committed; None if the policy of its queue dropped it, or
            made it a dead letter.

        Raises:
            All that a put raises; nothing was done then, and what was leaving stays.
        """
        leavings = list(leavings)
        puts: list[tuple[int, Put | None]] = []
        extra: list[Put] = []
        unit: Unit | None = None
        deadline = None if timeout is None else self._monotonic() + timeout
        numbered = sorted(enumerate(steps), key=lambda item: (item[1].queue.owner, item[0]))
        try:
            for index, step in numbered:
                left = None if deadline is None else max(0.0, deadline - self._monotonic())
                puts.append((index, self._prepare(step, left, extra, dead)))
            wanted = [put for _, put in sorted(puts, key=_index) if put is not None] + extra
            settles = [part for leaving in leavings for part in leaving.settles()]
            if not settles and not any(put.lane.is_logged for put in wanted):
                self._publish_unlogged(wanted, leavings, future)
                return [put for _, put in sorted(puts, key=_index)]
            unit = Unit(wanted, settles, leavings)
            unit.future = future
            batch = self._log.join(unit)
        except BaseException:
            if unit is None or not unit.joined:
                for put in [put for _, put in puts if put is not None] + extra:
                    put.lane.publisher.refused(put)
                for leaving in leavings:
                    leaving.refused(None)
            raise
        if not wait:
            self._log.flush(batch)
        else:
            self._log.wait(batch)
            if unit.error is not None:
                raise again(unit.error)
            for queue in {step.queue for _, step in numbered}:
                queue.spill_excess()
        return [put for _, put in sorted(puts, key=_index)]

    def _prepare(self, step: Step, timeout: float | None, extra: list[Put], dead: bool) -> Put | None:
        """Reserve room for a step; None if its queue's policy turns it away."""
        queue, number, records = step
        turned = False
        while True:
            try:
                put = queue.prepare(records, is_plain(records), number, timeout, dead=dead)
            except TurnedAway as error:
                turned = True
                if error.decision is Decision.DROP:
                    queue.count_turned_away(len(records), dropped=True)
                    return None
                queue.count_turned_away(len(records), dropped=False)
                if not dead:
                    records = dead_letters(queue.name, [Segment(-1, records, 0)], "limit", self._clock())
                queue, number, dead = self._dead_letter_queue(queue), 0, True
                continue
            if not turned:
                return put
            extra.append(put)
            return None

    def _publish_unlogged(self, puts: list[Put], leavings: list[Leaving], future: Future[Any] | None) -> None:
        """Do all of it without the log, which has no part in it."""
        for put in puts:
            put.lane.publisher.publish_transient(put)
        for leaving in leavings:
            leaving.committed(None)
        for put in puts:
            put.lane.publisher.spill_excess()  # type: ignore[attr-defined]
        if future is not None:
            future.set_result(None)


def _index(item: tuple[int, Put | None]) -> int:
    return item[0]
