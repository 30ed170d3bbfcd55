"""`qflow serve --https`: the page over TLS, to browsers and programs, with certificates that are renewed."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
from pathlib import Path

import pytest

import mqtt_served
from layout import ROOT

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
httpx = pytest.importorskip("httpx")
web_served = pytest.importorskip("web_served")

PEM = ROOT / "tests/serving/certificates"
WATCHDOG_S = 120


def shown(port: int) -> str:
    """Return the certificate that a handshake shows."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=WATCHDOG_S)


def test_the_page_is_served_over_tls_and_takes_new_certificates(tmp_path: Path) -> None:
    """Who has logged in stays so; what is broken is told and the old one stays; plain HTTP gets no answer."""
    cert, key, users = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "users.json"
    shutil.copy(PEM / "server.pem", cert)
    shutil.copy(PEM / "server.key", key)
    users.write_text(web_served.users().text())
    options = ("--https", "127.0.0.1:0", "--cert", "cert.pem", "--key", "key.pem", "--users", "users.json")
    with mqtt_served.serving(tmp_path, *options) as (process, ports):
        port, trusted = ports["https"][0], ssl.create_default_context(cafile=PEM / "ca.pem")
        browser = httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, headers={"Accept": "text/html"})
        with browser:
            answer = browser.get("/queues")
            assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fqueues")
            answer = browser.post("/login", data={"name": "anna", "password": web_served.PASSWORD, "next": "/queues"})
            assert (answer.status_code, answer.headers["location"]) == (303, "/queues")
            cookie = answer.headers["set-cookie"]
            assert cookie.startswith(f"__Host-qflow-{port}=")
            assert {"Secure", "HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
            assert "Log out anna" in browser.get("/queues").text
            with socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"HTTP" not in plain.makefile("rb").read()
            assert process.stderr is not None
            shutil.copy(PEM / "renewed.pem", cert)  # the key is still the other one's
            process.send_signal(signal.SIGHUP)
            assert process.stderr.readline().startswith("qflow: nothing is reloaded")
            assert shown(port) == (PEM / "server.pem").read_text()
            shutil.copy(PEM / "renewed.key", key)
            process.send_signal(signal.SIGHUP)
            assert process.stderr.readline() == "qflow: users, tokens and certificates are read anew\n"
            assert shown(port) == (PEM / "renewed.pem").read_text()
            assert "Log out anna" in browser.get("/queues").text
        with httpx.Client(base_url=f"https://localhost:{port}", verify=trusted, auth=("anna", "wrong")) as program:
            assert program.get("/api/overview").status_code == 401
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read().splitlines() == [
            "qflow: a login as 'anna' from 127.0.0.1 was refused",
            "qflow: SIGTERM: clients have 10 s to finish; a second signal ends at once",
        ]
