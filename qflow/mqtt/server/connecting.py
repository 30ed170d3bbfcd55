"""How a client comes in and goes: logged in, given its session, taken over, sent to sleep."""

from __future__ import annotations

import secrets
from contextlib import suppress

import attrs

from qflow.aio.broker import keep
from qflow.errors import QflowError, QueueFull
from qflow.loggers import get_logger
from qflow.mqtt.errors import MqttError, ReasonCode, as_mqtt_error
from qflow.mqtt.model.sessions import SessionState
from qflow.mqtt.model.wills import Will
from qflow.mqtt.server.access import Access, Login, refusal
from qflow.mqtt.server.client import Client
from qflow.mqtt.server.house import House
from qflow.mqtt.server.leaving import NO_ROOM
from qflow.mqtt.server.session import Session
from qflow.mqtt.server.storing import SESSIONS, WILLS, Rooms, forgetting
from qflow.mqtt.server.terms import Terms
from qflow.mqtt.wire.packets import MQTT_5, Connack, Connect, Properties

_logger = get_logger("qflow.mqtt")


class Reception:
    """See the module."""

    def __init__(self, house: House, login: Login, terms: Terms) -> None:
        self._house = house
        self._hub = house.hub
        self.login = login
        self.redirect = terms.redirect
        """The server to which all are sent who come; None: they are taken."""
        self.redirects_for_good = terms.redirect_permanent
        self._terms = terms

    async def admit(self, client: Client, connect: Connect) -> None:
        """Answer CONNECT; if it is taken, the client has its session."""
        if self.redirect is not None:
            client.send_to(self.redirect, self.redirects_for_good)
            return
        try:
            await self._admit(client, connect)
        except QflowError as error:
            _logger.info("%s: CONNECT is refused: %s", client.pipe.peer, error)
            client.fail(as_mqtt_error(error))

    async def _admit(self, client: Client, connect: Connect) -> None:
        if "authentication_method" in connect.properties:
            raise MqttError(ReasonCode.BAD_AUTHENTICATION_METHOD, "there is no authentication but by CONNECT")
        properties: Properties = {}
        client_id = connect.client_id
        if not client_id:
            if connect.version < MQTT_5 and not connect.clean_start:
                raise MqttError(ReasonCode.CLIENT_ID_NOT_VALID, "a session that is kept needs a client id")
            client_id = f"qflow-{secrets.token_hex(12)}"
            properties["assigned_client_id"] = client_id
            connect = attrs.evolve(connect, client_id=client_id)
        access = await self.login(connect, client.pipe.peer, client.pipe.certificate)
        if access is None:
            raise MqttError(ReasonCode.BAD_USERNAME_OR_PASSWORD, "wrong user name or password")
        client.access = access
        refused = None if connect.will is None else refusal(connect.will.topic, access)
        if refused is not None:
            raise refused
        client.keep_alive_s = self._terms.keep_alive_s(connect)
        if client.keep_alive_s != connect.keep_alive_s:
            properties["server_keep_alive_s"] = client.keep_alive_s
        client.session_expiry_of = self._terms.session_expiry_s
        async with self._hub.turn(client_id):
            if client.is_gone:
                return
            await self._take_over(client_id)
            await self._give_session(client, connect, client_id, access, properties)

    async def _take_over(self, client_id: str) -> None:
        """End the connection that has the session now."""
        old: Session | None = self._hub.sessions.get(client_id)
        if old is not None:
            old.outbound.fail(MqttError(ReasonCode.SESSION_TAKEN_OVER, "another client came with the same id"))
            await old.leave()

    async def _give_session(
        self, client: Client, connect: Connect, client_id: str, access: Access, properties: Properties
    ) -> None:
        """Give a client the session that sleeps, or a new one, and tell it."""
        hub = self._hub
        kept = await hub.records.load(client_id, hub.now_ms())
        state = None if connect.clean_start else kept.state
        rooms: Rooms = {}
        is_present = state is not None
        if kept.will is not None and self._house.leaving.is_due(client_id):
            with suppress(*NO_ROOM):  # it is told of; the client is back, and is not kept out for that
                await self._house.leaving.publish_now(client_id, kept.will, {WILLS: {client_id: None}})
                kept = kept._replace(will=None)
        if is_present:
            rooms = {} if kept.will is None else {WILLS: {client_id: None}}
        else:
            forgotten = await self._house.groups.forget(client_id, kept.shared)
            rooms = {**kept.forgotten(client_id), **forgotten}
            if kept.will is not None:  # its session ends here, or has ended
                try:
                    await self._house.leaving.publish(kept.will, {WILLS: {client_id: None}})
                except QueueFull as error:  # the client is not kept out for that
                    rooms[WILLS] = {client_id: None}
                    _logger.warning("the will of %r is lost: %s", client_id, error)
        state = state or SessionState(client_id, 0)
        state.expiry_s = client.session_expiry_of(connect.session_expiry_s)
        if state.expiry_s != connect.session_expiry_s:
            properties["session_expiry_s"] = state.expiry_s
        will = None if connect.will is None else Will.of(connect.will, state.expiry_s)
        session = Session(self._house, state, client, access, will)
        session.inbound.is_resumed = is_present
        if will is not None:
            rooms[WILLS] = {client_id: will.pack()}
        if state.is_durable:
            state.is_kept = True
            rooms[SESSIONS] = {client_id: session.record()}
        elif state.is_kept:  # it lasted until now, and is to end with this connection
            rooms |= forgetting(client_id, state.received)
            state.is_kept = False
        if rooms:
            await keep(hub.broker, self._house.groups.as_they_are(rooms))
        self._house.leaving.is_over(client_id)
        if client.is_gone:
            await session.leave()
            return
        hub.sessions[client_id] = session
        client.opened(session)
        client.machine.send(Connack(ReasonCode.SUCCESS, is_present, properties))
        client.flush_soon()
        await session.begin()

    async def dismiss(self, client: Client) -> None:
        """Have a session go to sleep whose client is gone."""
        session = client.session
        if session is None:
            return
        async with self._hub.turn(session.state.client_id):
            await session.leave()
