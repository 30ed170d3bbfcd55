"""Memory for record batches on their way: one budget for all calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pf = pytest.importorskip("pyarrow.flight")

import qflow  # noqa: E402
import qflow.flight  # noqa: E402
from flight.test_flight_reading import refused, ticket  # noqa: E402
from flight.test_flight_writing import put, rows  # noqa: E402
from qflow.flight import writing  # noqa: E402
from qflow.flight.owner import Owner  # noqa: E402
from qflow.flight.reading import Read  # noqa: E402
from qflow.flight.room import BUDGET_BYTES, LARGE, STALLED_S, Room  # noqa: E402
from qflow.flight.words import Command  # noqa: E402
from unit.clocks import Clock, until  # noqa: E402


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


def reads(owner: Owner, leaves: Callable[[], bool] = lambda: False) -> Any:
    """Return the batches of a read of `large`."""
    asked = ticket(stream="large", start=0)
    return Read(owner, Command.parse(asked.ticket, "the ticket")).batches(leaves, nothing)


@pytest.fixture
def owner(broker: qflow.Broker) -> Owner:
    """The owner of a stream of three messages, with room for two of them on their way."""
    broker.declare_stream("large", topics=["large/#"])
    for number in range(3):
        broker.publish("large/a", bytes([number]) * 3 * LARGE)
    owner = Owner(broker)
    owner.room = Room(7 * LARGE)
    return owner


def test_readers_that_take_nothing_hold_a_bounded_number_of_batches(owner: Owner) -> None:
    """One more waits before its batch is made, outside of a transaction, and gets it when one is taken."""
    one, two, three = reads(owner), reads(owner), reads(owner)
    next(one)
    next(two)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(lambda: next(three)["offset"].to_pylist())
        until(lambda: owner.room.waiting)
        assert [batch["offset"].to_pylist() for batch in two] == [[1], [2]]
        assert waiting.result(30) == [0]
    assert [batch["offset"].to_pylist() for batch in three] == [[1], [2]]
    one.close()
    assert owner.room.share(nothing).has(7 * LARGE), "nothing is held any more"


def test_a_reader_that_leaves_while_it_waits_is_no_failure(owner: Owner) -> None:
    """It is told nothing, and nothing is left of it."""
    with owner.room.share(nothing) as holder:
        holder.wait(7 * LARGE)
        with pytest.raises(pf.FlightCancelledError):
            next(reads(owner, leaves=lambda: True))
    assert not owner.room.waiting


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
        sending.result(30)
    assert answers == [{"messages": 1, "first": 0}, {"messages": 1, "first": 1}]
    assert owner.room.share(nothing).has(BUDGET_BYTES)
