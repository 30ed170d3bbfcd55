"""A door for MQTT clients: it listens, counts the seconds for its clients, and closes them."""

from __future__ import annotations

import asyncio
import ssl as tls
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Unpack

from qflow.aio.broker import AsyncBroker
from qflow.broker import Broker
from qflow.loggers import get_logger
from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.server.access import Gate
from qflow.mqtt.server.client import Client, Pipe
from qflow.mqtt.server.clock import Clock
from qflow.mqtt.server.connecting import NO_TERMS, Reception, Terms, TermsOptions, check_permanent, check_reference
from qflow.mqtt.server.house import House
from qflow.mqtt.server.storing import STREAM
from qflow.mqtt.server.tcp import TcpPipe
from qflow.mqtt.wire import Connection
from qflow.serving import presence
from qflow.serving.addresses import check_port
from qflow.serving.extras import load
from qflow.serving.listening import Listening
from qflow.serving.tasks import Tasks, Turn
from qflow.serving.users import Users, check_users

MOST_CONNECTIONS = 20_000
TICK_S = 1.0

_logger = get_logger("qflow.mqtt")


class Server(Listening):
    """MQTT clients on a stream of a broker. Made by `serve`; `async with` closes it."""

    def __init__(
        self,
        broker: AsyncBroker,
        users: Users | None,
        ssl: tls.SSLContext | None,
        clock: Clock,
        terms: Terms = NO_TERMS,
    ) -> None:
        super().__init__(ssl)
        self.broker = broker
        self._clock = clock
        self.house = House.of(broker, clock)
        """What it shares with the other doors of the broker."""
        self._hub = self.house.hub
        self._gate = Gate(users)
        self._reception = Reception(self.house, self._gate.login, terms)
        self.budget = self.house.budget
        self.monotonic = clock.monotonic
        self.tell = self._hub.tell
        self.spawn = self._hub.tasks.spawn
        self.admit = self._reception.admit
        self.rest = self._reception.dismiss
        self._websockets: Any = None
        self._tasks = Tasks(_logger)
        self._clients: set[Client] = set()
        self._flushing: deque[Client] = deque()
        self._is_flush_due = False

    # Listening -------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, stream: str, websockets: bool = False) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be listened on.
            InvalidArgument: the stream has several partitions.
            NotFound: the package `websockets` is not installed, and asked for.
        """
        make: Callable[[], asyncio.Protocol] = self._pipe
        if websockets:
            make = self._websockets = load_websockets().WebSockets(self._pipe, lambda: self._gate.is_open)
        await self.house.enter(stream)
        try:
            await self._listen(make, host, port, backlog=1024)
        except BaseException:
            self._is_closed = True
            await self.house.leave()
            raise
        presence.enter(self.broker.broker, self, self._present)
        self._tasks.spawn(self._tick())

    def _present(self) -> list[presence.Connected]:
        now_s = self._clock.monotonic()
        return [client.present(now_s) for client in self._clients]

    def _pipe(self) -> TcpPipe:
        return TcpPipe(self.connected)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._clients)

    def connected(self, pipe: Pipe) -> Client | None:
        """Return a new client; None if it is not taken."""
        if self._is_closed or self._hub.failed or len(self._clients) >= MOST_CONNECTIONS:
            return None
        client = Client(self, pipe, Connection(tally=self._hub.counts.tally))
        self._clients.add(client)
        return client

    def redirect(self, reference: str | None, *, permanent: bool = False) -> None:
        """Send clients to another server: those of MQTT 5 are told its reference, the others are closed, or refused.

        Their sessions sleep here. From then on nobody is taken, until it is None.

        Args:
            reference: such as `other.example:1883`; several with blanks between.
            permanent: this server has moved there: clients are told to use it from now on (0x9D), not for now (0x9C).

        Raises:
            InvalidArgument: it is none, or there is none that is permanent.
        """
        check_permanent(reference, permanent)
        if reference is not None:
            check_reference(reference)
            for client in list(self._clients):
                client.send_to(reference, permanent)
        self._reception.redirect, self._reception.redirects_for_good = reference, permanent

    def reload(self, *, users: Users | None, ssl: tls.SSLContext | None) -> None:
        """Use these users, and the certificates of this context, from now on.

        Clients that may not be here any more, or may not have one of their subscriptions, are told so and closed, these
        one after the other, as all subscriptions of thousands of clients are looked at: 0.4 ms for twenty of them. They
        may come again, if they may at all, and what is forbidden then is no part of their session.
        """
        self._gate.renew(users)
        self._renew(ssl)
        for client in self._clients:
            if client.access is not None and not client.access.renew(users):
                client.fail(MqttError(ReasonCode.NOT_AUTHORIZED, "the user may not be here any more"))
        self._tasks.spawn(self._end_forbidden())

    async def _end_forbidden(self) -> None:
        """Close clients that may not have one of their subscriptions; others have their turn meanwhile."""
        turn = Turn()
        for client in list(self._clients):
            if turn.is_over():
                await turn.next()
            if client.session is not None and client.session.forbidden():
                client.fail(MqttError(ReasonCode.NOT_AUTHORIZED, "a subscription is not permitted any more"))

    # What a client needs; see `Office` -------------------------------------------------------------------------------

    def flush_soon(self, client: Client) -> None:
        """Have `client.flush` called before the loop sleeps, with those of all others."""
        self._flushing.append(client)
        self._flush_due()

    def _flush_due(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Flush clients until others are to have their turn: a message may go to thousands, at 15 µs each."""
        self._is_flush_due = False
        turn = Turn()
        for _ in range(len(self._flushing)):  # those that come meanwhile have the next turn
            client = self._flushing.popleft()
            self._attend(client, client.flush)
            if turn.is_over():
                break
        if self._flushing:
            self._flush_due()

    def _attend(self, client: Client, work: Callable[[], object]) -> None:
        """Do something for a client; a fault of the server there ends its connection, and nobody else's."""
        try:
            work()
        except Exception:
            _logger.exception("%s: the connection ends by a fault of the server", client.pipe.peer)
            client.pipe.abort()

    async def dismiss(self, client: Client) -> None:
        """Have a session go to sleep whose client is gone, and forget the client."""
        try:
            await self._reception.dismiss(client)
        finally:
            self._clients.discard(client)

    # Time ------------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                _logger.exception("what is due each second is not done: a fault of the server")

    def tick(self) -> None:
        """Look for what time has come for. Once a second."""
        now_s = self._clock.monotonic()
        if self._hub.failed:
            self._end_all(MqttError(ReasonCode.SERVER_SHUTTING_DOWN, "the broker is closed"))
        for client in list(self._clients):
            self._attend(client, partial(client.tick, now_s))
        self.house.tick()

    # Ending ----------------------------------------------------------------------------------------------------------

    def _end_all(self, error: MqttError) -> None:
        for client in list(self._clients):
            client.fail(error)

    async def drain(self, grace_s: float) -> None:
        """Take no more clients, and return when all sessions sleep, or after `grace_s`.

        Clients get no more messages with QoS 1 and 2; each is told to go when it has acknowledged those it has.
        """
        await self._end_listening()
        ends = MqttError(ReasonCode.SERVER_SHUTTING_DOWN, "the server shuts down")
        end_s = self._clock.monotonic() + grace_s
        while self._clients and self._clock.monotonic() < end_s:
            for client in list(self._clients):
                client.drain(ends)
            await asyncio.sleep(0.02)

    async def _close(self) -> None:
        presence.leave(self.broker.broker, self)
        await self._end_listening()
        self._end_all(MqttError(ReasonCode.SERVER_SHUTTING_DOWN, "the server shuts down"))
        for client in list(self._clients):
            self._attend(client, client.flush)
            client.pipe.abort()
        if self._websockets is not None:
            self._websockets.close()
        while self._clients:
            await asyncio.sleep(0.01)
        self._gate.close()
        await self._tasks.close()
        await self.house.leave()


async def serve(
    broker: AsyncBroker | Broker,
    *,
    host: str = "127.0.0.1",
    port: int = 1883,
    ssl: tls.SSLContext | None = None,
    users: Users | None = None,
    stream: str = STREAM,
    websockets: bool = False,
    **terms: Unpack[TermsOptions],
) -> Server:
    """Listen for MQTT clients, which publish to a stream of a broker and subscribe to it; see `Server`.

    Args:
        port: 0 = any that is free; see `Server.port`.
        ssl: the certificate of the server; one that asks clients for theirs has them log in by it, without a password.
        users: who may log in, as `qflow.serving.users.Users.load` reads them; None = anybody, from this machine alone.
        stream: where messages with QoS 1 and 2 are stored; declared with 1 GiB of retention if there is none.
        websockets: clients come by WebSockets, with the subprotocol `mqtt` and any path; it needs the extra `mqtt`.
        terms: `max_keep_alive_s`: clients of MQTT 5 that want a longer keep-alive, or none, are told this one.
            `max_session_expiry_s`: sessions that are to last longer without their clients last so long; those of 3.1.1
            have no end otherwise. What sleeps keeps what it was given when its client came. `redirect`: clients are
            sent to this server; `redirect_permanent`: for good; see `Server.redirect`.

    Raises:
        OSError: the address cannot be listened on.
        NotFound: the package `websockets` is not installed, and asked for.
        InvalidArgument: another address than one of this machine alone, without users; a stream with partitions; a
            number out of its bounds, such as a port.
    """
    check_port(port)
    await check_users(users, host)
    around = broker if isinstance(broker, AsyncBroker) else AsyncBroker(broker)
    server = Server(around, users, ssl, Clock(), Terms(**terms))
    await server.start(host, port, stream, websockets)
    return server


def load_websockets() -> Any:
    """Return the module that carries MQTT over WebSockets. Raises NotFound: its package is not installed."""
    return load("qflow.mqtt.server.websockets", needs="websockets", what="MQTT over WebSockets")
