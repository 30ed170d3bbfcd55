"""Doors at which nobody answers, without a Spark: how long they are waited for, and how they are tried again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import qflow
from spark.task_doors import At, Time, asked, values

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
pytest.importorskip("pyarrow.flight", reason="Arrow Flight is not installed: pip install .[net]")

from qflow.arrow.states import SpoolState
from qflow.flight import serve
from qflow.spark.places import calls
from qflow.spark.places.calls import Door
from qflow.spark.places.flight import FlightPlace
from qflow.spark.places.local import LocalPlace
from qflow.spark.ranges import look_at
from qflow.spark.words import Away


class Dying:
    """A connection of which each read dies before its batch of a number, counted from 0."""

    def __init__(self, door: Door, before: int) -> None:
        self._client = door.client()
        self._before = before
        self.reads = 0

    def do_get(self, *asked: Any) -> Iterator[Any]:
        import pyarrow.flight as pf

        self.reads += 1
        for number, chunk in enumerate(self._client.do_get(*asked)):
            if number == self._before:
                raise pf.FlightUnavailableError("the connection was cut")
            yield chunk


@pytest.mark.parametrize("before", [0, 1])
def test_a_task_goes_on_as_long_as_rows_come(
    at: At, tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """However often connections die; where none brings a row, it ends when its patience does, with pauses."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        for number in range(8):
            broker.publish("plant/1", b"%d" % number + b" " * 2**20)
        place = at(broker, patience_s=20.0)
        reading = asked(place, 0, 8)
        dying = Dying(place.door, before)
        monkeypatch.setattr(Door, "client", lambda _: dying)
        if before:
            assert values(place, reading) == list(range(8))
            assert set(time.slept) == {min(time.slept)}, "none came of a broker that was away for long"
            return
        with pytest.raises(Away, match="the connection was cut.*it was waited for 2[01] s .*brokerTimeout"):
            values(place, reading)
        assert dying.reads < 30
        with pytest.raises(Away, match="has been waited for before"):
            values(place, reading)
        monkeypatch.undo()
        assert values(place, reading) == list(range(8))


def test_what_is_answered_slowly_uses_up_no_patience(time: Time) -> None:
    """It counts from when the broker went away; and again from when it has answered."""
    import pyarrow.flight as pf

    door = Door("grpc://127.0.0.1:4", patience_s=10.0)
    fails = iter([300.0, 0.0, 0.0])

    def call(_client: object) -> str:
        for taken_s in fails:
            time.now_s += taken_s
            raise pf.FlightUnavailableError("the owner was killed")
        return "an answer"

    assert door.wait_for(call) == "an answer"
    assert len(time.slept) == 3
    waiting = door.waiting()
    for _ in range(3):
        time.now_s += 300  # what came was worked on
        waiting.go_on(Away("it is away"))
        waiting.answered()
    with pytest.raises(Away, match="it was waited for 1[01] s"):
        for _ in range(100):
            waiting.go_on(Away("it is away"))


def test_a_broker_that_cancels_its_calls_as_it_ends_is_away(time: Time) -> None:
    """So is one that cannot be reached, or says that it is closing."""
    import pyarrow.flight as pf

    for kind in (pf.FlightCancelledError, pf.FlightUnavailableError, pf.FlightTimedOutError):
        call = Mock(side_effect=[kind("CANCELLED"), "an answer"])
        assert Door("grpc://127.0.0.1:5").wait_for(call) == "an answer"
    assert len(time.slept) == 3


# One that hangs -------------------------------------------------------------------------------------------------------


class Cable:
    """A port before that of a door; what goes through it from either side stays in it, once it is `pulled`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends = [socket.create_server(("127.0.0.1", 0))]
        self.url = f"grpc://127.0.0.1:{self._ends[0].getsockname()[1]}"
        self.pulled = threading.Event()
        self.pulled_after: int | None = None
        """How many bytes of the door go through it before it is pulled; None = whoever has it pulls it."""
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=target, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._ends[0].accept()
                self.connections += 1
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                self._start(self._carry, near, far)
                self._start(self._carry, far, near, True)

    def _carry(self, one: socket.socket, other: socket.socket, is_of_the_door: bool = False) -> None:
        carried = 0
        with suppress(OSError):
            while data := one.recv(2**16):
                if not self.pulled.is_set():
                    other.sendall(data)
                carried += len(data)
                if is_of_the_door and self.pulled_after is not None and carried > self.pulled_after:
                    self.pulled.set()
            other.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all that goes through it."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Cable]:
    """One that leads to a broker with eight messages of 1 MiB."""
    with qflow.open(tmp_path / "spool") as broker, serve(broker, port=0) as server:
        broker.declare_stream("plants", topics=["plant/#"])
        for number in range(8):
            broker.publish("plant/1", b"%d" % number + b" " * 2**20)
        found = Cable(server.port)
        yield found
        found.close()


def test_a_call_is_given_no_longer_than_a_broker_is_waited_for(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waited for its answer counts; a busy broker has 10 s, and a commit waits as long as its option says."""
    import pyarrow.flight as pf

    within: list[float | None] = []
    client = Mock()

    def options(_: Door, within_s: float | None = None) -> None:
        within.append(within_s)

    def unanswered(*_: Any) -> Any:
        time.now_s += within[-1] or 0.0
        raise pf.FlightTimedOutError("Deadline Exceeded")

    client.do_action = unanswered
    monkeypatch.setattr(Door, "client", lambda _: client)
    monkeypatch.setattr(Door, "options", options)
    with pytest.raises(Away, match="it was waited for 10 s "):
        Door("grpc://127.0.0.1:6", patience_s=5.0).action("describe", {})
    assert (within, time.slept) == ([10.0], [])
    with pytest.raises(Away, match="it was waited for 60 s "):
        Door("grpc://127.0.0.1:7", patience_s=60.0).action("describe", {})
    assert (within[1:], len(time.slept)) == ([30.0, 30.0], 1)
    with pytest.raises(Away, match="it was waited for 150 s "):
        Door("grpc://127.0.0.1:8", patience_s=5.0).action("adopt", {}, within_s=150.0)


def test_a_task_notices_a_broker_that_hangs(cable: Cable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pings are not answered, and neither are its connections."""
    monkeypatch.setattr(calls, "_PING_EVERY_S", 10.0)  # gRPC takes no less
    monkeypatch.setattr(calls, "_PING_S", 1.0)
    cable.pulled_after = 5 * 2**19  # which is amid the second batch
    place = FlightPlace(Door(cable.url, patience_s=1.0))
    reading = asked(place, 0, 8)
    rows, raised = [], []

    def read() -> None:
        try:
            rows.extend(batch.num_rows for batch in place.read(reading))
        except Away as error:
            raised.append(str(error))

    task = threading.Thread(target=read, daemon=True)
    task.start()
    task.join(150)
    assert not task.is_alive()
    assert ["see option brokerTimeout" in text for text in raised] == [True]
    assert 0 < sum(rows) < 8


def once_it_answers(place: FlightPlace) -> SpoolState:
    """Look at a place that may take longer than it is waited for: some times."""
    for _ in range(100):
        with suppress(Away):
            return place.look()
    raise AssertionError("it does not answer")


def test_who_goes_on_without_a_broker_tries_one_that_hangs_now_and_then(
    cable: Cable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A try takes a while, so none is made for some time after it; who needs the broker tries it all the same."""
    monkeypatch.setattr(calls, "_LEAST_S", 0.5)
    monkeypatch.setattr(calls, "_PEACE_S", 1000.0)
    door = Door(cable.url, patience_s=0.5)
    place, here = FlightPlace(door), LocalPlace(str(tmp_path / "here"))
    with qflow.open(tmp_path / "here"):
        pass
    there = once_it_answers(place)
    cable.pulled.set()
    with pytest.raises(Away, match="it was waited for"):
        place.look()
    with pytest.raises(Away, match="has been waited for before"):
        place.look()
    with monkeypatch.context() as patch:
        patch.setattr(Door, "client", Mock(side_effect=AssertionError))
        assert [seen.place for seen in look_at([place, here], skip_away=True)] == [here]
    cable.pulled.clear()
    assert place.rests
    assert once_it_answers(place).uuid == there.uuid
    assert not place.rests
