"""Queries of brokers at their doors, step by step and without a Spark: they do what those of a path do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import qflow
from qflow.spark.places.parse import parse_places
from spark import reader_process as there
from spark.reader_process import EARLIEST, ReaderProcess, Told, publish
from spark.trees import left_in_inbox

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
pytest.importorskip("pyarrow.flight", reason="Arrow Flight is not installed: pip install .[net]")

QUICK = {"brokerTimeout": "2"}


class Served:
    """Opens spools by name, each with a stream and a door."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.servers: dict[qflow.Broker, Any] = {}

    def __call__(self, name: str, port: int = 0) -> tuple[qflow.Broker, str]:
        """Return the owner, and the URL of its door."""
        from qflow.flight import serve

        broker = qflow.open(self._directory / name)
        if "plants" not in broker.streams():
            broker.declare_stream("plants", topics=["plant/#"], partitions=2)
        self.servers[broker] = serve(broker, port=port)
        return broker, f"grpc://127.0.0.1:{self.servers[broker].port}"

    def close(self, broker: qflow.Broker) -> None:
        """Close a broker, with its door."""
        self.servers.pop(broker).close()
        broker.close()


@pytest.fixture
def served(tmp_path: Path, process: ReaderProcess) -> Iterator[Served]:
    found = Served(tmp_path)
    yield found
    process(there.end)
    for broker in list(found.servers):
        found.close(broker)


def test_a_batch_query_reads_what_a_path_reads(served: Served, process: ReaderProcess) -> None:
    """In the same record batches, with the same bounds, filters and limits."""
    broker, url = served("one")
    publish(broker, 3000)
    options: list[dict[str, str]] = [
        {},
        {"filter": "plant/3/#"},
        {"minPartitions": "7"},
        {"maxRecordsPerPartition": "100"},
        {"startingTimestamp": "1", "endingTimestamp": "99999999999999"},
        {"startingOffsets": '{"plants":{"0":5,"1":-2}}', "endingOffsets": '{"plants":{"0":20,"1":-1}}'},
        {"assign": '{"plants":[1]}', "subscribe": ""},
    ]
    for option in options:
        assert process(there.batch, url, **option) == process(there.batch, str(broker.path), **option)
        ours, theirs = (process(there.batches, where, **option) for where in (url, str(broker.path)))
        assert [offsets for offsets, _ in ours] == [offsets for offsets, _ in theirs]
    with pytest.raises(Told, match="NotFound: there is no stream 'less' in grpc://.*; there are: 'plants'"):
        process(there.batch, url, subscribe="less")
    with pytest.raises(Told, match="startingOffsets: offset 5000 is past the end"):
        process(there.batch, url, startingOffsets='{"plants":{"0":5000,"1":0}}')
    process(there.let_go, str(broker.path))


def test_a_query_goes_on_at_a_url_from_a_checkpoint_of_a_path(served: Served, process: ReaderProcess) -> None:
    """And back; its group is the same one."""
    broker, url = served("one")
    options = {"group": "g", "maxBytesPerTrigger": "20"} | EARLIEST
    at = process(there.begin, str(broker.path), **options)
    read: list[int] = []
    for number, where in enumerate((str(broker.path), url, str(broker.path), url)):
        publish(broker, 25, start=25 * number)
        process(there.go_on, where, **options)
        while (end := process(there.latest, at)) != at:
            read += process(there.micro_batch, at, end)
            at = end
    assert sorted(read) == list(range(100))
    assert sorted(process(there.batch, url, startingOffsets="committed", group="g")) == []
    process(there.end)
    process(there.let_go, str(broker.path))


def test_a_broker_that_is_away_is_waited_for_and_another_spool_in_its_place_is_refused(
    served: Served, process: ReaderProcess
) -> None:
    """By a query of two; with failOnDataLoss false it goes on without the one that is away, and then with it."""
    (one, first), (other, second) = served("one"), served("other")
    publish(one, 10)
    publish(other, 10, start=10)
    both = f"{first},{second}"
    at = process(there.begin, both, **EARLIEST, **QUICK)
    end = process(there.latest, at)
    assert sorted(process(there.micro_batch, at, end)) == list(range(20))
    at = end
    port = int(second.rpartition(":")[2])
    served.close(other)
    publish(one, 5, start=20)
    with pytest.raises(
        Told, match="StorageError: the broker at grpc://.* is away .*waited for .*see option brokerTimeout"
    ):
        process(there.latest, at)
    with pytest.raises(Told, match="has been waited for before"):
        process(there.latest, at)
    process(there.go_on, both, failOnDataLoss="false", **QUICK)
    end = process(there.latest, at)
    assert sorted(process(there.micro_batch, at, end)) == list(range(20, 25))
    at = end
    again, _ = served("other", port)
    publish(again, 5, start=25)
    process(there.go_on, both, **QUICK)
    end = process(there.latest, at)
    assert sorted(process(there.micro_batch, at, end)) == list(range(25, 30))
    served.close(again)
    served("third", port)
    with pytest.raises(Told, match="this query has read from log .*, and none of grpc.* holds it"):
        process(there.latest, end)


def test_a_figure_that_cannot_be_shown_ends_no_query(served: Served, process: ReaderProcess) -> None:
    """Whether the query would go on without the broker that is away, or not."""
    (one, first), (other, second) = served("one"), served("other")
    publish(one, 10)
    at = process(there.begin, f"{first},{second}", failOnDataLoss="false", **EARLIEST, **QUICK)
    assert process(there.report) == {"logs": [{**log, "streams": ANY} for log in at["logs"]]}
    served.close(other)
    assert process(there.report)["uuid"] == str(one.uuid)
    process(there.go_on, f"{first},{second}", **QUICK)
    assert process(there.report) is None
    served.close(one)
    assert process(there.report) is None


@pytest.mark.parametrize("action", ["other_era", "offset_after", "eras", "lease", "commit_positions"])
def test_a_broker_that_goes_away_in_the_midst_of_a_plan_is_left_out_of_it(
    served: Served, process: ReaderProcess, action: str
) -> None:
    """With failOnDataLoss false; what it has comes in the next batch."""
    (one, first), (other, second) = served("one"), served("other")
    publish(one, 10)
    publish(other, 10, start=10)
    options = {"group": "g", "maxBytesPerTrigger": "1m", "failOnDataLoss": "false"}
    at = process(there.begin, f"{first},{second}", **EARLIEST, **options)
    end = process(there.latest, at)
    assert sorted(process(there.micro_batch, at, end)) == list(range(20))
    process(there.go_on, f"{first},{second}", **options)
    publish(one, 5, start=20)
    publish(other, 5, start=25)
    process(there.go_away_once, second, action)
    found, ends = [], [end]
    for _ in range(2):
        ends.append(process(there.latest, ends[-1]))
        found.append(sorted(process(there.micro_batch, *ends[-2:])))
    assert found[0] + found[1] == list(range(20, 30))
    if action not in ("lease", "commit_positions"):  # those are done again in time
        assert found[0] == list(range(20, 25))


def test_a_new_stream_that_its_group_could_not_hold_waits_for_the_next_batch(
    served: Served, process: ReaderProcess
) -> None:
    """Its broker goes away between the plan and the group's word; of the others the batch is whole."""
    (one, first), (other, second) = served("one"), served("other")
    publish(one, 10)
    publish(other, 10, start=10)
    options = {"group": "g", "failOnDataLoss": "false"}
    at = process(there.begin, first, **EARLIEST, **options)
    process(there.go_on, f"{first},{second}", **options)
    process(there.go_away_once, second, "lease")
    middle = process(there.latest, at)
    assert sorted(process(there.micro_batch, at, middle)) == list(range(10))
    end = process(there.latest, middle)
    assert sorted(process(there.micro_batch, middle, end)) == list(range(10, 20))


def test_brokers_that_all_go_away_in_the_midst_of_a_plan_end_the_query(served: Served, process: ReaderProcess) -> None:
    """An empty batch would be the end of one that takes what there is."""
    broker, url = served("one")
    publish(broker, 10)
    at = process(there.begin, url, failOnDataLoss="false", **EARLIEST)
    for action, option in (("eras", {}), ("commit_positions", {"group": "g"})):
        process(there.go_on, url, failOnDataLoss="false", **option)
        process(there.go_away_once, url, action, passed=1 if option else 0)
        with pytest.raises(Told, match="StorageError: the brokers of grpc://.* went away while a batch was planned"):
            process(there.latest, at)


def test_a_query_ends_where_no_broker_is_there_that_it_has_to_read(served: Served, process: ReaderProcess) -> None:
    """One was away when it began, and is back; the other one is away now, or goes in the midst of the plan."""
    (one, first), (other, second) = served("one"), served("other")
    both = f"{first},{second}"
    publish(one, 10)
    publish(other, 10, start=10)
    at = process(there.begin, both, group="g", **EARLIEST, **QUICK)
    served.close(other)
    publish(one, 5, start=20)
    process(there.go_on, both, failOnDataLoss="false", group="g", **QUICK)
    process(there.go_away_once, first, "commit_positions", passed=1)
    with pytest.raises(Told, match="went away while a batch was planned"):
        process(there.latest, at)
    process(there.go_on, both, failOnDataLoss="false", **QUICK)
    process(there.until_now)
    served.close(one)
    served("other", int(second.rpartition(":")[2]))
    with pytest.raises(Told, match="went away while a batch was planned"):
        process(there.latest, at)


def test_a_query_that_takes_what_there_is_goes_on_without_a_broker_that_is_away(
    served: Served, process: ReaderProcess
) -> None:
    """It keeps its place there, and takes it up in the next run; one that comes back meanwhile is for the next run."""
    (one, first), (other, second) = served("one"), served("other")
    both = f"{first},{second}"
    publish(one, 10)
    publish(other, 10, start=10)
    at = process(there.begin, both, **EARLIEST, **QUICK)
    end = process(there.latest, at)
    assert sorted(process(there.micro_batch, at, end)) == list(range(20))
    port = int(second.rpartition(":")[2])
    served.close(other)
    publish(one, 5, start=20)
    process(there.go_on, both, failOnDataLoss="false", **QUICK)
    process(there.until_now)
    again, _ = served("other", port)
    publish(again, 5, start=25)
    at, end = end, process(there.latest, end)
    assert sorted(process(there.micro_batch, at, end)) == list(range(20, 25))
    process(there.go_on, both, failOnDataLoss="false", **QUICK)
    process(there.until_now)
    at, end = end, process(there.latest, end)
    assert sorted(process(there.micro_batch, at, end)) == list(range(25, 30))


@pytest.mark.parametrize("more", [0, 20])
def test_a_broker_that_comes_back_with_an_older_copy_is_refused(
    served: Served, process: ReaderProcess, tmp_path: Path, more: int
) -> None:
    """It ends before what the query has read, or was written on since."""
    (_, first), (other, second) = served("one"), served("other")
    publish(other, 5)
    shutil.copytree(tmp_path / "other", tmp_path / "older", ignore=shutil.ignore_patterns("door", "stats.json*"))
    publish(other, 10, start=5)
    at = process(there.begin, f"{first},{second}", **EARLIEST, **QUICK)
    end = process(there.latest, at)
    assert sorted(process(there.micro_batch, at, end)) == list(range(15))
    served.close(other)
    with qflow.open(tmp_path / "older") as older:
        publish(older, more, start=100)
    (tmp_path / "other").rename(tmp_path / "lost")
    (tmp_path / "older").rename(tmp_path / "other")
    served("other", int(second.rpartition(":")[2]))
    process(there.go_on, f"{first},{second}", **QUICK)
    with pytest.raises(Told, match="(ends at|up to offset) .* it was replaced by an older copy"):
        process(there.latest, end)


def test_rows_are_staged_and_adopted_once_over_several_brokers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the answer of one is lost, and the batch is handed over again; what is not committed is removed."""
    import pyarrow as pa
    from pyspark.sql import types

    from qflow.spark.places.calls import Door
    from qflow.spark.source import QflowDataSource

    (one, first), (other, second) = served("one"), served("other")
    schema = (
        types.StructType().add("key", "string").add("value", "string").add("topic", "string").add("more", "integer")
    )
    options = {"path": f"{first},{second}", "txnAppId": "app", "txnVersion": "7"}
    rows = pa.table(
        {
            "key": [f"{n % 10}" for n in range(500)],
            "value": [str(n) for n in range(500)],
            "topic": [f"plant/{n % 3}" for n in range(500)],
            "more": [1] * 500,
        }
    ).to_batches(max_chunksize=100)
    writer: Any = QflowDataSource(options).writer(schema, False)
    messages = [writer.write(iter(rows[:3])), writer.write(iter(rows[3:])), writer.write(iter([]))]
    asked = Door.action

    def unheard(door: Door, name: str, body: Any, **more: Any) -> Any:
        answer = asked(door, name, body, **more)
        assert name != "adopt", "the answer is lost"
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(Door, "action", unheard)
        with pytest.raises(AssertionError, match="the answer is lost"):
            writer.commit(messages)
    for _ in range(2):
        writer.commit(messages)
    again: Any = QflowDataSource(options).writer(schema, False)
    again.commit([again.write(iter(rows))])
    left: Any = QflowDataSource(options | {"txnVersion": "8"}).writer(schema, False)
    left.abort([left.write(iter(rows))])
    half: Any = QflowDataSource(options | {"txnVersion": "9"}).writer(schema, False)
    written = half.write(iter(rows))

    def refused(door: Door, name: str, body: Any, **more: Any) -> Any:
        if name == "withdraw" and door.url == first:
            raise qflow.InvalidArgument("the token has ended")
        return asked(door, name, body, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Door, "action", refused)
        half.abort([written])  # it raises nothing: Spark would show that in place of why it aborts
    assert [len(left_in_inbox(Path(broker.path))) > 0 for broker in (one, other)] == [True, False]
    half.abort([written])
    stored = [sorted(int(m.body) for m in broker.stream("plants").query()) for broker in (one, other)]
    assert sorted(stored[0] + stored[1]) == list(range(500))
    assert {n % 10 for n in stored[0]}.isdisjoint({n % 10 for n in stored[1]})
    for broker in (one, other):
        assert left_in_inbox(Path(broker.path)) == []
    with pytest.raises(qflow.NotFound, match="takes topic 'nobody'"):
        left.write(iter([rows[0].set_column(2, "topic", pa.array(["nobody"] * 100))]))


def test_a_group_is_one_query_s_until_its_lease_ends(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has lost it acknowledges nothing more, and says so."""
    from qflow.spark.places import flight
    from qflow.spark.places.calls import Door

    monkeypatch.setattr(flight, "LEASE_S", 1.5)
    broker, url = served("one")
    publish(broker, 30)
    place = flight.FlightPlace(Door(url))
    uuid, number = str(broker.uuid), place.look().streams["plants"].owner
    lease = place.lease(uuid, "g")
    lease.acknowledge({number: {0: 3}})
    with monkeypatch.context() as patched:
        patched.setattr(flight, "LEASE_S", 1e-6)  # nothing is waited for
        with pytest.raises(qflow.GroupInUse, match="in use by another reader"):
            place.lease(uuid, "g")
    lease.stop()
    later = place.lease(uuid, "g")  # waits for its end
    assert later.committed() == {number: {0: 3}}
    with pytest.raises(qflow.GroupInUse, match="another reader has taken the group since"):
        lease.acknowledge({number: {0: 4}})
    assert place.committed(uuid, "g") == {number: {0: 3}}
    later.close()


def test_tokens_and_certificates(tmp_path: Path, process: ReaderProcess) -> None:
    """Those of the options; a wrong one is refused at once, in a sentence that does not show it."""
    from qflow.flight import serve
    from qflow.serving.certificates import Certificates

    pem = Path(__file__).parent.parent / "serving" / "certificates"
    tokens = tmp_path / "tokens"
    tokens.write_text("one-token-0123456789\n")
    with (
        qflow.open(tmp_path / "spool") as broker,
        serve(
            broker, port=0, certificates=Certificates(pem / "server.pem", pem / "server.key"), token_file=tokens
        ) as door,
    ):
        broker.declare_stream("plants", topics=["plant/#"])
        publish(broker, 10)
        url = f"grpc+tls://127.0.0.1:{door.port}"
        ca = str(pem / "ca.pem")
        assert process(there.batch, url, ca=ca, tokenFile=str(tokens)) == list(range(10))
        assert process(there.batch, url, ca=ca, token="one-token-0123456789") == list(range(10))
        for option in ({}, {"token": "other-token-0123456789"}):
            with pytest.raises(Told, match="InvalidArgument: the broker at .* refuses this token") as caught:
                process(there.batch, url, ca=ca, **option)
            assert "other-token" not in str(caught.value)
        for option, whom in (({}, "the system trusts"), ({"ca": str(pem / "renewed.pem")}, "'ca' has")):
            with pytest.raises(Told, match=f"InvalidArgument: the certificate of .* is signed by nobody whom {whom}"):
                process(there.batch, url, token="one-token-0123456789", **option)
        with pytest.raises(Told, match=r"InvalidArgument: TLS is spoken at grpc://.*: say grpc\+tls://"):
            process(there.batch, f"grpc://127.0.0.1:{door.port}", token="one-token-0123456789")
        with pytest.raises(
            Told, match="InvalidArgument: option 'ca' is .*, which has no certificates that can be used"
        ):
            process(there.batch, url, token="one-token-0123456789", ca=str(tokens))
        with pytest.raises(Told, match="NotFound: option 'ca' is '/nowhere', which cannot be read"):
            process(there.batch, url, ca="/nowhere")
        with pytest.raises(Told, match="options 'token' and 'tokenFile' say the same"):
            process(there.batch, url, token="a", tokenFile=str(tokens))


@pytest.mark.parametrize(
    "url", ["grpc://127.0.0.1", "grpc://127.0.0.1:70000", "GRPC://a:1", "grpc://a:1/b", "grpc+tls://:1"]
)
def test_a_url_that_is_none_is_refused_where_it_is_given(url: str) -> None:
    """Not after it was waited for."""
    with pytest.raises(qflow.InvalidArgument, match=r"a URL of a door is grpc\+tls://HOST:PORT, or grpc://HOST:PORT"):
        parse_places({"path": url})


@pytest.mark.parametrize("text", ["", "one-token-0123456789\n", "-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_certificates_that_are_none_are_refused_where_they_are_given(tmp_path: Path, text: str) -> None:
    """Nobody is asked, and nobody waited for."""
    ca = tmp_path / "ca.pem"
    ca.write_text(text)
    with pytest.raises(qflow.InvalidArgument, match="option 'ca' is .*ca.pem', which has no certificates that can be"):
        parse_places({"path": "grpc+tls://127.0.0.1:1", "ca": str(ca)})


def test_what_is_wrong_is_said_in_place_of_that_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing is, it is said that somebody is away."""
    import pyarrow.flight as pf

    from qflow.flight import trust
    from qflow.spark.places.calls import Door
    from qflow.spark.words import Away

    def nobody(_client: object) -> None:
        raise pf.FlightUnavailableError("nobody is there")

    monkeypatch.setattr(trust, "what_is_wrong", lambda *_: "TLS is spoken there")
    with pytest.raises(qflow.InvalidArgument, match="TLS is spoken there"):
        Door("grpc://127.0.0.1:41").wait_for(nobody)
    assert caplog.messages == []
    monkeypatch.setattr(trust, "what_is_wrong", lambda *_: None)
    with pytest.raises(Away):
        Door("grpc://127.0.0.1:42", patience_s=0.1).wait_for(nobody)
    assert caplog.messages == ["the broker at grpc://127.0.0.1:42 is away (nobody is there): it is waited for"]


def test_a_token_that_cannot_be_one_is_refused_where_it_is_given(tmp_path: Path) -> None:
    """Also one of a file, which may be read anew."""
    from qflow.spark.places.calls import Door

    given = tmp_path / "token"
    given.write_bytes("sch\u00f6n-0123456789\n".encode())
    for option in ({"token": "two words"}, {"token": "sch\u00f6n"}, {"tokenFile": str(given)}):
        with pytest.raises(qflow.InvalidArgument, match="which no token has: give one as it stands in the file"):
            parse_places({"path": "grpc://127.0.0.1:7420"} | option)
    (place,) = parse_places({"path": "grpc://127.0.0.1:7420", "token": " one-token\n"})
    assert place.door.token == "one-token"  # type: ignore[attr-defined]
    with pytest.raises(qflow.InvalidArgument, match="which no token has"):
        Door("grpc://127.0.0.1:7420", token_file=str(given)).options()


def test_a_door_that_speaks_no_tls_is_told_from_one_that_is_away(served: Served, process: ReaderProcess) -> None:
    """At once, with what to say instead."""
    _, url = served("one")
    with pytest.raises(Told, match=r"InvalidArgument: no TLS is spoken at grpc\+tls://.*: say grpc://"):
        process(there.batch, url.replace("grpc", "grpc+tls"))


def test_what_a_door_says_as_it_is_closed_is_not_taken_for_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is wrong twice, and at a door that has never answered."""
    import pyarrow.flight as pf

    from qflow.flight import trust
    from qflow.spark.places.calls import Door
    from qflow.spark.words import Away

    def nobody(_client: object) -> None:
        raise pf.FlightUnavailableError("nobody is there")

    said = iter(["it asks for a certificate"])
    monkeypatch.setattr(trust, "what_is_wrong", lambda *_: next(said, None))
    with pytest.raises(Away):
        Door("grpc+tls://127.0.0.1:1", patience_s=0.3).wait_for(nobody)
    assert next(said, None) is None, "it was asked"
    monkeypatch.setattr(trust, "what_is_wrong", lambda *_: "it asks for a certificate")
    with pytest.raises(qflow.InvalidArgument, match="it asks for a certificate"):
        Door("grpc+tls://127.0.0.1:2").wait_for(nobody)
    met = Door("grpc+tls://127.0.0.1:3", patience_s=0.1)
    assert met.wait_for(lambda _: "an answer") == "an answer"
    with pytest.raises(Away):
        met.wait_for(nobody)
