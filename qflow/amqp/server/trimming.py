"""Queues that have too much: what they have had for longest goes, dropped or as dead letters."""

from __future__ import annotations

from qflow.amqp.server.dead_letters import DeadLetters, Place
from qflow.amqp.server.deaths import TOO_MANY
from qflow.amqp.server.hosted import HostedQueue
from qflow.amqp.server.stores import QueueStore
from qflow.errors import BrokerClosed, QflowError, QueueDeleted
from qflow.loggers import get_logger
from qflow.serving.tasks import Tasks

TRIMMED_AT_ONCE = 1000

_logger = get_logger("qflow.amqp")


class Trimming:
    """See the module. One for a virtual host."""

    def __init__(self, place: Place, dead_letters: DeadLetters, tasks: Tasks) -> None:
        self._place = place
        self._dead_letters = dead_letters
        self._tasks = tasks
        self._under_way: set[HostedQueue] = set()

    def soon(self, hosted: HostedQueue) -> None:
        """Have what a queue has held for longest go, while it has too much and its arguments say so."""
        if hosted.drops and hosted not in self._under_way and hosted.excess() > 0:
            self._under_way.add(hosted)
            self._tasks.spawn(self._trim(hosted))

    async def _trim(self, hosted: HostedQueue) -> None:
        try:
            while (excess := hosted.excess()) > 0 and isinstance(hosted.store, QueueStore):
                batch = await hosted.store.queue.get_many(min(excess, TRIMMED_AT_ONCE), 0)
                if not len(batch):
                    return
                if hosted.arguments.dead_letter_exchange is None:
                    await batch.ack()
                else:
                    await self._dead_letters.carry_all(batch, self._place, hosted.name, TOO_MANY)
        except (QueueDeleted, BrokerClosed):
            return
        except QflowError as error:
            _logger.warning("%s has more than it should: %s", hosted.where, error)
        finally:
            self._under_way.discard(hosted)
