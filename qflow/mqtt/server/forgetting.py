"""Ends a session for who looks after a spool: of a client that sleeps or is there, with or without a server."""

from __future__ import annotations

import asyncio
from functools import partial

from qflow.aio.broker import AsyncBroker, in_thread, keep
from qflow.errors import BrokerClosed, CorruptionError, NotFound
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.model.wills import Will
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.groups import Groups
from qflow.mqtt.server.house import House
from qflow.mqtt.server.hub import Hub
from qflow.mqtt.server.storing import WILLS, Rooms, forgetting


async def forget_session(broker: AsyncBroker, client_id: str) -> None:
    """Forget a session, and that it is a member of groups; a client that is there is told 0x98 and closed.

    Its will is published, where no server runs by the next one. Where its record or its will is damaged, both are
    forgotten; of which groups it is a member is not known then.

    Raises:
        NotFound: there is no such session. BrokerClosed: the server has ended meanwhile; it may be deleted.
    """
    house = House.found(broker.broker)
    if house is None or house.loop.is_closed():
        hub = Hub(broker, Clock())
        await _forget(hub, Groups(hub), client_id)
        return
    asked = asyncio.run_coroutine_threadsafe(_end(house, client_id), house.loop)
    try:
        await asyncio.wrap_future(asked)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BrokerClosed("the server of MQTT has ended meanwhile: look whether the session is there") from None


async def _end(house: House, client_id: str) -> None:
    """Forget a session, in the loop of the server."""
    hub = house.hub
    async with hub.turn(client_id):
        session = hub.sessions.get(client_id)
        if session is not None:
            session.state.expiry_s = 0  # so it ends with its connection
            session.outbound.fail(MqttError(ReasonCode.ADMINISTRATIVE_ACTION, "the session was deleted"))
            await session.leave()
        try:
            will = await _forget(hub, house.groups, client_id)
        except NotFound:
            if session is None:
                raise
            return
        if will is not None:
            await house.leaving.publish(will, {WILLS: {client_id: None}})


async def _forget(hub: Hub, groups: Groups, client_id: str) -> Will | None:
    """Forget a session whose client is not there; return its will, which the log still has."""
    forgotten: Rooms
    left: Rooms = {}
    will: Will | None = None
    try:
        kept = await hub.records.load(client_id, hub.now_ms())
    except CorruptionError:
        received = await in_thread(hub.broker, partial(hub.records.received, client_id))
        forgotten = {**forgetting(client_id, received), WILLS: {client_id: None}}
    else:
        if not kept.has_record:
            raise NotFound(f"there is no session of the client {client_id!r}; `qflow sessions` lists those there are")
        forgotten, will = kept.forgotten(client_id), kept.will
        left = await groups.forget(client_id, kept.shared)
    await keep(hub.broker, groups.as_they_are({**forgotten, **left}))
    return will
