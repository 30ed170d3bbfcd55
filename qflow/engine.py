"""What a broker is made of: parts put together over an open spool, ended in order, refused in a forked child.

Threads: `qflow-writer` writes what callers hand over, `qflow-futures` resolves futures, `qflow-maintenance` is the
upkeep, and `qflow-door` waits for callers from other processes (see `door`).
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial

from qflow.adoption import Adoption
from qflow.config import parse_timeout
from qflow.door import Door
from qflow.durations import Duration
from qflow.errors import BrokerClosed
from qflow.figures import Figures
from qflow.listeners import Bell, Listeners
from qflow.memory.ledger import Ledger
from qflow.memory.waiting import sheltered
from qflow.periodic import Periodic
from qflow.publishing import Publisher
from qflow.queues.desk import Desk
from qflow.queues.ending import endings
from qflow.queues.gathering import Gathering
from qflow.queues.queue import parts_of
from qflow.queues.registry import Queues
from qflow.queues.tending import let_go
from qflow.queues.transaction import Transaction, transaction_of
from qflow.routing import Routing
from qflow.spool import Forked, Spool
from qflow.storage.streams.groups import Held
from qflow.streams.registry import Streams
from qflow.streams.room import Room
from qflow.streams.shared import Shared
from qflow.upkeep import Upkeep

STREAMS = 2**32 - 2
"""The number under which streams borrow memory."""

_engines: set[Engine] = set()
"""Those that were not ended: their threads are at work, whoever has forgotten them."""


class Engine:
    """See the module. Each part is thread-safe, and has its own state."""

    def __init__(self, spool: Spool) -> None:
        """Take over what the spool holds, and begin; a failure leaves nothing open."""
        self.spool = spool
        self.door: Door | None = None
        """Lets other processes in; whoever opens the spool makes it."""
        self.disowned = False
        """This is a forked child: the parent goes on owning the spool."""
        self.log = spool.log
        with ExitStack() as undo:
            undo.callback(spool.abandon)
            bell = Bell()
            spool.damage_noted = bell.ring
            self.ledger = Ledger(spool.settings.capacity_bytes)
            self.routing = Routing()
            self.listeners = Listeners(spool.path, bell, spool.clock)
            self.queues = Queues(spool, self.ledger, self.routing, self.listeners.tell)
            self.together = self.queues.router.together
            self.desk = Desk(self.ledger, spool.store)
            self.streams = self._make_streams()
            self.routing.streams = self.streams.routes
            self.publisher = Publisher(spool, self.queues, self.streams.producers, self.routing, self.together)
            self._recover()
            self.adoption = Adoption(spool, self.routing, self.together, self.streams.room, bell.ring)
            self.figures = Figures(
                spool, self.ledger, self.queues, self.streams, self.desk, self.routing, self.adoption
            )
            self.upkeep = Upkeep(spool, bell, self.queues, self.streams, self.adoption, self.figures, self.listeners)
            self.periodic = Periodic(spool, self.queues, self.together)
            self.upkeep.jobs.append(("schedules", self.periodic.put_due))
            self.figures.late = self.periodic.troubles
            self.upkeep.start()
            undo.pop_all()
        _engines.add(self)

    def _make_streams(self) -> Streams:
        spool = self.spool
        account = self.ledger.open(STREAMS, "streams", None, is_cache=True)
        room = Room(account, self.ledger, self.ledger.relieve)
        account.give_way = lambda missing, spill: room.give_way(missing)
        shared = Shared(
            log=spool.log,
            room=room,
            max_transaction_bytes=spool.settings.max_transaction_bytes,
            report=spool.report,
            used=spool.used,
            uuid=spool.uuid,
            clock=spool.clock,
            monotonic=spool.monotonic,
            held=Held(spool.place, spool.uuid, spool.clock),
        )
        return Streams(shared, spool.records, new_owner=spool.new_owner, reroute=self.routing.forget)

    def _recover(self) -> None:
        spool, found = self.spool, self.spool.found
        spool.note(self.queues.recover(found.queues, clean=found.clean))
        spool.note(self.streams.recover(found.streams, found.cursors, found.unread, clean=found.clean))
        self.routing.forget()
        queues = self.queues.all()
        spool.opened(len(queues), sum(map(len, queues)))

    def transaction(self, timeout_s: Duration | None) -> Transaction:
        """Return a transaction over any of the queues; see `Broker.transaction`."""
        self.spool.check_open()
        most = self.spool.settings.max_transaction_bytes
        return transaction_of(Gathering(self.publisher, self.together, self.desk, most, parse_timeout(timeout_s)))

    @sheltered
    def close(self) -> None:
        """End all parts and let go of the spool; see `Broker.close`."""
        spool = self.spool
        if not spool.begin_closing():
            return
        try:
            if self.door is not None:
                self.door.shut()
            queues = self.queues.end()
            self.streams.end(BrokerClosed)
            self.upkeep.end()
            self.adoption.close()
            with ExitStack() as ending:
                ending.callback(_engines.discard, self)
                spool.close(
                    lambda: [*endings(queues), *self.streams.endings()],
                    [partial(let_go, parts_of(queue)) for queue in queues],
                )
        finally:
            if self.door is not None:
                self.door.end()
            spool.end_closing()
            self.upkeep.attempt("telling what was noted", spool.tell_noted)

    def disown(self) -> None:
        """In a forked child: refuse everything."""
        self.disowned = True
        stub = Forked()
        if self.door is not None:
            self.door.leave()
        self.spool.disown(stub)
        self.queues.die(stub)
        self.streams.die(stub)


def _after_fork() -> None:
    for engine in list(_engines):
        engine.disown()
    _engines.clear()


os.register_at_fork(after_in_child=_after_fork)
