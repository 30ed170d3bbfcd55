"""MQTT over WebSockets: what the server does with a TCP connection, carried in binary frames (RFC 6455).

    TCP or TLS  ->  WebSocket  ->  the protocol of the server, which sees a transport and bytes, cut anywhere

Source: MQTT 5.0, section 6: the subprotocol is `mqtt`; frames are binary, and need not begin or end with packets.

A browser says which page a connection is from, and pages of others must not use what a client has without a password:
where nobody logs in, pages of this machine alone may connect; where a certificate stands for the user, pages from the
same host. A client that is no browser says nothing of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

from websockets.frames import CloseCode, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from qflow.loggers import get_logger
from qflow.mqtt.server.tcp import TcpPipe
from qflow.serving.addresses import is_loopback

HANDSHAKE_S = 10.0
"""A client has so long to ask for the protocol."""
CLOSE_S = 5.0
"""What a client has to answer the frame that ends the connection."""
MOST_REQUEST_BYTES = 16 * 1024
MOST_FRAME_BYTES = 2**20 + 2**10
"""A frame is kept until it is whole. What is in it has bounds of its own."""
MOST_UNSENT_BYTES = 512 * 1024
"""Of what the network has not taken: above, nothing more is read. So much there is of answers to pings alone."""
SUBPROTOCOL = Subprotocol("mqtt")
_END = b"\r\n\r\n"

_logger = get_logger("qflow.mqtt")


class WebSockets:
    """Makes the protocols of connections to one address.

    Args:
        make: makes what is carried.
        is_open: tells whether clients may come in without a password.
    """

    def __init__(self, make: Callable[[], TcpPipe], is_open: Callable[[], bool]) -> None:
        self._make = make
        self._is_open = is_open
        self._asking: set[WebSocket] = set()

    def __call__(self) -> WebSocket:
        """Return the protocol of a connection, for `loop.create_server`."""
        return WebSocket(self._begun, self._asking)

    def close(self) -> None:
        """End connections that have not asked for the protocol yet; the others are those of what is carried."""
        for one in list(self._asking):
            one.abort()

    def _begun(self, origin: str | None, host: str | None, has_certificate: bool) -> TcpPipe | None:
        """Return what is carried; None if a page from there may not connect."""
        if origin is None:
            return self._make()
        page = _host(origin)
        if self._is_open():
            return self._make() if page == "localhost" or is_loopback(page) else None
        if has_certificate:
            return self._make() if page and page == _host(f"//{host}") else None
        return self._make()


Begin = Callable[[str | None, str | None, bool], TcpPipe | None]


class WebSocket(asyncio.Protocol):
    """One connection, from its first byte."""

    def __init__(self, begin: Begin, asking: set[WebSocket]) -> None:
        self._begin = begin
        self._asking = asking
        self._machine = ServerProtocol(subprotocols=[SUBPROTOCOL], max_size=(None, MOST_FRAME_BYTES), logger=_logger)
        self._request = b""
        """What has come of the request."""
        self._transport: asyncio.Transport | None = None
        self._carried: TcpPipe | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False
        self._is_held = False
        """What is carried wants nothing to be read."""
        self._is_stuck = False
        """Nothing is read until the network has taken what was written."""

    # From the network ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's have no base class
        self._asking.add(self)
        self._abort_after(HANDSHAKE_S)

    def data_received(self, data: bytes) -> None:
        if self._carried is None and not self._is_closing:
            self._request += data
            end = self._request.find(_END) + len(_END)
            if end < len(_END):
                if len(self._request) > MOST_REQUEST_BYTES:
                    self.abort()
                return
            asked, data = self._request[:end], self._request[end:]
            self._request = b""
            self._machine.receive_data(asked)
            self._answer()
        if data:
            self._machine.receive_data(data)
            if self._carried is not None:
                self._carried.coming(len(self._machine.reader.buffer))
            for frame in self._machine.events_received():
                self._take(frame)
        self.flush()
        if self._transport is not None and self._transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            self._is_stuck = True
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_closing = True
        self._asking.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._carried is not None:
            self._carried.connection_lost(error)

    def pause_writing(self) -> None:
        if self._carried is not None:
            self._carried.pause_writing()

    def resume_writing(self) -> None:
        if self._is_stuck:
            self._is_stuck = False
            self._read()
        if self._carried is not None:
            self._carried.resume_writing()

    def _answer(self) -> None:
        """Accept a request, or refuse it."""
        asked = self._machine.events_received()
        if not asked:  # it was none, and the machine has said so
            self._is_closing = True
            return
        request, transport = asked[0], self._transport
        assert isinstance(request, Request)
        assert transport is not None
        origins, hosts = request.headers.get_all("Origin"), request.headers.get_all("Host")
        response = self._machine.accept(request)
        if response.status_code == 101:
            has_certificate = bool(transport.get_extra_info("peercert"))
            # Two that differ: whoever sent them is no browser, and who looks at the first sees no second.
            origin = ",".join(origins) if origins else None
            carried = self._begin(origin, ",".join(hosts) or None, has_certificate)
            if carried is None:
                response = self._machine.reject(403, "A page from elsewhere may not connect to this server.\n")
            self._carried = carried
        self._machine.send_response(response)
        if self._carried is None:
            self._is_closing = True
            return
        self._asking.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._carried.connection_made(Carrier(self, transport))

    def _take(self, frame: Any) -> None:
        if self._is_closing or self._carried is None:
            return
        if frame.opcode is Opcode.TEXT:
            self._is_closing = True
            self._machine.fail(CloseCode.UNSUPPORTED_DATA, "MQTT is in binary frames")
        elif frame.opcode in (Opcode.BINARY, Opcode.CONT) and frame.data:
            self._carried.data_received(bytes(frame.data))

    # From what is carried ------------------------------------------------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """Nothing is sent any more."""
        return self._is_closing

    def pause(self) -> None:
        """Read nothing for now."""
        self._is_held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        self._is_held = False
        self._read()

    def _read(self) -> None:
        """Read, if nothing is in the way of that."""
        if self._transport is not None and not (self._is_held or self._is_stuck):
            self._transport.resume_reading()

    def send(self, data: bytes) -> None:
        """Write a frame; nothing if the connection is closing."""
        if data and not self._is_closing and not self._machine.close_expected():
            self._machine.send_binary(data)
            self.flush()

    def close(self) -> None:
        """End the connection when all is written; the client has some seconds to answer."""
        if self._is_closing:
            return
        self._is_closing = True
        if not self._machine.close_expected():
            self._machine.send_close(CloseCode.NORMAL_CLOSURE)
        self.flush()
        if self._transport is not None and not self._transport.is_closing():
            self.resume()  # the answer is behind what was not to be read yet
        self._abort_after(CLOSE_S)

    def abort(self) -> None:
        """End the connection at once."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()

    def flush(self) -> None:
        """Write what the machine has to send."""
        transport = self._transport
        assert transport is not None
        for data in self._machine.data_to_send():
            if data:
                transport.write(data)
            else:  # the machine ends its side, and expects nothing more
                self._is_closing = True
                transport.close()

    def _abort_after(self, seconds: float) -> None:
        assert self._transport is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, partial(WebSocket.abort, self))


class Carrier:
    """A WebSocket as a transport: what it does not do itself, the connection below it does."""

    __slots__ = ("_socket", "_transport")

    def __init__(self, socket: WebSocket, transport: asyncio.Transport) -> None:
        self._socket = socket
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Send a frame."""
        self._socket.send(data)

    def pause_reading(self) -> None:
        """Read nothing for now."""
        self._socket.pause()

    def resume_reading(self) -> None:
        """Read again."""
        self._socket.resume()

    def can_write_eof(self) -> bool:
        """Tell that it ends with a frame that says so."""
        return False

    def close(self) -> None:
        """End it when all is written."""
        self._socket.close()

    def abort(self) -> None:
        """End it at once."""
        self._socket.abort()

    def is_closing(self) -> bool:
        """Tell whether nothing is sent any more."""
        return self._socket.is_closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _host(url: str) -> str:
    """Return the host of a URL in small letters, without a port; "" if it names none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
