"""Where figures come from: brokers of all kinds, and spools with an owner or without."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from operator import itemgetter
from typing import Any

from qflow.aio import AsyncBroker
from qflow.broker import Broker
from qflow.errors import InvalidArgument, QflowError
from qflow.memory.waiting import sheltered
from qflow.metrics.names import QUEUE
from qflow.metrics.naming import Row, Told, told_by
from qflow.named_tuples import NamedTuple
from qflow.remote.client.broker import RemoteBroker
from qflow.remote.client.task_broker import AsyncRemoteBroker
from qflow.starting import start
from qflow.stats import BrokerStats

ASKED = 200
"""So many queues are asked for their figures at each look; of more, those that have changed."""
_QUEUE_ROW: Callable[[Any], Row] = itemgetter(*(figure.field for figure in QUEUE))
ANSWER_S = 10.0
"""How long a broker that is connected may take to answer."""


class Source(NamedTuple):
    """Tells the figures of one spool."""

    where: Callable[[], str]
    """Tells its directory, which may be moved, or be one of another host."""
    look: Callable[[], Told]
    """Raises `QflowError` if nobody tells them."""


class Owned:
    """Tells the figures of a broker of this process. `look` may be called by several threads."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._since = 0
        self._rows: dict[str, Row] = {}

    @sheltered  # a signal handler may look, too, and would wait for the lock that it has interrupted
    def look(self) -> Told:
        """Return what is told now; where there are many queues, what was noted of them within the last second."""
        broker = self._broker
        if broker.closed or len(broker.queues()) <= ASKED:
            return told_by(broker.stats())
        figures = broker.engine.figures
        with self._lock:
            self._since, changed = figures.changes(self._since, with_rates=False)
            if not self._since:
                self._rows.clear()
                self._since, changed = figures.changes(0, with_rates=False)
            for name, facts in changed.items():
                if facts:
                    self._rows[name] = _QUEUE_ROW(facts)
                else:
                    self._rows.pop(name, None)
            return told_by(figures.summary())._replace(queues=dict(self._rows))


class Asked:
    """Asks a broker that is connected: one look at a time, shared by all who come meanwhile. Thread-safe.

    A look that is not answered in time goes on: until it ends, nobody waits and nothing else is asked.
    """

    def __init__(self, ask: Callable[[], Future[BrokerStats]]) -> None:
        self._ask = ask
        self._lock = threading.RLock()  # a signal handler may look, too: at worst it asks once more
        self._under_way: tuple[Future[BrokerStats], float] | None = None
        """And until when it is waited for, on the monotonic clock."""

    def look(self) -> Told:
        """Return what is told now. Raises QflowError: nothing was within `ANSWER_S`."""
        with self._lock:
            if self._under_way is None or self._under_way[0].done():
                self._under_way = self._ask(), time.monotonic() + ANSWER_S
            asked, ends = self._under_way
        if not wait([asked], max(0.0, ends - time.monotonic())).done:
            raise QflowError(f"the owner, or the event loop of the broker, has not answered within {ANSWER_S:g} s")
        try:
            return told_by(asked.result())
        except CancelledError:
            raise QflowError("the event loop of the broker has ended") from None


def source_of(broker: Broker | RemoteBroker | AsyncBroker | AsyncRemoteBroker) -> Source:
    """Return what asks a broker. An `AsyncRemoteBroker` is asked in the event loop that runs now.

    Raises:
        InvalidArgument: it is no broker, or no event loop runs.
    """
    match broker:
        case Broker():
            return Source(lambda: broker.path, Owned(broker).look)
        case RemoteBroker():
            return Source(lambda: broker.path, Asked(partial(_ask_in_thread, broker)).look)
        case AsyncBroker():
            return source_of(broker.broker)
        case AsyncRemoteBroker():
            return Source(lambda: broker.path, _asking(broker))
    raise InvalidArgument(f"metrics are of a broker, not of {broker!r}")


def _ask_in_thread(broker: RemoteBroker) -> Future[BrokerStats]:
    asked: Future[BrokerStats] = Future()

    def ask() -> None:
        try:
            asked.set_result(broker.stats())
        except BaseException as error:
            asked.set_exception(error)

    start(threading.Thread(target=ask, name="qflow-metrics-look", daemon=True))
    return asked


def _asking(broker: AsyncRemoteBroker) -> Callable[[], Told]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise InvalidArgument("make the collector where the event loop of the broker runs") from None

    def ask() -> Future[BrokerStats]:
        if loop.is_closed():
            raise QflowError("the event loop of the broker is closed")
        return asyncio.run_coroutine_threadsafe(broker.stats(), loop)

    asked = Asked(ask)

    def look() -> Told:
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is loop:
            raise InvalidArgument("collect in another thread than that of the event loop: asyncio.to_thread does")
        return asked.look()

    return look
