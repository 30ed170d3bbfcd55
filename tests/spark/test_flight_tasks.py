"""Tasks that read and write at a door, without a Spark: what they say is lost, and what they wait for."""

from __future__ import annotations

import logging
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

import qflow
from faults.test_full_disk import disk_of
from qflow.arrow.schema import Column
from qflow.errors import StorageError
from qflow.storage.inbox.stages import Batch, Manifest
from spark.reader_process import publish
from spark.task_doors import At, Time, asked, values
from spark.test_readers import damage
from spark.trees import left_in_inbox
from unit.clocks import Clock, open_still, until

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
pytest.importorskip("pyarrow.flight", reason="Arrow Flight is not installed: pip install .[net]")

from qflow.flight import serve
from qflow.flight.access import digest
from qflow.spark import spools
from qflow.spark.options import parse
from qflow.spark.places import flight, sent
from qflow.spark.places.calls import Door
from qflow.spark.places.flight import FlightPlace
from qflow.spark.places.local import LocalPlace
from qflow.spark.places.place import Place, Reading, Staging, Written
from qflow.spark.ranges import cut
from qflow.spark.words import Away


@pytest.fixture(autouse=True)
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Spark has files that do not last."""
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path / "local"))


# What is lost ---------------------------------------------------------------------------------------------------------


def test_what_retention_takes_before_a_task_has_read_it_is_told(
    at: At, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In words of the query's options: as an error, or as a warning."""
    with open_still(tmp_path / "spool", Clock()) as broker:
        stream = broker.declare_stream("plants", topics=["plant/#"], retention_messages=10)
        for number in range(30):
            broker.publish("plant/1", b"%d" % number)
        place = at(broker)
        gone, all_gone = asked(place, 0, 30), asked(place, 0, 5)
        while stream.retain():
            pass
        first = stream.stats().first_offsets[0]
        assert values(place, gone) == list(range(first, 30))
        assert values(place, all_gone) == []
        taken = "are gone, retention took them before this query has read them"
        goes_on = "it goes on behind them, for failOnDataLoss is false"
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
            f"stream 'plants', partition 0: offsets {told}; {goes_on}"
            for told in (
                f"0 to {first - 1} {taken}; the first that is there is {first}",
                f"0 to 4 {taken}; the first that is there is {first}",
            )
        ]
        for reading, end in ((gone, first), (all_gone, 5)):
            with pytest.raises(qflow.GapError, match="Set option failOnDataLoss to false .* give it a group") as caught:
                values(place, reading._replace(fail_on_data_loss=True))
            assert (caught.value.first, caught.value.end) == (0, end)


@pytest.mark.parametrize("wanted", ["#", "plant/#"])
def test_a_damaged_block_is_told_to_a_task(
    at: At, tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: str
) -> None:
    """Also where it is the last one."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        for number in range(5):
            broker.publish("plant/1", b"%d" % (1111 * number) + b" " * 100_000)  # a block of its own
    for text in (b"2222", b"4444"):
        damage(tmp_path / "spool", text)
    with qflow.open(tmp_path / "spool") as broker:
        place = at(broker)
        caplog.clear()
        assert values(place, asked(place, 0, 5, wanted=wanted)) == [0, 1111, 3333]
        said = [record.getMessage() for record in caplog.records if record.name == "qflow.spark"]
        for text, number in zip(said, (2, 4), strict=True):
            assert text.startswith(f"stream 'plants', partition 0: offsets {number} to {number} cannot be read: ")
        with pytest.raises(
            qflow.CorruptionError, match="offsets 2 to 2 .*`qflow check` of .*set option failOnDataLoss"
        ):
            values(place, asked(place, 0, 5, fail=True, wanted=wanted))


def test_a_stream_that_is_deleted_under_a_task_is_told(
    at: At, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it begins, and in the midst of it."""
    with qflow.open(tmp_path / "spool") as broker:
        for fail in (False, True):
            for begun in (False, True):
                broker.declare_stream("plants", topics=["plant/#"])
                for _ in range(40):
                    broker.publish("plant/1", b"1" + b" " * 2**20)
                place = at(broker)
                batches = place.read(asked(place, 0, 40, fail=fail))
                if begun:
                    next(batches)
                broker.delete_stream("plants")
                caplog.clear()
                if fail:
                    with pytest.raises(qflow.StreamDeleted, match="set option failOnDataLoss to false"):
                        list(batches)
                else:
                    assert sum(batch.num_rows for batch in batches) < 40
                    assert "for failOnDataLoss is false" in caplog.text


@pytest.mark.parametrize("more", [0, 20])
def test_an_older_copy_that_is_put_in_place_before_a_task_reads_is_refused(tmp_path: Path, at: At, more: int) -> None:
    """By a URL and by a path; whether it ends before what was planned, or was written on since."""
    spool, older = tmp_path / "spool", tmp_path / "older"
    with qflow.open(spool) as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        publish(broker, 5)
    shutil.copytree(spool, older, ignore=shutil.ignore_patterns("door", "stats.json*"))
    with qflow.open(spool) as broker:
        publish(broker, 10, start=5)
        place = at(broker)
        seen = place.look()
        (part,) = cut(
            [(place, seen.uuid, [(seen.streams["plants"], 0, 0, 15)])],
            parse({"path": place.where, "subscribe": "plants"}),
        )
        reading = Reading(part.uuid, part.span, "#", (Column("value"),), True, part.known)
        assert values(place, reading) == list(range(15))
    with qflow.open(older) as broker:
        publish(broker, more, start=100)
        with pytest.raises(qflow.StorageError, match="up to offset 15, .* it was replaced by an older copy"):
            values(at(broker), reading)
        publish(broker, more, start=200)
    with pytest.raises(qflow.StorageError, match="planned .* it is an older copy"):
        values(LocalPlace(str(older)), reading)
    spools.let_go(str(older))


# Leases ---------------------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_until_another_query_has_the_group(
    at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever else fails meanwhile, such as a token that has ended: which is told once."""
    monkeypatch.setattr(flight, "LEASE_S", 0.01)
    ended = qflow.InvalidArgument("the token has ended")
    fails = iter([ended, ended, qflow.StorageError("the disk"), Away("it is away")])
    renewed = threading.Event()
    action = Door.action

    def answer(door: Door, name: str, body: Any, **more: Any) -> Any:
        if "token" not in body:
            return action(door, name, body, **more)
        for error in fails:
            raise error
        if renewed.is_set():
            over.set()
            raise qflow.GroupInUse("another reader has taken the group")
        renewed.set()
        return {}

    over = threading.Event()
    monkeypatch.setattr(Door, "action", answer)
    with qflow.open(tmp_path / "spool") as broker:
        lease = at(broker).lease(str(broker.uuid), "g")
        assert renewed.wait(60)
        assert over.wait(60)
        lease.renewing.join(60)
        assert not lease.renewing.is_alive()
    assert [record.getMessage() for record in caplog.records if record.name == "qflow.spark"] == [
        "the lease of group 'g' is not renewed for now: the token has ended",
        "the lease of group 'g' is not renewed for now: the disk",
    ]


# Writing --------------------------------------------------------------------------------------------------------------


def batch_of(*numbers: int) -> Any:
    """Return rows of stream `plants`."""
    import pyarrow as pa

    return pa.record_batch({"value": [b"%d" % number for number in numbers], "topic": ["plant/1"] * len(numbers)})


def staging(broker: qflow.Broker) -> Staging:
    """Return what a task writes into."""
    return Staging(str(broker.uuid), Batch("q", 0), uuid4().hex, f"000000-{uuid4().hex}", None, None)


def adopted(place: Place, asked: Staging, written: Written) -> None:
    """Have what one task has written adopted."""
    assert written.file is not None
    manifest = Manifest(batch=asked.batch, token=asked.token, uuid=asked.uuid, once=True, files=(written.file,))
    place.hand_over(manifest, asked.batch, 60.0)


def bodies(broker: qflow.Broker) -> list[int]:
    return [int(message.body) for message in broker.stream("plants").query()]


@pytest.mark.parametrize("kind", ["path", "url"])
def test_an_attempt_at_a_batch_takes_the_place_of_those_before_it(at: At, tmp_path: Path, kind: str) -> None:
    """Of a streaming query; data frames of one application stage under one name, each for itself."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        place = at(broker) if kind == "url" else LocalPlace(str(tmp_path / "spool"))
        asked = [staging(broker)._replace(token=f"{number:032x}") for number in range(3)]
        if kind == "path":
            broker.close()  # a sink is another process, or owns the spool itself
        files: list[Written] = []
        for number, one in enumerate(asked):
            stage = place.stage(one._replace(replaces=number == 2))
            stage.add(batch_of(number))
            files.append(stage.finish())
            assert len(left_in_inbox(tmp_path / "spool")) == (1, 2, 1)[number]
        with pytest.raises(StorageError, match="A later attempt at it has begun"):
            adopted(place, asked[0], files[0])
        adopted(place, asked[2], files[2])
        assert left_in_inbox(tmp_path / "spool") == []
    spools.let_go(str(tmp_path / "spool"))
    with qflow.open(tmp_path / "spool") as broker:
        assert bodies(broker) == [2]


@pytest.mark.parametrize("most_held", [0, 30, 2**20])
@pytest.mark.parametrize("moment", [0, 1, 2, 3])
def test_a_task_that_writes_waits_for_a_broker_that_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int, most_held: int
) -> None:
    """Before it begins, amid its rows, or behind them: each row is stored once, in order, and no copy is left."""
    monkeypatch.setattr(sent, "MOST_HELD_BYTES", most_held)
    spool = tmp_path / "spool"
    broker = qflow.open(spool)
    broker.declare_stream("plants", topics=["plant/#"])
    server = serve(broker, port=0)
    port = server.port
    place = FlightPlace(Door(f"grpc://127.0.0.1:{port}"))
    asked = staging(broker)
    stage = place.stage(asked)
    for number in range(4):
        if number == moment:
            server.close()
            broker.close()
            broker = qflow.open(spool)
            server = serve(broker, port=port)
        if number < 3:
            stage.add(batch_of(2 * number, 2 * number + 1))
    written = stage.finish()
    with broker, server:
        adopted(place, asked, written)
        assert bodies(broker) == list(range(6))
        until(lambda: left_in_inbox(spool) == [])
        assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.parametrize("kind", ["ArrowInvalid", "ArrowIOError"])
def test_a_broker_that_ends_amid_the_rows_and_says_nothing_is_waited_for(
    at: At, tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What was written last lay in a buffer, and the call ended well: only the next row finds it closed."""
    import pyarrow as pa

    class Ended:
        def write_batch(self, batch: Any) -> None:
            raise getattr(pa, kind)("Destination already closed")

        def close(self) -> None: ...

    ends, begin = iter([(Ended(), None)]), flight.FlightStage._begin
    monkeypatch.setattr(flight.FlightStage, "_begin", lambda stage: next(ends, None) or begin(stage))
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        place, asked = at(broker), staging(broker)
        stage = place.stage(asked)
        stage.add(batch_of(0, 1))
        adopted(place, asked, stage.finish())
        assert bodies(broker) == [0, 1]
        assert len(time.slept) == 1


def test_an_answer_that_is_lost_is_asked_for_again(
    at: At, tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is one that nobody has adopted; where it is lost each time, the task ends when its patience does."""
    import pyarrow.flight as pf

    end = flight.FlightStage._end
    lost = iter(range(2))

    def unheard(stage: flight.FlightStage) -> Any:
        found = end(stage)
        for _ in lost:
            raise pf.FlightUnavailableError("the connection was cut")
        return found

    monkeypatch.setattr(flight.FlightStage, "_end", unheard)
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        place, asked = at(broker, patience_s=10.0), staging(broker)
        stage = place.stage(asked)
        stage.add(batch_of(1, 2))
        written = stage.finish()
        assert len(time.slept) == 2
        assert written.file is not None
        assert written.file.name == f"{asked.name}-3"
        adopted(place, asked, written)
        assert bodies(broker) == [1, 2]
        assert left_in_inbox(tmp_path / "spool") == []
        lost = iter(range(100))
        stage = place.stage(staging(broker))
        stage.add(batch_of(3))
        with pytest.raises(Away, match="it was waited for 1[01] s"):
            stage.finish()
        stage.discard()


def test_a_task_without_a_disk_for_its_copy_writes_all_the_same(
    at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails where the broker goes away, at once; whether it had a disk at first or not."""
    import pyarrow.flight as pf

    monkeypatch.setattr(sent, "MOST_HELD_BYTES", 0)
    with disk_of("1m", tmp_path / "disk") as disk, qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        place = at(broker)
        for directory in (disk, disk / "none"):
            monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{directory},{tmp_path}")
            asked = staging(broker)
            stage = place.stage(asked)
            stage.add(batch_of(1))
            stage.add(batch_of(*range(10**7, 10**7 + 100_000)))
            stage.add(batch_of(2))
            assert "a task keeps no copy of its rows" in caplog.text
            assert list(disk.iterdir()) == []
            caplog.clear()
            written = stage.finish()
            assert written.file is not None
            assert written.file.messages == 100_002
        stage = place.stage(staging(broker))
        stage.add(batch_of(1))
        with monkeypatch.context() as patched, pytest.raises(Away, match="the connection was cut"):
            patched.setattr(stage, "_end", Mock(side_effect=pf.FlightUnavailableError("the connection was cut")))
            stage.finish()
        stage.discard()


# Tokens ---------------------------------------------------------------------------------------------------------------


class Tokens:
    """A door that takes one token at a time, and the file from which tasks have theirs."""

    def __init__(self, broker: qflow.Broker, file: Path) -> None:
        self.file = file
        self._count = 0
        self.file.write_text("token-number-00000000\n")
        self.server = serve(broker, port=0, token_file=file)
        self.place = FlightPlace.of(
            f"grpc://127.0.0.1:{self.server.port}", token=None, token_file=str(file), ca=None, patience_s=60.0
        )

    def renew(self, *, in_file: bool = True) -> None:
        """Have the door take another one."""
        self._count += 1
        token = f"token-number-{self._count:08}"
        self.server.access.tokens = {digest(token): float("inf")}
        if in_file:
            self.file.write_text(f"{token}\n")


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[Tokens]:
    """Those of a broker with messages of 1 MiB."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        for number in range(40):
            broker.publish("plant/1", b"%d" % number + b" " * 2**20)
        found = Tokens(broker, tmp_path / "token")
        yield found
        found.server.close()


def test_a_task_that_reads_goes_on_with_the_token_that_is_in_the_file_by_then(tokens: Tokens) -> None:
    """Where there is no other one, that which has ended is an error."""
    place = tokens.place
    reading = asked(place, 0, 40)
    found = []
    for batch in place.read(reading):
        found += [int(value) for value in batch.column("value").to_pylist()]
        if len(found) < 4:
            tokens.renew()
    assert found == list(range(40))
    batches = place.read(reading)
    next(batches)
    tokens.renew(in_file=False)
    with pytest.raises(qflow.InvalidArgument, match="refuses this token .* give the right one"):
        list(batches)


@pytest.mark.parametrize("moment", [0, 1, 2, 3])
def test_a_task_that_writes_sends_its_rows_anew_with_the_token_that_is_in_the_file_by_then(
    tmp_path: Path, moment: int
) -> None:
    """Each is stored once, in order."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        tokens = Tokens(broker, tmp_path / "token")
        with tokens.server:
            writing = staging(broker)
            stage = tokens.place.stage(writing)
            for number in range(4):
                if number == moment:
                    tokens.renew()
                if number < 3:
                    stage.add(batch_of(2 * number, 2 * number + 1))
            adopted(tokens.place, writing, stage.finish())
            assert bodies(broker) == list(range(6))
            stage = tokens.place.stage(staging(broker))
            stage.add(batch_of(6))
            tokens.renew(in_file=False)
            with pytest.raises(qflow.InvalidArgument, match="refuses this token .* give the right one"):
                for _ in range(1000):
                    stage.add(batch_of(*range(1000)))
            stage.discard()


def test_a_task_on_a_host_without_the_file_has_the_token_of_when_it_was_planned(tokens: Tokens) -> None:
    """Not that with which the query began; and the connection stays the same."""
    place = tokens.place
    tokens.renew()
    sent_there = pickle.dumps(place)
    tokens.file.unlink()
    there = pickle.loads(sent_there)
    assert there.look().streams.keys() == {"plants"}
    assert there.door.client() is place.door.client()
    assert "token-number" not in repr(there)
