"""The certificates of a door, from files."""

from __future__ import annotations

import _ssl
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from qflow.errors import InvalidArgument
from qflow.named_tuples import NamedTuple

DAY_S = 86_400.0
_SOON_S = 14 * DAY_S
_SOON_PART = 0.1
"""A certificate expires soon if less than that is left, and less than that part of how long it is valid."""

_OF_ANOTHER = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
"""What OpenSSL says of a key that is not that of the certificate: the last ones where it is of another algorithm."""


class _Encrypted(Exception):
    """A key is encrypted, and nobody is there to type its password."""


class Validity(NamedTuple):
    """When a certificate is valid, in seconds since 1970."""

    path: Path
    begins_s: float
    ends_s: float

    def warning(self, now_s: float) -> str | None:
        """Return what is to be said of it: it is not valid, or soon will be no more; None if nothing is."""
        what = f"the certificate {str(self.path)!r}"
        if now_s < self.begins_s:
            return f"{what} is not valid before {_at(self.begins_s)}, and clients refuse it: look at the clock"
        if now_s >= self.ends_s:
            return f"{what} has expired at {_at(self.ends_s)}, and clients refuse it: renew it, and send SIGHUP"
        if now_s >= self._soon_s:
            return f"{what} expires at {_at(self.ends_s)}: renew it, and send SIGHUP"
        return None

    def rest_s(self, now_s: float) -> float:
        """Return after how many seconds to look for a warning again: a day, or earlier if there is another one then."""
        changes = (self.begins_s, self._soon_s, self.ends_s)
        return min([DAY_S, *(max(1.0, change - now_s) for change in changes if change > now_s)])

    @property
    def _soon_s(self) -> float:
        return self.ends_s - min(_SOON_S, _SOON_PART * (self.ends_s - self.begins_s))


@attrs.frozen
class Certificates:
    """Where the certificates of a door lie.

    Args:
        cert: the certificate of the server, and those between it and the one that clients trust (PEM).
        key: its private key, not encrypted (PEM).
        ca: certificates of who signs those of clients: with it, a client has to show one. None = none is asked for.
    """

    cert: Path
    key: Path
    ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files; return what a server needs of them: TLS 1.2 or later.

        Raises:
            InvalidArgument: a file cannot be read, or is not what it should be; the text names it.
        Cost: some ms.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path in filter(None, (self.cert, self.key, self.ca)):
            _check_readable(path)
        try:
            context.load_cert_chain(self.cert, self.key, password=_refuse)
        except _Encrypted as error:
            raise InvalidArgument(f"the key {str(self.key)!r} is encrypted; store it without a password") from error
        except OSError as error:
            raise InvalidArgument(_what_is_wrong(self.cert, self.key, error)) from error
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except OSError as error:
                raise InvalidArgument(_no_certificate(self.ca)) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def validity(self) -> Validity | None:
        """Return when the certificate of the server is valid; None if it does not say so in a way that can be read."""
        try:
            found = _ssl._test_decode_cert(str(self.cert))  # type: ignore[attr-defined]
            begins, ends = (ssl.cert_time_to_seconds(str(found[name])) for name in ("notBefore", "notAfter"))
        except (OSError, KeyError, ValueError):
            return None
        return Validity(self.cert, begins, ends)

    def contents(self) -> list[bytes]:
        """Return what the files hold, in the order of the arguments. Raises OSError."""
        return [path.read_bytes() for path in (self.cert, self.key, self.ca) if path is not None]


def common_name(certificate: Mapping[str, Any] | None) -> str | None:
    """Return the first common name of a client's certificate, as `SSLSocket.getpeercert` returns it; None if none."""
    for field in (certificate or {}).get("subject", ()):
        for key, value in field:
            if key == "commonName":
                return str(value)
    return None


class Renewable:
    """A context to listen with, whose certificates can be renewed: each handshake takes those that are newest then.

    A listening socket keeps the context that it was opened with. Loading other files into that one would add to it:
    certificates of another kind of key, and those of clients' authorities, would stay beside the new ones.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self.listening = context
        """What is listened with."""
        self._newest = context
        context.sni_callback = self._choose
        if context.verify_mode != ssl.CERT_NONE:  # a session that is resumed shows no certificate again
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0

    def renew(self, context: ssl.SSLContext) -> None:
        """Take the certificates of another context for the handshakes to come. It asks clients for theirs as before."""
        self._newest = context

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Called in each handshake, also of clients that name no server."""
        connection.context = self._newest


def _at(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_s))


def _refuse() -> str:
    raise _Encrypted


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise InvalidArgument(f"{str(path)!r} cannot be read: {error.strerror}") from error


def _what_is_wrong(cert: Path, key: Path, error: OSError) -> str:
    """Tell which of two files cannot be used, and what to give: the text of OpenSSL names neither."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cert)
    except OSError:
        return _no_certificate(cert)
    reason = getattr(error, "reason", None)
    if not reason:
        return (
            f"{str(key)!r} is no private key, or is cut off: give one in PEM, from a line such as "
            "-----BEGIN PRIVATE KEY----- to that of its end"
        )
    if reason in _OF_ANOTHER:
        return (
            f"{str(key)!r} is the key of another certificate than {str(cert)!r}: give the two that were made together"
        )
    return f"the certificate {str(cert)!r} is not taken, make another one: {reason.replace('_', ' ').lower()}"


def _no_certificate(path: Path) -> str:
    return (
        f"{str(path)!r} is no certificate, or has one that is cut off: give it in PEM, from the line "
        "-----BEGIN CERTIFICATE----- to -----END CERTIFICATE-----"
    )
