"""Batches that are handed in from outside: adopted once and whole, in their order, or set aside; without Spark."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from faults.seams import Faults, FaultyFiles, faulty_broker
from qflow import adoption
from qflow.adoption import MEMORY_SHARE
from qflow.inspect import check_spool
from qflow.storage.files import Files
from qflow.storage.inbox import batches as sink_batches
from qflow.storage.inbox import stages
from qflow.storage.inbox.batches import ONCE_EXPIRY_S, Adopted, Partial
from qflow.storage.inbox.inbox import Inbox
from qflow.storage.inbox.stage_files import StageWriter
from qflow.storage.inbox.stages import Batch
from qflow.storage.log.sealing import seal, unseal
from qflow.storage.log.table import Forgotten
from unit.clocks import Clock, until
from unit.handing import hand, staged, write_file

ROWS = [("plant/1", b"a"), ("plant/2", b"b"), ("plant/1", b"c"), ("plant/3", b"d"), ("plant/1", b"e")]


def bodies(broker: qflow.Broker, stream: str = "plants") -> list[bytes]:
    """Return what a stream holds, in order."""
    return [message.body for message in broker.stream(stream).query()]


def record(broker: qflow.Broker, query: str = "q") -> Adopted:
    """Return what the log says of a query."""
    with broker.engine.log.read() as txn:
        return sink_batches.read(txn, query)


def names(spool: Path) -> list[str]:
    """Return what lies in the inbox, but for empty directories of its own."""
    return sorted(name for name in os.listdir(spool / "inbox") if name not in (stages.STAGING, stages.REFUSED))


def damage(path: Path, at: int = 100) -> None:
    """Change a byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def broker(open_at: Any) -> qflow.Broker:
    """An owner that looks into the inbox when the test says so, with a stream of one partition."""
    broker: qflow.Broker = open_at()
    broker.declare_stream("plants", topics=["plant/#"])
    return broker


def test_a_batch_is_published_with_its_keys_and_headers_in_the_order_of_its_files(broker, spool):
    """What comes out of the stream is what went into the stage, and the stage is gone."""
    rows = [
        *ROWS,
        ("plant/9", b"", b"key"),
        ("plant/9", b"x", b"k", {"unit": "C"}),
        ("plant/9", b"y", None, {"n": "1"}),
    ]
    assert hand(spool, broker.uuid, rows)
    broker.engine.adoption.run()
    found = [
        (message.topic, message.body, message.key or None, message.headers)
        for message in broker.stream("plants").query()
    ]
    assert found == [(row[0], row[1], row[2] if len(row) > 2 else None, row[3] if len(row) > 3 else {}) for row in rows]
    assert names(spool) == []
    assert record(broker).batch == 0
    stats = broker.stats().inbox
    assert (stats.adopted_total, stats.messages_total, stats.waiting, stats.problem) == (1, len(rows), 0, None)


def test_a_batch_goes_wherever_a_publish_of_its_rows_would(broker, spool):
    """Two streams, one of several partitions chosen by key, and a bound queue with a lifetime: all in one commit."""
    broker.declare_stream("wide", topics=["plant/1", "plant/2"], partitions=4)
    jobs = broker.declare_queue("jobs", ttl_s=100)
    broker.bind(jobs, "plant/2")
    rows = [("plant/1", b"%d" % n, b"k%d" % n) for n in range(8)] + [("plant/2", b"j", b"k9", {"a": "b"})]
    before = broker.stats().commits_total
    hand(spool, broker.uuid, rows)
    broker.engine.adoption.run()
    assert broker.stats().commits_total == before + 1
    wide = broker.stream("wide")
    for topic, body, key, *_ in rows:
        (message,) = [message for message in wide.query() if message.body == body]
        assert (message.topic, message.partition) == (topic, wide.partition_for(topic, key).number)
    assert len(bodies(broker)) == len(rows)
    delivery = jobs.get_nowait()
    assert (delivery.body, delivery.topic, delivery.headers) == (b"j", "plant/2", {"a": "b"})
    assert delivery.expires_at_s is not None
    delivery.ack(wait=True)


def test_an_owner_adopts_what_comes_by_itself(open_spool, spool):
    """Within a second, and what came before it was opened, too."""
    with qflow.open(spool) as first:
        first.declare_stream("plants", topics=["plant/#"])
    hand(spool, first.uuid, ROWS)
    broker = open_spool()
    until(lambda: bodies(broker) == [body for _, body in ROWS])
    hand(spool, broker.uuid, ROWS, number=1)
    until(lambda: len(bodies(broker)) == 2 * len(ROWS))


def test_a_batch_that_is_in_the_log_is_not_stored_again(broker, spool):
    """Nor one before it; the same number of another query is another batch."""
    for number in (0, 1, 1, 0):
        assert hand(spool, broker.uuid, ROWS, number=number)
        broker.engine.adoption.run()
    assert len(bodies(broker)) == 2 * len(ROWS)
    assert broker.stats().inbox.replayed_total == 2
    hand(spool, broker.uuid, ROWS, query="other")
    broker.engine.adoption.run()
    assert len(bodies(broker)) == 3 * len(ROWS)
    assert names(spool) == []


def test_what_is_in_the_log_is_known_after_it_was_opened_again(broker, open_at, spool):
    """The record is a part of the log."""
    hand(spool, broker.uuid, ROWS, number=7)
    broker.engine.adoption.run()
    broker.close()
    again = open_at()
    hand(spool, again.uuid, ROWS, number=7)
    again.engine.adoption.run()
    assert bodies(again) == [body for _, body in ROWS]
    assert again.stats().inbox.replayed_total == 1


def test_a_second_attempt_at_a_batch_that_waits_is_dropped(broker, spool):
    """Whichever was handed in first counts, also when it is being adopted."""
    assert hand(spool, broker.uuid, [("plant/1", b"first")])
    assert not hand(spool, broker.uuid, [("plant/1", b"second")])
    os.rename(spool / "inbox" / "q-0", spool / "inbox" / "q-0~")
    assert not hand(spool, broker.uuid, [("plant/1", b"third")])
    broker.engine.adoption.run()
    assert bodies(broker) == [b"first"]
    assert os.listdir(spool / "inbox" / "staging") == []


def test_batches_of_a_query_are_adopted_in_the_order_of_their_numbers(broker, spool):
    """Of numbers, not of names."""
    for number in (10, 2, 9):
        hand(spool, broker.uuid, [("plant/1", b"%d" % number)], number=number)
    broker.engine.adoption.run()
    assert bodies(broker) == [b"2", b"9", b"10"]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("block", "does not match its checksum"),
        ("order", "expected message 0"),
        ("length", "bytes, expected"),
        ("missing", "is missing"),
        ("manifest", "manifest does not match its checksum"),
        ("exchanged", "is another file than the one that was written"),
        ("renamed", "holds batch q-0"),
    ],
)
def test_a_damaged_stage_is_set_aside_as_a_whole(broker, open_at, spool, what, expected):
    """Nothing of it is stored, the reason is there for who handed it in, and others go on."""
    rows = [("plant/1", b"%d" % number) for number in range(4)]
    hand(spool, broker.uuid, rows, at_once=1)
    hand(spool, broker.uuid, [("plant/7", b"z")], query="healthy")
    stage = spool / "inbox" / "q-0"
    first, second = stage / "000000-a", stage / "000001-b"
    if what == "block":
        damage(second)
    elif what == "order":
        data = second.read_bytes()
        second.write_bytes(data[len(data) // 2 :] + data[: len(data) // 2])
    elif what == "length":
        os.truncate(second, second.stat().st_size - 1)
    elif what == "missing":
        second.unlink()
    elif what == "manifest":
        damage(stage / "manifest", 10)
    elif what == "exchanged":
        first.write_bytes(second.read_bytes())
    else:
        os.rename(stage, spool / "inbox" / "q-5")
    number = 5 if what == "renamed" else 0
    broker.engine.adoption.run()
    assert bodies(broker) == [b"z"]
    assert record(broker) == Adopted()
    assert broker.stats().inbox.refused_total == 1
    reason = stages.why_refused(Files(), str(spool), Batch("q", number))
    assert reason is not None
    assert expected in reason
    assert any(reason in problem for problem in broker.recovery.problems)
    broker.close()
    assert any(reason in problem for problem in check_spool(spool))
    hand(spool, broker.uuid, rows, number=number)  # the batch comes again, and the old one is forgotten
    again = open_at()
    again.engine.adoption.run()
    assert bodies(again) == [b"z", *(body for _, body in rows)]
    again.close()
    assert check_spool(spool) == []


def test_a_batch_nobody_takes_is_set_aside_and_not_dropped(broker, spool):
    """A publish would count it as unrouted; here somebody is told."""
    hand(spool, broker.uuid, [*ROWS, ("nowhere/1", b"x")])
    broker.engine.adoption.run()
    assert bodies(broker) == []
    assert "no stream takes topic 'nowhere/1'" in str(stages.why_refused(Files(), str(spool), Batch("q", 0)))


def test_a_message_that_is_too_large_has_its_batch_set_aside(broker, spool):
    """With the name of the stream, and what to do."""
    broker.declare_stream("small", topics=["small"], max_message_bytes=10)
    hand(spool, broker.uuid, [("small", b"x" * 11)])
    broker.engine.adoption.run()
    assert "max_message_bytes=10 of stream 'small'" in str(stages.why_refused(Files(), str(spool), Batch("q", 0)))


def test_a_stage_for_another_log_is_set_aside(broker, spool):
    """The spool was made anew, and the query's batches belong to the one before."""
    hand(spool, "another", ROWS)
    broker.engine.adoption.run()
    assert bodies(broker) == []
    assert "made anew" in str(stages.why_refused(Files(), str(spool), Batch("q", 0)))


@pytest.mark.parametrize("taken", ["", "~"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_what_is_planted_in_the_place_of_a_stage_is_set_aside_and_not_followed(kind, taken, broker, spool, tmp_path):
    """Nothing is read, written or removed where a link leads; the batches of others go on, and so does that one."""
    elsewhere = tmp_path / "elsewhere"
    hand(spool, broker.uuid, ROWS)
    os.rename(spool / "inbox" / "q-0", elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    planted = spool / "inbox" / f"q-0{taken}"
    if kind == "file":
        planted.write_bytes(b"x")
    else:
        planted.symlink_to(elsewhere if kind == "link" else tmp_path / "nowhere")
    hand(spool, broker.uuid, [("plant/7", b"z")], query="healthy")
    broker.engine.adoption.run()
    assert bodies(broker) == [b"z"]
    assert any("q-0" in problem and "not a directory" in problem for problem in broker.recovery.problems)
    assert names(spool) == []
    broker.engine.adoption.run()
    hand(spool, broker.uuid, ROWS)
    broker.engine.adoption.run()
    assert bodies(broker) == [b"z", *(body for _, body in ROWS)]
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: {},
        lambda fields: [],
        lambda fields: 7,
        lambda fields: fields | {"batch": ["q"]},
        lambda fields: fields | {"files": [[*fields["files"][0], 1]]},
        lambda fields: fields | {"files": [[None, *fields["files"][0][1:]]]},
        lambda fields: fields | {"files": [["../../lock", *fields["files"][0][1:]]]},
        lambda fields: fields | {"files": [[*fields["files"][0][:3], "1", 1]]},
        lambda fields: fields | {"targets": [["a", "b", "c"]]},
        lambda fields: fields | {"targets": [["a", 1]]},
        lambda fields: fields | {"uuid": None},
        lambda fields: fields | {"plan": 1},
    ],
)
def test_a_manifest_that_another_version_wrote_has_its_batch_set_aside(change, broker, spool):
    """Whole, as its checksum says, and not as it is expected: the batches of others were held up by it for ever."""
    hand(spool, broker.uuid, ROWS)
    rewrite_manifest(spool, lambda data: json.dumps(change(json.loads(data))).encode())
    hand(spool, broker.uuid, [("plant/7", b"z")], query="healthy")
    broker.engine.adoption.run()
    assert bodies(broker) == [b"z"]
    reason = stages.why_refused(Files(), str(spool), Batch("q", 0))
    assert reason is not None
    assert "another version wrote it" in reason


@pytest.mark.parametrize("data", [b"no JSON", b"\xff", b"[" * 100_000, b" " * 2**27], ids=lambda data: repr(data[:2]))
def test_a_manifest_that_is_none_has_its_batch_set_aside(data, broker, spool):
    """Also one of any length: it is not read into memory."""
    hand(spool, broker.uuid, ROWS)
    rewrite_manifest(spool, lambda _: data)
    hand(spool, broker.uuid, [("plant/7", b"z")], query="healthy")
    broker.engine.adoption.run()
    assert bodies(broker) == [b"z"]
    assert "manifest" in str(stages.why_refused(Files(), str(spool), Batch("q", 0)))


def rewrite_manifest(spool: Path, change: Callable[[bytes], bytes]) -> None:
    """Change what is in the manifest of batch 0 of the query, and have its checksum match."""
    path = spool / "inbox" / "q-0" / stages.MANIFEST
    path.write_bytes(seal(change(unseal(path.read_bytes(), ""))))


@pytest.mark.parametrize("name", ["inbox", "inbox/staging"])
def test_a_link_in_the_place_of_the_inbox_is_not_followed(name, broker, spool, tmp_path):
    """Neither by who hands in, nor by who adopts."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    hand(spool, broker.uuid, ROWS)
    os.rename(spool / name, tmp_path / "moved")
    (spool / name).symlink_to(elsewhere)
    with pytest.raises(OSError, match="Not a directory"):
        hand(spool, broker.uuid, ROWS, number=1)
    broker.engine.adoption.look()
    assert bodies(broker) == []
    assert list(elsewhere.iterdir()) == []


def test_what_lies_in_the_inbox_and_is_none_of_ours_stays(broker, spool):
    """Names that no stage has are passed over."""
    hand(spool, broker.uuid, ROWS)
    (spool / "inbox" / "notes.txt").write_text("x")
    (spool / "inbox" / "q-1.tmp").mkdir()
    broker.engine.adoption.run()
    assert names(spool) == ["notes.txt", "q-1.tmp"]
    assert len(bodies(broker)) == len(ROWS)


# Large stages --------------------------------------------------------------------------------------------------------

MANY = [(f"plant/{n % 3}", b"%04d" % n * 100) for n in range(100)]


def crash(faults: Faults, spool: Path, work: Any) -> None:
    """Do something with an owner whose second commit from now on never comes."""
    with inside.without_maintenance(), faulty_broker(spool, faults, max_transaction_bytes=8_000) as broker:
        faults.fail("begin", MemoryError(), after=1)
        work(broker)


def test_a_stage_of_several_transactions_goes_on_where_a_failure_stopped_it(broker, spool):
    """Each message once, also when it is told by another owner."""
    hand(spool, broker.uuid, MANY)
    broker.close()
    faults = Faults()

    def adopt(faulty: qflow.Broker) -> None:
        with pytest.raises(MemoryError):
            faulty.engine.adoption.run()
        partial = record(faulty).partial
        assert partial is not None
        assert len(bodies(faulty)) == partial.messages
        assert 0 < partial.messages < len(MANY)
        assert faulty.engine.log.busy is False

    crash(faults, spool, adopt)
    assert names(spool) == ["q-0~"]
    with qflow.open(spool, max_transaction_bytes=8_000) as again:
        until(lambda: not names(spool))
        assert bodies(again) == [body for _, body in MANY]
        assert again.check() == []


def test_a_batch_of_which_a_part_is_stored_cannot_be_taken_back(broker, open_at, spool):
    """Whoever takes it back would tell that nothing of it is stored."""
    jobs = broker.declare_queue("jobs", limit_messages=1)
    jobs.put(b"in the way")
    broker.bind(jobs, "job")
    hand(spool, broker.uuid, [*MANY, ("job", b"x")])
    broker.close()
    again = open_at(max_transaction_bytes=8_000)
    again.engine.adoption.run()
    assert 0 < len(bodies(again)) < len(MANY) + 1
    assert again.stats().inbox.waiting == 1
    assert not stages.withdraw(Files(), str(spool), Batch("q", 0), "0" * 32)
    again.queue("jobs").get_nowait().ack(wait=True)
    again.engine.adoption.run()
    assert bodies(again) == [body for _, body in MANY]
    assert again.queue("jobs").get_nowait().body == b"x"


def test_a_part_of_a_batch_is_not_completed_from_another_attempt(broker, spool):
    """Its rows may be in another order, so nobody knows which are missing."""
    manifest = staged(spool, broker.uuid, MANY)
    broker.engine.log.commit(
        broker.engine.log.write(lambda txn: sink_batches.write(txn, "q", Adopted(-1, Partial(0, "another", 40))))
    )
    stages.hand_in(Files(), str(spool), manifest)
    broker.engine.adoption.run()
    assert bodies(broker) == []
    assert "the first 40 messages" in str(stages.why_refused(Files(), str(spool), Batch("q", 0)))


def test_of_a_large_damaged_stage_nothing_is_stored(broker, open_at, spool):
    """The end is looked at before the first transaction."""
    hand(spool, broker.uuid, MANY)
    damage(spool / "inbox" / "q-0" / "000001-b", -20)
    broker.close()
    again = open_at(max_transaction_bytes=8_000)
    again.engine.adoption.run()
    assert bodies(again) == []
    assert record(again) == Adopted()
    assert again.stats().inbox.refused_total == 1


def test_a_bound_queue_stores_topics_too_and_a_transaction_has_room_for_them(open_at, spool):
    """What a queue is given is larger than the rows: it is cut smaller, also in the middle of a block."""
    broker = open_at(max_transaction_bytes=10_000)
    broker.declare_stream("plants", topics=["plant/#"])
    jobs = broker.declare_queue("jobs")
    broker.bind(jobs, "plant/#")
    rows = [("plant/" + "long/" * 20, b"%04d" % n) for n in range(500)]
    for query, at_once in (("q", 4), ("r", 500)):
        hand(spool, broker.uuid, rows, query=query, at_once=at_once)
        broker.engine.adoption.run()
        assert broker.stats().inbox.refused_total == 0
        assert record(broker, query).batch == 0
    assert bodies(broker) == [body for _, body in rows] * 2
    assert [delivery.body for delivery in jobs.get_many(1000)] == [body for _, body in rows] * 2


@pytest.mark.parametrize("last", [("nowhere", b"x"), ("small", b"x" * 11), ("plant/#", b"x")])
def test_of_a_large_stage_whose_end_cannot_be_stored_nothing_is(open_at, spool, last):
    """A part of it would have each later attempt refused."""
    broker = open_at(max_transaction_bytes=8_000)
    broker.declare_stream("plants", topics=["plant/#"])
    broker.bind(broker.declare_queue("tight", max_message_bytes=10), "small")
    hand(spool, broker.uuid, [*MANY, last])
    broker.engine.adoption.run()
    assert bodies(broker) == []
    assert record(broker) == Adopted()
    assert broker.stats().inbox.refused_total == 1


def test_a_batch_takes_a_part_of_the_memory_at_once(open_at, spool):
    """Else one that is as large as a transaction may be would have all of it, and more."""
    broker = open_at(capacity_bytes=400_000)
    broker.declare_stream("plants", topics=["plant/#"])
    most = 400_000 // MEMORY_SHARE
    asked: list[int] = []
    reserve = broker.engine.streams.room.try_reserve
    broker.engine.streams.room.try_reserve = lambda asking, *a, **k: (
        asked.append(asking.amount) or reserve(asking, *a, **k)
    )
    rows = [("plant/1", b"%d" % n) for n in range(3_000)]
    hand(spool, broker.uuid, rows, at_once=700)
    broker.engine.adoption.run()
    assert bodies(broker) == [body for _, body in rows]
    assert most * 0.9 < max(asked) <= most


# No room -------------------------------------------------------------------------------------------------------------


def test_a_batch_waits_for_the_disk(broker, spool):
    """A full disk is no fault of the batch: it is adopted when there is room, and until then its owner says why."""
    broker.close()
    faults = Faults()
    with faulty_broker(spool, faults) as faulty:
        inside.still(faulty)
        faulty.declare_stream("plants", topics=["plant/#"])
        hand(spool, faulty.uuid, ROWS)
        faults.fail("make_room", qflow.DiskFull("the disk is full"))
        faulty.engine.adoption.run()
        stats = faulty.stats().inbox
        assert stats.waiting == 1
        assert "the disk is full" in str(stats.problem)
        assert names(spool) == ["q-0"]  # it can be withdrawn
        faults.heal()
        faulty.engine.adoption.run()
        assert len(bodies(faulty)) == len(ROWS)
        assert (faulty.stats().inbox.waiting, faulty.stats().inbox.problem) == (0, None)


def test_a_batch_waits_for_a_queue_at_its_limit_and_those_behind_it_wait_too(broker, spool):
    """Maintenance is not held up by it, and other queries are not."""
    jobs = broker.declare_queue("jobs", limit_messages=2)
    broker.bind(jobs, "job")
    jobs.put_many([b"1", b"2"])
    hand(spool, broker.uuid, [("job", b"3"), ("plant/1", b"x")])
    hand(spool, broker.uuid, [("plant/1", b"y")], number=1)
    hand(spool, broker.uuid, [("plant/1", b"z")], query="r")
    broker.engine.adoption.run()
    assert bodies(broker) == [b"z"]
    assert broker.stats().inbox.waiting == 2
    assert not broker.engine.streams.room.busy  # what was reserved for the part that streams take was given back
    assert "'jobs'" in str(broker.stats().inbox.problem)
    jobs.get_many(2).ack(wait=True)
    broker.engine.adoption.run()
    assert bodies(broker) == [b"z", b"x", b"y"]
    assert len(jobs) == 1


def test_a_batch_waits_in_line_for_memory_and_is_told_when_there_is_some(open_at, spool):
    """Whoever has the memory gives it back, and the owner is woken; what is withdrawn meanwhile leaves no trace."""
    broker = open_at(capacity_bytes=10_000)
    broker.declare_stream("plants", topics=["plant/#"])
    room = broker.engine.streams.room
    room.reserve(9_000)
    hand(spool, broker.uuid, [("plant/1", b"x" * 5_000)])
    broker.engine.adoption.run()
    assert "memory" in str(broker.stats().inbox.problem)
    bell = inside.upkeep(broker)._bell._event
    bell.clear()
    room.arrived(9_000)
    assert bell.is_set()
    assert stages.withdraw(Files(), str(spool), Batch("q", 0), "0" * 32)
    broker.engine.adoption.run()
    assert not room.busy
    hand(spool, broker.uuid, [("plant/1", b"y" * 50_000)])  # more than there is: it passes alone
    broker.engine.adoption.run()
    assert [len(body) for body in bodies(broker)] == [50_000]
    assert not room.busy


def test_who_waits_for_memory_is_not_read_again_and_keeps_its_place_in_the_line(open_at, spool, monkeypatch):
    """Two batches that wait would take it from each other; and one that is asked for is not taken from the inbox."""
    broker = open_at(capacity_bytes=10_000)
    broker.declare_stream("plants", topics=["plant/#"])
    room = broker.engine.streams.room
    room.reserve(9_000)
    hand(spool, broker.uuid, [("plant/1", b"x" * 5_000)], query="s")
    broker.engine.adoption.run()
    asking = broker.engine.adoption._asking
    hand(spool, broker.uuid, [("plant/1", b"y" * 4_000)], query="r")
    with monkeypatch.context() as patched:
        patched.setattr(Inbox, "take", None)
        broker.engine.adoption.run()
    assert broker.engine.adoption._asking is asking
    assert (broker.stats().inbox.waiting, names(spool)) == (2, ["r-0", "s-0"])
    room.arrived(9_000)
    broker.engine.adoption.run()
    assert bodies(broker) == [b"x" * 5_000, b"y" * 4_000]
    assert not room.busy


def test_what_was_tried_in_vain_is_left_alone_for_a_while(broker, spool, monkeypatch):
    """Its owner has something else to do than to read it over and over."""
    now = [1000.0]
    monkeypatch.setattr(adoption.time, "monotonic", lambda: now[0])
    jobs = broker.declare_queue("jobs", limit_messages=1)
    broker.bind(jobs, "job")
    jobs.put(b"in the way")
    hand(spool, broker.uuid, [("job", b"1")])
    take, taken = Inbox.take, []

    def slowly(self: Inbox, waiting: Any) -> Any:
        taken.append(now[0])
        now[0] += 0.1
        return take(self, waiting)

    monkeypatch.setattr(Inbox, "take", slowly)
    for _ in range(100):
        broker.engine.adoption.look()
        now[0] += 0.1
    assert len(taken) == 5
    assert "'jobs'" in str(broker.stats().inbox.problem)
    hand(spool, broker.uuid, [("plant/1", b"x")], query="r")
    broker.engine.adoption.look()
    assert bodies(broker) == [b"x"]


# Taking back, and clearing away --------------------------------------------------------------------------------------


def test_what_is_being_adopted_cannot_be_withdrawn(broker, spool):
    """One rename against another: either it is stored, or it is back."""
    hand(spool, broker.uuid, ROWS)
    assert stages.withdraw(Files(), str(spool), Batch("q", 0), "0" * 32)
    broker.engine.adoption.run()
    assert bodies(broker) == []
    hand(spool, broker.uuid, ROWS)
    broker.engine.adoption.run()
    assert not stages.withdraw(Files(), str(spool), Batch("q", 0), "0" * 32)


def test_stages_that_were_never_handed_in_are_removed_when_they_are_a_day_old(broker, spool):
    """And by the next batch of their query at once."""
    for query in ("old", "young"):
        staged(spool, broker.uuid, ROWS, query=query)
    (old,) = (spool / "inbox" / "staging").glob("old-0.*")
    day_before = old.stat().st_mtime - 25 * 3600
    for path in [*old.iterdir(), old]:
        os.utime(path, (day_before, day_before))
    broker.engine.adoption.run()
    assert [path.name.partition(".")[0] for path in (spool / "inbox" / "staging").iterdir()] == ["young-0"]
    stages.remove_staged(Files(), str(spool), "young", up_to=0)
    assert os.listdir(spool / "inbox" / "staging") == []


def attempt(spool: Path, broker: qflow.Broker, at: int, number: int = 0) -> stages.Manifest:
    """Write a stage of an attempt that began at some time."""
    batch, token = Batch("q", number), f"{at:032x}"
    file = write_file(spool, batch, token, "000000-a", [("plant/1", b"%d" % at)])
    return stages.Manifest(batch=batch, token=token, uuid=str(broker.uuid), once=False, files=(file,))


def test_an_attempt_removes_what_earlier_ones_at_its_batch_have_staged(broker, spool):
    """Not what later ones did, nor of another batch, nor what was handed in; tokens sort by time."""
    assert stages.new_token()[:12] <= stages.new_token()[:12]
    for at, number in ((1, 0), (2, 0), (9, 0), (1, 5)):
        attempt(spool, broker, at, number)
    stages.remove_earlier(Files(), str(spool), Batch("q", 0), f"{5:032x}")
    left = sorted(path.name for path in (spool / "inbox" / "staging").iterdir())
    assert left == [f"q-0.{9:032x}", f"q-5.{1:032x}"]
    assert stages.hand_in(Files(), str(spool), attempt(spool, broker, 3))
    stages.remove_earlier(Files(), str(spool), Batch("q", 0), f"{5:032x}")
    broker.engine.adoption.run()
    assert bodies(broker) == [b"3"]


def test_an_attempt_that_was_replaced_hands_in_nothing(broker, spool):
    """Neither what is gone, nor what one of its tasks has written since."""
    manifest = attempt(spool, broker, 1)
    stages.remove_earlier(Files(), str(spool), Batch("q", 0), f"{5:032x}")
    with pytest.raises(FileNotFoundError):
        stages.hand_in(Files(), str(spool), manifest)
    write_file(spool, manifest.batch, manifest.token, "000001-b", [("plant/1", b"late")])
    with pytest.raises(FileNotFoundError, match="000000-a"):
        stages.hand_in(Files(), str(spool), manifest)
    assert names(spool) == []
    assert stages.hand_in(Files(), str(spool), attempt(spool, broker, 5))
    broker.engine.adoption.run()
    assert bodies(broker) == [b"5"]


class ReplacedMeanwhile(Files):
    """A later attempt begins just before a stage is handed in."""

    def rename(self, old: str, new: str) -> None:
        if os.path.basename(new) == "q-0":
            stages.remove_earlier(Files(), os.path.dirname(os.path.dirname(new)), Batch("q", 0), "f" * 32)
        super().rename(old, new)


def test_a_stage_that_is_being_handed_in_is_handed_in_whole_or_not_at_all(broker, spool):
    """It has another name before the first of its files goes."""
    manifest = attempt(spool, broker, 1)
    with pytest.raises(FileNotFoundError):
        stages.hand_in(ReplacedMeanwhile(), str(spool), manifest)
    assert (names(spool), os.listdir(spool / "inbox" / "staging")) == ([], [])


class MadeAnew(Files):
    """A later attempt begins while a stage is being handed in, and a task of it makes its directory once more."""

    def __init__(self, manifest: stages.Manifest, step: str) -> None:
        self._manifest, self._step = manifest, step

    def _replace(self, step: str, spool: Path) -> None:
        if step == self._step:
            self._step = ""
            stages.remove_earlier(Files(), str(spool), self._manifest.batch, "f" * 32)
            write_file(spool, self._manifest.batch, self._manifest.token, "000001-b", [("plant/1", b"late")])

    def write_replacing(self, path: str, data: bytes) -> None:
        self._replace("manifest", Path(path).parents[3])
        super().write_replacing(path, data)

    def exists(self, path: str) -> bool:
        if path.endswith("~"):
            self._replace("taken", Path(path).parents[1])
        return super().exists(path)


@pytest.mark.parametrize("step", ["manifest", "taken"])
def test_a_stage_that_was_replaced_and_made_anew_while_it_is_handed_in_is_not(broker, spool, step):
    """It would be refused, and the later attempt with it, in whose place it lies."""
    manifest = attempt(spool, broker, 1)
    with pytest.raises(FileNotFoundError, match="000000-a"):
        stages.hand_in(MadeAnew(manifest, step), str(spool), manifest)
    assert names(spool) == []
    assert stages.hand_in(Files(), str(spool), attempt(spool, broker, 5))
    broker.engine.adoption.run()
    assert bodies(broker) == [b"5"]


def test_files_of_tasks_that_do_not_count_are_left_out(broker, spool):
    """Only what the manifest names is adopted."""
    manifest = staged(spool, broker.uuid, ROWS)
    directory = Path(stages.staged(str(spool), manifest.batch, manifest.token))
    (directory / "000000-z").write_bytes((directory / "000000-a").read_bytes())
    stages.hand_in(Files(), str(spool), manifest)
    assert not (spool / "inbox" / "q-0" / "000000-z").exists()
    broker.engine.adoption.run()
    assert len(bodies(broker)) == len(ROWS)


def test_the_record_of_a_query_of_one_batch_goes_when_it_is_a_week_old(broker, spool, clock: Clock):
    """That of a streaming query stays: it may be started again at any time."""
    hand(spool, broker.uuid, ROWS, query="once", once=True)
    hand(spool, broker.uuid, ROWS, query="stream")
    broker.engine.adoption.run()
    assert record(broker, "once").once
    clock.advance(ONCE_EXPIRY_S + 1)
    hand(spool, broker.uuid, ROWS, query="another", once=True)
    broker.engine.adoption.run()
    assert record(broker, "once") == Adopted()
    assert record(broker, "stream").batch == record(broker, "another").batch == 0


def test_a_record_stays_while_a_stage_it_knows_is_in_the_inbox(broker, spool, clock: Clock, monkeypatch):
    """It could not be removed when it was stored, a week ago, and is not stored again."""
    with monkeypatch.context() as patched:
        patched.setattr(Inbox, "remove", lambda self, waiting: None)
        hand(spool, broker.uuid, [("plant/1", b"a")], query="old", once=True)
        broker.engine.adoption.run()
    assert names(spool) == ["old-0~"]
    clock.advance(ONCE_EXPIRY_S + 1)
    hand(spool, broker.uuid, [("plant/1", b"b")], query="new", once=True)
    broker.engine.adoption.run()
    broker.engine.adoption.run()
    assert bodies(broker) == [b"a", b"b"]
    hand(spool, broker.uuid, [("plant/1", b"c")], query="newer", once=True)
    broker.engine.adoption.run()
    assert record(broker, "old") == Adopted()  # nothing of it is there any more


def test_records_are_forgotten_some_at_a_time(broker):
    """Each call goes on where the last one stopped, and says so only where there are more of them."""
    found: list[Forgotten] = []
    behind = bytes((sink_batches.SINK_BATCHES + 1,))

    def work(txn: Any) -> None:
        for name in "abcd":
            sink_batches.write(txn, name, Adopted(0, None, True, 0))
        txn.put(behind, b"of another table")
        for _ in range(2):
            start = found[-1].position if found else b""
            found.append(sink_batches.forget(txn, ONCE_EXPIRY_S * 1000, start, 2))
        assert txn.get(behind) == b"of another table"
        txn.delete(behind)

    broker.engine.log.commit(broker.engine.log.write(work))
    assert found == [(2, bytes((sink_batches.SINK_BATCHES,)) + b"c"), (2, b"")]


def test_a_stage_is_on_the_disk_before_it_is_handed_in(broker, spool):
    """Its files and their names, and then its new name: else a power cut leaves one that is torn."""
    steps: list[tuple[str, str]] = []

    class Watched(Files):
        def sync_file(self, path: str) -> None:
            steps.append(("sync", os.path.basename(path)))
            super().sync_file(path)

        def sync_directory(self, path: str) -> None:
            steps.append(("sync directory", os.path.basename(path)))
            super().sync_directory(path)

        def rename(self, source: str, target: str) -> None:
            steps.append(("rename", os.path.basename(target)))
            super().rename(source, target)

    manifest = staged(spool, broker.uuid, ROWS, files=Watched())
    assert [step for step in steps if step[0] == "sync"] == [("sync", "000000-a"), ("sync", "000001-b")]
    steps.clear()
    stages.hand_in(Watched(), str(spool), manifest)
    name = f"q-0.{manifest.token}"
    after_manifest = steps[steps.index(("sync", "manifest")) + 1 :]
    assert after_manifest == [("sync directory", name), ("rename", "q-0"), ("sync directory", "inbox")]


def test_of_two_stages_of_a_batch_the_one_that_was_begun_comes_first(broker, spool):
    """A part of it may be in the log, which the other one could not go on with."""
    hand(spool, broker.uuid, ROWS)
    os.rename(spool / "inbox" / "q-0", spool / "inbox" / "q-0~")
    (spool / "inbox" / "q-0").mkdir()
    found = Inbox(Files(), str(spool)).waiting()
    assert found == [(Batch("q", 0), True), (Batch("q", 0), False)]


def test_a_damaged_record_refuses_the_batches_of_its_query(broker, spool):
    """Taken for an empty one, it would have a batch stored twice."""
    hand(spool, broker.uuid, ROWS)
    broker.engine.adoption.run()
    key = bytes((sink_batches.SINK_BATCHES,)) + b"q"
    broker.engine.log.commit(broker.engine.log.write(lambda txn: txn.put(key, b"x" + txn.get(key)[1:])))
    hand(spool, broker.uuid, ROWS)
    broker.engine.adoption.run()
    assert len(bodies(broker)) == len(ROWS)
    assert "nobody knows which of them are in the log" in str(stages.why_refused(Files(), str(spool), Batch("q", 0)))
    broker.close()
    assert any("record of batches of query 'q'" in problem for problem in check_spool(spool))


@pytest.mark.parametrize(("query", "batch"), [("a/b", 0), ("", 0), ("..", 0), ("q" * 121, 0), ("q", -1), ("q", 2**63)])
def test_a_batch_whose_name_could_be_no_directory_is_refused(query, batch):
    """Before anything is written."""
    with pytest.raises(qflow.InvalidArgument):
        stages.check_batch(query, batch)


def test_a_task_that_finds_no_room_leaves_no_file(broker, spool):
    """Half of a stage would lie there until it is stale."""
    faults = Faults()
    files = FaultyFiles(faults)
    writer = StageWriter(files, stages.staged(str(spool), Batch("q", 0), "0" * 32), "000000-a")
    writer.add(b"x" * 100, 1, 100)
    faults.fail("pwrite", errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        writer.finish()
    writer.discard()
    assert [path.name for path in (spool / "inbox" / "staging").rglob("*") if path.is_file()] == []
