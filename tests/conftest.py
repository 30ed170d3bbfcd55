"""What all tests share: spools that are checked when the test ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import processes
import qflow

SPARK_TIMEOUT_S = 900
"""Some of its tests begin several sessions, each with a Java of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one process run all that needs Spark, and begin with it: the session is shared, and takes 400 MB."""
    for item in items:
        if "spark" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("spark"))
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_run() -> Iterator[None]:
    """What tests have begun has ended when the last of them has; in each process of pytest."""
    mark = processes.mark_children()
    yield
    found = processes.left_over(mark)
    processes.end(found)
    assert not found, [f"{process.pid}: {process.command}" for process in found]


@pytest.fixture(scope="session", autouse=True)
def signals_are_noticed() -> None:
    """Processes that tests begin are ended by Ctrl-C and SIGHUP, also where a shell runs the tests in the background."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """A path where no spool is yet."""
    return tmp_path / "spool"


@pytest.fixture
def open_spool(spool: Path) -> Iterator[Callable[..., qflow.Broker]]:
    """Open the spool with some settings; whatever is open at the end must pass its own check, and is closed."""
    opened: list[qflow.Broker] = []

    def open_it(**settings: Any) -> qflow.Broker:
        broker = qflow.open(spool, **settings)
        opened.append(broker)
        return broker

    yield open_it
    for broker in opened:
        if not broker.closed:
            assert broker.check() == []
            broker.close()
