"""Event loops of processes that serve; handshakes of TLS that fail in them, told to client and log."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import ssl
from asyncio import sslproto
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from qflow.descriptors import REMEDIES
from qflow.loggers import get_logger
from qflow.serving.addresses import Address
from qflow.serving.telling import Telling

_logger = get_logger("qflow")

TLS_BUFFER_BYTES = 2**16


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes a loop of uvloop, where that is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def take_small_buffers() -> None:
    """Have connections with TLS read into 64 KiB in loops of asyncio, in this process, where it has 256 KiB for each.

    They have them from their first byte until they end, whatever they say.
    """
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES


@contextmanager
def telling_of_few_files() -> Iterator[None]:
    """Have the loop that runs say in one line, and again after some seconds, that it lacks what a connection takes.

    Left to itself it logs each try with where it failed: a thousand a second for each socket it listens at.
    """
    telling = Telling(_logger, others="")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, listening = context.get("exception"), context.get("socket")
        if listening is None or not isinstance(error, OSError) or error.errno not in REMEDIES:
            return loop.default_exception_handler(context)
        address = Address(*listening.getsockname()[:2])
        return telling.tell("%s: nobody else is let in for now: %s", address, REMEDIES[error.errno])

    asyncio.get_running_loop().set_exception_handler(handle)
    try:
        yield
    finally:
        telling.end()


_EXPIRED, _NOT_YET, _SIGNED_BY_OTHERS = 10, 9, {2, 18, 19, 20, 21}
"""Numbers of OpenSSL for what is wrong with the certificate of a client."""
_ALERTS = {
    "CERTIFICATE_EXPIRED": "it has expired: renew it, and send SIGHUP",
    "CERTIFICATE_REVOKED": "it was revoked: have another one made, and send SIGHUP",
    "UNKNOWN_CA": "it knows nobody who signed it: have it trust who did, and have the certificates between the two in "
    "the file of --cert",
    "BAD_CERTIFICATE": "it is for another name, or broken; the log of the client says more",
    "CERTIFICATE_UNKNOWN": "the log of the client says why",
    "UNSUPPORTED_CERTIFICATE": "it is none for servers, or of a kind that the client does not know",
}
"""Why clients refuse the certificate of the server, by what they send."""


def why_refused(error: BaseException) -> str | None:
    """Return why a handshake failed, and the remedy; None where a client wants nothing that it could be given.

    So it is with who looks whether the port is open, or speaks no TLS.
    """
    reason = str(getattr(error, "reason", None) or "")
    if isinstance(error, ssl.SSLCertVerificationError):
        return _wrong_certificate(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the client shows no certificate: give it one that an authority in the file of --ca has signed"
    if reason in ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW"):
        return "the client speaks no TLS 1.2 or later: renew what it is made with"
    remedy = _ALERTS.get(reason.partition("_ALERT_")[2])
    return None if remedy is None else f"the client refuses the certificate of this server: {remedy}"


def _wrong_certificate(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "the certificate of the client, or of who signed it, has expired: renew it"
    if error.verify_code == _NOT_YET:
        return "the certificate of the client is not valid yet: look at the clocks of both hosts"
    if error.verify_code in _SIGNED_BY_OTHERS:
        return (
            "no authority in the file of --ca has signed the certificate of the client: give it one that is, or add "
            "who signed it to the file, and send SIGHUP"
        )
    return f"the certificate of the client is not taken: {error.verify_message}"


@contextmanager
def looking_after_handshakes() -> Iterator[None]:
    """Have handshakes that fail in this process told of, and let go of, until the block ends."""
    telling, before = Telling(_logger), sslproto.SSLProtocol
    sslproto.SSLProtocol = partial(_LookedAfter, telling)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        sslproto.SSLProtocol = before  # type: ignore[misc]
        telling.end()


class _LookedAfter(sslproto.SSLProtocol):
    """A connection with TLS.

    The error that ends a handshake holds the frames that it was raised in, and those hold the error and the connection:
    100 KiB for each who only looks whether the port is open, until the garbage collector has been through all that
    there is (https://github.com/python/cpython/issues/109534). Since 3.12.3 asyncio sees to its own frames alone.
    """

    _server_side: bool
    _transport: Any
    _waiter: Any

    def __init__(self, telling: Telling, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._telling = telling

    def _on_handshake_complete(self, handshake_exc: Any) -> None:
        """End a handshake, with an error, or the class of one, if it failed."""
        waiter = None
        if handshake_exc is not None and self._server_side:
            self._tell(handshake_exc)
            waiter, self._waiter = self._waiter, None
        super()._on_handshake_complete(handshake_exc)
        if waiter is not None:
            waiter.cancel()  # nobody asks the server why
            if isinstance(handshake_exc, BaseException):
                handshake_exc.__traceback__ = None

    def _tell(self, error: Any) -> None:
        """Tell the log, and the client, to whom asyncio says nothing (https://github.com/python/cpython/issues/98078)."""
        if not isinstance(error, ssl.SSLError):
            return
        self._process_outgoing()  # type: ignore[attr-defined]
        why = why_refused(error)
        client, here = (self._transport.get_extra_info(name) for name in ("peername", "sockname"))
        if why is not None and client and here:
            self._telling.tell("TLS with %s failed at %s: %s", client[0], Address(*here[:2]), why)
