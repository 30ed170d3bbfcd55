"""The sink's writers as Spark uses them, task by task, without a Spark: what they refuse, and what they store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import qflow
from qflow.inspect import check_spool
from qflow.message import topic_prefix

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
pa = pytest.importorskip("pyarrow")

from pyspark.sql import types  # noqa: E402

from qflow.arrow import handover as handing  # noqa: E402
from qflow.spark import sink, spools  # noqa: E402
from qflow.spark.places import local  # noqa: E402
from qflow.spark.places.parse import local_path  # noqa: E402
from qflow.spark.sink import make_durable  # noqa: E402
from qflow.spark.source import QflowDataSource  # noqa: E402
from qflow.storage.files import Files  # noqa: E402
from qflow.storage.inbox import stages  # noqa: E402
from qflow.storage.inbox.inbox import Inbox  # noqa: E402
from qflow.storage.inbox.stages import check_batch  # noqa: E402
from unit.handing import hand  # noqa: E402

HEADERS = types.ArrayType(types.StructType().add("key", "string").add("value", "binary"))
TYPES: dict[str, Any] = {
    "int": (types.IntegerType(), pa.int32()),
    "string": (types.StringType(), pa.string()),
    "binary": (types.BinaryType(), pa.binary()),
    "map": (types.MapType(types.StringType(), types.StringType()), pa.map_(pa.string(), pa.string())),
    "headers": (HEADERS, pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
}
COLUMNS = {"value": "string", "topic": "string"}


class Passing:
    """A time that passes a tenth of a second with each look at it, and as long as somebody sleeps; it ends."""

    def __init__(self) -> None:
        self._now = 1000.0

    def monotonic(self) -> float:
        """Return a later time."""
        self._now += 0.1
        assert self._now < 1100, "nobody waits so long"
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let it pass."""
        self._now += seconds


@pytest.fixture
def ready(spool: Path) -> Path:
    """A spool with streams, which nobody owns."""
    with qflow.open(spool) as broker:
        broker.declare_stream("copies", topics=["copy/#"], max_message_bytes=1000)
        broker.declare_stream("others", topics=["also"])
    return spool


def writer(spool: object, columns: dict[str, str] = COLUMNS, *, overwrite: bool = False, **options: str) -> Any:
    """Return who writes a data frame of some columns."""
    schema = types.StructType([types.StructField(name, TYPES[kind][0]) for name, kind in columns.items()])
    return QflowDataSource({"path": str(spool), **options}).writer(schema, overwrite)


def rows(columns: dict[str, str] = COLUMNS, **values: list[Any]) -> Any:
    """Return a record batch."""
    return pa.record_batch([pa.array(values[name], TYPES[kind][1]) for name, kind in columns.items()], names=[*columns])


def numbered(first: int, count: int) -> Any:
    """Return rows with a number each."""
    numbers = range(first, first + count)
    return rows(value=[str(n) for n in numbers], topic=[f"copy/{n % 7}" for n in numbers])


def stored(spool: Path, stream: str = "copies") -> list[bytes]:
    """Return what a stream holds; the spool is sound, and its inbox empty."""
    spools.let_go(str(spool))
    assert check_spool(spool) == []
    assert not [path for path in (spool / "inbox").rglob("*") if path.is_file()]
    with qflow.open(spool) as broker:
        return [message.body for message in broker.stream(stream).query()]


@pytest.mark.parametrize(
    ("columns", "options", "sentence"),
    [
        ({"value": "string"}, {}, "say where the rows are published: with a column 'topic'"),
        ({"topic": "string"}, {}, "there is no column 'value' .there are: topic."),
        ({"value": "int", "topic": "string"}, {}, "column 'value' is int, and must be binary or string"),
        ({"value": "string", "topic": "int"}, {}, "column 'topic' is int, and must be string"),
        (COLUMNS | {"key": "int"}, {}, "column 'key' is int"),
        (COLUMNS | {"headers": "map"}, {}, "column 'headers' is map<string,string>, and must be array"),
        (COLUMNS | {"TOPIC": "string"}, {}, "two columns 'topic'"),
        ({"value": "string"}, {"topic": "copy/+"}, "option 'topic': topic 'copy/.' contains"),
        (
            {"value": "string"},
            {"topic": "other"},
            "no stream of .* takes topic 'other'.*there are the streams 'copies'",
        ),
        (COLUMNS, {"stream": "nope"}, "there is no stream 'nope' in .*; did you mean 'copies'"),
        (COLUMNS, {"comitTimeout": "1"}, "no option 'comittimeout' for writing; did you mean 'commitTimeout'"),
        (COLUMNS, {"commitTimeout": "soon"}, "option 'commitTimeout' is 'soon': give seconds"),
        (COLUMNS, {"commitTimeout": "0"}, "option 'commitTimeout' is '0': give seconds"),
        (COLUMNS, {"overwrite": True}, "appends to a spool, and replaces nothing there"),
        (COLUMNS, {"path": "/nowhere"}, "there is no spool at /nowhere"),
        (COLUMNS, {"path": "s3a://bucket/x"}, "s3a://bucket/x: a spool lies on a local disk.*give the path of its dir"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_row_is(ready, columns, options, sentence):
    """With a sentence that says what to do."""
    with pytest.raises(qflow.QflowError, match=sentence):
        writer(
            **{"spool": options.get("path", ready), "columns": columns}
            | {k: v for k, v in options.items() if k != "path"}
        )


@pytest.mark.parametrize(
    ("change", "options", "sentence"),
    [
        ({"topic": [None]}, {}, "null in column 'topic'"),
        ({"topic": ["copy/#"]}, {}, "topic 'copy/#' contains '#'"),
        ({"topic": ["no"]}, {}, "no stream of .* takes topic 'no'"),
        ({"topic": ["also"]}, {"stream": "copies"}, "does not take topic 'also'"),
        ({"value": ["x" * 2000]}, {}, "2,000 bytes, more than the max_message_bytes=1,000"),
        ({"value": ["x" * 999], "key": [b"k"]}, {}, "1,0.. bytes, more than the max_message_bytes=1,000"),
        ({"key": [b""]}, {}, "column 'key': a key must be 1 to 65,535 bytes"),
        ({"headers": [[{"key": "h", "value": b"\xff"}]]}, {}, "column 'headers', header 'h' is not UTF-8"),
        ({"headers": [[{"key": "h", "value": b"A"}] * 2]}, {}, "two headers 'h'"),
        ({"headers": [[{"key": None, "value": b"A"}]]}, {}, "a header without a name"),
    ],
)
def test_a_row_that_cannot_be_written_has_the_whole_frame_refused(ready, change, options, sentence):
    """Nothing of the others is stored, and no file is left."""
    columns = COLUMNS | {"key": "binary", "headers": "headers"}
    good = {"value": ["a"], "topic": ["copy/1"], "key": [None], "headers": [None]}
    found = writer(ready, columns, **options)
    with pytest.raises(qflow.QflowError, match=sentence):
        found.write(iter([rows(columns, **good), rows(columns, **good | change)]))
    found.abort([])
    assert stored(ready) == []


@pytest.mark.parametrize("place", [0, 1, 2, 500, 998, 999])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"topic": None}, "row {} .the first is 0, key b'k{}'.: there is null in column 'topic'"),
        ({"topic": "copy/#"}, "row {} .the first is 0, topic 'copy/#', key b'k{}'.: topic 'copy/#' contains '#'"),
        ({"topic": "no" * 40}, "row {} .the first is 0, topic '(no){{30}}'…, key b'k{}'.: no stream of"),
        ({"key": b""}, "row {} .the first is 0, topic 'copy/1', key b''.: column 'key': a key must be"),
        (
            {"key": b"k" * 70_000},
            "row {} .the first is 0, topic 'copy/1', key b'(k){{60}}'….: column 'key': a key must",
        ),
        ({"value": "x" * 2000}, "row {} .the first is 0, topic 'copy/1', key b'k{}'.: .* 2,0.. bytes, more than"),
        ({"headers": [{"key": "h", "value": b"A"}] * 2}, "row {} .*: in column 'headers' are two headers 'h'"),
    ],
)
def test_a_row_that_cannot_be_written_is_named(ready, change, sentence, place):
    """The first of them, by its place in what its task writes, and by its topic and key, cut short."""
    columns = COLUMNS | {"key": "binary", "headers": "headers"}
    good = [
        {"value": "a", "topic": "copy/1", "key": b"k%d" % (100 + number), "headers": None} for number in range(1100)
    ]
    for wrong in (place, 999):
        good[100 + wrong] |= change
    found = writer(ready, columns)
    parts = [{name: [one[name] for one in part] for name in columns} for part in (good[:100], good[100:])]
    with pytest.raises(qflow.QflowError, match=sentence.format(100 + place, 200 + place)):
        found.write(iter([rows(columns, **part) for part in parts]))
    found.abort([])
    assert stored(ready) == []


def test_what_a_job_for_kafka_has_set_does_no_harm(ready):
    """Options of its sink that have no meaning here."""
    found = writer(ready, **{"kafka.bootstrap.servers": "a:9092", "includeHeaders": "true"})
    found.commit([found.write(iter([numbered(0, 2)]))])
    assert len(stored(ready)) == 2


def test_a_topic_that_is_not_utf_8_is_a_sentence(ready):
    """Spark's strings may be any bytes: those of cast(binary as string)."""
    offsets = pa.py_buffer((0).to_bytes(4, "little") + (2).to_bytes(4, "little"))
    topic = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff\xfe")])
    found = writer(ready)
    with pytest.raises(qflow.InvalidArgument, match="a topic that is not UTF-8.*decode it"):
        found.write(iter([pa.record_batch([pa.array(["a"]), topic], names=["value", "topic"])]))
    found.abort([])
    assert stored(ready) == []


def test_a_spool_that_was_read_through_a_link_is_written(ready):
    """A worker may have it open under another name, and must let go of it to own it."""
    link = ready.with_name("link")
    link.symlink_to(ready)
    with spools.reading(str(link)):
        pass
    found = writer(ready, commitTimeout="2")
    found.commit([found.write(iter([numbered(0, 5)]))])
    assert len(stored(ready)) == 5


@pytest.mark.parametrize("ttl_s", [None, 60.0])
def test_a_row_for_a_queue_has_room_for_its_topic(ready, ttl_s):
    """What the sink lets pass is stored: one byte more, and the row is refused, not the batch."""
    topic = "a/topic/of/some/length"
    most = 1000 - len(topic_prefix(topic)) - (8 if ttl_s else 0)
    with qflow.open(ready) as broker:
        broker.bind(broker.declare_queue("jobs", max_message_bytes=1000, ttl_s=ttl_s), topic)
    found = writer(ready)
    found.commit([found.write(iter([rows(value=["x" * most], topic=[topic])]))])
    with pytest.raises(qflow.MessageTooLarge, match="less its topic, where that is a queue"):
        writer(ready).write(iter([rows(value=["x" * (most + 1)], topic=[topic])]))
    spools.let_go(str(ready))
    with qflow.open(ready) as broker:
        assert broker.queue("jobs").get_nowait().body == b"x" * most


def test_tasks_write_one_batch_in_one_transaction(ready):
    """In the order of the partitions; a task without rows, and one that never answered, count for nothing."""
    found = writer(ready)
    parts = [found.write(iter([numbered(first, 500)])) for first in (0, 500)]
    parts += [found.write(iter([])), None]
    found.commit(parts)
    assert sorted(map(int, stored(ready))) == list(range(1000))
    empty = writer(ready)
    empty.commit([empty.write(iter([])), None])
    assert len(stored(ready)) == 1000


def test_a_frame_of_an_application_is_stored_once_a_version(ready):
    """Whoever repeats it does no harm, and a lower version is an old one; another application has its own."""
    for app, version, first in (("a", 3, 0), ("a", 3, 10), ("a", 2, 20), ("b", 0, 30), ("a", 4, 40)):
        found = writer(ready, txnAppId=app, txnVersion=str(version))
        found.commit([found.write(iter([numbered(first, 5)]))])
        spools.let_go(str(ready))
    assert sorted(map(int, stored(ready))) == [*range(5), *range(30, 35), *range(40, 45)]


def test_a_version_goes_to_each_of_several_streams_once(ready):
    """As a `foreachBatch` writes them, one after the other, and all of them again after a crash."""
    for _ in range(2):
        for version in ("0", "1"):
            for topic, options in (("copy/1", {}), ("also", {}), ("copy/2", {"topic": "copy/2"})):
                found = writer(ready, txnAppId="a", txnVersion=version, **options)
                found.commit([found.write(iter([rows(value=[f"{topic} {version}"], topic=[topic])]))])
                spools.let_go(str(ready))
    assert stored(ready) == [b"copy/1 0", b"copy/2 0", b"copy/1 1", b"copy/2 1"]
    assert stored(ready, "others") == [b"also 0", b"also 1"]


def test_a_version_of_several_transactions_is_stored_once(ready, monkeypatch):
    """Its streams have it when the last of them is done."""

    def small(path: str, **options: Any) -> Any:
        return qflow.open(path, max_transaction_bytes=200, **options)

    monkeypatch.setattr(local, "open_broker", small)
    for _ in range(2):
        found = writer(ready, txnAppId="a", txnVersion="0")
        found.commit([found.write(iter([numbered(0, 500)]))])
        spools.let_go(str(ready))
    assert sorted(map(int, stored(ready))) == list(range(500))


def test_a_version_that_is_in_one_of_its_streams_only_is_a_sentence(ready):
    """It may be the same frame, or another one: nothing is stored twice, and nothing is left out in silence."""
    for topics in (["copy/1"], ["copy/1", "also"]):
        found = writer(ready, txnAppId="a", txnVersion="0")
        written = [found.write(iter([rows(value=topics, topic=topics)]))]
        if len(topics) == 1:
            found.commit(written)
            continue
        with pytest.raises(qflow.InvalidArgument, match="version 0 of txnAppId 'a' is in stream 'copies', and not in"):
            found.commit(written)
        found.abort(written)
    assert stored(ready) == [b"copy/1"]
    assert stored(ready, "others") == []


def test_a_version_that_is_repeated_after_a_stream_was_added_says_that_it_is_stored(ready):
    """Under another name it would be stored twice; the next version goes to both."""

    def save(version: str) -> None:
        found = writer(ready, txnAppId="a", txnVersion=version)
        found.commit([found.write(iter([rows(value=[version], topic=["copy/1"])]))])
        spools.let_go(str(ready))

    save("0")
    with qflow.open(ready) as broker:
        broker.declare_stream("later", topics=["copy/#"])
    sentence = (
        "not in stream 'later', to which this data frame goes, too. If two data frames were written under that name "
        "and version, give each a txnAppId of its own. If stream 'later' takes these rows only since then, .* the "
        "version is stored: leave it out, and go on with the next one"
    )
    with pytest.raises(qflow.InvalidArgument, match=sentence):
        save("0")
    save("1")
    assert stored(ready) == [b"0", b"1"]
    assert stored(ready, "later") == [b"1"]


def test_a_version_that_was_stored_before_targets_were_told_apart_is_known(ready):
    """Of a log in which an application had one record."""
    with qflow.open(ready) as broker:
        hand(ready, broker.uuid, [("copy/1", b"of before")], query="app-a", number=3)
        broker.engine.adoption.run()
    for version in ("3", "4"):
        found = writer(ready, txnAppId="a", txnVersion=version)
        found.commit([found.write(iter([numbered(int(version), 1)]))])
        spools.let_go(str(ready))
    assert stored(ready) == [b"of before", b"4"]


def test_the_same_version_to_two_streams_waits_for_both(ready):
    """Handed in by two threads, and adopted later: neither is taken for the other."""
    for topic in ("copy/1", "also"):
        found = writer(ready, txnAppId="a", txnVersion="0")
        hand_in_only(found, found.write(iter([rows(value=[topic], topic=[topic])])))
    spools.let_go(str(ready))
    with qflow.open(ready) as broker:
        broker.engine.adoption.run()
    assert (stored(ready), stored(ready, "others")) == ([b"copy/1"], [b"also"])


def hand_in_only(found: Any, staged: Any) -> None:
    """Commit, and be killed before the owner has adopted it."""

    class Killed(Exception): ...

    def die(self: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local.Handover, "_wait", die)
        with pytest.raises(Killed):
            found.commit([staged])


def test_a_frame_that_is_given_up_leaves_nothing(ready):
    """Also what tasks had finished."""
    found = writer(ready)
    found.write(iter([numbered(0, 5)]))
    found.abort([])
    assert stored(ready) == []


def test_a_frame_that_waits_is_taken_back_as_soon_as_nobody_is_at_it(ready, monkeypatch):
    """Its owner takes it each time it tries in vain; a sink that came at such a moment comes again."""
    waits = ready / "inbox"
    looks: list[bool] = []

    def withdraw(*args: Any) -> bool:
        (name,) = [path.name for path in waits.iterdir() if path.name.startswith("batch-")]
        looks.append(name.endswith("~"))
        if len(looks) == 3:
            (waits / name).rename(waits / name.removesuffix("~"))
        return take_back(*args)

    def somebody(path: str) -> int:
        for stage in waits.glob("batch-*[0-9]"):
            if not looks:
                stage.rename(f"{stage}~")
        return 1

    take_back = stages.withdraw
    found = writer(ready, commitTimeout="5")
    with monkeypatch.context() as patched:
        patched.setattr(stages, "withdraw", withdraw)
        patched.setattr(local, "owner_pid", somebody)
        patched.setattr(handing, "time", Passing())
        with pytest.raises(qflow.StorageError, match="taken back, and nothing of it is stored"):
            found.commit([found.write(iter([numbered(0, 5)]))])
    assert looks == [True, True, True]
    assert stored(ready) == []


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("what", ["unreadable", "gone", "held"])
def test_a_frame_that_cannot_be_adopted_is_waited_for_no_longer_than_that(ready, monkeypatch, what, once):
    """Whatever the inbox is like: one that cannot be listed, one that somebody has emptied, one whose owner hangs."""
    expected = "too many open files.*(taken back|waits in the inbox)"

    def hand_in(files: Files, spool: str, manifest: Any) -> None:
        real(files, spool, manifest)
        if what == "gone":
            shutil.rmtree(stages.handed_in(spool, manifest.batch))

    def fail(self: Inbox) -> list[Any]:
        raise qflow.StorageError("cannot look into the inbox: too many open files")

    real = stages.hand_in
    found = writer(ready, commitTimeout="5", **({} if once else {"txnAppId": "a", "txnVersion": "1"}))
    monkeypatch.setattr(handing, "time", Passing())
    monkeypatch.setattr(stages, "hand_in", hand_in)
    if what == "unreadable":
        monkeypatch.setattr(Inbox, "waiting", fail)
    elif what == "gone":
        expected = "It is not in the inbox any more"
    else:
        expected = "is being adopted and cannot be taken back" if once else "waits in the inbox"
        monkeypatch.setattr(local, "owner_pid", lambda path: 1)
        monkeypatch.setattr(stages, "withdraw", lambda *args: False)
    with pytest.raises(qflow.StorageError, match=expected):
        found.commit([found.write(iter([numbered(0, 5)]))])


def test_a_spool_that_is_gone_when_a_task_runs_is_named(ready):
    """It runs on a host that does not see the path, or the spool was made anew."""
    found = writer(ready)
    spools.let_go(str(ready))
    ready.rename(ready.with_name("elsewhere"))
    with pytest.raises(qflow.NotFound, match="this executor, on host .*, cannot see the spool"):
        found.write(iter([numbered(0, 5)]))
    with qflow.open(ready) as broker:
        broker.declare_stream("copies", topics=["copy/#"])
    with pytest.raises(qflow.StorageError, match="was made anew"):
        found.write(iter([numbered(0, 5)]))
    spools.let_go(str(ready))
    shutil.rmtree(ready)


def test_an_inbox_that_cannot_be_written_is_named(ready):
    """A file stands in its place."""
    found = writer(ready)
    (ready / "inbox").write_text("x")
    with pytest.raises(qflow.StorageError, match="cannot write a batch .*: a file stands where|: .*move it away"):
        found.write(iter([numbered(0, 5)]))


def test_a_stream_writer_needs_to_know_its_batch(ready):
    """What Spark tells its tasks."""
    schema = types.StructType().add("value", "string").add("topic", "string")
    found = QflowDataSource({"path": str(ready)}).streamWriter(schema, False)
    with pytest.raises(qflow.InvalidArgument, match="did not tell this task which batch"):
        found.write(iter([numbered(0, 5)]))


def checkpoint_of(directory: Path, batch: int) -> Path:
    """Make what Spark has written when a batch begins."""
    (directory / "offsets").mkdir(parents=True)
    for name in ("metadata", ".metadata.crc", f"offsets/{batch}", f"offsets/.{batch}.crc"):
        (directory / name).write_text("x")
    return directory


def test_a_batch_is_in_the_log_only_when_its_checkpoint_is_on_the_disk(ready, tmp_path, monkeypatch):
    """Else a power cut could leave a log that knows a batch which Spark has forgotten, and plans with more in it."""
    synced: list[str] = []

    class Watched(Files):
        def sync_file(self, path: str) -> None:
            assert not (ready / "inbox" / "query-0").exists()
            synced.append(path)

        def sync_directory(self, path: str) -> None:
            synced.append(path)

    monkeypatch.setattr(sink, "_batch_of_task", lambda: check_batch("query", 0))
    schema = types.StructType().add("value", "string").add("topic", "string")
    directory = checkpoint_of(tmp_path / "checkpoint", 0)
    options = {"path": str(ready), "checkpointLocation": f"file://{directory}"}
    found = QflowDataSource(options).streamWriter(schema, False)
    with monkeypatch.context() as patched:
        patched.setattr(sink, "make_durable", lambda location, batch, _: make_durable(location, batch, Watched()))
        found.commit([found.write(iter([numbered(0, 5)]))], 0)
    names = ["metadata", ".metadata.crc", "offsets/0", "offsets/.0.crc", "offsets"]
    assert synced == [*(str(directory / name) for name in names), str(directory), str(tmp_path)]
    assert len(stored(ready)) == 5


def test_a_batch_that_the_checkpoint_does_not_know_is_not_stored(ready, tmp_path, monkeypatch):
    """Somebody has removed it."""
    monkeypatch.setattr(sink, "_batch_of_task", lambda: check_batch("query", 8))
    schema = types.StructType().add("value", "string").add("topic", "string")
    options = {"path": str(ready), "checkpointLocation": str(checkpoint_of(tmp_path / "checkpoint", 7))}
    found = QflowDataSource(options).streamWriter(schema, False)
    written = [found.write(iter([numbered(0, 5)]))]
    with pytest.raises(qflow.StorageError, match="batch 8 is not in the checkpoint at .*offsets/8 is missing"):
        found.commit(written, 8)
    found.abort(written, 8)
    assert stored(ready) == []


@pytest.fixture
def stream_query(ready, tmp_path, monkeypatch):
    """A streaming query: a function that writes one of its batches of some rows, as Spark has it done."""
    directory = tmp_path / "checkpoint"
    schema = types.StructType().add("value", "string").add("topic", "string")

    def write(batch: int, count: int, *, plan: str = "x") -> None:
        if not (directory / "offsets").exists():
            checkpoint_of(directory, batch)
        (directory / "offsets" / str(batch)).write_text(plan)
        monkeypatch.setattr(sink, "_batch_of_task", lambda: check_batch("query", batch))
        found = QflowDataSource({"path": str(ready), "checkpointLocation": str(directory)}).streamWriter(schema, False)
        written = [found.write(iter([numbered(10 * batch, count)] if count else []))]
        try:
            found.commit(written, batch)
        except qflow.QflowError:
            found.abort(written, batch)
            raise
        finally:
            spools.let_go(str(ready))

    return write


@pytest.mark.parametrize("counts", [(5, 5, 5), (5, 0, 5), (0, 0, 5), (5, 5, 0)])
def test_a_target_that_lacks_batches_of_a_query_is_noticed(ready, stream_query, tmp_path, counts):
    """It was made anew, or an older copy was put in its place: also where some batches had no rows."""
    shutil.copytree(ready, tmp_path / "empty")
    for batch, count in enumerate(counts):
        stream_query(batch, count)
        if batch == 0:
            shutil.copytree(ready, tmp_path / "older")
    assert len(stored(ready)) == sum(counts)
    for copy, has in (("empty", "none of its batches"), ("older", "its batches up to 0 only")):
        shutil.rmtree(ready)
        shutil.copytree(tmp_path / copy, ready)
        with pytest.raises(qflow.StorageError, match=f"is at batch 3, and the spool at {ready} has {has}: it was made"):
            stream_query(3, 5)
        assert len(stored(ready)) == (counts[0] if copy == "older" else 0)


def test_batches_without_rows_are_repeated_and_followed(ready, stream_query):
    """Each is known, and leaves nothing in the inbox."""
    for batch, count in ((0, 0), (0, 0), (1, 5), (1, 5), (2, 0), (3, 5)):
        stream_query(batch, count)
    assert sorted(map(int, stored(ready))) == [*range(10, 15), *range(30, 35)]


def test_a_checkpoint_that_is_older_than_the_target_is_noticed(ready, stream_query):
    """It plans anew what the target has, with other messages in it, which would be left out."""
    for batch in range(3):
        stream_query(batch, 5)
    stream_query(2, 5)
    for batch, sentence in ((1, "has its batches up to 2:"), (2, "up to 2, which is of other messages:")):
        with pytest.raises(qflow.StorageError, match=f"{sentence} the checkpoint was replaced by an older copy"):
            stream_query(batch, 5, plan="another")
    assert len(stored(ready)) == 15


def test_a_query_that_left_out_batches_without_rows_goes_on(ready, stream_query):
    """As before they were recorded: what its record says of numbers that are missing is not known."""
    with qflow.open(ready) as broker:
        hand(ready, broker.uuid, [("copy/1", b"7")], query="query", number=0)
        broker.engine.adoption.run()
    stream_query(5, 1)
    with pytest.raises(qflow.StorageError, match="is at batch 7, .* has its batches up to 5 only"):
        stream_query(7, 1)
    assert stored(ready) == [b"7", b"50"]


def test_a_checkpoint_elsewhere_is_left_to_those_who_keep_it():
    """A store of objects, or HDFS, answers for what it has confirmed."""
    assert local_path("s3a://bucket/checkpoint") is None
    assert local_path("file:/a/b") == local_path("file:///a/b") == local_path("/a/b") == "/a/b"
    make_durable("hdfs://host/nowhere", 0, Files())


def test_rows_go_to_one_of_several_spools_by_key_or_topic(tmp_path: Path) -> None:
    """Those of a key to one of them, whoever is named first; a batch that is repeated is stored once in each."""
    paths = [tmp_path / "one", tmp_path / "other"]
    for path in paths:
        with qflow.open(path) as broker:
            broker.declare_stream("copies", topics=["copy/#"])
    columns = {"key": "string", "value": "string", "topic": "string"}
    batch = rows(
        columns,
        key=[f"{n % 10}" if n < 100 else None for n in range(200)],
        value=[str(n) for n in range(200)],
        topic=[f"copy/{n % 7}" for n in range(200)],
    )
    for order in (paths, paths[::-1]):
        made = writer(",".join(map(str, order)), columns, txnAppId="app", txnVersion="1")
        made.commit([made.write(iter([batch])), made.write(iter([]))])
    found = [sorted(map(int, stored(path))) for path in paths]
    assert sorted(found[0] + found[1]) == list(range(200))
    assert all(found)
    for count, numbers in ((10, range(100)), (7, range(100, 200))):
        assert all(len({n in found[0] for n in numbers if n % count == one}) == 1 for one in range(count))


def test_a_batch_of_other_spools_than_those_it_was_planned_for_is_refused(tmp_path: Path) -> None:
    """Its rows are shared out by how many there are."""
    paths = [tmp_path / "one", tmp_path / "other", tmp_path / "third"]
    for path in paths:
        with qflow.open(path) as broker:
            broker.declare_stream("copies", topics=["copy/#"])
    staged = writer(f"{paths[0]},{paths[1]}").write(iter([numbered(0, 10)]))
    with pytest.raises(qflow.errors.StorageError, match="was made anew"):
        writer(f"{paths[0]},{paths[2]}").commit([staged])


def test_an_attempt_that_did_not_hear_that_it_was_handed_in_may_be_repeated(ready: Path) -> None:
    """It is stored once, whether it was adopted meanwhile or not."""
    made = writer(ready, txnAppId="app", txnVersion="1")
    message = made.write(iter([numbered(0, 10)]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local.Handover, "_wait", lambda self: None)  # its answer is lost
        made.commit([message])
    made.commit([message])
    made.commit([message])
    assert stored(ready) == [b"%d" % n for n in range(10)]


def test_a_query_goes_on_with_the_spools_that_know_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not refuses a batch before another one has taken its part; so does a batch of other spools."""
    paths = [tmp_path / name for name in ("one", "other", "third")]
    for path in paths:
        with qflow.open(path) as broker:
            broker.declare_stream("copies", topics=["copy/#"])
    schema = types.StructType([types.StructField(name, types.StringType()) for name in COLUMNS])

    def write(number: int, *places: Path) -> None:
        monkeypatch.setattr(sink, "_batch_of_task", lambda: check_batch("query", number))
        found: Any = QflowDataSource({"path": ",".join(map(str, places))}).streamWriter(schema, False)
        message = found.write(iter([numbered(10 * number, 10)]))
        try:
            found.commit([message], number)
        except qflow.StorageError:
            found.abort([message], number)
            raise

    for number in (0, 1, 1):
        write(number, *paths[:2])
    for places in (paths, paths[1:]):
        with pytest.raises(qflow.StorageError, match="third has none of its batches"):
            write(2, *places)
    with monkeypatch.context() as patched:
        taken = local.Handover.run

        def once(handing_over: Any) -> None:
            taken(handing_over)
            raise qflow.StorageError("the driver is killed")

        patched.setattr(local.Handover, "run", once)
        with pytest.raises(qflow.StorageError, match="the driver is killed"):
            write(2, *paths[:2])
    for place in paths[:2]:
        with pytest.raises(qflow.StorageError, match="is of other messages|third has none of its batches"):
            write(2, place, paths[2])
    write(2, *paths[1::-1])
    found = [int(body) for path in paths[:2] for body in stored(path)]
    assert sorted(found) == list(range(30))
    assert stored(paths[2]) == []
