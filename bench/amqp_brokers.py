"""Brokers of AMQP as processes: `qflow serve`, and RabbitMQ where it is installed.

RabbitMQ runs as it comes, in a directory and with a name directory (epmd) of its own, so that none that runs already is
touched; its data lie on the file system that qflow's spool lies on.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from time import monotonic, sleep

import attrs

from bench import children
from bench.errors import CannotRun
from bench.measure import Setup

QFLOW = "qflow serve"
RABBITMQ = "RabbitMQ"
RABBITMQ_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""What Debian's wrapper starts, which would run as another user and write elsewhere."""
HOST = "127.0.0.1"
CAPACITY = "64MiB"
PATIENCE_S = 60.0
LOOK_S = 0.002
LOG = "log"


@attrs.frozen
class Broker:
    """One that listens."""

    name: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        """Where it is; connections send no heartbeats, as their loops stand still while the other side has its turn."""
        return f"amqp://guest:guest@{HOST}:{self.port}/?heartbeat=0"

    def anonymous_bytes(self) -> int:
        """Return the RssAnon of its processes, which are one session."""
        found = [_anonymous_bytes(entry) for entry in Path("/proc").glob("[0-9]*") if _session(entry) == self.pid]
        if not found:
            raise CannotRun(f"{self.name}: {children.NO_RSS}")
        return sum(found)


def _session(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[3])
    except OSError:  # it has ended meanwhile
        return 0


def _anonymous_bytes(entry: Path) -> int:
    try:
        lines = (entry / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


Start = Callable[[Path, int], AbstractContextManager[Broker]]
"""Start a broker on a directory, with its data if there are any, and a port; listening or not when it returns. It is
killed with SIGKILL at the end."""


@contextmanager
def qflow(directory: Path, port: int) -> Iterator[Broker]:
    command = [sys.executable, "-m", "qflow", "serve", str(directory / "spool")]
    command += ["--amqp", f"{HOST}:{port}", "--capacity", CAPACITY]
    with _process(directory, command, {}) as process:
        yield Broker(QFLOW, port, process.pid)


@contextmanager
def rabbitmq(directory: Path, port: int) -> Iterator[Broker]:
    names_port = free_port()
    configuration = directory / "rabbitmq.conf"
    configuration.touch()
    (directory / "plugins").write_text("[].")
    settings = {
        "HOME": str(directory),
        "ERL_EPMD_PORT": str(names_port),
        "ERL_EPMD_ADDRESS": HOST,
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": HOST,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_CONFIG_FILE": str(configuration.with_suffix("")),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
    }
    with (
        _process(directory, ["epmd", "-address", HOST, "-port", str(names_port)], {}),
        _process(directory, [str(RABBITMQ_SERVER)], settings) as process,
    ):
        yield Broker(RABBITMQ, port, process.pid)


def wait_until_it_listens(broker: Broker) -> None:
    """Wait until a connection is taken and answered."""
    deadline = monotonic() + PATIENCE_S
    while not _answers(broker.port):
        if not Path(f"/proc/{broker.pid}").exists() or _has_ended(broker.pid):
            raise CannotRun(f"{broker.name} ended before it listened")
        if monotonic() > deadline:
            raise CannotRun(f"{broker.name} did not listen after {PATIENCE_S:.0f} s")
        sleep(LOOK_S)


def starters(setup: Setup) -> tuple[dict[str, Start], dict[str, str]]:
    """Return how the brokers that take part are started, and why others do not, by their names."""
    found: dict[str, Start] = {QFLOW: qflow}
    if setup.quick:
        return found, {RABBITMQ: f"{RABBITMQ} is left out of a quick run"}
    if not RABBITMQ_SERVER.exists() or not shutil.which("epmd"):
        return found, {RABBITMQ: f"{RABBITMQ} is not installed"}
    return found | {RABBITMQ: rabbitmq}, {}


@contextmanager
def running(setup: Setup) -> Iterator[tuple[dict[str, Broker], str]]:
    """Run all brokers that can run; give them by name, and why one is missing."""
    with ExitStack() as stack:
        found: dict[str, Broker] = {}
        started, reasons = starters(setup)
        for name, start in started.items():
            directory = stack.enter_context(setup.scratch())  # relative to where the bench runs
            broker = stack.enter_context(start(directory.absolute(), free_port()))
            try:
                wait_until_it_listens(broker)
                found[name] = broker
            except CannotRun as error:
                reasons[name] = f"{error}: {_last_line(directory)}"
        yield found, reasons.get(QFLOW) or reasons.get(RABBITMQ, "")


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


@contextmanager
def _process(directory: Path, command: list[str], settings: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with (
        open(directory / LOG, "ab") as log,
        subprocess.Popen(
            command, cwd=directory, env=_environment() | settings, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Return this process's, with the qflow that the bench itself imports before any other."""
    root = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=PATIENCE_S) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(connection.recv(1))
    except OSError:
        return False


def _has_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _last_line(directory: Path) -> str:
    lines = (directory / LOG).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
