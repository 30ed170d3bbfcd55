"""A connection: what its bytes say, one event after the other, and what is written back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pamqp import commands

from qflow.amqp.errors import AmqpError, ReplyCode, as_amqp_error
from qflow.amqp.server.channel import TICK_S, Channel
from qflow.amqp.server.client import Permissions, Share
from qflow.amqp.server.consuming import BUFFER_BYTES
from qflow.amqp.server.host import Host
from qflow.amqp.server.publishing import PUBLISH
from qflow.amqp.server.revoking import end_forbidden
from qflow.amqp.wire import events
from qflow.amqp.wire.connection import Connection
from qflow.amqp.wire.states import State
from qflow.errors import QflowError
from qflow.loggers import get_logger
from qflow.serving.budget import Budget
from qflow.serving.sockets import Drain, gone, has_hung_up, hear_out
from qflow.serving.tasks import Turn, Turns, ending
from qflow.serving.users import Action, User

READ_BYTES = 128 * 1024
"""Read at once at most."""
NOBODY = User("")
LINGER_S = 5.0
"""How long a client has to confirm that its connection is closed, and then to close it."""

_logger = get_logger("qflow.amqp")


class Site(Protocol):
    """The server, as far as a connection sees it."""

    @property
    def login_s(self) -> float: ...
    @property
    def max_unit_bytes(self) -> int: ...
    @property
    def budget(self) -> Budget: ...
    @property
    def turns(self) -> Turns: ...
    def new_machine(self, writer: asyncio.StreamWriter) -> Connection: ...
    async def login(self, login: events.Login, address: str, certificate: dict[str, Any] | None) -> User | None: ...
    async def host(self, name: str) -> Host | None: ...
    def permissions(self, user: User, host_name: str) -> Permissions | None: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> None: ...
    def tell(self, text: str, *values: object) -> None: ...


class Session:
    """See the module.

    One task reads; while it waits for a queue to have room, for instance, nothing more is read, and the client's writes
    wait in its socket. Consumers write from tasks of their own.
    """

    def __init__(self, server: Site, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.number = number
        """No other connection of the server has had it."""
        self.machine: Connection = server.new_machine(writer)
        self.channels: dict[int, Channel] = {}
        self.permissions: Permissions | None = None
        self.user: User | None = None
        self.began_s = self.read_s = self.written_s = time.monotonic()
        self.is_draining = False
        """The server ends: no message is sent any more."""
        self.is_handling = False
        """The reading task does something else: a client that is not read from is not silent."""
        self._drain = Drain(writer)
        self._host: Host | None = None
        self._reader = reader
        self._writer = writer
        self._flush_due = False
        self._running: Channel | None = None
        """It may take the next publish together with the last."""
        self._tags = 0
        self._ending = False
        self._shutdown: AmqpError | None = None
        """What it ends with when all that it has read is done."""
        self._handled = self._handled_before = 0
        """Events, now and at the last tick."""
        self.share = Share(server.budget)
        """What it holds of the budget that connections have together."""
        self.turns = server.turns
        self.max_unit_bytes = server.max_unit_bytes
        self.warn = server.tell
        self._closing_s: float | None = None
        """When the client was told to close."""
        self._task = asyncio.current_task()
        peer = writer.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else ""
        """The IP address of the client."""
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        self.certificate: dict[str, Any] | None = writer.get_extra_info("peercert")
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES, low=BUFFER_BYTES // 4)

    @property
    def host(self) -> Host:
        """The virtual host it has opened."""
        assert self._host is not None
        return self._host

    @property
    def is_open(self) -> bool:
        """It has opened a virtual host."""
        return self._host is not None

    # Reading -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the connection until it ends."""
        try:
            await self._read()
        except (ConnectionError, TimeoutError):
            pass  # the client is gone
        except asyncio.CancelledError:
            self.flush()
        finally:
            await self._end()

    async def _read(self) -> None:
        while self.machine.state is not State.OVER:
            data = await self._reader.read(READ_BYTES)
            self.read_s = time.monotonic()
            if not data:
                return
            self.is_handling = True
            turn = Turn()
            for event in self.machine.receive(data):
                self._handled += 1
                if turn.is_over():
                    await self._hand_over()
                    await turn.next()
                if self._running is not None:
                    if type(event) is events.Published and self._running.publishing.goes_on(event):
                        continue
                    await self._hand_over()
                try:
                    handled = self._handle(event)
                    if handled is not None:
                        await handled
                except QflowError as error:
                    await self._refuse(event, as_amqp_error(error))
                if self.machine.pending_bytes() > BUFFER_BYTES:
                    await self._write()
            if (excess := self.share.excess(self.machine.assembling_bytes)) is not None:
                self.fail(excess)
            await self._write()
            self.is_handling = False
            if self.machine.state is State.CLOSING:
                await self._leave()
            elif self._shutdown is not None and not self.holds:
                for channel in list(self.channels.values()):
                    await channel.publishing.done()
                self.finish(self._shutdown)

    async def _hand_over(self) -> None:
        """Put what was published of late, before anything else is done."""
        channel, self._running = self._running, None
        waits = None if channel is None else channel.publishing.hand_over()
        if waits is not None:
            await waits

    async def _write(self) -> None:
        """Write what is to be written; wait for a client that asks, and does not read the answers."""
        await self._hand_over()
        self.read_s = time.monotonic()
        self.flush()
        if self._writer.transport.get_write_buffer_size() > 4 * BUFFER_BYTES:
            self.is_handling = False
            await self._drain.wait()
            self.is_handling = True

    def _handle(self, event: Any) -> Any:
        """Do what an event says; returns what is to be awaited, if anything is."""
        kind = type(event)
        if kind is events.Published:
            channel = self.channels.get(event.channel)
            if channel is None:
                return None  # it was closed meanwhile
            if event.immediate:
                raise AmqpError(ReplyCode.NOT_IMPLEMENTED, "immediate=true")
            self._running = channel
            return channel.publishing.publish(
                event.exchange, event.routing_key, event.mandatory, event.properties, event.body
            )
        if kind is events.Method:
            channel = self.channels.get(event.channel)
            return channel.handle(event.method) if channel is not None else self._connection_method(event)
        return _HANDLERS[kind](self, event)

    async def _refuse(self, event: Any, error: AmqpError) -> None:
        if isinstance(event, events.Method):
            error.about(event.method)
        elif isinstance(event, events.Published):
            error.class_id, error.method_id = PUBLISH
        channel = self.channels.get(getattr(event, "channel", 0))
        if error.hard or not getattr(event, "channel", 0):
            self.fail(error)
        elif channel is not None:  # else it was closed meanwhile
            await self._close_channel(channel, error)

    async def _login(self, event: events.Login) -> None:
        user = await self.server.login(event, self.address, self.certificate)
        if user is None:
            text = f"Login was refused using authentication mechanism {event.mechanism}."
            self.machine.refuse_login(f"{text} For details see the broker logfile.")
            return
        self.user = user
        self.machine.accept_login()

    async def _open(self, event: events.VhostAsked) -> None:
        assert self.user is not None
        host = await self.server.host(event.vhost)
        if host is None:
            self.machine.refuse_vhost(f"vhost {event.vhost} not found")
            return
        self.permissions = self.server.permissions(self.user, event.vhost)
        if self.permissions is None:
            self.machine.refuse_vhost(f"access to vhost '{event.vhost}' refused for user '{self.user.name}'")
            return
        self._host = host
        self.machine.open_ok()

    def _channel_opened(self, event: events.ChannelOpened) -> None:
        self.channels[event.channel] = Channel(self, event.channel)

    async def _channel_closed(self, event: events.ChannelClosed | events.ChannelFailed) -> None:
        if (channel := self.channels.pop(event.channel, None)) is not None:
            await channel.end()

    def _connection_method(self, event: events.Method) -> None:
        if isinstance(event.method, commands.Connection.UpdateSecret):  # users have passwords, which do not run out
            self.machine.send(0, commands.Connection.UpdateSecretOk())

    def _nothing(self, _: Any) -> None:
        return None

    # Refusing ----------------------------------------------------------------------------------------------------

    def fail(self, error: AmqpError) -> None:
        """End the connection with an error."""
        _logger.info("%s: %s", self.peer, error)
        self.end(error)

    def fail_channel(self, channel: Channel, error: AmqpError) -> None:
        """End a channel with an error, from any task."""
        if self.channels.get(channel.number) is channel:
            self.server.spawn(self._close_channel(channel, error))

    async def _close_channel(self, channel: Channel, error: AmqpError) -> None:
        if self.channels.get(channel.number) is not channel:
            return  # it was closed meanwhile
        del self.channels[channel.number]
        _logger.info("%s, channel %d: %s", self.peer, channel.number, error)
        self.machine.fail_channel(channel.number, error)
        self.flush()
        await channel.end()

    # What channels ask -------------------------------------------------------------------------------------------

    def may(self, what: Action, name: str) -> None:
        """Refuse what the user may not do. Raises AmqpError: ACCESS_REFUSED."""
        if self.permissions is not None:
            self.permissions.check(what, name)

    def check_user_id(self, name: str) -> None:
        """Refuse a message that names another user than its connection has."""
        assert self.permissions is not None
        user = self.permissions.user
        if name != user.name and "impersonator" not in user.tags:
            raise AmqpError(
                ReplyCode.PRECONDITION_FAILED,
                f"user_id property set to '{name}' but authenticated user was '{user.name}'",
            )

    @property
    def cancels_consumers(self) -> bool:
        """The client wants to be told when a consumer's queue is gone."""
        return bool(self.machine.capabilities.get("consumer_cancel_notify"))

    def new_tag(self) -> str:
        """Return a consumer tag."""
        self._tags += 1
        return f"amq.ctag-{self.number}-{self._tags}"

    @contextmanager
    def blocked(self, reason: str) -> Iterator[None]:
        """Tell the client, for as long as this lasts, that it is not read from."""
        self.machine.blocked(reason)
        self.warn("%s waits: %s", self.peer, reason)
        self.flush()
        try:
            yield
        finally:
            self.machine.unblocked()
            self.flush()

    # Writing -----------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """There is a lot to write already."""
        return self._writer.transport.get_write_buffer_size() + self.machine.pending_bytes() > BUFFER_BYTES

    async def drain(self) -> None:
        """Return when there is less to write."""
        self.flush()
        await self._writer.drain()

    def flush_soon(self) -> None:
        """Write what is to be written, together with what other tasks have until they all wait."""
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Write what is to be written now."""
        self._flush_due = False
        data = self.machine.data_to_send()
        if data and not self._writer.is_closing():
            self._writer.write(data)
            self.written_s = time.monotonic()

    def tick(self, now: float) -> None:
        """Send a heartbeat, or end what is silent or holds messages for too long."""
        for channel in list(self.channels.values()):
            channel.tick(now)
        if self._is_over(now):
            self.abort()
            return
        if not self.is_open:
            if now - self.began_s > self.server.login_s:
                self.abort()
            return
        if not (heartbeat_s := self.machine.heartbeat_s):
            return
        if now + TICK_S - self.written_s > heartbeat_s / 2:  # the next look would be too late
            self.machine.heartbeat()
            self.flush()
        if self._drain.goes_on():  # on a slow network, the heartbeats that it sends are not read meanwhile
            self.read_s = now
        if now - self.read_s > 2 * heartbeat_s and not self.is_handling:
            _logger.info("%s: missed heartbeats, %d s", self.peer, heartbeat_s)
            self.abort()

    def _is_over(self, now: float) -> bool:
        """Tell whether the client has had its time to confirm the end, or is gone, which nobody reads meanwhile."""
        if self.machine.state is State.CLOSING:
            self._closing_s = now if self._closing_s is None else self._closing_s
            return now - self._closing_s > LINGER_S
        waits = self.is_handling and self._handled == self._handled_before
        self._handled_before = self._handled
        return waits and has_hung_up(self._writer.get_extra_info("socket"))

    # Ending ------------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Have the rights that this connection's user has now; end consumers that need others, and it without any."""
        if self.user is None or self._host is None:
            return  # it has those that its user has when it opens a virtual host
        self.permissions = self.server.permissions(self.user, self._host.name)
        if self.permissions is None:
            self.permissions = Permissions(NOBODY, self._host.name)
            self.end(AmqpError(ReplyCode.CONNECTION_FORCED, f"user '{self.user.name}' has no access any more"))
        else:
            for channel in self.channels.values():
                self.server.spawn(end_forbidden(channel))

    def stop(self) -> None:
        """Send no more messages; what the client holds it can still settle."""
        self.is_draining = True
        for channel in self.channels.values():
            self.server.spawn(channel.stop_consumers())

    def finish(self, shutdown: AmqpError) -> None:
        """End when what was read is done, and its publishes are confirmed; twice is fine."""
        self._shutdown = shutdown
        if not self.is_handling and not self.is_busy and self._closing_s is None:
            self.end(shutdown)

    @property
    def holds(self) -> bool:
        """The client has messages that it has not settled."""
        return any(channel.holding for channel in self.channels.values())

    @property
    def is_busy(self) -> bool:
        """It has messages that are not settled, or publishes that are not confirmed."""
        return self.holds or any(channel.publishing.pending or channel.confirms for channel in self.channels.values())

    def end(self, error: AmqpError) -> None:
        """Ask the client to close; it has `LINGER_S` for its answer."""
        if self._closing_s is None:
            self._closing_s = time.monotonic()
        self.machine.fail(error)
        self.flush()

    def abort(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()
        if self._task is not None and not self._ending:
            self._task.cancel()

    @ending
    async def _leave(self, event: object = None) -> None:
        """Give back what the client holds, and delete what was its alone, before it is told that it is closed."""
        channels, self.channels = list(self.channels.values()), {}
        for channel in channels:
            await channel.end()
        if self._host is not None:
            await self._host.connection_ended(self.number)
        if isinstance(event, events.ConnectionClosed):
            self.flush()
            await hear_out(self._reader, self._writer, LINGER_S)

    async def _end(self) -> None:
        self._ending = True
        try:
            await self._leave()
        finally:
            self.share.end()
            self._writer.close()
        await gone(self._writer, LINGER_S)


_HANDLERS: dict[type, Any] = {
    events.Login: Session._login,
    events.VhostAsked: Session._open,
    events.ChannelOpened: Session._channel_opened,
    events.ChannelClosed: Session._channel_closed,
    events.ChannelFailed: Session._channel_closed,
    events.ChannelReleased: Session._nothing,
    events.ConnectionClosed: Session._leave,
    events.ConnectionReleased: Session._nothing,
    events.Failed: Session._leave,
}
