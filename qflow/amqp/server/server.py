"""The server: sockets, connections, virtual hosts, and what is done for all of them once a second."""

from __future__ import annotations

import asyncio
import ssl as tls
import time
from collections.abc import Coroutine
from typing import Any

from pamqp import decode
from pamqp.common import FieldTable

from qflow import __version__
from qflow.aio.broker import AsyncBroker
from qflow.amqp.errors import AmqpError, ReplyCode
from qflow.amqp.server.channel import TICK_S
from qflow.amqp.server.client import MOST_IN_A_TURN, Permissions
from qflow.amqp.server.host import Host, Hosts
from qflow.amqp.server.session import Session
from qflow.amqp.wire.connection import SERVER_PROPERTIES, Connection
from qflow.amqp.wire.events import Login
from qflow.amqp.wire.limits import DEFAULT_LIMITS, Limits
from qflow.amqp.wire.tables import check_table
from qflow.broker import Broker
from qflow.loggers import get_logger
from qflow.named_tuples import NamedTuple
from qflow.serving import presence
from qflow.serving.addresses import check_port
from qflow.serving.budget import Budget
from qflow.serving.certificates import common_name
from qflow.serving.listening import Listening
from qflow.serving.logins import Logins
from qflow.serving.tasks import Tasks, Turn, Turns
from qflow.serving.telling import Telling
from qflow.serving.users import User, Users, check_users

LOGIN_S = 10.0
"""A client has so long to log in and to open a virtual host."""
MOST_CONNECTIONS = 20_000
PROPERTIES: FieldTable = {**SERVER_PROPERTIES, "version": __version__}
UNIT_BYTES = 64 * 1024**2
DRAINING_S = 0.02

_logger = get_logger("qflow.amqp")


class Server(Listening):
    """AMQP 0-9-1 clients on the queues of a broker. Made by `serve`; `async with` closes it."""

    def __init__(self, broker: AsyncBroker, users: Users | None, ssl: tls.SSLContext | None) -> None:
        super().__init__(ssl)
        self.broker = broker
        self.login_s = LOGIN_S
        self.max_unit_bytes = UNIT_BYTES
        self.budget = Budget()
        self.turns = Turns(MOST_IN_A_TURN)
        self._hosts: Hosts | None = None
        self._tasks = Tasks(_logger)
        self._logins = Logins(users)
        self._sessions: set[Session] = set()
        self._telling = Telling(_logger)
        self.tell = self._telling.tell
        self._is_draining = False

    # Listening ---------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises OSError: the address cannot be listened on."""
        self._hosts = await Hosts.of(self.broker)
        try:
            await self._listen(self._protocol, host, port, backlog=1024)
        except BaseException:
            await self.close()
            raise
        presence.enter(self.broker.broker, self, self._present)
        self.spawn(self._tick())

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._connected)

    def _present(self) -> list[presence.Connected]:
        now_s = time.monotonic()
        return [_present(session, now_s) for session in self._sessions]

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._sessions)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_draining or self._is_closed or self._hosts is None or len(self._sessions) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        session = Session(self, next(self._hosts.numbers), reader, writer)
        self._sessions.add(session)
        try:
            await session.run()
        except Exception:
            _logger.exception("%s: the connection ends by a fault of the server", session.peer)
        finally:
            self._sessions.discard(session)

    def new_machine(self, writer: asyncio.StreamWriter) -> Connection:
        """Return the protocol machine of a connection."""
        mechanisms: tuple[str, ...] = (PLAIN, AMQPLAIN)
        if writer.get_extra_info("peercert"):
            mechanisms = (EXTERNAL, *mechanisms)
        return Connection(limits=Limits(), mechanisms=mechanisms, server_properties=PROPERTIES)

    # Logging in --------------------------------------------------------------------------------------------------

    async def login(self, login: Login, address: str, certificate: dict[str, Any] | None) -> User | None:
        """Return who logs in; None if that is refused."""
        given = credentials(login.mechanism, login.response, certificate)
        if given is not None and given.password is not None:
            return await self._logins.check(given.name, given.password, address)
        users = self._logins.users
        user = None if given is None or users is None else users.get(given.name)
        if user is None:
            self._logins.tell_refused("" if given is None else given.name, address)
        return user

    async def host(self, name: str) -> Host | None:
        """Return a virtual host; None if there is none of this name."""
        users = self._logins.users
        known = users.virtual_hosts if users is not None else ("/",)
        return await self._hosts.find(name) if self._hosts is not None and name in known else None

    def permissions(self, user: User, host_name: str) -> Permissions | None:
        """Return what a user may do in a virtual host now; None: not even enter it."""
        users = self._logins.users
        current = user if users is None else users.get(user.name)
        return Permissions(current, host_name) if current is not None and current.may_enter(host_name) else None

    def reload(self, *, users: Users | None, ssl: tls.SSLContext | None) -> None:
        """Use these users, and the certificates of this context, from now on.

        Who is connected and no user any more, or may not enter the virtual host any more, is told to close.
        """
        self._logins.users = users
        self._renew(ssl)
        for session in list(self._sessions):
            session.reload()

    # Beside ------------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a task do something; what it raises is logged."""
        self._tasks.spawn(work)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if self.broker.closed:
                await self._end_listening()
                for session in self._sessions:
                    session.end(AmqpError(ReplyCode.CONNECTION_FORCED, "the broker is closed"))
            turn = Turn()
            for session in list(self._sessions):
                if turn.is_over():
                    await turn.next()
                if session not in self._sessions:  # it has ended meanwhile
                    continue
                try:
                    session.tick(now)
                except Exception:
                    _logger.exception("%s: the connection ends by a fault of the server", session.peer)
                    session.abort()

    # Ending ------------------------------------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> None:
        """Take no more clients, ask those there are to close, and return when all have gone, or after `grace_s`.

        They are asked when none of them holds a message any more: who works on one may use several connections, and
        give it up as one of them ends. Until then they can settle and publish; what was read is confirmed.
        """
        self._is_draining = True
        await self._end_listening()
        for session in self._sessions:
            session.stop()
            if not session.is_open:
                session.abort()
        end = time.monotonic() + grace_s
        while self._sessions and time.monotonic() < end:
            await asyncio.sleep(DRAINING_S)
            if not any(session.holds for session in self._sessions):
                for session in self._sessions:
                    session.finish(_shutdown())
        for session in self._sessions:
            session.end(_shutdown())

    async def _close(self) -> None:
        presence.leave(self.broker.broker, self)
        await self._end_listening()
        for session in list(self._sessions):
            session.end(_shutdown())
            session.abort()
        while self._sessions:
            await asyncio.sleep(0.01)
        self._logins.close()
        await self._tasks.close()
        self._telling.end()
        if self._hosts is not None:
            await self._hosts.leave()


async def serve(
    broker: AsyncBroker | Broker,
    *,
    host: str = "127.0.0.1",
    port: int = 5672,
    ssl: tls.SSLContext | None = None,
    users: Users | None = None,
) -> Server:
    """Listen for AMQP 0-9-1 clients, which use the queues of a broker beside the program; see `Server`.

    Args:
        port: 0 = any that is free; see `Server.port`.
        ssl: the certificate of the server; one that asks clients for theirs has them log in by it (EXTERNAL).
        users: who may log in; None = `guest`, password `guest`, from this machine alone.

    Raises:
        OSError: the address cannot be listened on.
        InvalidArgument: another address than one of this machine alone, without users; no port.
    """
    check_port(port)
    await check_users(users, host)
    around = broker if isinstance(broker, AsyncBroker) else AsyncBroker(broker)
    server = Server(around, users, ssl)
    await server.start(host, port)
    return server


def _present(session: Session, now_s: float) -> presence.Connected:
    """Return who it is that a connection is of, for those who show it."""
    consumers = sum(len(channel.consumers) for channel in session.channels.values())
    detail = f"{len(session.channels)} channels, {consumers} consumers"
    if session.is_open:
        detail = f"virtual host {session.host.name}, {detail}"
    told = (session.machine.client_properties or {}).get("connection_name")
    name = told if isinstance(told, str) else ""
    user = "" if session.user is None else session.user.name
    return presence.Connected("amqp", name, user, session.peer, now_s - session.began_s, detail)


def _shutdown() -> AmqpError:
    return AmqpError(ReplyCode.CONNECTION_FORCED, "broker forced connection closure with reason 'shutdown'")


PLAIN, AMQPLAIN, EXTERNAL = "PLAIN", "AMQPLAIN", "EXTERNAL"


class Credentials(NamedTuple):
    """A name, and the password; None: a certificate has shown it."""

    name: str
    password: str | None


def credentials(mechanism: str, response: bytes, certificate: dict[str, Any] | None) -> Credentials | None:
    """Return what a client says of itself; None if it says nothing that can be understood.

    Args:
        certificate: that of the client, checked by TLS, as `SSLSocket.getpeercert` returns it; None or empty for none.
    """
    if mechanism == PLAIN:
        parts = response.split(b"\0")
        return Credentials(_text(parts[1]), _text(parts[2])) if len(parts) == 3 else None
    if mechanism == AMQPLAIN:
        try:
            encoded = len(response).to_bytes(4, "big") + response
            check_table(encoded, 0, len(encoded), DEFAULT_LIMITS)
            table = decode.field_table(encoded)[1]
        except (AmqpError, ValueError, IndexError, KeyError):
            return None
        name, password = table.get("LOGIN"), table.get("PASSWORD")
        return Credentials(name, password) if isinstance(name, str) and isinstance(password, str) else None
    name = common_name(certificate) if mechanism == EXTERNAL else None
    return None if name is None else Credentials(name, None)


def _text(part: bytes) -> str:
    return part.decode(errors="surrogateescape")
