"""The readers beside a living owner of the spool, without a Spark: what they read, and what they say goes wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

import qflow
from qflow.arrow.states import state_of
from qflow.storage.files import Files
from qflow.storage.log.keys import ERAS, meta_key
from qflow.storage.log.sealing import seal
from qflow.storage.streams import groups
from spark import reader_process as there
from spark.reader_process import EARLIEST, ReaderProcess, Told, publish
from unit.clocks import Clock, open_still

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")


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
    [(99, "FormatTooNew: .* open it with the newer qflow"), (1, "FormatTooOld: .*drain it with the version that")],
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
    shutil.copytree(spool, tmp_path / "copy", ignore=shutil.ignore_patterns("door", "stats.json*"))
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


def test_an_older_copy_in_which_the_stream_has_fewer_partitions(
    open_spool: Callable[..., qflow.Broker], reader: ReaderProcess, spool: Path, tmp_path: Path
) -> None:
    """It was declared anew there, and has the number that it has in the newer one."""
    open_spool().close()
    shutil.copytree(spool, tmp_path / "copy")
    with open_spool() as broker:
        broker.declare_stream("plants", topics=["plant/#"], partitions=2)
        publish(broker, 20)
        start = reader(there.begin, str(spool), **EARLIEST)
        end = reader(there.latest, start)
    reader(there.let_go, str(spool))
    spool.rename(tmp_path / "away")
    shutil.copytree(tmp_path / "copy", spool)
    with open_spool() as other:
        other.declare_stream("plants", topics=["plant/#"])
        publish(other, 40)
        for step in ((there.latest, end), (there.micro_batch, start, end)):
            with pytest.raises(Told, match="knows offsets up to 10, and the spool at .* ends at 0: it was replaced"):
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
    damage(spool, b"2222" + b" " * 100)  # times and hashes have digits, too
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


def test_what_is_settled_in_a_block_is_looked_for_once(
    broker: qflow.Broker, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every other message was acked, all ranges were looked at for each message, in one transaction."""
    from qflow.spark import queue_reading

    class Compared(int):
        times = 0

        def __lt__(self, other: int) -> bool:
            Compared.times += 1
            return int(self) < other

        def __gt__(self, other: int) -> bool:
            Compared.times += 1
            return int(self) > other

        def __le__(self, other: int) -> bool:
            return not self > other

        def __ge__(self, other: int) -> bool:
            return not self < other

    def compared(*asked: Any) -> Iterator[tuple[Compared, Compared]]:
        return ((Compared(low), Compared(high)) for low, high in settled_ranges(*asked))

    settled_ranges = queue_reading.settled_ranges
    monkeypatch.setattr(queue_reading, "settled_ranges", compared)
    jobs = broker.declare_queue("jobs")
    jobs.put_many([b"%d" % number for number in range(1000)])
    jobs.ack_many([one for one in jobs.get_many(1000) if int(one.body) % 2], wait=True)
    with broker.engine.log.read() as txn:
        (record,) = state_of(txn, str(spool)).found.queues
        rows, _ = queue_reading._rows(txn, queue_reading.Lane("", record.owner, 0), 0)
    assert [int(value) for _, value, *_ in rows] == list(range(0, 1000, 2))
    assert 0 < Compared.times <= 20_000


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
        ({"subscribe": "plants", "startingOffsets": '{"plants":{"7":0}}'}, "names partition 7 of stream 'plants'"),
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


def test_a_start_behind_the_end_is_a_sentence(
    broker: qflow.Broker, plants: Any, reader: ReaderProcess, spool: Path
) -> None:
    """Where both are offsets: it is a mistake. What is not there yet, or no more, is not."""
    publish(broker, 20)
    ends = {"endingOffsets": '{"plants":{"0":5}}'}
    with pytest.raises(Told, match="stream 'plants', partition 0: startingOffsets is 15 and endingOffsets 5: give"):
        reader(there.batch, str(spool), startingOffsets='{"plants":{"0":15}}', **ends)
    for start in ('{"plants":{"0":5}}', "latest"):
        assert reader(there.batch, str(spool), startingOffsets=start, **ends) == []


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
