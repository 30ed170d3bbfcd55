"""Handshakes of TLS that fail: nothing of them is left, and client and log are told why."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from doors.event_loop import run, until
from qflow.serving.certificates import Certificates
from qflow.serving.loops import looking_after_handshakes

PEM = Path(__file__).parent / "certificates"


class Door(asyncio.Protocol):
    """What a door makes for a connection."""


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def _look(port: int) -> None:
    """Look whether a port is open."""
    socket.create_connection(("127.0.0.1", port)).close()


def _talk_otherwise(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client, suppress(ConnectionError):
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        client.recv(1)


def _distrust(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client, pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(client, server_hostname="localhost")


@pytest.mark.parametrize("fail", [_look, _talk_otherwise, _distrust])
@pytest.mark.usefixtures("without_collector")
def test_a_handshake_that_fails_leaves_nothing(fail: Callable[[int], None]) -> None:
    """The garbage collector is not needed for what it held, its buffers and what the door made."""
    made: list[weakref.ref[Door]] = []

    def make() -> Door:
        protocol = Door()
        made.append(weakref.ref(protocol))
        return protocol

    async def serve() -> None:
        context = Certificates(PEM / "server.pem", PEM / "server.key").context()
        async with await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            for _ in range(3):
                await asyncio.to_thread(fail, port)
            await until(lambda: len(made) == 3 and not any(one() for one in made))

    with looking_after_handshakes():
        run(serve())


def _shake(port: int, trusted: str, shown: str | None, most: ssl.TLSVersion) -> str:
    """Shake hands, and return what the client is told of why that failed; empty if it is told nothing."""
    context = ssl.create_default_context(cafile=PEM / trusted)
    if shown is not None:
        context.load_cert_chain(PEM / f"{shown}.pem", PEM / f"{shown}.key")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = most
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    try:
        with (
            socket.create_connection(("127.0.0.1", port)) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as client,
        ):
            client.recv(1)
    except ssl.SSLError as error:
        return str(error.reason)
    return ""


NONE = "the client shows no certificate: give it one that an authority in the file of --ca has signed"
OTHER = "no authority in the file of --ca has signed the certificate of the client: give it one that is"
EXPIRED = "the certificate of the client, or of who signed it, has expired: renew it"
UNKNOWN = "the client refuses the certificate of this server: it knows nobody who signed it: have it trust who did"
OLD = "the client speaks no TLS 1.2 or later: renew what it is made with"
NEW, LAST, BEFORE = ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_1


@pytest.mark.parametrize(
    ("ca", "trusted", "shown", "most", "told", "logged"),
    [
        ("ca.pem", "ca.pem", None, NEW, "CERTIFICATE_REQUIRED", NONE),
        ("ca.pem", "ca.pem", None, LAST, "HANDSHAKE_FAILURE", NONE),
        ("ca.pem", "ca.pem", "expired", NEW, "UNKNOWN_CA", OTHER),
        ("expired.pem", "ca.pem", "expired", NEW, "CERTIFICATE_EXPIRED", EXPIRED),
        ("expired.pem", "ca.pem", "expired", LAST, "CERTIFICATE_EXPIRED", EXPIRED),
        (None, "expired.pem", None, NEW, "CERTIFICATE_VERIFY_FAILED", UNKNOWN),
        (None, "ca.pem", None, BEFORE, "PROTOCOL_VERSION", OLD),
    ],
)
def test_client_and_log_are_told_why_a_handshake_failed(
    ca: str | None,
    trusted: str,
    shown: str | None,
    most: ssl.TLSVersion,
    told: str,
    logged: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one line of the log, with the address of the client, that of the door, and what to do."""
    answers: list[str] = []

    async def serve() -> str:
        authority = None if ca is None else PEM / ca
        context = Certificates(PEM / "server.pem", PEM / "server.key", authority).context()
        async with await asyncio.get_running_loop().create_server(Door, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            answers.append(await asyncio.to_thread(_shake, port, trusted, shown, most))
            await until(lambda: caplog.records)
        return f"127.0.0.1:{port}"

    with caplog.at_level(logging.WARNING), looking_after_handshakes():
        address = run(serve())
    [record] = caplog.records
    assert (record.name, record.levelname) == ("qflow", "WARNING")
    assert record.getMessage().startswith(f"TLS with 127.0.0.1 failed at {address}: {logged}")
    assert answers[0].endswith(told)


@pytest.mark.parametrize("fail", [_look, _talk_otherwise])
def test_who_looks_whether_a_port_is_open_leaves_no_line(
    fail: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A load balancer does, each second, and who scans ports."""

    async def serve() -> None:
        context = Certificates(PEM / "server.pem", PEM / "server.key").context()
        async with await asyncio.get_running_loop().create_server(Door, "127.0.0.1", 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            await asyncio.to_thread(fail, port)
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context())

    with caplog.at_level(logging.WARNING), looking_after_handshakes():
        run(serve())
    assert caplog.records == []
