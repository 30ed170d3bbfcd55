"""What all tests share: spools that are checked when the test ends."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, Phase, settings

import drivers
import large_pages
import processes
import qflow
import scratch
from crash import beside
from doors import forking
from thorough import TORTURE

PATIENCE_S = 10
"""A process of pytest that is gone has ended by then."""
SPARK_TIMEOUT_S = 900
"""Some of its tests begin several sessions, each with a Java of its own."""
SPOOLS_BYTES = 4 * 2**30
"""What the spools of all tests together may take at a time is less."""
FORKING = ("crash", "faults", "model")
"""Directories with tests that fork thousands of times: what that costs grows with the memory of who forks."""
TESTS_A_FREEZE = 100
"""So many tests leave little for a collection to go through; see `freeze`."""
ended = itertools.count(1)
NO_SESSION = {
    "test_cluster.py",
    "test_flight_away.py",
    "test_flight_places.py",
    "test_flight_tasks.py",
    "test_parts.py",
    "test_places.py",
    "test_reader_steps.py",
    "test_readers.py",
    "test_script.py",
}
"""Files of the tests of Spark that need no session here: they run beside those that share one, one after the other."""
EARLY = {"test_types.py"}
"""Long ones that would come last, and be waited for: large groups are begun first, and they are in that one."""
SHARING = {"test_layout.py", "test_streams_real_data.py"}
"""Files whose tests share what takes seconds to make: one process of several runs all tests of one."""


settings.register_profile(
    "untimed",
    deadline=None,
    max_examples=100 if TORTURE else 50,
    suppress_health_check=[HealthCheck.too_slow],
    phases=set(Phase) if TORTURE else set(Phase) - {Phase.shrink},
)
settings.load_profile("untimed")
"""What is asked of an example is that it holds, not that it does so in time: others work beside it.

One that fails is told as it is: Hypothesis may make it smaller for as long as a test may take, whose time-out ends the
process, and nothing is told.
"""


def pytest_configure(config: pytest.Config) -> None:
    """Have the processes that tests begin share what they compile, also where no bytecode is to lie beside the sources.

    There are more than a thousand of them, and compiling the package takes each longer than the rest of its start. What
    they compile lies in a directory of the run.
    """
    if hasattr(config, "workerinput"):
        pytest_timeout.dump_stacks = lambda _: faulthandler.dump_traceback(sys.__stderr__)  # its own are not seen
    else:
        os.dup2(1, 2)  # the stacks of one of several processes, at a crash or a time-out, are part of the run's output
    if sys.dont_write_bytecode and sys.pycache_prefix is None:
        directory = tempfile.TemporaryDirectory(prefix="qflow-bytecode-", ignore_cleanup_errors=True)
        config.add_cleanup(directory.cleanup)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = directory.name
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy: with more, each import spins, and no test multiplies
    collect_in_turns(config)
    if (memory := scratch.in_memory(SPOOLS_BYTES)) is not None:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def freeze() -> None:
    """Have collections pass over what is there, until it is freed: half a million objects of the tests that are known.

    With them, and with what is kept of tests that ran, each collection of everything takes 0.2 s.
    """
    gc.collect()
    gc.freeze()


def collect_in_turns(config: pytest.Config) -> None:
    """Have each process of several begin with another part of the tests: it finds the rest compiled by the others."""
    here = Path(__file__).parent
    worker = getattr(config, "workerinput", None)
    if worker is not None and [Path(arg) for arg in config.args] in ([here], [here.relative_to(config.rootpath)]):
        parts = sorted(str(path) for path in here.iterdir() if path.is_dir() or path.name.startswith("test_"))
        first = len(parts) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = parts[first:] + parts[:first]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have tests be found without collections of garbage: what is found stays, and each would go through all of it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what needs Spark: it takes longest; and with what forks, before these processes have grown."""
    for item in items:
        if "spark" in item.path.parts:
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
    items.sort(key=lambda item: ("spark" not in item.path.parts, item.path.parent.name not in FORKING, item.path))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Make forks cheap: what is there now stays to the end, so that no collection needs to touch it in a child."""
    freeze()
    large_pages.gather()


def pytest_runtest_logfinish() -> None:
    """Keep forks cheap, where there were many, and collections."""
    large_pages.gather_after_forks()
    if next(ended) % TESTS_A_FREEZE == 0:
        freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one process run all that needs Spark with `--dist loadgroup`: the session is shared, and takes 400 MB.

    So it does with the tests of each of some files.

    With pytest 9.2, pytest-xdist 3.8 sees no mark `xdist_group`: it adds the group to an attribute that is read no more.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class OneSpark(LoadGroupScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0].split("/")
            if path[-1] in EARLY or ("spark" in path and path[-1] in NO_SESSION):
                return "early"
            if "spark" in path:
                return "spark"
            return path[-1] if path[-1] in SHARING else str(super()._split_scope(nodeid))

        def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
            """Forget the groups that are done: all that a process ever had would be gone through after each test."""
            for scope in [scope for scope, tests in workload.items() if all(tests.values())]:
                del workload[scope]
            return int(super()._pending_of(workload))

    return OneSpark(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a process of several has ended, where that is not as it should: by which signal, or with which code."""
    if error is not None:
        with suppress(subprocess.TimeoutExpired):
            status = node.gateway._io.popen.wait(PATIENCE_S)
            how = (signal.strsignal(-status) or f"signal {-status}") if status < 0 else f"exit code {status}"
            node.config.pluginmanager.get_plugin("terminalreporter").write_line(f"[{node.gateway.id}] ended: {how}")


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_run() -> Iterator[None]:
    """What tests have begun has ended when the last of them has; in each process of pytest."""
    mark = processes.mark_children()
    yield
    beside.end()
    forking.end()
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
def access(request: pytest.FixtureRequest) -> str:
    """How a test has a broker: as its `owner`, or through the `door` of one; see `pytest_generate_tests`."""
    access: str = getattr(request, "param", drivers.OWNER)
    return access


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what is marked `two_drivers` once in the owner and once through the door, but for what is `owner_only`."""
    test = metafunc.definition
    wanted = test.get_closest_marker("two_drivers") and not test.get_closest_marker("owner_only")
    if wanted and "access" in metafunc.fixturenames:
        metafunc.parametrize("access", [drivers.OWNER, drivers.DOOR], indirect=True)


@pytest.fixture
def open_spool(spool: Path, access: str) -> Iterator[Callable[..., qflow.Broker]]:
    """Open the spool with some settings; whatever is open at the end must pass its own check, and is closed."""
    with drivers.opening(access, lambda **settings: qflow.open(spool, **settings)) as open_it:
        yield open_it
