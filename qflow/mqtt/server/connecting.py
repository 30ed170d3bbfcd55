"""How a client comes in and goes: on which terms, logged in, given its session, taken over, sent to sleep."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any, TypedDict

import attrs

from qflow.aio.broker import keep
from qflow.durations import Duration, seconds_of
from qflow.errors import InvalidArgument, QflowError, QueueFull
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
from qflow.mqtt.wire.packets import MQTT_5, NEVER_EXPIRES_S, Connack, Connect, Properties

MOST_KEEP_ALIVE_S = 65_535
MOST_REFERENCE_BYTES = 1024


class TermsOptions(TypedDict, total=False):
    """Arguments of `serve`."""

    max_keep_alive_s: Duration | None
    """Clients of MQTT 5 that want a longer keep-alive, or none, are told this one."""
    max_session_expiry_s: Duration | None
    """Sessions that are to last longer without clients last so long. Those of 3.1.1 have no end otherwise; clients
    of MQTT 5 are told. Sessions that sleep keep what they were given when their clients came."""

    redirect: str | None
    """Nobody is taken: clients of MQTT 5 are told to use this server instead, such as `other.example:1883`."""

    redirect_permanent: bool
    """They are to use it from now on, since this server has moved there."""


def _whole(value: Any) -> Any:
    """Return whole seconds, of a duration; anything else as it is."""
    seconds = seconds_of(value)
    return value if seconds is None or seconds % 1 else int(seconds)


def _check(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    most = MOST_KEEP_ALIVE_S if attribute.name == "max_keep_alive_s" else NEVER_EXPIRES_S - 1
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise InvalidArgument(f"{attribute.name} is a number of seconds from 1 to {most:,}, not {value!r}")


def check_reference(reference: object) -> None:
    """Refuse what is no reference to servers, with blanks between: MQTT 5.0, section 4.11. Raises InvalidArgument."""
    if (
        not isinstance(reference, str)
        or not 0 < len(reference.encode(errors="replace")) <= MOST_REFERENCE_BYTES
        or not reference.isprintable()
        or reference.strip() != reference
    ):
        raise InvalidArgument(
            f"a server is referred to by a text such as 'other.example:1883', of at most {MOST_REFERENCE_BYTES} bytes "
            f"without line ends, not by {reference!r:.80}"
        )


def check_permanent(reference: object, permanent: object) -> None:
    """Refuse a move for good that leads nowhere. Raises InvalidArgument."""
    if not isinstance(permanent, bool):
        raise InvalidArgument(f"a redirect is permanent or not: True or False, not {permanent!r:.80}")
    if permanent and reference is None:
        raise InvalidArgument("a permanent redirect leads to another server: say which one")


def _check_redirect(_: object, __: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        check_reference(value)


@attrs.frozen(kw_only=True)
class Terms:
    """See `TermsOptions`.

    Raises:
        InvalidArgument: a number is out of its bounds, a server is referred to by what is no text, or a permanent
            redirect leads nowhere.
    """

    max_keep_alive_s: int | None = attrs.field(default=None, converter=_whole, validator=_check)
    max_session_expiry_s: int | None = attrs.field(default=None, converter=_whole, validator=_check)
    redirect: str | None = attrs.field(default=None, validator=_check_redirect)
    redirect_permanent: bool = attrs.field(default=False)

    @redirect_permanent.validator
    def _check_permanent(self, _: object, value: object) -> None:
        check_permanent(self.redirect, value)

    def keep_alive_s(self, connect: Connect) -> int:
        """Return the keep-alive of a client; 0: none."""
        most_s, wanted_s = self.max_keep_alive_s, connect.keep_alive_s
        return wanted_s if most_s is None or connect.version < MQTT_5 or 0 < wanted_s <= most_s else most_s

    def session_expiry_s(self, wanted_s: int) -> int:
        """Return how long a session lasts without its client that is to last so long."""
        return wanted_s if self.max_session_expiry_s is None else min(wanted_s, self.max_session_expiry_s)


NO_TERMS = Terms()

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
        await self._hub.leaving.begin()
        async with self._hub.turn(session.state.client_id):
            await session.leave()
