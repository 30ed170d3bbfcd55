"""Dead letters on their way: to which queue they go, and the commit that carries them there."""

from __future__ import annotations

from collections.abc import Callable

from qflow.delivery import Segment
from qflow.errors import BrokerClosed, NotFound, QflowError
from qflow.events import EventKind, Teller
from qflow.loggers import get_logger
from qflow.memory.waiting import sheltered
from qflow.queues.assembly import Insert
from qflow.queues.context import Context
from qflow.queues.dead_letters import REJECTED, Cause, dead_letters
from qflow.queues.exits import Leaving, weigh
from qflow.queues.puts import Puts
from qflow.queues.queue import Queue, parts_of
from qflow.queues.together import Together
from qflow.spool import Spool

ROOM_S = 2.0
"""For so long what was rejected waits for room that dead letters before it are about to leave, unless the disk takes
nothing: back in its queue, it would be delivered again. What else becomes a dead letter stays in its place."""

_logger = get_logger("qflow")


class DeadLetterRouter:
    """See the module. One a broker; thread-safe."""

    def __init__(self, spool: Spool, find: Callable[[str], Queue], tell: Teller) -> None:
        """`find` returns a queue by name, declaring it if it is missing."""
        self._spool = spool
        self._tell = tell
        self._find = find
        self.together = Together(spool.log, self.queue_for, spool.clock, spool.monotonic)
        """What commits several queues in one: dead letters, publishes, transactions."""

    @sheltered
    def queue_for(self, source: Context) -> Puts:
        """Return where a queue's dead letters go, declaring it if it is missing."""
        name = source.settings.dead_letter
        if name is None:
            raise NotFound(f"queue {source.name!r} has no dead-letter queue any more")
        return parts_of(self._find(name)).puts

    def carry(
        self, source: Context, segments: list[Segment], cause: Cause, leaving: Leaving | None, waits: bool
    ) -> bool:
        """Carry messages to their dead-letter queue in one commit with what settles them; False if that failed.

        Without `leaving` they come from a put, which gets the error. `waits`: it returns when that holds.
        """
        try:
            target = self.queue_for(source)
            insert = Insert(target, 0, dead_letters(source.name, segments, cause, self._spool.clock()))
            leavings = [] if leaving is None else [leaving]
            patience_s = ROOM_S if cause.reason == REJECTED and target.spiller.error is None else 0
            self.together.commit([insert], leavings, timeout=patience_s, wait=waits, dead=True)
        except BrokerClosed:
            if leaving is None:
                raise
            return False  # which needs no warning: what is durable is where it was when the spool is opened again
        except QflowError as error:
            if leaving is None:
                raise
            path = self._spool.path
            _logger.warning(
                "%s: dead letters of queue %r stay where they are: %s",
                path,
                source.name,
                error,
                extra={"spool": path, "queue": source.name, "event": "dead_letters_stay"},
            )
            return False
        if leaving is None:  # of what is leaving it is told when that has left
            self._tell(EventKind.DEAD_LETTERED, source.name, cause.told(weigh(segments)[0]))
        return True
