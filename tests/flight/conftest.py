"""A spool, a door for Arrow Flight on it, and a client that is pyarrow's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pf = pytest.importorskip("pyarrow.flight")

import qflow  # noqa: E402
import qflow.flight  # noqa: E402

Act = Callable[..., Any]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[qflow.Broker]:
    """A broker with the stream `plants`, two partitions, and the queue `jobs`."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"], partitions=2)
        broker.declare_queue("jobs")
        yield broker


@pytest.fixture
def server(broker: qflow.Broker) -> Iterator[qflow.flight.Server]:
    """A door on it, on any port of this machine."""
    with qflow.flight.serve(broker, port=0) as server:
        yield server


@pytest.fixture
def client(server: qflow.flight.Server) -> Iterator[Any]:
    """A client of pyarrow's."""
    with pf.connect(f"grpc://127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture
def act(client: Any) -> Act:
    """Does an action: its name, and the fields of its object."""

    def act(name: str, **fields: Any) -> Any:
        (answer,) = client.do_action(pf.Action(name, json.dumps(fields).encode()))
        return json.loads(answer.body.to_pybytes())

    return act
