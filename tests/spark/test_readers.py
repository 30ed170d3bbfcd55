"""The readers beside a living owner of the spool, without a Spark: what they read, and what they say goes wrong."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

import qflow
from qflow.storage import groups
from qflow.storage.block_log import ERAS, meta_key, seal
from qflow.storage.files import Files
from spark import reader_process as there
from spark.reader_process import ReaderProcess, Told
from unit.clocks import Clock, open_still

pytest.importorskip("pyspark", reason='PySpark is not installed: pip install "qflow[spark]"')
EARLIEST = {"startingOffsets": "earliest"}


@pytest.fixture(scope="module")
def process() -> Iterator[ReaderProcess]:
    found = ReaderProcess()
    yield found
    found.close()


@pytest.fixture
def reader(process: ReaderProcess, spool: Path) -> Iterator[ReaderProcess]:
    yield process
    process(there.let_go, str(spool))


def publish(broker: qflow.Broker, count: int, start: int = 0, topic: str = "plant/{}/heat") -> None:
    broker.publish_many([(topic.format(n % 10), b"%d" % n) for n in range(start, start + count)])


def edit(spool: Path, change: Callable[[Any], None]) -> None:
    """Change a log that nobody has open."""
    with lmdb.open(str(spool / "log"), map_size=2**30) as env, env.begin(write=True) as txn:
        change(txn)


def damage(spool: Path, text: bytes) -> None:
    """Flip a bit of the one value that holds a text, in that text."""

    def change(txn: Any) -> None:
        ((key, value),) = [(key, value) for key, value in txn.cursor() if text in value]
        changed = bytearray(value)
        changed[value.index(text)] ^= 1
        txn.put(key, bytes(changed))

    edit(spool, change)


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [(99, "FormatTooNew: .* open it with the newer qflow"), (1, "StorageError: .*drain it with the version that")],
)
def test_a_spool_of_another_format_is_told(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path, version: int, expected: str
) -> None:
    """A newer and an older one, in a batch and in a query."""
    open_spool().close()
    edit(spool, lambda txn: txn.put(meta_key("format"), seal(version.to_bytes(4, "little"))))
    for read in (there.batch, there.begin):
        with pytest.raises(Told, match=expected):
            reader(read, str(spool))


def test_an_executor_that_cannot_see_the_spool_says_so(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path, tmp_path: Path
) -> None:
    """It was planned where the spool is, and is run where it is not."""
    publish(broker, 10)
    planned = reader(there.plan, str(spool))
    assert reader(there.run, *planned) == list(range(10))
    broker.close()
    spool.rename(tmp_path / "elsewhere")
    with pytest.raises(
        Told, match="this executor, on host '.*', cannot see the spool at .*, which the driver has seen"
    ):
        reader(there.run, *planned)


def test_what_is_gone_before_a_task_reads_it(still: qflow.Broker, reader: ReaderProcess, spool: Path) -> None:
    """Retention, or the deletion of the stream, is faster than the task: the error says what is there."""
    stream = still.declare_stream("plants", topics=["plant/#"], retention_messages=5)
    publish(still, 100)
    strict, parts = reader(there.plan, str(spool), endingOffsets='{"plants":{"0":97}}')
    lax, _ = reader(there.plan, str(spool), failOnDataLoss="false")
    short, few = reader(there.plan, str(spool), endingOffsets='{"plants":{"0":7}}')
    while stream.retain():
        pass
    with pytest.raises(
        Told, match=r"offsets 0 to 94 are gone, retention took them .*the first that is there is 95\. Set"
    ):
        reader(there.run, strict, parts)
    with pytest.raises(Told, match="offsets 0 to 6 are gone, .*the first that is there is 95"):
        reader(there.run, short, few)
    assert reader(there.run, lax, parts) == [95, 96]
    assert reader(there.run, lax, few) == []
    still.delete_stream("plants")
    with pytest.raises(Told, match="StreamDeleted: stream 'plants' was deleted.*failOnDataLoss"):
        reader(there.run, strict, parts)
    assert reader(there.run, lax, parts) == []


def test_what_retention_took_between_two_batches(still: qflow.Broker, reader: ReaderProcess, spool: Path) -> None:
    """Is an error that names the first offset there is, or is left out."""
    stream = still.declare_stream("plants", topics=["plant/#"], retention_messages=5)
    publish(still, 10)
    start = reader(there.begin, str(spool), **EARLIEST)
    publish(still, 10, 10)
    end = reader(there.latest, start)
    while stream.retain():
        pass
    with pytest.raises(Told, match="offsets 0 to 14 are gone, .*; the first that is there is 15.*failOnDataLoss"):
        reader(there.micro_batch, start, end)
    reader(there.go_on, str(spool), failOnDataLoss="false")
    assert reader(there.micro_batch, start, end) == list(range(15, 20))


def test_a_query_of_another_log_leaves_the_group_alone(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path, tmp_path: Path
) -> None:
    """It is refused before it writes anything."""
    with open_spool() as broker:
        broker.declare_stream("plants", topics=["plant/#"])
    start = reader(there.begin, str(spool), **EARLIEST)
    spool.rename(tmp_path / "away")
    again = open_spool()
    owner = again.declare_stream("plants", topics=["plant/#"]).owner
    group = groups.Group(str(spool), "g", str(again.uuid), Files())
    group.acknowledge({owner: {0: 0}})
    group.close()
    for step in ((there.latest, start), (there.micro_batch, start, start)):
        reader(there.go_on, str(spool), **EARLIEST, group="g")
        with pytest.raises(Told, match="was made anew"):
            reader(*step)
        assert groups.committed_of(str(spool), "g", str(again.uuid)) == {owner: {0: 0}}


def test_a_spool_that_was_made_anew(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path, tmp_path: Path
) -> None:
    """Its offsets say nothing of the one before, which is told at every step."""
    with open_spool() as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        publish(broker, 10)
    start = reader(there.begin, str(spool), **EARLIEST)
    end = reader(there.latest, start)
    planned = reader(there.plan, str(spool))
    spool.rename(tmp_path / "away")
    again = open_spool()
    again.declare_stream("plants", topics=["plant/#"])
    publish(again, 20)
    for step in ((there.latest, end), (there.micro_batch, start, end), (there.run, *planned)):
        with pytest.raises(Told, match="was made anew: its log is .*, the offsets of this query belong to"):
            reader(*step)


def test_an_older_copy_that_was_put_back(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path, tmp_path: Path
) -> None:
    """It has the same uuid, and ends before what the query has read: neither the next batch nor a repeated one."""
    with open_spool() as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        publish(broker, 10)
    shutil.copytree(spool, tmp_path / "copy")
    with open_spool() as broker:
        publish(broker, 10, 10)
    start = reader(there.begin, str(spool), **EARLIEST)
    end = reader(there.latest, start)
    spool.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "copy", spool)
    for step in ((there.latest, end), (there.micro_batch, start, end)):
        with pytest.raises(
            Told, match="knows offsets up to 20, and the spool at .* ends at 10: it was replaced by an old"
        ):
            reader(*step)


@pytest.mark.parametrize("copied", ["closed", "open"])
@pytest.mark.parametrize("kept", [1000, 1])
def test_an_older_copy_that_has_outgrown_the_query(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path, tmp_path: Path, copied: str, kept: int
) -> None:
    """It has all the offsets that the query knows, under which it holds other messages: also where retention took the
    last of those that were read, and where the copy was made beside an owner, who went on."""
    broker = open_spool()
    broker.declare_stream("plants", topics=["plant/#"])
    publish(broker, 10)
    if copied == "closed":
        broker.close()
    shutil.copytree(spool, tmp_path / "copy")
    if copied == "closed":
        broker = open_spool()
    publish(broker, 10, 10)
    start = reader(there.begin, str(spool), **EARLIEST)
    end = reader(there.latest, start)
    broker.close()
    reader(there.let_go, str(spool))
    spool.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "copy", spool)
    with open_still(spool, Clock()) as other:
        publish(other, 11, 1000)
        other.alter_stream("plants", retention_messages=kept)
        while other.stream("plants").retain():
            pass
        publish(other, 30, 1011)
        assert kept > 1 or other.stream("plants").stats().first_offsets == [20]
        for step in ((there.latest, end), (there.micro_batch, start, end)):
            with pytest.raises(Told, match="up to offset 20 is not what the spool at .* holds there: it was replaced"):
                reader(*step)


def test_a_log_that_is_opened_and_compacted_again_and_again_is_read_on(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path
) -> None:
    """From any checkpoint that there ever was of it."""
    at = []
    for number in range(5):
        with open_spool() as broker:
            broker.declare_stream("plants", topics=["plant/#"], partitions=2)
            publish(broker, 10, 10 * number)
            at.append(reader(there.begin, str(spool), startingOffsets="latest"))
        with open_spool() as broker:
            broker.compact()
        reader(there.let_go, str(spool))
    with open_spool():
        for number, start in enumerate(at):
            end = reader(there.latest, start)
            assert sorted(reader(there.micro_batch, start, end)) == list(range(10 * number + 10, 50))


def test_a_log_from_before_there_were_eras_is_read_on(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path, tmp_path: Path
) -> None:
    """It opens as it did, and what it gets from then on has an era: so an older copy is noticed from then on."""
    with open_spool() as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        publish(broker, 10)
    edit(spool, lambda txn: [txn.delete(key) for key, _ in txn.cursor() if key[0] == ERAS])
    shutil.copytree(spool, tmp_path / "copy")
    start = reader(there.begin, str(spool), startingOffsets="latest")
    assert "eras" not in start["streams"]["plants"]
    with open_spool() as broker:
        publish(broker, 10, 10)
        end = reader(there.latest, start)
        assert reader(there.micro_batch, start, end) == list(range(10, 20))
    reader(there.let_go, str(spool))
    spool.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "copy", spool)
    with open_spool() as broker:
        publish(broker, 30, 1000)
        with pytest.raises(Told, match="is not what the spool"):
            reader(there.latest, end)


def test_a_stream_that_was_deleted(broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path) -> None:
    """Or declared again, too: an error, or the query goes on with what there is now, from its beginning."""
    publish(broker, 10)
    start = reader(there.begin, str(spool), **EARLIEST)
    end = reader(there.latest, start)
    broker.delete_stream("plants")
    for step in ((there.latest, end), (there.micro_batch, start, end)):
        with pytest.raises(
            Told, match="StreamDeleted: stream 'plants' was deleted.*set option failOnDataLoss to false"
        ):
            reader(*step)
    reader(there.go_on, str(spool), failOnDataLoss="false")
    assert reader(there.micro_batch, start, end) == []
    without = reader(there.latest, end)
    assert reader(there.latest, without) == without
    broker.declare_stream("plants", topics=["plant/#"])
    publish(broker, 3, 100)
    for before in (end, without):
        assert reader(there.micro_batch, before, reader(there.latest, before)) == [100, 101, 102]
    reader(there.go_on, str(spool))
    with pytest.raises(Told, match="StreamDeleted"):
        reader(there.latest, end)


def test_a_damaged_block_is_a_hole(open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path) -> None:
    """Which is an error, or is left out; the blocks before and behind it are read."""
    with open_spool() as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        for number in range(5):
            broker.publish("plant/1", b"%d" % (1111 * number) + b" " * 100_000)  # a block of its own
    damage(spool, b"2222")
    with pytest.raises(
        Told, match="CorruptionError: stream 'plants', partition 0: offsets 2 to 2 cannot be read: .*`qflow check"
    ):
        reader(there.batch, str(spool))
    assert reader(there.batch, str(spool), failOnDataLoss="false") == [0, 1111, 3333, 4444]


def test_a_damaged_shared_body_is_a_hole_of_one_message(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path
) -> None:
    """Though it lies in one block with others; whoever does not want it does not notice."""
    bodies = [b"%d" % number * 4096 for number in range(1, 6)]
    with open_spool() as broker:
        broker.declare_stream("plants", topics=["plant/#"])
        other = broker.declare_stream("others", topics=["plant/#"])
        broker.publish_many([(f"plant/{number}", body) for number, body in enumerate(bodies, 1)])
        assert other.stats().messages == 5
    damage(spool, bodies[2])
    with pytest.raises(Told, match="offsets 2 to 2 cannot be read"):
        reader(there.batch, str(spool))
    kept = [int(body) for index, body in enumerate(bodies) if index != 2]
    assert reader(there.batch, str(spool), failOnDataLoss="false") == kept
    assert reader(there.batch, str(spool), filter="plant/4") == [int(bodies[3])]


def test_a_queue_is_read_with_little_memory(broker: qflow.Broker, reader: ReaderProcess, spool: Path) -> None:
    """Bodies that are shared with others are small in their block; what is settled stays left out."""
    for name in ("jobs", "others"):
        broker.declare_queue(name)
        broker.bind(name, "#")
    count = 12
    broker.publish_many([("a", b"%d" % number * 2**19) for number in range(10, 10 + count)])
    _, second = broker.queue("jobs").get_many(2)
    second.ack(wait=True)
    broker.queue("jobs").put(b"1" * 5 * 2**20)
    batches = reader(there.batches, str(spool), subscribe="", queue="jobs")
    assert [offset for offsets, _ in batches for offset in offsets] == [0, *range(2, count + 1)]
    assert all(size <= 2 * 2**20 + 1000 or len(offsets) == 1 for offsets, size in batches), batches


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscribe": ""}, "say what to read"),
        ({"subscribe": "plants", "subscribePattern": "p"}, "subscribe and subscribePattern are given"),
        ({"subscribe": " , "}, "'subscribe' is empty"),
        ({"subscribe": "plant"}, "there is no stream 'plant' in .*; there are: 'plants'"),
        ({"subscribe": "", "subscribePattern": "("}, "no regular expression"),
        ({"subscribe": "plants", "filter": "a/#/b"}, "goes on after '#'"),
        ({"subscribe": "plants", "startingOffset": "latest"}, "did you mean 'startingOffsets'"),
        ({"subscribe": "plants", "startingOffsets": "newest"}, "give earliest, latest, committed"),
        ({"subscribe": "plants", "startingOffsets": "{"}, "is no JSON"),
        ({"subscribe": "plants", "startingOffsets": '{"plants":{"0":"1"}}'}, "give a number for each partition"),
        ({"subscribe": "plants", "startingOffsets": '{"plants":{}}'}, "leaves out partition 0"),
        ({"subscribe": "plants", "startingOffsets": '{"plants":{"0":0,"1":0}}'}, "names partition 1"),
        ({"subscribe": "plants", "startingOffsets": '{"other":{"0":0}}'}, "names stream 'other'"),
        ({"subscribe": "plants", "startingOffsets": '{"plants":{"0":9}}'}, "offset 9 is past the end"),
        ({"subscribe": "plants", "startingOffsets": "committed"}, "say whose with option 'group'"),
        ({"subscribe": "plants", "endingOffsets": "earliest"}, "endingOffsets cannot be 'earliest'"),
        ({"subscribe": "plants", "startingTimestamp": "today"}, "give milliseconds since 1970"),
        ({"subscribe": "plants", "startingTimestamp": "1", "startingOffsets": "latest"}, "the same in two ways"),
        ({"subscribe": "plants", "minPartitions": "0"}, "give a whole number, 1 or more"),
        ({"subscribe": "plants", "failOnDataLoss": "maybe"}, "give true or false"),
        ({"subscribe": "plants", "maxOffsetsPerTrigger": "5"}, "is for spark.readStream only"),
        ({"subscribe": "plants", "minPartitions": "9" * 5000}, "give a whole number, 1 or more"),
        ({"subscribe": "plants", "startingTimestamp": "9" * 5000}, "give milliseconds since 1970"),
        ({"subscribe": "plants", "startingOffsets": '{"plants":{"0":' + "9" * 5000 + "}}"}, "is no JSON"),
        ({"subscribe": "plants", "startingOffsets": '{"plants":' * 100_000}, "is no JSON"),
        ({"subscribe": "plants", "startingOffsets": '{"plants":{"' + "9" * 5000 + '":0}}'}, "give a number for each"),
        ({"subscribe": "plants", "startingOffsets": '{"plants":{"0":3,"00":5}}'}, "gives partition 0 .* twice"),
        ({"subscribe": "", "queue": "q", "failOnDataLoss": "false"}, "'failOnDataLoss' is for streams"),
        ({"subscribe": "plants", "assign": '{"plants":[0]}'}, "subscribe and assign are given"),
        ({"subscribe": "", "assign": "{}"}, "give the numbers of the partitions of each stream"),
        ({"subscribe": "", "assign": "plants"}, "'assign' is no JSON"),
        ({"subscribe": "", "assign": '{"plants":[0,true]}'}, "give the numbers of the partitions"),
        ({"subscribe": "", "assign": '{"plants":[0,1]}'}, "names partition 1 of stream 'plants', which has 1"),
        (
            {"subscribe": "", "assign": '{"plants":[0]}', "startingOffsets": '{"plants":{"0":0,"1":0}}'},
            "names partition 1 of stream 'plants': give a number for each of its partitions that are read, 0",
        ),
        ({"subscribe": "plants", "minOffsetsPerTrigger": "5"}, "is for spark.readStream only"),
    ],
)
def test_a_wrong_option_is_a_sentence(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path, options: dict[str, str], expected: str
) -> None:
    """Which names the option and what to do."""
    with pytest.raises(Told, match=expected):
        reader(there.batch, str(spool), **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"subscribe": "plants", "endingOffsets": "latest"}, "'endingOffsets' is for spark.read only"),
        ({"queue": "jobs"}, "'queue' is for spark.read only"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "would wait for more than it may have"),
        ({"maxTriggerDelay": "soon"}, "'maxTriggerDelay': give a time such as 30s or 15m"),
        ({"subscribe": "plants", "startingOffset": "latest"}, "did you mean 'startingOffsets'"),
    ],
)
def test_a_wrong_option_of_a_streaming_query_is_told_when_spark_first_asks(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path, options: dict[str, str], expected: str
) -> None:
    """Spark loses what is raised before that; with a checkpoint it asks for something else first."""
    with pytest.raises(Told, match=expected):
        reader(there.begin, str(spool), **options)
    reader(there.go_on, str(spool), **options)
    with pytest.raises(Told, match=expected):
        reader(there.latest, {})
    with pytest.raises(Told, match=expected):
        reader(there.micro_batch, {}, {})


# Beside a living owner ------------------------------------------------------------------------------------------------


def test_a_log_that_grows_beyond_what_is_mapped(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path
) -> None:
    """Is mapped anew, in the middle of a query."""
    publish(broker, 10)
    reader(there.map_no_more_than, 2**20)
    try:
        start = reader(there.begin, str(spool), **EARLIEST)
        end = reader(there.latest, start)
        assert reader(there.micro_batch, start, end) == list(range(10))
        before = reader(there.mapped, str(spool))
        for start in range(10, 4010, 1000):
            broker.publish_many([("plant/1", b"%0800d" % n) for n in range(start, start + 1000)])
        more = reader(there.latest, end)
        assert reader(there.micro_batch, end, more) == list(range(10, 4010))
        assert before < 2 * 2**20 < reader(there.mapped, str(spool))
    finally:
        reader(there.map_no_more_than, 2**40)


def test_a_log_that_is_compacted_between_two_batches(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path
) -> None:
    """Is another file: what the readers have open is let go."""
    publish(broker, 1000)
    start = reader(there.begin, str(spool), **EARLIEST)
    end = reader(there.latest, start)
    planned = reader(there.plan, str(spool))
    broker.compact()
    assert reader(there.micro_batch, start, end) == list(range(1000))
    publish(broker, 10, 1000)
    broker.compact()
    assert reader(there.micro_batch, end, reader(there.latest, end)) == list(range(1000, 1010))
    assert reader(there.run, *planned) == list(range(1000))


def test_a_filter_reads_the_blocks_that_hold_a_match(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path
) -> None:
    """And few others: 1 % of the topics in twice their blocks at the most."""
    for start in range(0, 200_000, 2000):
        topic = f"plant/{start // 2000}/heat"
        broker.publish_many([(topic, b"%d" % n) for n in range(start, start + 2000)])
    decoded, matching, blocks = reader(there.blocks_read, str(spool), "plant/42/+")
    assert 0 < matching <= decoded <= 2 * matching
    assert blocks > 20 * matching
    assert reader(there.batch, str(spool), filter="plant/42/+") == list(range(84_000, 86_000))


# A query, step by step ------------------------------------------------------------------------------------------------


def test_where_a_query_begins(still: qflow.Broker, clock: Clock, reader: ReaderProcess, spool: Path) -> None:
    """By each form there is."""
    still.declare_stream("plants", topics=["plant/#"], partitions=2)
    still.publish_many([("plant/1", b"%d" % n) for n in range(10)])
    clock.advance(60)
    still.publish_many([("plant/1", b"%d" % n) for n in range(10, 20)])
    (used,) = {message.partition for message in still.stream("plants").query()}
    moment = str(int(clock.wall() * 1000))

    def begins(**options: str) -> int:
        at = reader(there.begin, str(spool), **options)
        return int(at["streams"]["plants"]["offsets"][str(used)])

    def both(low: int) -> str:
        return f'{{"plants":{{"0":{low if used == 0 else 0},"1":{low if used == 1 else 0}}}}}'

    assert begins() == 20
    assert begins(startingOffsets="latest") == 20
    assert begins(startingOffsets="earliest") == 0
    assert begins(startingOffsets=both(7)) == 7
    assert begins(startingOffsets=both(-2)) == 0
    assert begins(startingOffsets=both(-1)) == 20
    assert begins(startingTimestamp=moment) == 10
    assert begins(startingOffsetsByTimestamp=both(int(moment))) == 10
    assert begins(startingOffsets="committed", group="nobody") == 0


def test_limits_of_a_batch(broker: qflow.Broker, reader: ReaderProcess, spool: Path) -> None:
    """Are divided among partitions by what waits in them, and none is left out for ever."""
    broker.declare_stream("plants", topics=["plant/#"], partitions=3)
    publish(broker, 1000, topic="plant/{}")
    for options in ({"maxOffsetsPerTrigger": "70"}, {"maxBytesPerTrigger": "100"}):
        at = reader(there.begin, str(spool), **EARLIEST, **options)
        read: list[int] = []
        sizes: list[int] = []
        while (end := reader(there.latest, at)) != at:
            found = reader(there.micro_batch, at, end)
            sizes.append(len(found))
            read += found
            at = end
        assert sorted(read) == list(range(1000))
        if "maxOffsetsPerTrigger" in options:
            assert max(sizes) == 70


def test_a_small_partition_beside_a_large_one_is_read(broker: qflow.Broker, reader: ReaderProcess, spool: Path) -> None:
    """In proportion it would get nothing for as long as the other one is long; with the smallest of limits, too."""
    broker.declare_stream("plants", topics=["plant"])
    broker.declare_stream("plants2", topics=["new"])
    broker.publish_many([("plant", b"0")] * 1000 + [("new", b"%d" % n) for n in range(1, 4)])
    for limit, sizes in (("10", [10] * 4), ("1", [2] * 3 + [1])):
        options = {"subscribe": "", "subscribePattern": "plants.*", "maxOffsetsPerTrigger": limit, **EARLIEST}
        at = reader(there.begin, str(spool), **options)
        read: list[int] = []
        for size in sizes:
            end = reader(there.latest, at)
            found = reader(there.micro_batch, at, end)
            assert len(found) == size
            read += filter(None, found)
            at = end
        assert read == [1, 2, 3]


def test_bodies_that_streams_share_count_as_what_they_are(
    broker: qflow.Broker, reader: ReaderProcess, spool: Path
) -> None:
    """In bytes of a batch; the block that refers to them is small, and is cut where the limit is."""
    broker.declare_stream("plants", topics=["plant"])
    broker.declare_stream("others", topics=["plant"])
    broker.publish_many([("plant", b"%-100000d" % n) for n in range(40)])
    broker.publish("plant", b"40")
    at = reader(there.begin, str(spool), maxBytesPerTrigger="1000000", **EARLIEST)
    read = []
    while (end := reader(there.latest, at)) != at:
        read.append(reader(there.micro_batch, at, end))
        at = end
    assert list(map(len, read)) == [10] * 4 + [1]
    assert [number for part in read for number in part] == list(range(41))


def test_a_stream_that_is_left_and_taken_again_goes_on_where_it_was(
    still: qflow.Broker, clock: Clock, reader: ReaderProcess, spool: Path
) -> None:
    """On one checkpoint, by names and by a pattern. Meanwhile its group has retention keep nothing of it; what that
    took is told, and a stream that is another one by now is read from its beginning."""
    for name in ("plants", "plants2"):
        still.declare_stream(name, topics=[f"{name}/#"])
        publish(still, 10, topic=f"{name}/{{}}")
    both = {"subscribe": "plants,plants2", "group": "g"}
    pattern = {"subscribe": "", "subscribePattern": "plants.*", "group": "g"}
    start = reader(there.begin, str(spool), **both, **EARLIEST)
    at = reader(there.latest, start)
    reader(there.latest, at)
    for again in (both, pattern):
        publish(still, 2, 100, topic="plants/{}")
        publish(still, 3, 200, topic="plants2/{}")
        reader(there.go_on, str(spool), subscribe="plants", group="g")
        left = reader(there.latest, at)
        assert reader(there.micro_batch, at, left) == [100, 101]
        reader(there.go_on, str(spool), **again)
        at = reader(there.latest, left)
        assert reader(there.micro_batch, left, at) == [200, 201, 202]
    reader(there.go_on, str(spool), subscribe="plants", group="g")
    left = reader(there.latest, at)
    still.alter_stream("plants2", retention_messages=1)
    publish(still, 5, 300, topic="plants2/{}")
    clock.wall_s = time.time() + groups.GRACE_S + 60
    while still.stream("plants2").retain():
        pass
    reader(there.go_on, str(spool), **both)
    with pytest.raises(Told, match="stream 'plants2', partition 0: offsets 16 to 19 are gone"):
        reader(there.micro_batch, left, reader(there.latest, left))
    still.delete_stream("plants2")
    still.declare_stream("plants2", topics=["plants2/#"])
    publish(still, 2, 400, topic="plants2/{}")
    reader(there.go_on, str(spool), subscribe="plants")
    without = reader(there.latest, left)
    reader(there.go_on, str(spool), subscribe="plants,plants2")
    assert reader(there.micro_batch, without, reader(there.latest, without)) == [400, 401]


def test_a_checkpoint_of_another_query_is_a_sentence(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path
) -> None:
    """Of one that reads other streams, and of one with another source."""
    broker.declare_stream("animals", topics=["animal"])
    start = reader(there.begin, str(spool), subscribe="animals", **EARLIEST)
    reader(there.go_on, str(spool))
    with pytest.raises(
        Told, match="is one of a query that reads 'animals', and this one reads nothing of that: give it"
    ):
        reader(there.latest, start)
    for offset in ({"logOffset": 3}, {"plants": {"0": 7}}, 7):
        with pytest.raises(Told, match="the offsets in the checkpoint are not those of format qflow"):
            reader(there.micro_batch, offset, offset)


def test_partitions_that_are_assigned_are_read(
    still: qflow.Broker, clock: Clock, reader: ReaderProcess, spool: Path
) -> None:
    """In a batch and by a query; those that are assigned later are read from their beginning, those that are left and
    taken again from where they were. A group holds those that are read."""
    stream = still.declare_stream("plants", topics=["plant/#"], partitions=3, retention_messages=1)
    publish(still, 100, topic="plant/{}")
    by_partition: dict[int, list[int]] = {}
    for message in stream.query():
        by_partition.setdefault(message.partition, []).append(int(message.body))

    def numbers(*partitions: int) -> list[int]:
        return sorted(number for partition in partitions for number in by_partition.get(partition, ()))

    def assigned(*partitions: int) -> dict[str, str]:
        return {"subscribe": "", "assign": f'{{"plants":{list(partitions)}}}', "group": "g"}

    assert sorted(reader(there.batch, str(spool), **assigned(0, 2))) == numbers(0, 2)
    start = reader(there.begin, str(spool), **assigned(1), **EARLIEST)
    one = reader(there.latest, start)
    assert sorted(reader(there.micro_batch, start, one)) == numbers(1)
    reader(there.go_on, str(spool), **assigned(0, 2))
    others = reader(there.latest, one)
    assert sorted(reader(there.micro_batch, one, others)) == numbers(0, 2)
    clock.wall_s = time.time() + groups.GRACE_S + 60
    while stream.retain():
        pass
    assert [stream.stats().first_offsets[number] for number in (0, 2)] == [0, 0]
    reader(there.go_on, str(spool), **assigned(0, 1, 2))
    assert reader(there.latest, others) == others


def test_a_batch_waits_for_enough_and_not_for_ever(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path
) -> None:
    """The first one does not, nor does what ends with what is there."""
    options = {"minOffsetsPerTrigger": "10", "maxTriggerDelay": "1h"}
    publish(broker, 2)
    start = reader(there.begin, str(spool), **options, **EARLIEST)
    first = reader(there.latest, start)
    assert reader(there.micro_batch, start, first) == [0, 1]
    publish(broker, 9, 2)
    assert reader(there.latest, first) == first
    publish(broker, 1, 11)
    second = reader(there.latest, first)
    assert reader(there.micro_batch, first, second) == list(range(2, 12))
    publish(broker, 1, 12)
    assert reader(there.latest, second) == second
    reader(there.go_on, str(spool), **options | {"maxTriggerDelay": "0"})
    for number in range(12, 14):
        third = reader(there.latest, second)
        assert reader(there.micro_batch, second, third) == [number]
        publish(broker, 1, number + 1)
        second = third
    reader(there.until_now)
    assert reader(there.micro_batch, second, reader(there.latest, second)) == [14]


def test_until_now_is_until_then(broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path) -> None:
    """What comes later, also streams of a pattern, waits for the next run."""
    publish(broker, 10)
    options = {"subscribe": "plants"}
    start = reader(there.begin, str(spool), **options, **EARLIEST)
    reader(there.until_now)
    publish(broker, 10, 10)
    end = reader(there.latest, start)
    assert reader(there.micro_batch, start, end) == list(range(10))
    assert reader(there.latest, end) == end


def test_a_group_has_one_reader(broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path) -> None:
    """The second one is told which process reads as the group."""
    publish(broker, 10)
    other = ReaderProcess()
    try:
        start = other(there.begin, str(spool), group="archive", **EARLIEST)
        other(there.latest, start)
        pid = other(os.getpid)
        reader(there.go_on, str(spool), group="archive")
        with pytest.raises(
            Told, match=f"GroupInUse: group 'archive' of the spool .* is in use by process {pid}: stop the"
        ):
            reader(there.latest, start)
    finally:
        other.close()
    assert reader(there.micro_batch, start, reader(there.latest, start)) == list(range(10))


def test_a_new_query_goes_on_where_its_group_was(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path
) -> None:
    """With `committed` and no checkpoint: where the batch ends that was done, also for a batch query."""
    publish(broker, 10)
    start = reader(there.begin, str(spool), group="archive", startingOffsets="committed")
    end = reader(there.latest, start)
    assert reader(there.micro_batch, start, end) == list(range(10))
    assert reader(there.begin, str(spool), group="archive", startingOffsets="committed") == start  # not known as done
    reader(there.go_on, str(spool), group="other")
    reader(there.latest, end)
    publish(broker, 5, 10)
    assert reader(there.begin, str(spool), group="other", startingOffsets="committed") == end
    assert reader(there.batch, str(spool), group="other", startingOffsets="committed") == list(range(10, 15))


def test_a_group_holds_retention(still: qflow.Broker, clock: Clock, reader: ReaderProcess, spool: Path) -> None:
    """Until a batch is done and for a grace time, and not when nobody has read as the group for long."""
    stream = still.declare_stream("plants", topics=["plant/#"], retention_messages=1)
    publish(still, 100)
    start = reader(there.begin, str(spool), group="archive", maxOffsetsPerTrigger="60", **EARLIEST)

    def first_at(moment_s: float) -> int:
        clock.wall_s = moment_s
        while stream.retain():
            pass
        return stream.stats().first_offsets[0]

    end = reader(there.latest, start)
    now = time.time()
    assert reader(there.micro_batch, start, end) == list(range(60))
    assert first_at(now + groups.GRACE_S + 60) == 0  # it was not said to be done
    reader(there.latest, end)
    assert first_at(now) == 0  # it is done, but the checkpoint that says so is perhaps not on the disk yet
    assert first_at(now + groups.GRACE_S + 60) == 60
    assert first_at(now + groups.EXPIRY_S + 60) == 99


def test_a_group_holds_a_stream_that_appears_while_the_query_runs(
    still: qflow.Broker, clock: Clock, reader: ReaderProcess, spool: Path
) -> None:
    """From the moment it is planned, also after a restart, and for the grace time after it was read."""
    pattern = {"subscribe": "", "subscribePattern": "plants.*"}
    still.declare_stream("plants", topics=["plant/#"])
    publish(still, 10)
    start = reader(there.latest, reader(there.begin, str(spool), group="archive", **pattern, **EARLIEST))
    reader(there.latest, start)
    stream = still.declare_stream("plants2", topics=["new"], retention_messages=1)
    publish(still, 20, topic="new")
    end = reader(there.latest, start)
    now = time.time()

    def first_at(moment_s: float) -> int:
        clock.wall_s = moment_s
        while stream.retain():
            pass
        return stream.stats().first_offsets[0]

    assert first_at(now + groups.GRACE_S + 60) == 0
    reader(there.go_on, str(spool), group="archive", **pattern)
    assert reader(there.micro_batch, start, end) == list(range(20))
    assert first_at(now + groups.GRACE_S + 60) == 0
    reader(there.latest, end)
    assert first_at(now) == 0
    assert first_at(now + groups.GRACE_S + 60) == 19


def test_a_stream_that_loses_messages_just_before_it_is_held_begins_behind_them(
    still: qflow.Broker, reader: ReaderProcess, spool: Path
) -> None:
    """What is planned is what the group has held, not what was there a moment before."""
    pattern = {"subscribe": "", "subscribePattern": "plants.*"}
    still.declare_stream("plants", topics=["plant/#"])
    start = reader(there.latest, reader(there.begin, str(spool), group="archive", **pattern, **EARLIEST))
    stream = still.declare_stream("plants2", topics=["new"], retention_messages=5)
    publish(still, 20, topic="new")
    reader(there.look_now, str(spool))
    while stream.retain():
        pass
    end = reader(there.latest, start)
    assert reader(there.micro_batch, start, end) == list(range(15, 20))


def test_a_group_holds_what_is_read_again_after_a_restart(
    still: qflow.Broker, clock: Clock, reader: ReaderProcess, spool: Path
) -> None:
    """Spark has that planned before it asks how far it may go; the query had no group before."""
    pattern = {"subscribe": "", "subscribePattern": "plants.*"}
    streams = [still.declare_stream("plants", topics=["plant/#"], retention_messages=1)]
    publish(still, 10)
    start = reader(there.begin, str(spool), **pattern, **EARLIEST)
    streams.append(still.declare_stream("plants2", topics=["new"], retention_messages=1))
    publish(still, 20, 10, topic="new")
    end = reader(there.latest, start)
    reader(there.go_on, str(spool), group="archive", **pattern)
    assert reader(there.micro_batch, start, end) == list(range(30))
    clock.wall_s = time.time() + groups.GRACE_S + 60
    for stream in streams:
        while stream.retain():
            pass
        assert stream.stats().first_offsets == [0]
