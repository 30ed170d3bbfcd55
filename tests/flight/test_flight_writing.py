"""Record batches written by any Arrow client: published, put, staged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pa = pytest.importorskip("pyarrow")
pf = pytest.importorskip("pyarrow.flight")

import inside  # noqa: E402
import qflow  # noqa: E402
import qflow.flight  # noqa: E402
from faults.test_full_disk import disk_of, fill, filled  # noqa: E402
from flight.test_flight_reading import refused, ticket  # noqa: E402
from qflow.flight import words, writing  # noqa: E402

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def put(client: Any, command: dict[str, Any], *batches: Any) -> list[dict[str, Any]]:
    """Send batches under a command; return what was answered to each."""
    descriptor = pf.FlightDescriptor.for_command(json.dumps(command).encode())
    writer, metadata = client.do_put(descriptor, batches[0].schema)
    answers = []
    with writer:
        for batch in batches:
            writer.write_batch(batch)
            answers.append(json.loads(metadata.read().to_pybytes()))
    return answers


def rows(**columns: Any) -> Any:
    """Return a record batch."""
    return pa.record_batch(dict(columns.items()))


def test_rows_are_published_each_batch_a_commit(broker: qflow.Broker, client: Any) -> None:
    """With topics, keys and headers of their own; a null value stays one."""
    first = rows(
        topic=["plant/1", "plant/2"],
        value=pa.array([b"one", None], pa.binary()),
        key=pa.array([b"k", None], pa.binary()),
        headers=pa.array([[("unit", b"K")], None], HEADERS),
    )
    second = rows(
        topic=["plant/3", "nowhere"],
        value=[b"three", b"lost"],
        key=pa.nulls(2, pa.binary()),
        headers=pa.nulls(2, HEADERS),
    )
    assert put(client, {"publish": {}}, first, second) == [
        {"messages": 2, "streams": {"plants": 2}, "queues": {}, "duplicate": False},
        {"messages": 2, "streams": {"plants": 1}, "queues": {}, "duplicate": False},
    ]
    found = {message.topic: message for message in broker.stream("plants").query()}
    assert found["plant/1"].body == b"one"
    assert found["plant/1"].headers == {"unit": "K"}
    assert found["plant/1"].key == b"k"
    assert found["plant/2"].headers == {"qflow-null": True}
    read = [
        row
        for endpoint in client.get_flight_info(pf.FlightDescriptor.for_path("plants")).endpoints
        for row in client.do_get(endpoint.ticket).read_all().to_pylist()
    ]
    assert {row["topic"]: row["value"] for row in read} == {"plant/1": b"one", "plant/2": None, "plant/3": b"three"}


def test_rows_of_one_topic_need_no_column_of_topics(broker: qflow.Broker, client: Any) -> None:
    """Strings, large ones and dictionaries are taken, too."""
    for values in (
        pa.array(["a"], pa.large_string()),
        pa.array(["b"]).dictionary_encode(),
        pa.array(["c"], pa.string_view()),
    ):
        put(client, {"publish": {"topic": "plant/1"}}, rows(value=values))
    assert [message.body for message in broker.stream("plants").query()] == [b"a", b"b", b"c"]


def test_columns_of_nulls_alone_are_no_keys_and_no_headers(broker: qflow.Broker, client: Any) -> None:
    """Of whatever type: DuckDB's `NULL` has none."""
    nulls = rows(value=[b"a"], key=pa.nulls(1), headers=pa.nulls(1))
    put(client, {"publish": {"topic": "plant/1"}}, nulls)
    put(client, {"put": "jobs"}, nulls)
    command = stage(broker)
    (answer,) = put_once(client, command, nulls)
    assert answer["file"][1] == 1
    (message,) = broker.stream("plants").query()
    assert (message.body, message.key, message.headers) == (b"a", None, {})
    error = refused(lambda: put(client, {"publish": {"topic": "plant/1"}}, rows(value=pa.nulls(1))))
    assert "must be binary or string, not null" in str(error)


def test_headers_in_a_dictionary_are_refused_by_their_type(broker: qflow.Broker, client: Any) -> None:
    """Not as a batch that is damaged; a dictionary of nulls is one, too."""
    for headers in (pa.array([[("unit", b"K")]], HEADERS), pa.nulls(1)):
        encoded = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), headers)
        for command in ({"publish": {"topic": "plant/1"}}, {"put": "jobs"}, stage(broker)):
            error = refused(lambda: put(client, command, rows(value=[b"a"], headers=encoded)))  # noqa: B023
            assert isinstance(error, qflow.InvalidArgument)
            assert "column 'headers' must be list<struct<key: string, value: binary>>, not dictionary<" in str(error)


def test_columns_that_nobody_uses_are_not_looked_at(broker: qflow.Broker, client: Any) -> None:
    """A text that is none is refused where it is used alone."""
    text = pa.StringArray.from_buffers(1, pa.py_buffer(struct.pack("<2i", 0, 1)), pa.py_buffer(b"\xff"))
    put(client, {"publish": {"topic": "plant/1"}}, rows(value=[b"a"], topic=text, other=text))
    assert [message.body for message in broker.stream("plants").query()] == [b"a"]
    error = refused(lambda: put(client, {"publish": {}}, rows(value=[b"b"], topic=text)))
    assert "damaged, or not what it says" in str(error)


def test_what_a_producer_has_numbered_is_published_once(broker: qflow.Broker, client: Any) -> None:
    """A put that is repeated under the same numbers changes nothing."""
    command = {"publish": {"topic": "plant/1", "producer": "p", "number": 5}}
    for _ in range(2):
        put(client, command, rows(value=[b"a", b"b"]), rows(value=[b"c"]))
    assert [message.body for message in broker.stream("plants").query()] == [b"a", b"b", b"c"]


def test_rows_are_put_into_a_queue(broker: qflow.Broker, client: Any) -> None:
    """Each batch is one commit; headers may differ."""
    assert put(client, {"put": "jobs"}, rows(value=[b"a", b"b"])) == [{"messages": 2, "first": 0}]
    headers = pa.array([[("n", b"1")], [("n", b"1")], None], HEADERS)
    others = rows(value=[b"c", b"d", b"e"], headers=headers)
    assert put(client, {"put": {"queue": "jobs", "priority": 0}}, others) == [{"messages": 3, "first": None}]
    found = [(one.body, one.headers.get("n")) for one in broker.queue("jobs").get_many(10)]
    assert found == [(b"a", None), (b"b", None), (b"c", "1"), (b"d", "1"), (b"e", None)]


@pytest.mark.parametrize(
    ("command", "columns", "kind", "text"),
    [
        ({"publish": {}}, {"value": [b"a"]}, qflow.InvalidArgument, "by a column 'topic'"),
        ({"publish": {"topic": "a/#"}}, {"value": [b"a"]}, qflow.InvalidArgument, "a/#"),
        ({"publish": {}}, {"topic": ["plant/1"]}, qflow.InvalidArgument, "no column 'value'"),
        (
            {"publish": {}},
            {"topic": ["plant/1"], "value": [1]},
            qflow.InvalidArgument,
            "must be binary or string, not int64",
        ),
        ({"publish": {}}, {"topic": [b"x"], "value": [b"a"]}, qflow.InvalidArgument, "column 'topic' must be string"),
        ({"publish": {}}, {"topic": pa.nulls(1, pa.string()), "value": [b"a"]}, qflow.InvalidArgument, "has null"),
        ({"publish": {"topic": "plant/1"}, "uuid": "no"}, {"value": [b"a"]}, qflow.StorageError, "made anew"),
        ({"put": "none"}, {"value": [b"a"]}, qflow.NotFound, "none"),
        ({"put": {"queue": "jobs", "prio": 1}}, {"value": [b"a"]}, qflow.InvalidArgument, "'prio' is none of queue"),
        ({"publish": {"topics": "a"}}, {"value": [b"a"]}, qflow.InvalidArgument, "'topics' is none of topic"),
        ({"publish": {}, "topic": "plant/1"}, {"value": [b"a"]}, qflow.InvalidArgument, "'topic' is none of publish"),
        ({}, {"value": [b"a"]}, qflow.InvalidArgument, "must have one of 'publish', 'put', 'stage'"),
    ],
)
def test_a_put_that_makes_no_sense_is_refused(
    broker: qflow.Broker,
    client: Any,
    command: dict[str, Any],
    columns: dict[str, Any],
    kind: type[Exception],
    text: str,
) -> None:
    """With a sentence, and nothing is stored."""
    error = refused(lambda: put(client, command, rows(**columns)))
    assert type(error) is kind
    assert text in str(error)
    assert not list(broker.stream("plants").query())
    assert not len(broker.queue("jobs"))


def test_a_batch_that_lies_about_its_sizes_is_refused(broker: qflow.Broker, client: Any) -> None:
    """Offsets that point in front of the values are noticed before anything is stored."""
    offsets = pa.py_buffer(struct.pack("<4i", 0, 5, -2, 5))
    lying = pa.Array.from_buffers(pa.binary(), 3, [None, offsets, pa.py_buffer(b"short")])
    error = refused(lambda: put(client, {"publish": {"topic": "plant/1"}}, rows(value=lying)))
    assert isinstance(error, qflow.InvalidArgument)
    assert "damaged" in str(error)
    assert not list(broker.stream("plants").query())


def test_a_client_that_goes_in_the_middle_of_a_put_leaves_whole_batches(broker: qflow.Broker, client: Any) -> None:
    """What was answered is stored, and the door goes on."""
    descriptor = pf.FlightDescriptor.for_command(b'{"publish": {"topic": "plant/1"}}')
    batch = rows(value=[b"a", b"b"])
    writer, metadata = client.do_put(descriptor, batch.schema)
    writer.write_batch(batch)
    metadata.read()
    del writer, metadata
    assert [message.body for message in broker.stream("plants").query()] == [b"a", b"b"]
    assert put(client, {"put": "jobs"}, batch)[0]["messages"] == 2


def test_a_client_that_goes_before_its_answer_is_no_failure_of_the_owner(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is logged; an error of a disk is one still."""

    class Left:
        def write(self, _answer: bytes) -> None:
            raise OSError("Unknown error writing metadata")

    with pytest.raises(pf.FlightCancelledError, match="the client has left"), words.plainly("DoPut"):
        writing.answering(Left())({"messages": 1})
    assert not caplog.records
    with pytest.raises(pf.FlightInternalError, match="OSError: a disk"), words.plainly("DoPut"):
        raise OSError("a disk")
    assert len(caplog.records) == 1


def stage(broker: qflow.Broker, **fields: Any) -> dict[str, Any]:
    """Return a command that stages rows."""
    said = {"query": "q", "batch": 0, "token": uuid4().hex, "name": "000000-a", "uuid": str(broker.uuid)}
    return {"stage": said | {"topic": "plant/1"} | fields}


def test_rows_are_staged_and_not_yet_published(broker: qflow.Broker, client: Any) -> None:
    """The answer has the file for the manifest, and who takes the rows."""
    command = stage(broker)
    (answer,) = put_once(client, command, rows(value=[b"a", b"b"]), rows(value=[b"c"]))
    name, messages, size, _, _ = answer["file"]
    assert (name, messages, size) == ("000000-a", 3, 3)
    assert [taker[:2] for taker in answer["takers"]] == [["stream", "plants"]]
    assert not list(broker.stream("plants").query())


def put_once(client: Any, command: dict[str, Any], *batches: Any) -> list[dict[str, Any]]:
    """Send batches under a command that answers once, at the end; return what was answered."""
    descriptor = pf.FlightDescriptor.for_command(json.dumps(command).encode())
    writer, metadata = client.do_put(descriptor, batches[0].schema)
    with writer:
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()
        return [json.loads(metadata.read().to_pybytes())]


def manifest(command: dict[str, Any], answer: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the manifest of a stage of one file."""
    said = command["stage"]
    return {
        "batch": [said["query"], said["batch"]],
        "token": said["token"],
        "uuid": said["uuid"],
        "files": [answer["file"]],
    } | fields


def test_a_stage_is_adopted_once(broker: qflow.Broker, client: Any, act: Any) -> None:
    """Also by who did not hear the answer, and by another attempt at the same batch."""
    command = stage(broker)
    (answer,) = put_once(client, command, rows(value=[b"a", b"b"]))
    said = manifest(command, answer, every=True)
    for _ in range(2):
        assert act("adopt", manifest=said) == {}
    again = stage(broker)
    (answer,) = put_once(client, again, rows(value=[b"a", b"b"]))
    act("adopt", manifest=manifest(again, answer, every=True))
    assert [message.body for message in broker.stream("plants").query()] == [b"a", b"b"]


def test_a_batch_is_staged_in_a_spool_that_was_just_moved(broker: qflow.Broker, client: Any, act: Any) -> None:
    """And nothing is made where it was."""
    inside.still(broker)
    old = Path(broker.path)
    old.rename(old.with_name("moved"))
    command = stage(broker)
    (answer,) = put_once(client, command, rows(value=[b"a"]))
    assert not old.exists()
    assert act("adopt", manifest=manifest(command, answer)) == {}
    assert [message.body for message in broker.stream("plants").query()] == [b"a"]


def test_a_stage_is_adopted_under_another_name(broker: qflow.Broker, client: Any, act: Any) -> None:
    """A batch of an application is renamed when all know where it goes."""
    command = stage(broker, query="app-a")
    (answer,) = put_once(client, command, rows(value=[b"a"]))
    said = manifest(command, answer, batch=["0123-app-a", 0], targets=[["app-a@1", "stream 'plants'"]])
    act("adopt", manifest=said, staged=["app-a", 0])
    assert [message.body for message in broker.stream("plants").query()] == [b"a"]


def test_what_cannot_be_adopted_says_why(broker: qflow.Broker, client: Any, act: Any) -> None:
    """A file that is not what was written; a batch that does not follow; another log; a name that leads elsewhere."""
    command = stage(broker)
    (answer,) = put_once(client, command, rows(value=[b"a"]))
    name, messages, size, length, checksum = answer["file"]
    wrong = manifest(command, {"file": [name, messages, size, length, checksum ^ 1]})
    assert "did not take batch 0" in str(refused(lambda: act("adopt", manifest=wrong)))
    late = manifest(command, answer, batch=["q", 7], every=True)
    assert "has none of its batches" in str(refused(lambda: act("adopt", manifest=late)))
    other = manifest(command, answer, uuid="another")
    assert "made anew" in str(refused(lambda: act("adopt", manifest=other)))
    outside = manifest(command, {"file": ["../x", 1, 1, 1, 1]})
    assert "the name of a file" in str(refused(lambda: act("adopt", manifest=outside)))
    assert not list(broker.stream("plants").query())


def test_a_stage_is_withdrawn(broker: qflow.Broker, client: Any, act: Any) -> None:
    """What an attempt has written and not handed in goes."""
    command = stage(broker)
    put_once(client, command, rows(value=[b"a"]))
    assert act("withdraw", tokens=[command["stage"]["token"], "0" * 32]) == {"stages": 1}
    assert act("withdraw", tokens=[command["stage"]["token"]]) == {"stages": 0}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "../../log"}, "the name of a file"),
        ({"name": "manifest"}, "the name of a file"),
        ({"token": "../x"}, "'token'"),
        ({"query": "../q"}, "a batch has a query"),
        ({"uuid": "another"}, "made anew"),
        ({"topic": "nowhere"}, "takes topic 'nowhere'"),
        ({"stream": "none"}, "there is no stream 'none'"),
    ],
)
def test_a_stage_that_makes_no_sense_is_refused(
    broker: qflow.Broker, client: Any, fields: dict[str, Any], text: str
) -> None:
    """Above all names that lead out of the inbox; nothing is left of it."""
    error = refused(lambda: put(client, stage(broker, **fields), rows(value=[b"a"])))
    assert text in str(error)
    assert not list((Path(broker.path) / "inbox").rglob("*-a"))


def test_a_full_disk_refuses_rows_and_nothing_else(tmp_path: Path) -> None:
    """Whether they are published, put or staged: none of a batch is there. All else goes on, and they do later."""
    with (
        disk_of("6m", tmp_path / "disk") as disk,
        qflow.open(disk / "spool") as broker,
        qflow.flight.serve(broker, port=0) as server,
        pf.connect(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        broker.declare_stream("plants", topics=["plant/#"])
        jobs, other = broker.declare_queues(["jobs", "other"])
        jobs.put(b"one")
        ballast = fill(disk)
        filled(other, 1_000)
        batch = rows(topic=["plant/1"] * 50, value=[bytes(5_000)] * 50)
        commands = ({"publish": {}}, {"put": "jobs"}, stage(broker))
        for command in commands:
            assert isinstance(refused(lambda command=command: put_once(client, command, batch)), qflow.DiskFull)
        assert client.do_get(ticket(stream="plants", partition=0)).read_all().num_rows == 0
        with qflow.connect(f"grpc://127.0.0.1:{server.port}") as remote, remote.queue("jobs").get(0) as delivery:
            assert delivery.body == b"one"
        ballast.unlink()
        for command in commands:
            put_once(client, command, batch)
        assert (len(jobs), broker.check()) == (50, [])
