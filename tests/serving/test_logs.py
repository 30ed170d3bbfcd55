"""The log on one line for each record: for people, and as JSON with fields."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import mqtt_served
import qflow
from layout import ROOT
from qflow.cli.server import FORMATTERS, JsonLines, OneLine


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    """Return one as a logger makes it."""
    return logging.getLogger("qflow").makeRecord(
        "qflow", logging.ERROR, "f.py", 1, message, arguments, None, extra=extra
    )


def test_a_record_is_a_json_object_on_one_line() -> None:
    """With its fields, whatever they are, and nothing of the process."""
    line = JsonLines().format(record("queue %r is\nfull", "a\x1b", queue="a\x1b", event="full", path=Path("/x")))
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "error",
        "logger": "qflow",
        "message": "queue 'a\\x1b' is\nfull",
        "queue": "a\x1b",
        "event": "full",
        "path": "/x",
    }


def test_a_traceback_is_a_field() -> None:
    """So it does not break the line."""
    one = record("it failed")
    try:
        raise LookupError("no such thing")
    except LookupError:
        one.exc_info = sys.exc_info()
    line = JsonLines().format(one)
    assert "\n" not in line
    assert "LookupError: no such thing" in json.loads(line)["exception"]
    assert OneLine("%(message)s").format(one).count("\n") > 1


def test_people_get_one_line() -> None:
    """Whatever a client sent."""
    assert FORMATTERS["text"]().format(record("bad\r\nname")) == "qflow: bad name"


def test_records_of_a_broker_have_fields(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A consumer that fails says of which queue."""
    called = threading.Event()

    def fail(delivery: qflow.Delivery) -> None:
        called.set()
        raise LookupError("no such customer")

    with qflow.open(tmp_path / "spool") as broker:
        jobs = broker.declare_queue("jobs", max_deliveries=1)
        jobs.put(b"x")
        with jobs.consume(fail):
            assert called.wait(60)
    found = [one for one in caplog.records if getattr(one, "event", None) == "consumer_failed"]
    assert [vars(one)["queue"] for one in found] == ["jobs"]


def test_a_server_logs_json(tmp_path: Path) -> None:
    """Each line of stderr is an object, also what is said of the service."""
    options = ("--mqtt", "127.0.0.1:0", "--log-format", "json")
    with mqtt_served.serving(tmp_path, *options) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert any(line["event"] == "service" and "SIGTERM" in line["message"] for line in lines)


def test_grpc_writes_no_lines_of_its_own(tmp_path: Path) -> None:
    """Whoever knocks without TLS at a door that speaks it: what a server says on stderr is JSON, all of it."""
    pytest.importorskip("pyarrow.flight")
    (tmp_path / "tokens").write_text("0123456789abcdef\n")
    pem = Path(__file__).parent / "certificates"
    options = ("--cert", pem / "server.pem", "--key", pem / "server.key", "--token-file", tmp_path / "tokens")
    command = ("serve", tmp_path / "spool", "--flight", "127.0.0.1:0", *options, "--log-format", "json")
    with subprocess.Popen(
        [sys.executable, "-m", "qflow", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as knocking:
            knocking.sendall(b"GET / HTTP/1.0\r\n\r\n")
            while knocking.recv(1024):
                pass
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=120)
    assert [json.loads(line)["event"] for line in errors.splitlines()] == ["service"]


@pytest.mark.parametrize(("given", "kept"), [(None, "NONE"), ("DEBUG", "DEBUG")])
def test_what_grpc_is_to_say_may_be_set(given: str | None, kept: str) -> None:
    """By its own variable, also for clients, from what first imports the room on."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    told = subprocess.run(
        [sys.executable, "-c", "import os, qflow.flight; print(os.environ['GRPC_VERBOSITY'])"],
        env=environment | ({} if given is None else {"GRPC_VERBOSITY": given}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == f"{kept}\n"


def test_the_page_lists_every_event() -> None:
    """Those that the code tells."""
    code = "".join(path.read_text() for path in (ROOT / "qflow").rglob("*.py"))
    events = set(re.findall(r'(?:"event": |\bevent=)"(\w+)"', code))
    section = (ROOT / "docs/howto/metrics.md").read_text().split("## The log")[1]
    assert events == {
        name for row in re.findall(r"^\| (`.+?) \|", section, re.M) for name in re.findall(r"`(\w+)`", row)
    } - {"event"}
