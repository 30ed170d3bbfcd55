"""Celery with `qflow:///path` for its broker, and nothing else: workers and clients that find each other by the spool."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kombu.pools
import pytest

import qflow.kombu  # noqa: F401 - the transport
from amqp_clients import PATIENCE_S
from local_servers import entry_points, pid, url, wait_for_the_end

WATCHDOG_S = 60


@contextmanager
def worker(directory: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    """Run a worker with two processes beside a block, from when it is ready; all of it is killed at the end."""
    path = [str(entry_points(directory)), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    command = ["-m", "celery", "-A", "celery_app", "worker", "--concurrency=2", "--loglevel=INFO", "--without-mingle"]
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=directory,  # not where this process is: the path is absolute
        env={**os.environ, "QFLOW_TEST_URL": url, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        said: list[str] = []
        is_ready = threading.Event()

        def listen() -> None:
            for line in process.stdout or ():
                said.append(line)
                if " ready." in line:
                    is_ready.set()
            is_ready.set()

        listening = threading.Thread(target=listen)
        listening.start()
        try:
            assert is_ready.wait(WATCHDOG_S)
            assert process.poll() is None, "".join(said)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            listening.join()


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spool that is not there yet; the app names it."""
    monkeypatch.setenv("QFLOW_TEST_URL", url(tmp_path / "a spool"))
    return tmp_path / "a spool"


@pytest.fixture
def tasks(spool: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The app, in this process."""
    monkeypatch.delitem(sys.modules, "celery_app", raising=False)
    module = importlib.import_module("celery_app")
    yield module
    module.app.backend.result_consumer.on_after_fork()  # closes its connection: that may be to a server that was killed
    module.app.close()
    kombu.pools.reset()
    wait_for_the_end(spool)


def noted(path: Path) -> set[int]:
    return set(map(int, path.read_text().split())) if path.exists() else set()


def wait_until(holds: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if holds():
            return
        tick.wait(0.02)
    raise AssertionError("it did not come")


def test_kombu_finds_the_transport_by_the_entry_point(tmp_path: Path) -> None:
    """As Celery imports it; the serializer that the entry point stands for is none."""
    script = """
import celery, kombu
app = celery.Celery(broker="qflow:///srv/spool")
print(app.connection().transport_cls, app.connection().transport.driver_type, app.connection().as_uri())
try:
    kombu.serialization.dumps({}, serializer="qflow")
except kombu.exceptions.SerializerNotInstalled as error:
    print(error)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{entry_points(tmp_path)}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines() == ["qflow amqp qflow:///srv/spool", "No encoder installed for qflow"]


def test_tasks_of_several_processes_are_done_whatever_is_killed(
    spool: Path, tasks: types.ModuleType, tmp_path: Path
) -> None:
    """The server once, and the worker once with the tasks it holds; each task whose `delay` returned is done."""
    done = tmp_path / "done"
    with worker(tmp_path / "first", tasks.app.conf.broker_url) as first:
        results = [tasks.add.delay(number, 1) for number in range(50)]
        assert [result.get(timeout=WATCHDOG_S) for result in results] == list(range(1, 51))
        for number in range(100):
            tasks.note.delay(number, str(done))
        killed = pid(spool)
        os.kill(killed, signal.SIGKILL)
        for number in range(100, 200):
            tasks.note.delay(number, str(done))
        assert pid(spool) != killed
        wait_until(lambda: len(noted(done)) == 200)
        for number in range(200, 300):
            tasks.note.delay(number, str(done))
        os.killpg(first.pid, signal.SIGKILL)
    with worker(tmp_path / "second", tasks.app.conf.broker_url) as second:
        wait_until(lambda: len(noted(done)) == 300)
        second.send_signal(signal.SIGTERM)
        assert second.wait(WATCHDOG_S) == 0
    assert noted(done) == set(range(300))


def test_the_server_ends_after_the_worker(spool: Path, tmp_path: Path) -> None:
    """A worker that is told to end leaves nothing behind."""
    with worker(tmp_path / "only", url(spool)) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(WATCHDOG_S) == 0
    wait_for_the_end(spool)
    assert (spool / "amqp" / "log").read_text() == ""
    assert (spool / "amqp" / "serving").read_bytes() == b""
