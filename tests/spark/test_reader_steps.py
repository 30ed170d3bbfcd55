"""A streaming query step by step, without a Spark: where it begins, how far a batch goes, and what its group holds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import qflow
from qflow.storage.streams import groups
from spark import reader_process as there
from spark.reader_process import EARLIEST, ReaderProcess, Told, publish
from unit.clocks import Clock

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")


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


def test_a_first_batch_that_is_repeated_begins_where_it_began(
    still: qflow.Broker, clock: Clock, reader: ReaderProcess, spool: Path
) -> None:
    """Spark keeps its end only, and asks once more where the query begins. A group goes by what was read, too; and what
    retention took meanwhile is told."""
    stream = still.declare_stream("plants", topics=["plant/#"], retention_messages=1)
    publish(still, 10)
    for group, count in (("", 3), ("g", 5)):
        start = reader(there.begin, str(spool), startingOffsets="latest", group=group)
        publish(still, count, 10)
        end = reader(there.latest, start)
        publish(still, 2, 50)
        reader(there.go_on, str(spool), startingOffsets="latest", group=group)
        again = reader(there.begin, str(spool), startingOffsets="latest", group=group)
        assert reader(there.micro_batch, again, end) == list(range(10, 10 + count))
    assert groups.committed_of(str(spool), "g", str(still.uuid)) == {stream.owner: {0: 15}}
    start = reader(there.begin, str(spool), maxOffsetsPerTrigger="6", **EARLIEST)
    end = reader(there.latest, start)
    clock.wall_s = time.time() + groups.EXPIRY_S + 60
    while stream.retain():
        pass
    again = reader(there.begin, str(spool), **EARLIEST)
    with pytest.raises(Told, match="stream 'plants', partition 0: offsets 0 to 5 are gone, retention took them before"):
        reader(there.micro_batch, again, end)


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
    again = reader(there.begin, str(spool), group="other", startingOffsets="committed")
    assert again["streams"]["plants"]["offsets"] == end["streams"]["plants"]["offsets"]
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
    assert first_at(now + groups.EXPIRY_S + 60) == 60  # somebody reads as the group
    reader(there.end)
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
