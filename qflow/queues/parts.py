"""The parts of a queue, put together: what the broker, streams, tasks and transactions use of it. See `context`."""

from __future__ import annotations

from qflow.config import QueueSettings
from qflow.memory.gate import ENDED, EXPIRES, LIMITED, LOGGED, Gate
from qflow.message import OVERHEAD_BYTES
from qflow.queues.admission import Admission
from qflow.queues.claims import Claims
from qflow.queues.consumer import Consumers
from qflow.queues.context import Context
from qflow.queues.exits import Exits
from qflow.queues.expiry import Expiry
from qflow.queues.gets import Gets
from qflow.queues.held import Held
from qflow.queues.lanes import COUNTED, Lanes
from qflow.queues.leases import Leases
from qflow.queues.puts import Puts
from qflow.queues.restorer import Restorer
from qflow.queues.ring import Ring
from qflow.queues.source import Source
from qflow.queues.spiller import Spiller
from qflow.rates import Meter
from qflow.storage.log.rows import Row
from qflow.storage.log.transaction_log import Lane
from qflow.storage.spill.store import SpillStore


class Parts:
    """See the module."""

    def __init__(self, context: Context, gate: Gate, store: SpillStore, rows: dict[int, Row] | None) -> None:
        self.context = context
        self.gate = gate
        self.lanes = lanes = Lanes(context, gate)
        self.admission = admission = Admission(lanes)
        self.held = held = Held(gate)
        self.source = source = Source(lanes, admission)
        self.spiller = spiller = Spiller(lanes, admission, store)
        self.restorer = restorer = Restorer(lanes, admission, held, spiller)
        self.exits = exits = Exits(lanes, admission, held, source, spiller)
        self.expiry = Expiry(lanes, held, source, spiller, restorer, exits)
        self.claims = Claims(lanes, admission, held, source, spiller, exits)
        self.leases = Leases(lanes, held, self.claims)
        self.ring = ring = Ring(lanes, source, restorer, exits)
        self.puts = Puts(lanes, admission, spiller, exits, ring)
        self.gets = Gets(lanes, admission, held, source, self.leases, restorer, self.expiry)
        self.consumers = Consumers(self.gets, self.claims)
        lanes.open_all(rows, self.puts)
        self.puts.lane = lanes.logged.get(0)
        self.meter = Meter(context.monotonic())
        self.found = lanes.messages()
        """How many there were at open."""
        with context.lock:
            self.apply(context.settings)

    @property
    def logged_lanes(self) -> list[Lane]:
        """Its lanes in the log; none if it is not durable."""
        return list(self.lanes.logged.values())

    def apply(self, settings: QueueSettings) -> None:
        """Take over settings: why puts and gets go the long way, and how large a message may be. Under the lock."""
        context, gate, lanes = self.context, self.gate, self.lanes
        context.settings = settings
        gate.largest = settings.max_message_bytes + OVERHEAD_BYTES
        gate.bar(LIMITED, context.has_limit)
        gate.places = 0
        gate.bar(LOGGED, context.log is not None)
        gate.bar(EXPIRES, settings.ttl_s is not None)
        lanes.close_front(COUNTED, settings.max_deliveries is not None)
        for bar in (gate.bar, lanes.close_front):
            bar(ENDED, context.ended is not None)
        self.leases.refresh()
