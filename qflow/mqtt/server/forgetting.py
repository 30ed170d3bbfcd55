"""Ends a session while no server runs: for who looks after a spool."""

from __future__ import annotations

from functools import partial

from qflow.aio.broker import AsyncBroker, keep
from qflow.errors import CorruptionError, NotFound
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.groups import Groups
from qflow.mqtt.server.hub import Hub
from qflow.mqtt.server.storing import WILLS, Rooms, forgetting


async def forget_session(broker: AsyncBroker, client_id: str) -> None:
    """Forget a session that sleeps, and that it is a member of groups; its will is published by the next server.

    Where its record or its will is damaged, both are forgotten; of which groups it is a member is not known then.

    Raises:
        NotFound: there is no such session.
    """
    hub = Hub(broker, Clock())
    forgotten: Rooms
    groups: Rooms = {}
    try:
        kept = await hub.records.load(client_id, hub.now_ms())
    except CorruptionError:
        received = await hub.in_thread(partial(hub.records.received, client_id))
        forgotten = {**forgetting(client_id, received), WILLS: {client_id: None}}
    else:
        if not kept.has_record:
            raise NotFound(f"there is no session of the client {client_id!r}; `qflow sessions` lists those there are")
        forgotten = kept.forgotten(client_id)
        groups = await Groups(hub).forget(client_id, kept.shared)
    await keep(broker, {**forgotten, **groups})
