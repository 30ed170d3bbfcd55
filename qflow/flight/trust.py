"""Certificates of a client: whom it trusts, and what it shows; and what went wrong between it and a door."""

from __future__ import annotations

import os
import re
import socket
import ssl
from pathlib import Path
from typing import Any

import attrs

from qflow.errors import InvalidArgument

PROBE_S = 5.0
_URL = re.compile(r"grpc(\+tls|\+tcp)?://([^/\s@]+):([0-9]{1,5})/?")
_HOST_PORT = re.compile(r"grpc\+tls://\[?([^/\s]+?)\]?:(\d+)/?")
_PLAIN = re.compile(r"grpc(?:\+tcp)?://\[?([^/\s]+?)\]?:(\d+)/?")
_EXPIRED, _NOT_YET, _NAMES = 10, 9, {62, 64}
"""Numbers of OpenSSL for what is wrong with a certificate."""
_File = str | os.PathLike[str] | None


@attrs.frozen
class Trust:
    """Files in PEM.

    Args:
        ca: certificates to trust in place of the system's.
        cert, key: shown to a door that asks for one: a certificate, and its private key, not encrypted.
        given_ca: what was in a file of such certificates that may not be on this host, in place of `ca`.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    given_ca: bytes | None = None

    @classmethod
    def of(cls, url: str, ca: _File, cert: _File, key: _File) -> Trust:
        """Return what goes with a URL. Raises InvalidArgument: it makes no sense."""
        given = [None if one is None else Path(one) for one in (ca, cert, key)]
        if any(given) and not url.startswith("grpc+tls"):
            raise InvalidArgument(f"certificates are for grpc+tls://, and the URL is {url!r}")
        if (cert is None) is not (key is None):
            raise InvalidArgument("a certificate to show needs its private key: give cert and key")
        return cls(given[0], given[1], given[2])

    def options(self) -> dict[str, Any]:
        """Return what `pyarrow.flight.connect` takes. Raises InvalidArgument: a file cannot be read."""
        return {"tls_root_certs": _read(self.ca), "cert_chain": _read(self.cert), "private_key": _read(self.key)}


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{os.fspath(path or '')!r} cannot be read: {error.strerror}") from error


def check_url(url: str) -> str:
    """Return the URL of a door, without a slash at its end. Raises InvalidArgument: it is none."""
    found = _URL.fullmatch(url)
    if found is None or int(found[3]) >= 2**16 or not _is_name(found[2]):
        raise InvalidArgument(f"a URL of a door is grpc+tls://HOST:PORT, or grpc://HOST:PORT, not {url!r:.200}")
    return url.rstrip("/")


def _is_name(host: str) -> bool:
    try:
        host.encode("idna")  # as for a look-up, which raises this at once
    except UnicodeError:
        return False
    return True


def check_certificates(given: bytes, what: str) -> None:
    """Raises InvalidArgument: `what` has no certificates to trust, or they are not in PEM."""
    text = given.decode("ascii", "ignore")
    try:
        if not text.strip():
            raise ValueError("it is empty")
        ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{what} has no certificates that can be used ({_reason(error)}): give a file in PEM with those that "
            "signed the broker's"
        ) from error


def what_is_wrong(url: str, trust: Trust, *, may_guess: bool = False) -> str | None:
    """Return a sentence on why TLS with a door cannot begin: gRPC does not tell. None where it is something else.

    Shakes hands once more.

    Args:
        may_guess: a door that ends the connection then wants a certificate; it may be a relay behind which nobody is.
    """
    found = _HOST_PORT.fullmatch(url)
    if found is None:
        return _without_tls(url)
    try:
        given = None if trust.given_ca is None else trust.given_ca.decode("ascii", "ignore")
        context = ssl.create_default_context(cafile=trust.ca, cadata=given)
        if trust.cert is not None and trust.key is not None:
            context.load_cert_chain(trust.cert, trust.key, password=lambda: "")
    except (OSError, ValueError) as error:
        return f"the certificates for {url} cannot be used: {_reason(error)}: ca, cert and key are files in PEM"
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # which CPython 3.13 sets, and gRPC does not
    context.set_alpn_protocols(["h2"])
    host = found[1]
    is_begun = False
    try:
        with (
            socket.create_connection((host, int(found[2])), timeout=PROBE_S) as raw,
            context.wrap_socket(raw, server_hostname=host) as one,
        ):
            is_begun = True
            if one.recv(1):  # with TLS 1.3, what is wrong with the client's certificate comes behind the handshake
                return None
    except ssl.SSLCertVerificationError as error:
        return _wrong_certificate(url, host, error, trust)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, TimeoutError):
        return None
    except ssl.SSLError as error:
        return _refused(url, error, trust)
    except OSError:
        pass
    return _untrusted(url, trust) if is_begun and may_guess else None


def _without_tls(url: str) -> str | None:
    """Tell of a door that speaks TLS to who does not: it ends the connection at the first bytes that are no TLS."""
    found = _PLAIN.fullmatch(url)
    if found is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((found[1], int(found[2])), timeout=PROBE_S) as raw, context.wrap_socket(raw):
            return f"TLS is spoken at {url}: say grpc+tls://"
    except OSError:
        return None


def _wrong_certificate(url: str, host: str, error: ssl.SSLCertVerificationError, trust: Trust) -> str:
    if error.verify_code == _EXPIRED:
        return f"the certificate of {url} has expired: renew it there, and start the server again"
    if error.verify_code == _NOT_YET:
        return f"the certificate of {url} is not valid yet: look at the clocks of both hosts"
    if error.verify_code in _NAMES:
        return f"the certificate of {url} is for another name than {host!r}: connect to a name that it has"
    ca = trust.ca if trust.given_ca is None else "ca"
    whom = "the system trusts" if ca is None else f"{os.fspath(ca)!r} has"
    return (
        f"the certificate of {url} is signed by nobody whom {whom} ({error.verify_message}): give the file of "
        "certificates that signed it as ca"
    )


def _refused(url: str, error: ssl.SSLError, trust: Trust) -> str | None:
    reason = _reason(error).upper()
    if "CERTIFICATE" in reason or "HANDSHAKE_FAILURE" in reason or "UNKNOWN_CA" in reason:
        return _untrusted(url, trust)
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason:
        return f"no TLS is spoken at {url}: say grpc:// for a door without certificates"
    return f"TLS with {url} cannot begin: {_reason(error)}"


def _untrusted(url: str, trust: Trust) -> str:
    if trust.cert is None:
        return f"{url} asks clients for a certificate: give yours as cert, and its private key as key"
    return (
        f"{url} does not take the certificate {os.fspath(trust.cert)!r}: it has expired, or none of the authorities "
        "that are trusted there has signed it"
    )


def _reason(error: OSError | ValueError) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
