"""Streams seen from outside: what `check_spool` must name, and a reader whose log is replaced under it."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lmdb
import pytest

import qflow
from qflow import inspect
from qflow.inspect import Gap
from qflow.storage import encoding
from qflow.storage.log import recovery
from qflow.storage.log.keys import BLOCKS, DAMAGED, WINDOWS, key_of, prefix_of, queue_key
from qflow.storage.log.rows import read_row, write_row
from qflow.storage.log.sealing import seal, unseal
from qflow.storage.streams import producers
from qflow.storage.streams.producers import Window
from qflow.storage.topics import records as topic_records
from thorough import TORTURE

STREAM, CURSOR = 1, 2
Change = Callable[[Any], None]
CHECKS = 100 if TORTURE else 10
"""Beside a busy owner."""


@pytest.fixture
def written(spool: Path) -> Path:
    """A spool with an indexed stream of 40 blocks, and a subscription that settled every third message out of order."""
    with qflow.open(spool) as broker:
        stream = broker.declare_stream("s", topics=["s/#"])
        for number in range(40):
            messages = [(f"s/{number % 5}/{part}", b"%04d" % number * 1000) for part in range(8)]
            broker.publish_many(messages)
        with broker.subscribe("s", name="panel", start="earliest") as panel:
            for delivery in list(panel.get_many(90))[1::3]:
                delivery.ack()
            broker.publish("s/last", b"the last")
        assert stream.index(least=1) is not None
        while stream.index(least=1):
            pass
        assert broker.check() == []
    assert inspect.check_spool(spool) == []
    return spool


def edit(spool: Path, change: Change) -> None:
    """Change a closed log with plain LMDB."""
    env = lmdb.open(str(spool / "log"), map_size=2**30, lib_version=0)
    with env.begin(write=True) as txn:
        change(txn)
    env.close()


def keys(txn: Any, prefix: bytes) -> list[bytes]:
    return [key for key, _ in txn.cursor() if key.startswith(prefix) and key[-8:] != b"\xff" * 8]


def delete(prefix: bytes, index: int) -> Change:
    return lambda txn: txn.delete(keys(txn, prefix)[index])


def flip(prefix: bytes, index: int, position: int) -> Change:
    def change(txn: Any) -> None:
        key = keys(txn, prefix)[index]
        value = bytearray(txn.get(key))
        value[position] ^= 0x10
        txn.put(key, bytes(value))

    return change


def alter_row(owner: int, **values: int) -> Change:
    def change(txn: Any) -> None:
        row = read_row(txn, owner, 0)
        write_row(txn, owner, 0, row._replace(**{name: getattr(row, name) + by for name, by in values.items()}))

    return change


def begin_index_later(txn: Any) -> None:
    progress = topic_records.read_progress(txn, STREAM, 0)
    topic_records.write_progress(txn, STREAM, 0, progress._replace(begin=16))


def list_fewer_names(txn: Any) -> None:
    row = topic_records.read_names_row(txn, STREAM)
    assert row is not None
    key = topic_records.piece_key(STREAM, row.next - 1)
    names = unseal(txn.get(key), "", key).split(b"\0")
    txn.put(key, seal(b"\0".join(name for name in names if name != b"s/3/3"), key))


def leave_out_a_topic(txn: Any) -> None:
    """Give a block another topic than the index has read in it."""
    from qflow.storage import blocks
    from qflow.storage.blocks import BlockKey

    key = BlockKey(BLOCKS, STREAM, 0, int.from_bytes(keys(txn, blocks_of_stream)[7][-8:], "big"))
    block = blocks.decode(txn.get(key_of(*key)), key, where="")
    topics = ["s/0/0"] * len(block.records)
    times = [moment - block.header.time_ms for moment in block.times_ms]
    txn.put(
        key_of(*key),
        encoding.encode(
            key, block.records, previous=block.header.previous, time_ms=block.header.time_ms, times=times, topics=topics
        ),
    )


def damage_producer(txn: Any) -> None:
    producers.write(txn, "p", Window(5))
    (key,) = keys(txn, bytes((producers.PRODUCERS,)))
    txn.put(key, txn.get(key)[:-1])


def set_aside(txn: Any) -> None:
    txn.put(key_of(DAMAGED, STREAM, 0, 8), b"what was found")


blocks_of_stream = key_of(BLOCKS, STREAM, 0, 0)[:-8]
marks = key_of(WINDOWS, CURSOR, 0, 0)[:-8]
postings = key_of(topic_records.POSTINGS, STREAM, 0, 0)[:-8]
names_row = prefix_of(topic_records.INDEX, STREAM)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (delete(blocks_of_stream, 3), "stream 's', partition 0: what came before block"),
        (delete(blocks_of_stream, -1), "stream 's', partition 0: the last block"),
        (flip(blocks_of_stream, 5, 100), "stream 's', partition 0: block"),
        (alter_row(STREAM, messages=1), "stream 's', partition 0: the row says 322 messages"),
        (alter_row(STREAM, bytes=-1), "the blocks hold 321 of"),
        (
            alter_row(CURSOR, floor=1000, next=1000, marks=-1),
            "it is settled up to 1000, where the stream ends with 321",
        ),
        (alter_row(CURSOR, marks=1), "ranges are settled out of order, found"),
        (delete(marks, 0), "ranges are settled out of order, found"),
        (flip(marks, 0, 0), "ranges are settled out of order, found"),
        (delete(postings, 0), "stream 's': the postings for 0 of stream 1, lane 0 have vanished"),
        (flip(postings, 0, 6), "stream 's': postings 0 of stream 1, lane 0: the head does not match"),
        (flip(postings, 0, -1), "stream 's': postings 0 of stream 1, lane 0: group 0 does not match"),
        (lambda txn: txn.delete(names_row), "stream 's': its index of topics has no row"),
        (begin_index_later, "stream 's': its index begins at 16 of lane 0, above the floor 0"),
        (list_fewer_names, "stream 's': topic 's/3/3' is in postings 0"),
        (flip(prefix_of(topic_records.TOPIC_NAMES, STREAM), 0, 5), "stream 's': piece 0 of the topics"),
        (leave_out_a_topic, "stream 's': postings 0 of stream 1, lane 0 leave out topic 's/0/0' in block"),
        (set_aside, "stream 's': damaged block 8 was set aside (14 bytes)"),
        (damage_producer, "producer 'p'"),
        (lambda txn: txn.delete(queue_key(CURSOR)), ""),
    ],
)
def test_check_names_what_does_not_agree(written: Path, change: Change, expected: str) -> None:
    """One thing at a time; nothing else is named, and what is sound is sound."""
    edit(written, change)
    found = inspect.check_spool(written)
    assert any(expected in problem for problem in found) if expected else found == []
    assert len(found) <= 1, found


def test_a_check_takes_as_many_steps_as_it_needs(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small transactions find the same, and nothing where there is nothing."""
    monkeypatch.setattr("qflow.inspect.stream_check._READ_AT_ONCE", 1)
    monkeypatch.setattr("qflow.storage.topics.check.PIECES_AT_ONCE", 1)
    assert inspect.check_spool(written) == []
    edit(written, delete(blocks_of_stream, 3))
    edit(written, list_fewer_names)
    assert len(inspect.check_spool(written)) == 2


def test_a_damaged_row_is_named_and_the_rest_is_shown(written: Path) -> None:
    """Its stream and its subscription are listed with their problem; nobody reads it."""
    edit(written, lambda txn: txn.put(key_of(BLOCKS, STREAM, 0, 2**64 - 1), b"no row"))
    found = inspect.read_spool(written)
    assert [stream.problem for stream in found.streams] == ["its row is damaged"]
    assert found.streams[0].subscriptions[0].name == "panel"
    assert len(inspect.check_spool(written)) == 1
    with pytest.raises(qflow.CorruptionError, match="see `qflow check`"):
        inspect.read_stream(written, "s", on_gap=fail)


# A reader ------------------------------------------------------------------------------------------------------------


def fail(gap: Gap) -> None:
    raise AssertionError(f"a gap: {gap}")


def bodies(reader: inspect.StreamReader) -> list[bytes]:
    return [message.body for batch in reader.new() for message in batch]


def elsewhere(program: str, spool: Path) -> None:
    """Run a program in another process, for LMDB opens a file once a process."""
    subprocess.run([sys.executable, "-c", "import os, shutil, sys, qflow\n" + program, str(spool)], check=True)


PUBLISH = "with qflow.open(sys.argv[1]) as broker:\n    broker.publish('s/new', b'new %d')\n"
COMPACT = """
from qflow.storage.environment import Environment
from qflow.storage.files import Files
os.chdir(sys.argv[1])
env = Environment("log", Files(), read_only=True)
os.mkdir("log.new")
env.copy_to("log.new")
env.close()
os.rename("log", "log.old")
os.rename("log.new", "log")
shutil.rmtree("log.old")
"""


def test_a_reader_goes_on_in_a_log_that_took_the_place_of_its_own(written: Path) -> None:
    """Nothing twice, nothing left out, however often it is replaced."""
    with inspect.read_stream(written, "s", on_gap=fail) as reader:
        assert len(bodies(reader)) == 321
        for number in range(3):
            elsewhere(PUBLISH % number, written)
            elsewhere(COMPACT + PUBLISH % -number, written)
            assert bodies(reader) == [b"new %d" % number, b"new %d" % -number]
        assert bodies(reader) == []


def test_a_log_is_replaced_in_the_middle_of_a_read(written: Path) -> None:
    """The rest comes from the new one, up to where the stream ended when the read began."""
    with inspect.read_stream(written, "s", start=40, on_gap=fail) as reader:
        found: list[bytes] = []
        for batch in reader.new():
            if not found:
                elsewhere(COMPACT + PUBLISH % 1, written)
            found += [message.body for message in batch]
        assert len(found) == 321 - 40
        assert bodies(reader) == [b"new 1"]


def test_another_spool_in_its_place_is_no_continuation(written: Path) -> None:
    """A reader says so instead of waiting for an offset that means something else there; or that there is none."""
    with inspect.read_stream(written, "s", start="latest", on_gap=fail) as reader:
        assert bodies(reader) == []
        shutil.rmtree(written)
        with pytest.raises(qflow.NotFound, match="is gone"):
            bodies(reader)
        elsewhere("qflow.open(sys.argv[1]).declare_stream('s', topics=['s/#'])", written)
        with pytest.raises(qflow.StorageError, match="another spool now"):
            bodies(reader)


def test_an_older_copy_in_its_place_is_no_continuation(written: Path) -> None:
    """The same spool, brought back from before."""
    shutil.copytree(written, written.parent / "copy")
    elsewhere(PUBLISH % 1, written)
    with inspect.read_stream(written, "s", start="latest", on_gap=fail) as reader:
        shutil.rmtree(written)
        (written.parent / "copy").rename(written)
        with pytest.raises(qflow.StorageError, match="older copy"):
            bodies(reader)


def test_a_filter_is_looked_up_in_the_index_of_the_new_log(written: Path) -> None:
    """What a reader with wildcards remembers of the list of topics holds in the copy, and what was added is found."""
    with inspect.read_stream(written, "s", "s/+/3", on_gap=fail) as reader:
        assert len(bodies(reader)) == 40
        elsewhere(COMPACT + PUBLISH.replace("s/new", "s/x/3") % 1, written)
        assert bodies(reader) == [b"new 1"]


def test_gaps_come_in_order_and_everything_else_is_read(written: Path) -> None:
    """A damaged block and a vanished one, which the index knows: told before what follows them is returned."""
    edit(written, delete(blocks_of_stream, 3))
    edit(written, flip(blocks_of_stream, 7, 100))
    gaps: list[Gap] = []
    with inspect.read_stream(written, "s", on_gap=gaps.append) as reader:
        offsets: list[int] = []
        for batch in reader.new():
            assert all(gap.end <= batch[0].offset or gap.first > batch[-1].offset for gap in gaps)
            offsets += [message.offset for message in batch]
    assert [gap.damaged for gap in gaps] == [True, True]
    gone = [offset for gap in gaps for offset in range(gap.first, gap.end)]
    assert sorted(offsets + gone) == list(range(321))
    assert offsets == sorted(offsets)


def test_a_check_beside_a_busy_owner_finds_nothing(spool: Path) -> None:
    """He publishes, drops, indexes, acks out of order, declares and deletes: none of that is damage."""
    checking = (
        "import sys\nfrom qflow import inspect\n"
        f"for _ in range({CHECKS}):\n"
        "    found = inspect.check_spool(sys.argv[1])\n"
        "    assert found == [], found\n"
        "    inspect.read_spool(sys.argv[1])\n"
    )
    with qflow.open(spool) as broker:
        stream = broker.declare_stream("s", topics=["s/#"], partitions=2, retention_messages=2000)
        subscription = broker.subscribe("s", name="panel", start="earliest", on_gap="skip")
        checker = subprocess.Popen([sys.executable, "-c", checking, str(spool)], stderr=subprocess.PIPE)
        rounds = 0
        while checker.poll() is None:
            messages = [(f"s/{rounds % 50}/{part}", b"%04d" % rounds * 100) for part in range(50)]
            broker.publish_many(messages)
            for delivery in list(subscription.get_many(40, timeout_s=0))[:: 1 + rounds % 3]:
                delivery.ack()
            stream.index(least=4)
            stream.retain()
            if rounds % 10 == 0:
                broker.declare_stream("passing", topics=["s/1/#"])
            if rounds % 10 == 5:
                broker.delete_stream("passing")
            rounds += 1
        _, errors = checker.communicate()
        assert checker.returncode == 0, errors
        assert rounds > 10
        subscription.close()


def test_messages_that_several_drop_at_once_are_counted_once(spool: Path) -> None:
    """Whoever calls `retain` beside the maintenance thread leaves a row that says what the blocks hold."""
    with qflow.open(spool) as broker:
        stream = broker.declare_stream("s", topics=["s"], retention_messages=100)
        published = threading.Event()

        def retain() -> None:
            while not published.is_set():
                stream.retain()

        with ThreadPoolExecutor(3) as threads:
            dropping = [threads.submit(retain) for _ in range(3)]
            for _ in range(200):
                broker.publish_many([("s", b"x" * 10)] * 20)
            published.set()
        assert [one.result() for one in dropping] == [None] * 3
        assert broker.check() == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_reader_finds_what_a_query_finds(spool: Path, count: int) -> None:
    """Random topics, filters and starts, in one partition and in several: against `Stream.query`."""
    chance = random.Random(5)
    print("seed 5")
    expected: dict[tuple[str, object], list[tuple[int, int, bytes]]] = {}
    with qflow.open(spool) as broker:
        stream = broker.declare_stream("s", topics=["#"], partitions=count)
        for number in range(60):
            broker.publish_many(
                [
                    (f"a/{chance.randrange(50)}/{chance.randrange(3)}", b"%d" % number * chance.randrange(500))
                    for _ in range(chance.randrange(40))
                ]
            )
        while stream.index(least=1):
            pass
        moments = [message.time_ms for message in stream.query()]
        starts = [datetime.fromtimestamp(chance.choice(moments) / 1000, UTC) for _ in range(5)]
        for topic_filter in ("#", "a/7/#", "a/+/2", "a/3/1", "+/4/+", "nothing"):
            for start in (None, datetime.now(UTC) + timedelta(days=1), *starts):
                found = stream.query(topic_filter, start=start)
                expected[topic_filter, start] = [(one.partition, one.offset, one.body) for one in found]
    for (topic_filter, start), messages in expected.items():
        with inspect.read_stream(spool, "s", topic_filter, start=start or "earliest", on_gap=fail) as reader:
            read = [(one.partition, one.offset, one.body) for batch in reader.new() for one in batch]
            assert read == messages
            assert bodies(reader) == []


def test_the_record_of_an_owner_tells_whether_it_is_there(written: Path) -> None:
    """A deleted stream is not, although its blocks are being removed; nor is what never was."""

    def look(txn: Any) -> None:
        assert recovery.is_there(txn, STREAM)
        assert not recovery.is_there(txn, 77)

    edit(written, look)
