"""Streams read by any Arrow client: what there is, ranges, filters, and what comes from now on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

pa = pytest.importorskip("pyarrow")
pf = pytest.importorskip("pyarrow.flight")

import qflow  # noqa: E402
import qflow.arrow.reading  # noqa: E402
from qflow.arrow.ranges import Span  # noqa: E402
from qflow.flight import reading, words  # noqa: E402
from qflow.flight.owner import Owner  # noqa: E402
from qflow.flight.reading import Losses, Read  # noqa: E402
from qflow.flight.words import Command  # noqa: E402


def ticket(**fields: Any) -> Any:
    """Return a ticket of these fields."""
    return pf.Ticket(json.dumps(fields).encode())


def refused(call: Callable[[], object]) -> qflow.QflowError:
    """Return the error that a call brings back from the owner."""
    with pytest.raises(pf.FlightError) as caught:
        call()
    error = words.error_of(caught.value)
    assert error is not None, caught.value
    assert str(error) in str(caught.value), "its sentence is what any client shows"
    return error


def told(client: Any, **fields: Any) -> list[tuple[int, Any]]:
    """Return (rows, what is told to be lost) of each batch of a read that goes on behind what is lost."""
    chunks = client.do_get(ticket(**fields, fail_on_data_loss=False))
    beside = [(chunk.data.num_rows, chunk.app_metadata) for chunk in chunks]
    said = [(rows, None if data is None else json.loads(data.to_pybytes())) for rows, data in beside]
    assert all(one is None or one["more"] == 0 for _, one in said)
    return [(rows, None if one is None else one["losses"]) for rows, one in said]


def fill(broker: qflow.Broker, count: int = 100) -> list[bytes]:
    """Publish so many messages to three topics, in one partition or the other; return their bodies."""
    bodies = [b"%d" % number for number in range(count)]
    broker.publish_many((f"plant/{number % 3}", body) for number, body in enumerate(bodies))
    return bodies


def test_a_client_lists_streams_and_reads_all_of_them(broker: qflow.Broker, client: Any) -> None:
    """Endpoints have tickets that together give every message once, in the schema that was told."""
    bodies = fill(broker)
    (info,) = client.list_flights()
    assert (info.descriptor.path, info.total_records) == ([b"plants"], 100)
    tables = [client.do_get(endpoint.ticket).read_all() for endpoint in info.endpoints]
    assert {table.schema for table in tables} == {info.schema}
    rows = [row for table in tables for row in table.to_pylist()]
    assert sorted(row["value"] for row in rows) == sorted(bodies)
    assert {row["topic"] for row in rows} == {"plant/0", "plant/1", "plant/2"}
    for number, table in enumerate(tables):
        assert table["offset"].to_pylist() == list(range(table.num_rows))
        assert set(table["partition"].to_pylist()) <= {number}


def test_a_path_names_a_stream_or_a_partition(broker: qflow.Broker, client: Any) -> None:
    """GetFlightInfo and GetSchema take [stream] and [stream, partition]."""
    fill(broker)
    whole = client.get_flight_info(pf.FlightDescriptor.for_path("plants"))
    parts = [client.get_flight_info(pf.FlightDescriptor.for_path("plants", str(number))) for number in (0, 1)]
    assert whole.total_records == sum(part.total_records for part in parts) == 100
    assert [len(part.endpoints) for part in parts] == [1, 1]
    assert client.get_schema(pf.FlightDescriptor.for_path("plants")).schema == whole.schema


def test_a_range_a_filter_and_columns_are_kept_to(broker: qflow.Broker, client: Any) -> None:
    """A ticket says which offsets, which topics and which columns."""
    fill(broker)
    end = broker.stream("plants").stats().next_offsets[0]
    table = client.do_get(
        ticket(stream="plants", partition=0, start=3, end=end - 2, columns=["offset", "topic"])
    ).read_all()
    assert table.column_names == ["offset", "topic"]
    assert table["offset"].to_pylist() == list(range(3, end - 2))
    wanted = table["topic"][0].as_py()
    found = client.do_get(ticket(stream="plants", partition=0, filter=wanted)).read_all()
    assert set(found["topic"].to_pylist()) == {wanted}
    little = client.do_get(ticket(stream="plants", partition=0, max_bytes=1)).read_all()
    assert little.num_rows


def test_a_stream_is_followed_until_the_client_leaves(broker: qflow.Broker, client: Any) -> None:
    """What is published later comes; nothing is left behind when the client goes."""
    broker.declare_stream("logs", topics=["log/#"])
    broker.publish("log/a", b"before")
    reader = client.do_get(ticket(stream="logs", start=0, follow=True))
    assert reader.read_chunk().data["value"].to_pylist() == [b"before"]
    broker.publish("log/a", b"later")
    assert reader.read_chunk().data["value"].to_pylist() == [b"later"]
    reader.cancel()


def _stays_for(looks: int) -> Callable[[], None]:
    """Return what raises once a client has been looked for so often."""
    left = iter(range(looks))

    def stay() -> None:
        if next(left, None) is None:
            raise pf.FlightCancelledError("the client has left")

    return stay


def test_who_follows_up_to_so_many_bytes_is_let_go_with_them(broker: qflow.Broker) -> None:
    """However few come at a time."""
    broker.declare_stream("logs", topics=["log/#"])
    asked = ticket(stream="logs", start=0, follow=True, max_bytes=1000, columns=["value"])
    read = Read(Owner(broker), Command.parse(asked.ticket, "the ticket"))
    found = 0
    broker.publish("log/a", bytes(400))
    for batch in read.batches(_stays_for(50)):
        found += batch.num_rows
        broker.publish("log/a", bytes(400))
    assert found == 3


def test_who_follows_hears_of_the_server_while_nothing_comes(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else gRPC ends the connection of a client that asks, after some two minutes."""
    broker.declare_stream("logs", topics=["log/#"])
    read = Read(Owner(broker), Command.parse(ticket(stream="logs", start=0, follow=True).ticket, "the ticket"))
    batches = read.batches(_stays_for(50))
    monkeypatch.setattr(reading, "QUIET_S", 0.0)
    assert [next(batches).num_rows for _ in range(2)] == [0, 0]
    broker.publish("log/a", b"one")
    monkeypatch.setattr(reading, "QUIET_S", 3600.0)
    assert next(batches)["value"].to_pylist() == [b"one"]


@pytest.mark.parametrize("topics", ["plant/9", "plant/+"])
def test_a_reader_hears_of_the_server_while_its_filter_lets_nothing_through(
    broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch, topics: str
) -> None:
    """And of what it lets through: it is not kept until there is more."""
    monkeypatch.setattr(qflow.arrow.reading, "BATCH_MESSAGES", 10)
    for _ in range(3):
        fill(broker, 30)
    asked = ticket(stream="plants", partition=0, filter=topics)
    for quiet_s, is_heard in [(3600.0, False), (0.0, True)]:
        monkeypatch.setattr(reading, "QUIET_S", quiet_s)
        rows = [
            batch.num_rows for batch in Read(Owner(broker), Command.parse(asked.ticket, "it")).batches(lambda: None)
        ]
        assert (len(rows) > 1) == is_heard
        assert any(rows) == (topics == "plant/+")


def test_who_follows_is_told_that_the_door_closes(broker: qflow.Broker, client: Any, server: Any) -> None:
    """A sentence ends the read; closing the door does not hang."""
    broker.declare_stream("logs", topics=["log/#"])
    broker.publish("log/a", b"one")
    reader = client.do_get(ticket(stream="logs", start=0, follow=True))
    reader.read_chunk()
    server.close()
    error = refused(reader.read_chunk)
    assert isinstance(error, qflow.BrokerClosed)
    assert "being closed" in str(error)


def test_a_deleted_stream_ends_its_followers(broker: qflow.Broker, client: Any) -> None:
    """Also where a stream of the same name is declared at once."""
    broker.declare_stream("logs", topics=["log/#"])
    broker.publish("log/a", b"one")
    reader = client.do_get(ticket(stream="logs", start=0, follow=True))
    reader.read_chunk()
    broker.delete_stream("logs")
    broker.declare_stream("logs", topics=["log/#"])
    assert isinstance(refused(reader.read_chunk), qflow.StreamDeleted)


@pytest.mark.parametrize("again", [True, False])
def test_who_follows_a_stream_follows_no_other(broker: qflow.Broker, again: bool) -> None:
    """Deleted after the first batch was read, before anything else is looked for."""
    broker.declare_stream("logs", topics=["log/#"])
    broker.publish("log/a", b"one")
    read = Read(Owner(broker), Command.parse(ticket(stream="logs", start=0, follow=True).ticket, "the ticket"))
    batches = read.batches(_stays_for(50))
    assert next(batches).num_rows == 1
    broker.delete_stream("logs")
    if again:
        broker.declare_stream("logs", topics=["log/#"])
    with pytest.raises(qflow.StreamDeleted):
        next(batches)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"stream": "none"}, qflow.NotFound, "there is no stream 'none'"),
        ({"stream": "plants"}, qflow.InvalidArgument, "'partition' of the ticket must be a whole number"),
        ({"stream": "plants", "partition": 7}, qflow.NotFound, "no partition 7"),
        ({"stream": "plants", "partition": 0, "end": 10**6}, qflow.InvalidArgument, "1000000 is past that"),
        ({"stream": "plants", "partition": 0, "start": -1}, qflow.InvalidArgument, "at least 0"),
        ({"stream": "plants", "partition": 0, "columns": ["size"]}, qflow.InvalidArgument, "there is no column 'size'"),
        ({"stream": "plants", "partition": 0, "fliter": "a"}, qflow.InvalidArgument, "'fliter' is none of stream"),
        ({"stream": "plants", "partition": 0, "filter": "a/#/b"}, qflow.InvalidArgument, "#"),
        ({"stream": "plants", "partition": 0, "uuid": "another"}, qflow.StorageError, "was made anew"),
        ({"stream": "plants", "partition": 0, "number": 99}, qflow.NotFound, "declared again"),
    ],
)
def test_a_ticket_that_makes_no_sense_is_refused(
    broker: qflow.Broker, client: Any, fields: dict[str, Any], kind: type[Exception], text: str
) -> None:
    """With a sentence, and the class of the error."""
    fill(broker)
    error = refused(lambda: client.do_get(ticket(**fields)).read_all())
    assert type(error) is kind
    assert text in str(error)


@pytest.mark.parametrize("character", ["x", "%", "\u00e9", "\u20ac", "\U0001f331", "\0", "\n", '"', "\ud800"])
@pytest.mark.parametrize("count", [400, 3000, 65_000])
def test_a_long_text_leaves_an_error_what_it_is(broker: qflow.Broker, client: Any, character: str, count: int) -> None:
    """Its class, and the beginning and the end of its sentence; gRPC loses all of what is too long for it."""
    error = words.flight_error(qflow.NotFound(f"begins {count * character} ends"))
    said = words.error_of(error)
    assert isinstance(said, qflow.NotFound)
    assert str(said).startswith("begins ")
    assert str(said).endswith(" ends")
    told = refused(lambda: client.do_get(ticket(stream=f"a{count * character}z")).read_all())
    assert type(told) in (qflow.NotFound, qflow.InvalidArgument)


def test_losses_that_are_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told once; what tells them stays small."""
    monkeypatch.setattr(reading, "MOST_TOLD", 2)
    losses, span = Losses(fail=False), Span("logs", 7, 0, 0, 100)
    batch = pa.record_batch({"value": [b"a"]})
    for number in range(5):
        losses.damage(span, number, number + 1, "is damaged")
    beside, metadata = losses.beside(batch)
    said = json.loads(metadata or b"")
    assert (beside, [loss["start"] for loss in said["losses"]], said["more"]) == (batch, [0, 1], 3)
    losses.stream(span)
    assert json.loads(losses.beside(batch)[1] or b"") == {"losses": [{"loss": "stream"}], "more": 0}
    assert losses.beside(batch) == (batch, None)


def test_what_is_no_json_is_refused(broker: qflow.Broker, client: Any) -> None:
    """A ticket of rubbish, and one that is no object."""
    for rubbish in (b"\xff\x00", b"[1]", b"{"):
        assert isinstance(refused(lambda: client.do_get(pf.Ticket(rubbish)).read_all()), qflow.InvalidArgument)  # noqa: B023


def test_a_gap_is_an_error_or_is_gone_over(broker: qflow.Broker, client: Any) -> None:
    """Retention took some of it: who named a start is told, with the facts, unless it says that does not matter."""
    broker.declare_stream("logs", topics=["log/#"], retention_messages=10)
    for number in range(30):
        broker.publish("log/a", b"%d" % number)
    stream = broker.stream("logs")
    while stream.retain():  # type: ignore[attr-defined]
        pass
    first = broker.stream("logs").stats().first_offsets[0]
    assert first > 0
    error = refused(lambda: client.do_get(ticket(stream="logs", start=0)).read_all())
    assert isinstance(error, qflow.GapError)
    assert (error.first, error.end) == (0, first)
    table = client.do_get(ticket(stream="logs", start=0, fail_on_data_loss=False)).read_all()
    assert table["offset"].to_pylist() == list(range(first, 30))
    gap = {"loss": "gap", "start": 0, "end": first, "first": first}
    assert told(client, stream="logs", start=0) == [(30 - first, [gap])]
    assert told(client, stream="logs", start=2, end=first - 1) == [(0, [gap | {"start": 2, "end": first - 1}])]
    assert told(client, stream="logs", start=first) == [(30 - first, None)]
    assert client.do_get(ticket(stream="logs")).read_all().num_rows == 30 - first


@pytest.mark.parametrize("topics", ["#", "plant/1"])
def test_what_lies_before_a_damage_is_read_before_it_is_told(tmp_path: Path, topics: str) -> None:
    """A client goes on behind the damage: what a filter had let through, and was gathered for a batch, was lost to it."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        for number in range(6):
            broker.publish("plant/1", b"body %d" % number + bytes(20_000))
    with lmdb.open(str(tmp_path / "spool" / "log"), map_size=2**30) as env, env.begin(write=True) as txn:
        ((key, value),) = [(key, value) for key, value in txn.cursor() if b"body 3" in value]
        txn.put(key, value.replace(b"body 3", b"body 9"))
    with (
        qflow.open(tmp_path / "spool") as broker,
        qflow.flight.serve(broker, port=0) as server,
        pf.connect(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        reader = client.do_get(ticket(stream="plants", start=0, filter=topics))
        assert reader.read_chunk().data.column("offset").to_pylist() == [0, 1, 2]
        error = refused(reader.read_chunk)
        assert isinstance(error, qflow.CorruptionError)
        assert (vars(error)["start"], vars(error)["end"]) == (3, 4)
