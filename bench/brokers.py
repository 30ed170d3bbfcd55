"""Brokers as processes: started on a directory and a port, waited for, looked at, killed."""

from __future__ import annotations

import os
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
from bench.measure import Bound, Row, Series, Setup

QFLOW = "qflow serve"
HOST = "127.0.0.1"
CAPACITY = "64MiB"
PATIENCE_S = 60.0
LOOK_S = 0.002
LOG = "log"


@attrs.frozen
class Broker:
    """One that listens.

    Args:
        hello: what a client says first, and is answered.
    """

    name: str
    port: int
    pid: int
    hello: bytes

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
Running = tuple[dict[str, Broker], str]
"""Brokers by name, and why one is missing."""


@contextmanager
def qflow(directory: Path, port: int, option: str, hello: bytes) -> Iterator[Broker]:
    """Start `qflow serve` with a door that an option asks for, such as `--amqp`."""
    command = [sys.executable, "-m", "qflow", "serve", str(directory / "spool")]
    command += [option, f"{HOST}:{port}", "--capacity", CAPACITY]
    with process(directory, command, {}) as started:
        yield Broker(QFLOW, port, started.pid, hello)


def own(name: str, found: dict[str, Series], bound: Bound, problems: dict[str, str], notes: list[str]) -> Row:
    """Return the row of a figure of qflow's own, with the other broker's beside it."""
    others = [series for broker, series in found.items() if broker != QFLOW]
    if QFLOW not in found:
        return Row(name=name, problem=f"not measured: {problems.get(QFLOW, '')}", details=others, notes=notes)
    return Row(name=name, figure=found[QFLOW], bound=bound, details=others, notes=[*notes, *problems.values()])


def wait_until_it_listens(broker: Broker) -> None:
    """Wait until a connection is taken and answered."""
    deadline = monotonic() + PATIENCE_S
    while not _answers(broker):
        if not Path(f"/proc/{broker.pid}").exists() or _has_ended(broker.pid):
            raise CannotRun(f"{broker.name} ended before it listened")
        if monotonic() > deadline:
            raise CannotRun(f"{broker.name} did not listen after {PATIENCE_S:.0f} s")
        sleep(LOOK_S)


@contextmanager
def running(setup: Setup, started: dict[str, Start], reasons: dict[str, str]) -> Iterator[Running]:
    """Run all brokers that can run; give them by name, and why one is missing.

    Args:
        started: how, by name.
        reasons: why others do not run, by name.
    """
    with ExitStack() as stack:
        found: dict[str, Broker] = {}
        missing = dict(reasons)
        for name, start in started.items():
            directory = stack.enter_context(setup.scratch())  # relative to where the bench runs
            broker = stack.enter_context(start(directory.absolute(), free_port()))
            try:
                wait_until_it_listens(broker)
                found[name] = broker
            except CannotRun as error:
                missing[name] = f"{error}: {_last_line(directory)}"
        yield found, missing.get(QFLOW) or next(iter(missing.values()), "")


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        return int(one.getsockname()[1])


@contextmanager
def process(directory: Path, command: list[str], settings: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own, with its output in a file, until it is killed at the end."""
    with (
        open(directory / LOG, "ab") as log,
        subprocess.Popen(
            command, cwd=directory, env=_environment() | settings, stdout=log, stderr=log, start_new_session=True
        ) as started,
    ):
        try:
            yield started
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Return this process's, with the qflow that the bench itself imports before any other."""
    root = str(Path(__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def _answers(broker: Broker) -> bool:
    try:
        with socket.create_connection((HOST, broker.port), timeout=PATIENCE_S) as connection:
            connection.sendall(broker.hello)
            return bool(connection.recv(1))
    except OSError:
        return False


def _has_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _last_line(directory: Path) -> str:
    lines = (directory / LOG).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
