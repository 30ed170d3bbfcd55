"""Who collects while signals come, descriptors are used up or an `Accept` makes no sense."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

import qflow
import qflow.metrics
from qflow.errors import NO_THREAD
from qflow.metrics import door, naming, sources
from qflow.metrics.collecting import Exposition
from qflow.serving.addresses import Address


def test_the_main_thread_collects_with_no_lock_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that collects, too, waited for good for the lock of what it had interrupted."""
    threads: list[threading.Thread] = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            threads.append(threading.current_thread())
            return work(*arguments, **named)

        return noted

    monkeypatch.setattr(sources, "ASKED", 0)
    monkeypatch.setattr(naming.Naming, "divide", noting(naming.Naming.divide))
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("jobs")
        figures = type(broker.engine.figures)
        monkeypatch.setattr(figures, "changes", noting(figures.changes))
        assert b'queue="jobs"' in Exposition(qflow.metrics.collector(broker)).text()
    assert len(threads) == 4
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", "text/plain; version==; ;;="])
def test_an_accept_that_cannot_be_read_is_none(tmp_path: Path, accept: str) -> None:
    """Whoever reaches a door may send one: it was answered by 500, and a traceback in the log."""
    with qflow.open(tmp_path / "spool") as broker:
        body, content_type = Exposition(qflow.metrics.collector(broker)).answer(accept)
        assert content_type.startswith("text/plain")
        assert b"qflow_up 1.0" in body
        statuses: list[str] = []
        registry = door.CollectorRegistry()
        registry.register(qflow.metrics.collector(broker))
        app = door.make_wsgi_app(registry)
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "HTTP_ACCEPT": accept}
        told = b"".join(door._answer(app, environ, lambda status, _headers: statuses.append(status)))
        assert statuses == ["200 OK"]
        assert b"qflow_up 1.0" in told


def test_a_door_without_descriptors_waits_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that cannot be taken stays there, and was tried again at once: that took a whole processor."""
    pauses: list[float] = []
    server = door._Server(Address("127.0.0.1", 0))
    try:

        def accept(_: object) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(door.WSGIServer, "get_request", accept)
        monkeypatch.setattr(door.time, "sleep", pauses.append)
        with socket.create_connection(server.server_address[:2]):
            server.handle_request()
        assert pauses == [door.PAUSE_S]
    finally:
        server.server_close()


def test_a_look_that_gets_no_thread_is_one_of_a_broker_that_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other metrics of the program go on."""
    with qflow.open(tmp_path / "spool") as owner, qflow.connect(owner.path) as broker:
        collector = qflow.metrics.collector(broker)

        def refused(_: threading.Thread) -> None:
            raise RuntimeError(NO_THREAD)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            text = Exposition(collector).text()
        assert b"qflow_up 0.0" in text
        assert b"qflow_up 1.0" in Exposition(collector).text()
