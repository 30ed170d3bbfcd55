"""One local Spark for all tests of this room: it takes ten seconds to start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qflow
from qflow.errors import NotFound
from spark import reader_process as there
from spark.reader_process import ReaderProcess
from spark.task_doors import At, Time
from spark.trees import Trees
from unit.clocks import Clock, open_still

QUICK_TO_START = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    "-XX:MetaspaceSize=192m -XX:+UnlockExperimentalVMOptions -XX:SymbolTableSize=262144"
)
"""For each Java that is begun here: nothing runs long, and the bytecode of Spark needs no check.

Sixteen thousand classes are loaded, with 350,000 names: there is room for both from the beginning, without collections
of everything on the way and long searches for a name.
"""


@pytest.fixture(scope="session", autouse=True)
def java_is_quick_to_start() -> None:
    """Whoever starts a Java in a process of the run."""
    os.environ.setdefault("JDK_JAVA_OPTIONS", QUICK_TO_START)


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session with two tasks at once; the only one of a run by groups."""
    if getattr(request.config.option, "loadgroup", False):
        (tmp_path_factory.getbasetemp().parent / "the session of Spark").mkdir()
    pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
    from qflow.spark import session

    warehouse = tmp_path_factory.mktemp("warehouse")
    try:
        found = session(
            "tests",
            master="local[2]",
            spark__sql__warehouse__dir=str(warehouse),
            spark__sql__codegen__wholeStage=False,  # nor are rows so many that code is worth being made for them
            spark__sql__codegen__factoryMode="NO_CODEGEN",
            spark__driver__extraJavaOptions="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # nothing runs long here
        )
    except NotFound as error:
        pytest.skip(str(error))
    yield found
    found.stop()


@pytest.fixture
def trees() -> Iterator[Trees]:
    """Workers that are killed, with what they have started."""
    started = Trees()
    yield started
    started.kill_all()


@pytest.fixture
def broker(open_spool: Callable[..., qflow.Broker]) -> qflow.Broker:
    """An owner of the spool, alive while Spark reads."""
    return open_spool()


@pytest.fixture
def plants(broker: qflow.Broker) -> Any:
    """A stream of one partition."""
    return broker.declare_stream("plants", topics=["plant/#"])


@pytest.fixture
def read(spark: Any, spool: Path) -> Callable[..., Any]:
    """Return a data frame of the spool, by options."""

    def read_it(*, schema: str | None = None, **options: Any) -> Any:
        reader = spark.read.format("qflow")
        if schema is not None:
            reader = reader.schema(schema)
        return reader.options(**options).load(str(spool))

    return read_it


@pytest.fixture
def clock() -> Clock:
    """What `still` goes by."""
    return Clock()


@pytest.fixture
def still(spool: Path, clock: Clock) -> Iterator[qflow.Broker]:
    """An owner whose retention is a step of the test: `Stream.retain`."""
    broker = open_still(spool, clock)
    yield broker
    assert broker.check() == []
    broker.close()


@pytest.fixture(scope="module")
def process() -> Iterator[ReaderProcess]:
    found = ReaderProcess()
    yield found
    found.close()


@pytest.fixture
def reader(process: ReaderProcess, spool: Path) -> Iterator[ReaderProcess]:
    yield process
    process(there.let_go, str(spool))


@pytest.fixture
def at() -> Iterator[At]:
    """Opens doors: returns the place behind one."""
    from qflow.flight import serve
    from qflow.spark.places.calls import Door
    from qflow.spark.places.flight import FlightPlace

    servers = []

    def open_door(broker: qflow.Broker, **options: Any) -> FlightPlace:
        servers.append(serve(broker, port=0))
        return FlightPlace(Door(f"grpc://127.0.0.1:{servers[-1].port}", **options))

    yield open_door
    for server in servers:
        server.close()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """A time that waits for doors go by."""
    from qflow.spark.places import calls

    found = Time()
    monkeypatch.setattr(calls, "time", found)
    return found
