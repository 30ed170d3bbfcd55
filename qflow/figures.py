"""What a broker tells of itself: statistics, to its users and in `stats.json`; and whether everything agrees."""

from __future__ import annotations

import json
import os

import attrs

from qflow.adoption import Adoption
from qflow.memory.ledger import Ledger
from qflow.queues.desk import Desk
from qflow.queues.registry import Queues
from qflow.routing import Routing
from qflow.spool import Spool
from qflow.stats import BrokerStats
from qflow.storage.files import storage_error
from qflow.streams.registry import Streams


class Figures:
    """See the module."""

    def __init__(
        self,
        spool: Spool,
        ledger: Ledger,
        queues: Queues,
        streams: Streams,
        desk: Desk,
        routing: Routing,
        adoption: Adoption,
    ) -> None:
        self._spool = spool
        self._ledger = ledger
        self._queues = queues
        self._streams = streams
        self._desk = desk
        self._routing = routing
        self._adoption = adoption

    def stats(self) -> BrokerStats:
        """Return a snapshot of the broker and each queue."""
        queues = {name: queue.stats() for name, queue in self._queues.named().items()}
        return BrokerStats(
            capacity_bytes=self._ledger.capacity,
            resident_bytes=sum(stats.resident_bytes for stats in queues.values())
            + self._desk.borrowed
            + self._streams.room.used,
            spilled_bytes=sum(stats.spilled_bytes for stats in queues.values()),
            messages=sum(stats.messages for stats in queues.values()),
            commits_total=self._spool.log.commits,
            unrouted_total=self._routing.unrouted,
            queues=queues,
            streams={stream.name: stream.stats() for stream in self._streams.all()},
            duplicates_total=self._streams.producers.duplicates_total,
            inbox=self._adoption.stats(),
        )

    def write(self) -> None:
        """Renew `stats.json` for those who look from outside."""
        spool = self._spool
        facts = {"pid": os.getpid(), "time_s": spool.clock(), "uuid": str(spool.uuid), **attrs.asdict(self.stats())}
        try:
            spool.files.write_replacing(os.path.join(spool.path, "stats.json"), json.dumps(facts).encode())
        except OSError as error:
            raise storage_error(error, "write the statistics", spool.path) from error

    def problems(self) -> list[str]:
        """Return what does not agree, in words. While no maintenance moves anything."""
        parts = (self._ledger, self._queues, self._streams, self._spool.log)
        return [problem for part in parts for problem in part.problems()]
