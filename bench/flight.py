"""A stream read and written by a client of Arrow Flight on loopback; the owner is in a process of its own.

Beside it, a server of pyarrow's that has the same batches in memory, without qflow: what the wire costs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import qflow
import qflow.flight
from bench.children import alive, report, wait_to_be_killed
from bench.errors import CannotRun
from bench.measure import Row, Series, Setup, Workload, at_least, interleave, rates
from bench.timing import timed

STREAM, TOPICS, BATCH = "plants", 100, 10_000


def serve(spool: str) -> None:
    """Child: own a spool with a door, until it is killed."""
    with qflow.open(spool) as broker, qflow.flight.serve(broker, port=0) as server:
        report(f"grpc://127.0.0.1:{server.port}")
        wait_to_be_killed()


def serve_bare(spool: str) -> None:
    """Child: serve the same batches from memory, with nothing of qflow's, until it is killed."""
    import pyarrow.flight as pf

    with qflow.open(spool) as broker, qflow.flight.serve(broker, port=0) as server:
        table = pf.connect(f"grpc://127.0.0.1:{server.port}").do_get(ticket()).read_all()

    class Bare(pf.FlightServerBase):  # type: ignore[misc]
        def do_get(self, context: Any, asked: Any) -> Any:
            return pf.RecordBatchStream(table)

    bare = Bare("grpc+tcp://127.0.0.1:0")
    report(f"grpc://127.0.0.1:{bare.port}")
    wait_to_be_killed()


ROLES = {"flight-owner": serve, "flight-bare": serve_bare}


def ticket() -> Any:
    """Return the ticket of the whole stream."""
    import pyarrow.flight as pf

    return pf.Ticket(json.dumps({"stream": STREAM}).encode())


def _flight() -> Any:
    try:
        import pyarrow.flight as pf
    except ImportError as error:
        raise CannotRun(f"Arrow Flight needs the extra net: {error}") from error
    return pf


def read(setup: Setup) -> Iterator[Row]:
    """Read a million messages by one client."""
    pf = _flight()
    messages, size = setup.size(1_000_000, 10_000), 100
    setup.need_disk(messages * (size + 50) * 2)
    with setup.scratch() as path:
        spool = path / "spool"
        _fill(str(spool), messages, size)
        taken = {}
        for name, role in (("qflow", "flight-owner"), ("batches in memory, without qflow", "flight-bare")):
            with alive(role, spool) as url, pf.connect(url) as client:
                side = _reading(client, messages)
                side()
                (taken[name],) = interleave(setup.rounds, 1, side)
    ours, bare = (rates(name, messages, seconds) for name, seconds in taken.items())
    name = f"Arrow Flight: {messages:,} x {size} B read by one client on loopback"
    yield Row(name=name, figure=ours, bound=at_least(2e6, "/s"), details=[bare])


def _reading(client: Any, messages: int) -> Callable[[], float]:
    def side() -> float:
        begun = perf_counter()
        rows = sum(chunk.data.num_rows for chunk in client.do_get(ticket()))
        seconds = perf_counter() - begun
        assert rows == messages
        return seconds

    return side


def write(setup: Setup) -> Iterator[Row]:
    """Publish record batches of ten thousand rows, each a commit."""
    import pyarrow as pa

    pf = _flight()
    batches, size = setup.size(30, 2), 100
    setup.need_disk(batches * BATCH * (size + 50) * (setup.few_rounds + 2))
    rows = pa.record_batch(
        {"topic": [_topic(number) for number in range(BATCH)], "value": pa.array([bytes(size)] * BATCH, pa.binary())}
    )
    with setup.scratch() as path:
        spool = path / "spool"
        _fill(str(spool), 0, size)
        with alive("flight-owner", spool) as url, pf.connect(url) as client:

            @timed
            def side() -> None:
                writer, answers = client.do_put(pf.FlightDescriptor.for_command(b'{"publish": {}}'), rows.schema)
                with writer:
                    for _ in range(batches):
                        writer.write_batch(rows)
                    for _ in range(batches):
                        answers.read()

            side()
            (seconds,) = interleave(setup.few_rounds, 1, side)
    figure: Series = rates("published", batches * BATCH, seconds)
    yield Row(name=f"Arrow Flight: batches of {BATCH:,} x {size} B published, each a commit", figure=figure)


def _fill(spool: str, messages: int, size: int) -> None:
    with qflow.open(spool) as broker:
        broker.declare_stream(STREAM, topics=["plant/#"])
        for first in range(0, messages, BATCH):
            broker.publish_many((_topic(number), bytes(size)) for number in range(first, min(first + BATCH, messages)))


def _topic(number: int) -> str:
    return f"plant/{number % TOPICS:02d}/heat"


WORKLOADS = [
    Workload("flight-read", "one client of pyarrow's reads a stream over Arrow Flight on loopback", read),
    Workload("flight-publish", "one client of pyarrow's publishes record batches", write),
]
