"""What is given back: to its place, to a schedule until its delay is over, or away, if it is wanted no more.

What the log is told of it, nobody waits for; but where thousands of requests stand before the writer, as of acks, the
thread or task that gave something back waits for them: they take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from time import sleep
from typing import TypeVar

from qflow.delivery import AT_ONCE, ONE_ATTEMPT, Delivery, Return, Segment
from qflow.errors import BrokerClosed, QflowError
from qflow.held_batch import HeldBatch
from qflow.memory.line import PAUSE_S
from qflow.message import RETURNED
from qflow.queues import portions
from qflow.queues.apart import HeldOne
from qflow.queues.dead_letters import REJECTED, Cause
from qflow.queues.exits import Exits, Fate, weigh
from qflow.queues.held import Held, segments_of
from qflow.queues.lanes import Lanes
from qflow.queues.source import Source
from qflow.storage.log.transaction_log import Request

T = TypeVar("T")


class Returns:
    """See the module."""

    def __init__(self, lanes: Lanes, held: Held, source: Source, exits: Exits) -> None:
        self._context = lanes.context
        self._gate = lanes.gate
        self._lanes = lanes
        self._held = held
        self._source = source
        self._exits = exits
        exits.come_back = self._come_back
        self.total = 0
        """Deliveries that came back, those that made a dead letter included."""
        self.given_up = 0
        """Messages that were fetched, and came back without having been seen: `delivered_total` only grows."""

    def take_back(self, held: Collection[HeldOne], how: Return = AT_ONCE) -> None:
        """Return acquired messages to the queue, or let them go if they are not wanted or came too often.

        Called with the lock held; lets go of it where dead letters are carried away.
        """
        context = self._context
        most = context.settings.max_deliveries
        back: list[Segment] = []
        spent: list[Segment] = []
        for segment in self._counted(held):
            is_spent = not how.requeue or (most is not None and segment.marks >> 1 >= most)
            (spent if is_spent else back).append(segment)
        if back:
            self._source.give_back(back, self._lanes.now_ms(RETURNED) + int(how.delay_s * 1000) if how.delay_s else 0)
            if most is not None or how.delay_s:
                self._lanes.log_attempts(back)
        if spent:
            cause = Cause("max_deliveries" if how.requeue else REJECTED, how.reason)
            self._exits.let_go_of((spent, cause, Fate.DROPPED))

    def give_up(self, one: HeldOne) -> None:
        """Return what nobody has seen of this, not counted as delivered; nothing if it is not acquired."""
        if one in self._held:
            self._give_up_left(one)

    def _give_up_left(self, one: HeldOne) -> None:
        left = segments_of([one])
        self.given_up += weigh(left)[0]
        self._held.drop([one])
        self._source.give_back(left)

    # A long batch ----------------------------------------------------------------------------------------------------

    def begin(self, one: HeldOne, how: Return | None = AT_ONCE) -> HeldBatch | None:
        """Take one back, or give it up where nothing says `how`; of a long batch return what is left, for `go_on`."""
        if not isinstance(one, Delivery) and one in self._held and portions.is_long(one):
            return portions.hand_over(self._held, one, was_seen=how is not None)
        if how is None:
            self.give_up(one)
        else:
            self.take_back([one], how)
        return None

    def go_on(self, rest: HeldBatch | None, how: Return | None = AT_ONCE) -> None:
        """Do with what is left of a long batch what `begin` would have done with a short one. Takes the lock."""
        if rest is None:
            return
        if how is None:
            with suppress(BrokerClosed):  # whose end has given up the rest
                self._in_portions(rest, self._give_up_left)
        elif self._may_bury(how.requeue):
            wait, most = self._wait_for_dead_letters, portions.DEAD_LETTERS
            self._in_portions(rest, lambda some: self.take_back([some], how), wait, most)
        else:
            self._in_portions(rest, lambda some: self.take_back([some], how))

    def settle(self, rest: HeldBatch, settle: Callable[[list[HeldBatch]], Request | None]) -> Request | None:
        """Settle what is left of a long batch; return what `settle` has handed over last. Takes the lock."""

        def use(some: HeldBatch) -> Request | None:
            try:
                return settle([some])
            except QflowError:  # the log takes nothing more
                self._come_back([some])
                raise

        return self._in_portions(rest, use, self.outlast)

    def outlast(self, settled: Request | None) -> None:
        """Return when the log is done with a settle that others follow; what fails of it is tried again with those."""
        if settled is not None and self._context.log is not None:
            self._context.log.wait(settled)

    def _in_portions(
        self,
        rest: HeldBatch,
        use: Callable[[HeldBatch], T],
        between: Callable[[T], object] = lambda _: None,
        most: int | None = None,
    ) -> T | None:
        """Use what `portions.hand_over` has returned, a portion at a time; return what comes of the last.

        What is left if that fails goes back, for nobody would hold it.

        Args:
            use: called under the lock.
            between: called without it, with what came of a portion, before the next one.
            most: messages in a portion; None = as many as are settled, or go back, at once.
        """
        try:
            rest.begin_to_take()
            while True:
                with self._context.lock:
                    some = portions.take_some(self._held, rest, most)
                    if some is None:
                        self._context.check_not_closed()
                        return None
                    result = use(some)
                if rest.is_over:
                    return result
                between(result)
                sleep(PAUSE_S)
        except BaseException:
            with self._context.lock:
                if rest in self._held:
                    self._come_back([rest])
            raise

    def _wait_for_dead_letters(self, _: object) -> None:
        """Return when the commits of those before are done: what is on its way takes memory, and holds others up."""
        if self._context.log is not None:
            self._context.log.drain()

    def take_some_back(self, rest: HeldBatch) -> None:
        """Take back a portion of what `portions.hand_over` has returned, if there is one."""
        some = portions.take_some(self._held, rest, portions.DEAD_LETTERS if self._may_bury(True) else None)
        if some is not None:
            self.take_back([some])

    def _come_back(self, held: Collection[HeldOne]) -> None:
        """Return what is held by those that have gone. Called with the lock held, by the writer, too.

        What came too often goes with the next get, and that has the log know how often the rest did.
        """
        self._source.give_back(self._counted(held))

    def _counted(self, held: Collection[HeldOne]) -> list[Segment]:
        """Take what comes back from its holders; return it, with one more delivery counted."""
        segments = segments_of(held)
        self.total += weigh(segments)[0]
        self._held.drop(held)
        return [Segment(first, records, marks + ONE_ATTEMPT) for first, records, marks in segments]

    def takes_disk(self, requeue: bool) -> bool:
        """Tell whether taking messages back may take work on the disk: for dead letters, or for want of memory."""
        return self._may_bury(requeue) or self._gate.used > self._gate.account.capacity

    def _may_bury(self, requeue: bool) -> bool:
        settings = self._context.settings
        return settings.dead_letter is not None and (not requeue or settings.max_deliveries is not None)

    def is_logged(self, how: Return) -> bool:
        """Tell whether the log is told of what is given back so."""
        return bool(how.delay_s or not how.requeue or self._context.settings.max_deliveries is not None)
