"""A standalone cluster of Spark on this machine: a master and workers, each on a host of its own as far as that goes.

A worker runs in a mount namespace in which the directory of the spools is empty. Where this user may make no such
namespace, `why_not` says why. It is on a host of a network, as far as there can be one; see `networks`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

from spark.networks import Loopback, Network
from spark.trees import kill_session
from unit.clocks import until

_STARTED = re.compile(r"Starting Spark master at (spark://\S+)")
_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xss512k"


class Cluster:
    """A master and workers of one core each. `close` kills all that they have started."""

    def __init__(self, directory: Path, hidden: Path, network: Network | Loopback) -> None:
        """Start it, a worker on each host, and return while these start; `hidden` is a directory that none sees into."""
        import pyspark

        from qflow.spark.java import find_java, worker_python

        self._directory = directory
        self._network = network
        self._processes: list[subprocess.Popen[bytes]] = []
        home = Path(pyspark.__file__).parent
        self.environment = os.environ | {
            "JAVA_HOME": find_java(),
            "SPARK_HOME": str(home),
            "PYSPARK_PYTHON": worker_python(),
            "QFLOW_PYTHON": sys.executable,
            "SPARK_LOG_DIR": str(directory),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": _OPTIONS,
            "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
        }
        self._spark_class = str(home / "bin" / "spark-class")
        self._start("master", [], network.here, "org.apache.spark.deploy.master.Master", "--port", "0")
        until(lambda: _STARTED.search(self.log("master")) is not None)
        found = _STARTED.search(self.log("master"))
        assert found is not None
        self.url = found[1]
        """For `master`."""
        self.workers = [self._start_worker(number, hidden) for number in range(len(network.addresses))]

    def log(self, name: str) -> str:
        """Return what a process of it has said so far."""
        return (self._directory / f"{name}.log").read_text(errors="replace")

    def _start_worker(self, number: int, hidden: Path) -> int:
        name = f"worker-{number}"
        work = self._directory / name
        work.mkdir()
        options = ["--cores", "1", "--memory", "512m", "--work-dir", str(work), self.url]
        there = [*self._network.on(number), *apart(), f'mount -t tmpfs nothing "{hidden}" && exec "$@"', "sh"]
        kind = "org.apache.spark.deploy.worker.Worker"
        return self._start(name, there, self._network.addresses[number], kind, *options)

    def _start(self, name: str, there: list[str], host: str, kind: str, *options: str) -> int:
        command = [*there, self._spark_class, kind, "--host", host, "--webui-port", "0", *options]
        with open(self._directory / f"{name}.log", "wb") as said:
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=self._directory,
                    env=self.environment | {"SPARK_LOCAL_IP": host},
                )
            )
        return self._processes[-1].pid

    def executors(self) -> list[int]:
        """Return the processes that run tasks."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                command = Path("/proc", pid, "cmdline").read_bytes()
                if b"CoarseGrainedExecutorBackend" in command:
                    parent = int(Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1])
                    if parent in self.workers:
                        found.append(int(pid))
        return found

    def kill_an_executor(self, draw: Random) -> bool:
        """Kill one, if there is one."""
        there = self.executors()
        if there:
            with suppress(ProcessLookupError):
                os.kill(draw.choice(there), signal.SIGKILL)
        return bool(there)

    def close(self) -> None:
        """Kill everything."""
        for process in self._processes:
            kill_session(process.pid)
            process.wait()


def apart() -> list[str]:
    """Return the beginning of a command that runs a shell script in a mount namespace of its own."""
    as_root = ["unshare", "--mount", "--propagation", "private"]
    return [*(as_root if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", *as_root[1:]]), "sh", "-c"]


def why_not(directory: Path) -> str | None:
    """Return why this machine cannot have hosts apart from each other; None if it can."""
    try:
        tried = subprocess.run(
            [*apart(), f'mount -t tmpfs nothing "{directory}"'], capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError as error:
        return f"there is no mount namespace for a worker: {error}"
    return None if not tried.returncode else f"there is no mount namespace for a worker: {tried.stderr.strip()}"
