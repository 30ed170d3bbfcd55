"""Celery with `qflow:///path` for its broker, and nothing else: workers and clients that find each other by the spool."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import kombu.pools
import pytest

import qflow.kombu  # noqa: F401 - the transport
from amqp_workers import WATCHDOG_S, end, kill, wait_for, worker
from local_servers import entry_points, pid, url, wait_for_the_end
from thorough import TORTURE

THIRD = 3400 if TORTURE else 100
"""Tasks before something is killed, and after the last."""


def celery(directory: Path, url: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a worker with two processes beside a block; not where this process is, as the path of the spool is absolute."""
    directory.mkdir()
    command = ("-m", "celery", "-A", "celery_app", "worker", "--concurrency=2", "--loglevel=INFO", "--without-mingle")
    path = entry_points(directory), Path(__file__).parent.parent
    return worker(directory, " ready.", *command, path=path, QFLOW_TEST_URL=url)


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
    with celery(tmp_path / "first", tasks.app.conf.broker_url) as first:
        results = [tasks.add.delay(number, 1) for number in range(50)]
        assert [result.get(timeout=WATCHDOG_S) for result in results] == list(range(1, 51))
        for number in range(THIRD):
            tasks.note.delay(number, str(done))
        killed = pid(spool)
        os.kill(killed, signal.SIGKILL)
        for number in range(THIRD, 2 * THIRD):
            tasks.note.delay(number, str(done))
        assert pid(spool) != killed
        wait_for(lambda: len(noted(done)) == 2 * THIRD)
        for number in range(2 * THIRD, 3 * THIRD):
            tasks.note.delay(number, str(done))
        kill(first)
    with celery(tmp_path / "second", tasks.app.conf.broker_url) as second:
        wait_for(lambda: len(noted(done)) == 3 * THIRD)
        end(second)
    assert noted(done) == set(range(3 * THIRD))


def test_tasks_for_later_do_not_hold_up_others(spool: Path, tasks: types.ModuleType, tmp_path: Path) -> None:
    """A worker that holds as many of them as it takes ahead does the others meanwhile."""
    with celery(tmp_path / "only", url(spool)) as process:
        for number in range(3 * tasks.app.conf.worker_prefetch_multiplier):
            tasks.note.apply_async((number, str(tmp_path / "done")), countdown=86_400)
        assert tasks.add.delay(1, 2).get(timeout=WATCHDOG_S) == 3
        end(process)
    assert noted(tmp_path / "done") == set()


def test_a_limit_of_celery_is_that_of_a_worker(spool: Path) -> None:
    """Of all its queues together: Celery gives it to the channel where a server tells a channel from its consumers."""
    with kombu.Connection(url(spool)) as connection:
        assert not connection.qos_semantics_matches_spec
    wait_for_the_end(spool)


def test_the_server_ends_after_the_worker(spool: Path, tmp_path: Path) -> None:
    """A worker that is told to end leaves nothing behind."""
    with celery(tmp_path / "only", url(spool)) as process:
        end(process)
    wait_for_the_end(spool)
    assert (spool / "amqp" / "log").read_text() == ""
    assert (spool / "amqp" / "serving").read_bytes() == b""
