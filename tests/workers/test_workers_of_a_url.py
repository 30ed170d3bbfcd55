"""`qflow work` and `qflow.workers.run` on the broker of another host, by Arrow Flight: TLS, tokens, a broker away."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyarrow.flight")

import qflow
import qflow.flight
import qflow.workers
from doors.command_line import CommandLine
from qflow.serving.certificates import Certificates
from workers.conftest import JOBS, Working, kill

PEM = Path(__file__).parent.parent / "serving" / "certificates"
CERTIFICATES = Certificates(PEM / "server.pem", PEM / "server.key")
OLD, NEW = "old-token-0123456789", "new-token-0123456789"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """The file of tokens that both sides have."""
    path = tmp_path / "tokens"
    path.write_text(f"# of the cluster\n{OLD}\n")
    return path


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[qflow.Broker]:
    with qflow.open(tmp_path / "there") as broker:
        broker.declare_queue("jobs", max_deliveries=2)
        yield broker


def test_workers_of_another_host_lose_nothing(cli: CommandLine, broker: qflow.Broker, tokens: Path) -> None:
    """One is killed at a message, which another has then; the broker goes away and comes back with another token."""
    for name in ("one", "two"):
        os.mkfifo(cli.directory / name)
    jobs = broker.queue("jobs")
    with qflow.flight.serve(broker, port=0, token_file=tokens, certificates=CERTIFICATES) as server:
        port = server.port
        options = ("--processes", 3, "--token-file", tokens, "--ca", PEM / "ca.pem")
        working = Working(cli, "wait", *options, spool=f"grpc+tls://localhost:{port}")
        working.until(rf"3 processes work on queue 'jobs'; the broker is grpc\+tls://localhost:{port}")
        jobs.put(b"one")
        one = int(working.until(r"(\d+) does one")[1])
        kill(one)
        working.until(r"ended by SIGKILL at message 0 of queue 'jobs', which goes back")
        other = int(working.found(rf"^(?!{one} )(\d+) does one")[1])  # it may have begun before that was said
    working.until("the workers wait")
    kill(other)
    tokens.write_text(f"{NEW}\n")
    with qflow.flight.serve(broker, port=port, token_file=tokens, certificates=CERTIFICATES):
        working.until("the workers go on")
        jobs.put(b"two")
        working.until("does two")
        working.signal()
        with open(cli.directory / "two", "w"):
            pass
        assert working.end() == 128 + signal.SIGTERM
        assert len(jobs) == 0


def test_what_is_wrong_with_a_url_is_said_before_a_process_starts(cli: CommandLine, broker: qflow.Broker) -> None:
    function = f"{JOBS}:say"
    with qflow.flight.serve(broker, port=0) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        done = cli.run("work", url, "job", function)
        assert (done.returncode, b"there is no queue 'job'" in done.stderr) == (2, True), done.stderr
        with pytest.raises(qflow.InvalidArgument, match="certificates are for grpc"):
            qflow.workers.run(url, "jobs", function, ca=PEM / "ca.pem")
    done = cli.run("work", url, "jobs", function)
    assert (done.returncode, b"nobody answers at" in done.stderr) == (4, True), done.stderr
    done = cli.run("work", broker.path, "jobs", function, "--ca", PEM / "ca.pem")
    assert (done.returncode, b"for the URL of a broker" in done.stderr) == (2, True), done.stderr
    empty = cli.directory / "empty"
    empty.write_text("# nothing\n")
    with pytest.raises(qflow.NotFound, match="has none: write it on a line"):
        qflow.workers.run(url, "jobs", function, token_file=empty)
