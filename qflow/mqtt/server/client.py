"""One client: its bytes go through the protocol machine, and what they mean to its session.

The network is a `Pipe`: a TCP connection, with TLS or without, or a WebSocket.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from qflow.mqtt.errors import MqttError, ReasonCode
from qflow.mqtt.server.access import Access
from qflow.mqtt.server.session import Session
from qflow.mqtt.wire import Connection, State
from qflow.mqtt.wire.packets import (
    Auth,
    Connect,
    Disconnect,
    Event,
    Failed,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
)
from qflow.serving.budget import Budget
from qflow.serving.presence import Connected
from qflow.serving.tasks import Turn

LOGIN_S = 10.0
"""A client has so long to send CONNECT."""
CLOSING_S = 5.0
"""Until a connection that is closed on this side is cut off."""
KEEP_ALIVE_FACTOR = 1.5
MOST_UNSENT_BYTES = 256 * 1024
"""Of answers that the network has not taken: above, no more is read from the client."""
MOST_IN_A_TURN = 2_000
"""Packets of a client, after which the loop does other things, as when its turn is over: it may read several times."""


class Pipe(Protocol):
    """The network connection of a client."""

    peer: str
    """Where it is from: an IP address."""
    certificate: dict[str, Any] | None
    """What the client has shown, as `SSLObject.getpeercert` gives it."""

    def write(self, data: bytes) -> None:
        """Send bytes; none are refused."""

    def close(self) -> None:
        """Close, once all is sent; a client that goes on sending gets to read it. Called more than once."""

    def abort(self) -> None:
        """Close at once."""

    def pause(self) -> None:
        """Read nothing for now."""

    def resume(self) -> None:
        """Read again."""


class Office(Protocol):
    """The server, as far as a client needs it; see `server.Server`."""

    @property
    def budget(self) -> Budget: ...
    def monotonic(self) -> float: ...
    def flush_soon(self, client: Client) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, None]) -> object: ...
    def tell(self, text: str, *values: object) -> None: ...
    async def admit(self, client: Client, connect: Connect) -> None: ...
    async def rest(self, client: Client) -> None:
        """Have its session go to sleep: it is told to go."""

    async def dismiss(self, client: Client) -> None: ...


class Client:
    """See the module. In the loop alone."""

    __slots__ = (
        "_closing_s", "_handlers", "_heard_s", "_in_frame", "_in_turn", "_incomplete", "_is_busy", "_is_held",
        "_office", "_opened_s", "access", "is_flushing", "is_gone", "is_paused", "keep_alive_s",
        "machine", "pipe", "session", "session_expiry_of", "will_is_due",
    )  # fmt: skip

    def __init__(self, office: Office, pipe: Pipe, machine: Connection) -> None:
        self.pipe = pipe
        self.machine = machine
        self.session: Session | None = None
        self.access: Access | None = None
        self.is_paused = False
        self.is_flushing = False
        self.is_gone = False
        """The network connection is closed."""
        self.keep_alive_s = 0
        """Seconds between what it sends; 0 = as it likes."""
        self.session_expiry_of: Callable[[int], int] = lambda wanted_s: wanted_s
        """Seconds that its session lasts without it, of those that it wants."""
        self.will_is_due = True
        """It has not said good-bye."""
        self._office = office
        self._opened_s = self._heard_s = office.monotonic()
        self._closing_s = 0.0
        self._is_busy = False
        self._is_held = False
        self._in_turn = 0
        """Packets since the last flush."""
        self._in_frame = 0
        """Bytes of a frame that is not whole."""
        self._incomplete = 0
        """The same, and of a packet, as noted last."""
        self._handlers: dict[type, Callable[[Any], object]] = {}

    @property
    def client_id(self) -> str:
        """Return its id; empty before it is known."""
        return "" if self.session is None else self.session.state.client_id

    def present(self, now_s: float) -> Connected:
        """Return who it is, for those who show it."""
        user = "" if self.access is None else self.access.user_name
        return Connected("mqtt", self.client_id, user, self.pipe.peer, now_s - self._opened_s)

    # What comes ------------------------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Take what came."""
        self._heard_s = self._office.monotonic()
        self._take(data)

    def coming(self, size: int) -> None:
        """So many bytes have come of a frame of a WebSocket that is not whole."""
        if size > self._in_frame:
            self._heard_s = self._office.monotonic()
        self._in_frame = size
        self._note_incomplete()

    def _note_incomplete(self) -> None:
        size = self._in_frame + self.machine.incomplete_bytes
        if size == self._incomplete or self.is_gone:
            return
        self._incomplete = size
        budget = self._office.budget
        if not budget.allows(self, size) and self.machine.state is not State.CLOSED:
            most = f"{budget.most_bytes:,} bytes of packets that are not whole"
            error = MqttError(
                ReasonCode.QUOTA_EXCEEDED, f"clients hold more than {most}, and this one {size:,} of them"
            )
            self._office.tell("%s, client %r: closed, %s", self.pipe.peer, self.client_id, error.text)
            self.fail(error)

    def _take(self, data: bytes) -> None:
        machine = self.machine
        events = machine.receive(data)
        if not self._is_held:  # frames of a WebSocket come one by one, though it was told to pause
            turn = Turn()
            for number, event in enumerate(events, self._in_turn + 1):
                self._in_turn = MOST_IN_A_TURN if turn.is_over() else number
                self._handle(event)
                if self._must_wait():
                    break
        if self._must_wait():
            self._hold()
        self._note_incomplete()
        if self._is_held or machine.pending_bytes or machine.state is State.CLOSED:
            self.flush_soon()

    def _must_wait(self) -> bool:
        if self._is_busy or self._in_turn >= MOST_IN_A_TURN or self.machine.pending_bytes > MOST_UNSENT_BYTES:
            return True
        return self.session is not None and self.session.inbound.is_full

    def _hold(self) -> None:
        if not self._is_held and not self.is_gone:
            self._is_held = True
            self.pipe.pause()

    def _go_on(self) -> None:
        """Take what was not taken before."""
        if self._is_held and not self._must_wait():
            self._is_held = False
            if not self.is_gone:
                self.pipe.resume()
            self._take(b"")

    def _handle(self, event: Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        elif isinstance(event, Connect):
            self._work(self._office.admit(self, event))
        elif isinstance(event, Disconnect):
            self._left(event)
        elif isinstance(event, Failed):
            self._office.tell("%s, client %r: closed, %s", self.pipe.peer, self.client_id, event.text)
        elif isinstance(event, Auth):
            self.machine.fail(MqttError(ReasonCode.PROTOCOL_ERROR, "there is no authentication but by CONNECT"))

    def _left(self, packet: Disconnect) -> None:
        self.will_is_due = packet.code != ReasonCode.SUCCESS
        expiry_s = packet.properties.get("session_expiry_s")
        if expiry_s is not None and self.session is not None:
            self.session.state.expiry_s = self.session_expiry_of(expiry_s)

    def opened(self, session: Session) -> None:
        """Its CONNECT was taken."""
        self.session = session
        inbound, outbound = session.inbound, session.outbound
        inbound.has_room_again = self._go_on
        self._handlers = {
            Publish: inbound.publish,
            Puback: outbound.puback,
            Pubrec: outbound.pubrec,
            Pubrel: inbound.release,
            Pubcomp: outbound.pubcomp,
            Subscribe: self._subscribe,
            Unsubscribe: self._unsubscribe,
        }

    def _subscribe(self, packet: Subscribe) -> None:
        assert self.session is not None
        self._work(self.session.subscribe(packet))

    def _unsubscribe(self, packet: Unsubscribe) -> None:
        assert self.session is not None
        self._work(self.session.unsubscribe(packet))

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a task do something; what the client sends meanwhile waits."""
        self._is_busy = True
        self._office.spawn(self._until_done(work))

    async def _until_done(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            self.machine.fail(MqttError(ReasonCode.UNSPECIFIED, "the server has failed"))
            raise
        finally:
            self._is_busy = False
            self.flush_soon()
            if self.is_gone:
                self._office.spawn(self._office.dismiss(self))
            elif self._closing_s:
                self._office.spawn(self._office.rest(self))
            else:
                self._go_on()

    # What goes -------------------------------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Have what was written sent before the loop sleeps."""
        if not self.is_flushing:
            self.is_flushing = True
            self._office.flush_soon(self)

    def flush(self) -> None:
        """Send what was written, if the network takes it: a small piece that waits there costs more than its bytes."""
        self.is_flushing = False
        self._in_turn = 0
        if self.is_gone:
            return
        machine = self.machine
        if not self.is_paused or machine.state is State.CLOSED:
            data = machine.data_to_send()
            if data:
                self.pipe.write(data)
        if machine.state is State.CLOSED:
            if not self._closing_s:
                self._closing_s = self._office.monotonic() + CLOSING_S
                self.pipe.close()
                if not self._is_busy:
                    self._office.spawn(self._office.rest(self))
        else:
            self._go_on()
            if self.session is not None and not self.is_paused:
                self.session.pump()

    def paused(self) -> None:
        """The network takes nothing more for now."""
        self.is_paused = True

    def resumed(self) -> None:
        """The network takes more."""
        self.is_paused = False
        self.flush_soon()

    # Ending ----------------------------------------------------------------------------------------------------------

    def drain(self, ends: MqttError) -> None:
        """Send no more messages with QoS 1 and 2; close once the client has acknowledged what was sent."""
        if self.machine.state is State.CLOSED:
            return
        if self.session is not None and self.session.outbound.drain():
            return
        self.fail(ends)

    def fail(self, error: MqttError) -> None:
        """Tell the client why, and close."""
        self.machine.fail(error)
        self.flush_soon()

    def send_to(self, reference: str, for_good: bool) -> None:
        """Tell the client to use another server, for good or for now, and close."""
        code = ReasonCode.SERVER_MOVED if for_good else ReasonCode.USE_ANOTHER_SERVER
        error = MqttError(code, f"use {reference}")
        self.machine.fail(error, {"server_reference": reference})
        self.flush_soon()

    def gone(self) -> None:
        """The network connection is closed."""
        self.is_gone = True
        self.machine.close()
        self._office.budget.allows(self, 0)
        if not self._is_busy:
            self._office.spawn(self._office.dismiss(self))

    def tick(self, now_s: float) -> None:
        """Look whether the client is still there. Once a second."""
        if self._closing_s:
            if now_s >= self._closing_s:
                self.pipe.abort()
        elif self.machine.state is State.WAITING:
            if now_s >= self._opened_s + LOGIN_S:
                self.pipe.abort()
        elif self.machine.state is State.OPEN and not self._is_held:
            keep_alive_s = self.keep_alive_s
            if keep_alive_s and now_s >= self._heard_s + KEEP_ALIVE_FACTOR * keep_alive_s:
                self.fail(MqttError(ReasonCode.KEEP_ALIVE_TIMEOUT, f"nothing came for 1.5 times {keep_alive_s} s"))
