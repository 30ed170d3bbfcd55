"""Memory for record batches on their way: one budget for all calls."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pf = pytest.importorskip("pyarrow.flight")

import qflow  # noqa: E402
import qflow.flight  # noqa: E402
from flight.test_flight_reading import refused, ticket  # noqa: E402
from flight.test_flight_writing import put, rows  # noqa: E402
from qflow.arrow import columns  # noqa: E402
from qflow.flight import writing  # noqa: E402
from qflow.flight.owner import Owner  # noqa: E402
from qflow.flight.reading import Read  # noqa: E402
from qflow.flight.room import BUDGET_BYTES, LARGE, STALLED_S, Room  # noqa: E402
from qflow.flight.words import Command  # noqa: E402
from unit.clocks import LONG_S, Clock, until  # noqa: E402

PUTS = """
import sys
import pyarrow as pa
import pyarrow.flight as pf
batch = pa.record_batch({"value": pa.array([bytes(2**21)], pa.binary())})
descriptor = pf.FlightDescriptor.for_command(b'{"put": "jobs"}')
writer, reader = pf.connect(sys.argv[1]).do_put(descriptor, batch.schema)
writer.write_batch(batch)
reader.read()
"""


class Left(Exception):
    """What a check raises."""


def nothing() -> None:
    """Check nothing."""


def leave() -> None:
    """End whoever waits."""
    raise Left


def test_room_is_given_in_turn() -> None:
    """Who comes later waits behind who waits for more; small batches need none."""
    room = Room(4 * LARGE)
    first, second, third = (room.share(nothing) for _ in range(3))
    assert first.has(3 * LARGE)
    assert not second.has(2 * LARGE)
    assert not third.has(LARGE)
    assert third.has(LARGE - 1)
    first.free()
    assert not third.has(LARGE)
    assert second.has(2 * LARGE)
    assert third.has(LARGE)


def test_who_waits_holds_nothing() -> None:
    """Two that hold room, and need more, do not wait for each other."""
    room = Room(4 * LARGE)
    first, second = room.share(nothing), room.share(nothing)
    assert first.has(2 * LARGE)
    assert second.has(2 * LARGE)
    assert not first.has(3 * LARGE)
    assert not second.has(3 * LARGE)
    assert first.has(3 * LARGE)
    first.free()
    assert second.has(3 * LARGE)


class Turn(threading.Condition):
    """Counts how often it is notified."""

    notified = 0

    def notify(self, n: int = 1) -> None:
        self.notified += 1


def test_what_gives_nothing_back_wakes_nobody() -> None:
    """As a call with small batches, which frees after each; what does wakes the first in line."""
    room = Room(4 * LARGE)
    holder, first, second, small = (room.share(nothing) for _ in range(4))
    turns = [Turn(room.lock), Turn(room.lock)]
    first.turn, second.turn = turns
    assert holder.has(4 * LARGE)
    assert not first.has(LARGE)
    assert not second.has(LARGE)
    assert small.has(LARGE - 1)
    small.free()
    assert [turn.notified for turn in turns] == [0, 0]
    holder.free()
    assert [turn.notified for turn in turns] == [1, 0]
    assert first.has(LARGE)
    assert [turn.notified for turn in turns] == [1, 1]


def test_what_is_larger_than_all_room_has_it_alone() -> None:
    """Nothing waits for good."""
    room = Room(4 * LARGE)
    small, large = room.share(nothing), room.share(nothing)
    assert small.has(LARGE)
    assert not large.has(9 * LARGE)
    small.free()
    assert large.has(9 * LARGE)
    assert not small.has(LARGE)
    large.free()
    assert small.has(LARGE)


def test_one_that_has_stalled_holds_up_nobody_for_good() -> None:
    """It counts for a while; what it leaves later is left once."""
    clock = Clock()
    room = Room(4 * LARGE, clock.monotonic)
    stalled, other, last = (room.share(nothing) for _ in range(3))
    assert stalled.has(4 * LARGE)
    assert not other.has(4 * LARGE)
    clock.advance(STALLED_S)
    assert other.has(4 * LARGE)
    stalled.free()
    assert not last.has(LARGE)


def test_a_client_that_leaves_while_it_waits_leaves_the_line() -> None:
    """So does one whose door is closed: its check raises."""
    room = Room(4 * LARGE)
    holder, other = room.share(nothing), room.share(nothing)
    holder.wait(4 * LARGE)
    with pytest.raises(Left), room.share(leave) as leaving:
        leaving.wait(LARGE)
    assert not room.waiting
    holder.free()
    assert other.has(4 * LARGE)


def reads(owner: Owner, stay: Callable[[], None] = nothing, **asked: Any) -> Any:
    """Return the batches of a read of `large`."""
    return Read(owner, Command.parse(ticket(stream="large", start=0, **asked).ticket, "the ticket")).batches(stay)


@pytest.fixture
def owner(broker: qflow.Broker) -> Owner:
    """The owner of a stream of three messages, with room for two of them on their way."""
    broker.declare_stream("large", topics=["large/#"])
    for number in range(3):
        broker.publish("large/a", bytes([number]) * 3 * LARGE)
    owner = Owner(broker)
    owner.room = Room(7 * LARGE, Clock().monotonic)
    return owner


def offsets(batches: Any, most: int) -> list[int]:
    """Return those in the next batches, at most so many."""
    return [number for batch in islice(batches, most) for number in batch["offset"].to_pylist()]


@pytest.mark.parametrize("topics", ["#", "large/+"])
def test_readers_that_take_nothing_hold_a_bounded_number_of_batches(owner: Owner, topics: str) -> None:
    """One more waits before its batch is made, outside of a transaction, and gets it when one is taken."""
    one, two, three = (reads(owner, filter=topics) for _ in range(3))
    next(one)
    next(two)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(offsets, three, 1)
        until(lambda: owner.room.waiting)
        following = threads.submit(offsets, two, 1)
        assert waiting.result(LONG_S) == [0]
        until(lambda: owner.room.waiting)
        one.close()
        assert following.result(LONG_S) == [1]
    assert offsets(two, 2) == [2]
    assert offsets(three, 3) == [1, 2]
    assert owner.room.share(nothing).has(7 * LARGE), "nothing is held any more"


@pytest.mark.parametrize("topics", ["#", "large/+"])
def test_a_reader_that_waits_keeps_no_batch(owner: Owner, topics: str) -> None:
    """What was taken of it is gone from memory before it gets into line."""
    clock = Clock()
    owner.room = Room(7 * LARGE, clock.monotonic)
    before = pa.total_allocated_bytes()
    reader = reads(owner, filter=topics)
    next(reader)
    clock.advance(STALLED_S)
    with ThreadPoolExecutor() as threads:
        with owner.room.share(nothing) as holder:
            holder.wait(7 * LARGE)
            waiting = threads.submit(offsets, reader, 1)
            until(lambda: owner.room.waiting)
            assert pa.total_allocated_bytes() - before < LARGE
        assert waiting.result(LONG_S) == [1]


def test_small_columns_of_large_messages_need_no_room(owner: Owner) -> None:
    """They are counted by what is asked for."""
    with owner.room.share(nothing) as holder:
        holder.wait(7 * LARGE)
        batches = list(reads(owner, filter="large/+", columns=["offset", "topic"]))
    assert [batch["offset"].to_pylist() for batch in batches] == [[0, 1, 2]]


def test_what_is_gathered_for_a_filter_holds_no_room(owner: Owner) -> None:
    """Room was for the messages of which it is a small part."""
    batches = reads(owner, filter="large/+", columns=["key"])
    assert next(batches).num_rows == 3
    assert owner.room.share(nothing).has(7 * LARGE)


def test_a_reader_that_leaves_while_it_waits_is_no_failure(owner: Owner) -> None:
    """Nothing is left of it."""
    with owner.room.share(nothing) as holder:
        holder.wait(7 * LARGE)
        with pytest.raises(Left):
            next(reads(owner, leave))
    assert not owner.room.waiting


def test_a_client_that_dies_while_its_put_waits_leaves_the_line(broker: qflow.Broker) -> None:
    """Nothing of it is stored later."""
    with qflow.flight.serve(broker, port=0) as server, ExitStack() as stack:
        room = server._owner.room = Room(4 * LARGE, Clock().monotonic)
        stack.enter_context(room.share(nothing)).wait(4 * LARGE)
        command = [sys.executable, "-c", PUTS, f"grpc://127.0.0.1:{server.port}"]
        process = stack.enter_context(subprocess.Popen(command))
        stack.callback(process.kill)
        until(lambda: room.waiting)
        process.kill()
        until(lambda: not room.waiting)
    assert len(broker.queue("jobs")) == 0


@pytest.mark.parametrize("command", [{"publish": {"topic": "plant/1"}}, {"put": "jobs"}])
def test_a_batch_that_is_too_large_is_refused_before_it_is_decoded(
    command: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As objects of Python it would take several times as much."""
    monkeypatch.setattr(writing, "_rows", None)
    with qflow.open(tmp_path / "small", max_transaction_bytes="1MiB") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        broker.declare_queue("jobs")
        with qflow.flight.serve(broker, port=0) as server, pf.connect(f"grpc://127.0.0.1:{server.port}") as client:
            error = refused(lambda: put(client, command, rows(value=[bytes(600_000)] * 2)))
    assert isinstance(error, qflow.TransactionTooLarge)
    assert "2 messages of 1200000 bytes together are more than max_transaction_bytes=1048576" in str(error)


@pytest.mark.parametrize("command", [{"publish": {"topic": "plant/1"}}, {"put": "jobs"}])
@pytest.mark.parametrize("kind", [pa.binary(), pa.binary_view(), pa.dictionary(pa.int8(), pa.binary())])
def test_a_message_that_nobody_admits_is_refused_before_it_is_decoded(
    command: dict[str, Any], kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is as large as any may be is stored, also above what a transaction has."""
    with qflow.open(tmp_path / "small", max_transaction_bytes="1MiB") as broker:
        broker.declare_stream("plants", topics=["plant/#"], max_message_bytes="2MiB")
        broker.declare_queue("jobs", max_message_bytes="2MiB", durable=False)
        with qflow.flight.serve(broker, port=0) as server, pf.connect(f"grpc://127.0.0.1:{server.port}") as client:
            assert put(client, command, one_of(kind, 2**21 - 100))[0]["messages"] == 1
            monkeypatch.setattr(writing, "_rows", None)
            error = refused(lambda: put(client, command, one_of(kind, 2**21 + 1)))
    assert isinstance(error, qflow.MessageTooLarge)
    assert "a message of 2097153 bytes is more than max_message_bytes=2097152 of whoever may take it" in str(error)


def one_of(kind: Any, size: int) -> Any:
    """Return a batch of one message."""
    body = pa.array([bytes(size)])
    return rows(value=body.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else body.cast(kind))


def test_bodies_that_stand_for_one_another_are_counted_each(owner: Owner) -> None:
    """A dictionary of one body is small, and what it stands for is not."""
    bodies = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int16()), pa.array([bytes(2**20)]))
    with (
        qflow.flight.serve(owner.broker, port=0) as server,
        pf.connect(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        error = refused(lambda: put(client, {"put": "jobs"}, rows(value=bodies)))
    assert isinstance(error, qflow.TransactionTooLarge)
    assert "3000 messages of 3145728000 bytes together" in str(error)


@pytest.mark.parametrize("column", ["key", "topic", "value"])
@pytest.mark.parametrize("kind", ["publish", "stage"])
@pytest.mark.parametrize("is_dictionary", [True, False])
def test_what_stands_for_far_more_than_was_sent_is_refused_before_it_is_decoded(
    owner: Owner, kind: str, column: str, is_dictionary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column of a MiB stands for two thousand, by a dictionary of one value, or by views of it."""
    monkeypatch.setattr(columns, "_TYPES", None)
    of_stage = {"uuid": owner.uuid, "query": "q", "batch": 0, "token": "0" * 32, "name": "a"}
    command = Command({kind: of_stage if kind == "stage" else {}}, "it")
    batch = {"key": pa.array([b"k"] * 2000), "topic": pa.array(["a"] * 2000), "value": pa.array([b"v"] * 2000)}
    batch[column] = repeated(2000, batch[column].type, is_dictionary=is_dictionary)
    with owner.room.share(nothing) as share:
        sent = writing.Batches(rows(**batch).schema, iter([rows(**batch)]), share)
        with pytest.raises(qflow.TransactionTooLarge, match="2000 (rows|messages) .*209715"):
            writing.write(owner, command, sent, pytest.fail)


def repeated(count: int, kind: Any, *, is_dictionary: bool) -> Any:
    """Return a column of one value of a MiB, many times."""
    if is_dictionary:
        return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int16()), pa.array([bytes(2**20)]).cast(kind))
    view = pa.binary_view() if pa.types.is_binary(kind) else pa.string_view()
    validity, views, value = pa.array([bytes(2**20)]).cast(kind).cast(view).buffers()
    return pa.Array.from_buffers(view, count, [validity, pa.py_buffer(views.to_pybytes()[:16] * count), value])


def test_batches_wait_for_room_before_they_are_decoded(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives it back when it is stored."""
    decoded = []
    original = writing._rows
    monkeypatch.setattr(writing, "_rows", lambda *asked: decoded.append(1) or original(*asked))
    batch = rows(value=[bytes(2 * LARGE)])
    answers: list[Any] = []

    def send() -> None:
        with owner.room.share(nothing) as share:
            sent = writing.Batches(batch.schema, iter([batch, batch]), share)
            writing.write(owner, Command.parse(json.dumps({"put": "jobs"}).encode(), "it"), sent, answers.append)

    with ThreadPoolExecutor() as threads, owner.room.share(nothing) as holder:
        holder.wait(7 * LARGE)
        sending = threads.submit(send)
        until(lambda: owner.room.waiting)
        assert not decoded
        holder.free()
        sending.result(60)
    assert answers == [{"messages": 1, "first": 0}, {"messages": 1, "first": 1}]
    assert owner.room.share(nothing).has(BUDGET_BYTES)
