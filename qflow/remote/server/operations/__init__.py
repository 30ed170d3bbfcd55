"""The operations of a door, by name; `docs/reference/protocol.md` has them in a table."""

from __future__ import annotations

from qflow.remote.server.operations import admin, publishing, queues, settling, streams, subscriptions
from qflow.remote.server.session import Operation

_ROOMS = (admin, queues, settling, publishing, streams, subscriptions)
OPERATIONS: dict[str, Operation] = {name: call for room in _ROOMS for name, call in room.OPERATIONS.items()}
assert len(OPERATIONS) == sum(len(room.OPERATIONS) for room in _ROOMS), "two operations have one name"
