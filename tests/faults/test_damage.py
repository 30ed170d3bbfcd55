"""A log that is not what was written: flipped bits, vanished blocks, rows that disagree. Reported, the rest is served."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

import inside
import qflow
from faults.seams import in_thread
from qflow import inspect
from qflow.queues.queue import parts_of
from qflow.storage.log import recovery, rows
from qflow.storage.log.journal import STATE_KEY
from qflow.storage.log.keys import BLOCKS, FORMAT, MARKS, OLDEST_FORMAT, WINDOWS, key_of, meta_key, queue_key
from qflow.storage.log.rows import Row, read_row
from qflow.storage.log.sealing import seal, unseal
from unit.clocks import until

OWNER = 1
BIG = 20_000  # three make a block


def body(number: int) -> bytes:
    return b"%04d" % number * (BIG // 4)


@pytest.fixture
def written(spool: Path) -> Path:
    """A spool with queue `q` of 30 messages in ten blocks, and a queue `other`."""
    with qflow.open(spool) as broker:
        broker.declare_queue("q").put_many([body(number) for number in range(30)])
        broker.declare_queue("other").put_many([b"o1", b"o2"])
    return spool


def edit(spool: Path, change: Callable[[Any], None]) -> None:
    """Change a closed log with plain LMDB."""
    env = lmdb.open(str(spool / "log"), map_size=2**30, lib_version=0)
    with env.begin(write=True) as txn:
        change(txn)
    env.close()


def block_keys(spool: Path) -> list[bytes]:
    keys: list[bytes] = []
    edit(spool, lambda txn: keys.extend(key for key, _ in txn.cursor()))
    return [key for key in keys if key[:5] == key_of(1, OWNER, 0, 0)[:5] and key[-8:] != b"\xff" * 8]


def flip(spool: Path, key: bytes, position: int) -> None:
    def change(txn: Any) -> None:
        value = bytearray(txn.get(key))
        value[position] ^= 0x10
        txn.put(key, bytes(value))

    edit(spool, change)


def take(queue: qflow.Queue) -> dict[int, bytes]:
    came: dict[int, bytes] = {}
    while batch := queue.get_many(1, timeout_s=0):
        assert batch[0].sequence not in came
        came[batch[0].sequence] = batch[0].body
        batch.ack()
    return came


def expect(spool: Path, gone: range, *words: str, capacity: int | str = "64MiB") -> None:
    """Check that the inspector and the broker name the range, and that all else is served in order, and for good."""
    found = inspect.check_spool(spool)
    assert found, "the inspector saw nothing"
    assert any("'q'" in problem and all(word in problem for word in words) for problem in found), found
    broker = qflow.open(spool, capacity_bytes=capacity)
    queue = broker.queue("q")
    came = in_thread(lambda: take(queue))
    assert came == {number: body(number) for number in range(30) if number not in gone}
    assert list(came) == sorted(came)
    assert queue.stats().quarantined_total == len(gone)
    assert any("'q'" in problem for problem in broker.recovery.problems)
    assert queue.put(b"new") == 30
    assert [*take(broker.queue("other")).values()] == [b"o1", b"o2"]
    assert take(queue) == {30: b"new"}
    inside.problems(broker).clear()
    assert broker.check() == []
    broker.close()
    with qflow.open(spool) as broker:
        assert len(broker.queue("q")) == 0
        assert broker.recovery.problems == ()


@pytest.mark.parametrize("where", [8, 30, 45, 60, 5_000, -1], ids=lambda position: f"byte {position}")
@pytest.mark.parametrize("index", [0, 4, 9])
def test_a_flipped_bit_in_a_block_costs_its_messages_and_is_reported(index, where, written):
    """Edge 28, I10: header (count, span), columns, payload or checksum: the block is set aside, the rest is served."""
    keys = block_keys(written)
    assert len(keys) == 10
    flip(written, keys[index], where)
    first = int.from_bytes(keys[index][-8:], "big")
    expect(written, range(first, first + 3), f"block {first}:", capacity=200_000)
    with qflow.open(written) as broker:
        assert broker.recovery.quarantined_blocks == 0


def test_a_damaged_block_is_kept_as_it_was_found(written):
    """I10: quarantine keeps the bytes, and the inspector goes on naming them after all else is settled."""
    key = block_keys(written)[4]
    flip(written, key, 5_000)
    with qflow.open(written) as broker:
        take(broker.queue("q"))
        assert broker.recovery.quarantined_blocks >= 1
    assert any("block 12 was set aside" in problem for problem in inspect.check_spool(written))


@pytest.mark.parametrize("index", [0, 4, 9])
def test_a_vanished_block_is_reported_with_its_range(index, written):
    """Edge 28: a block that is gone, first, middle or last, is named; the rest is served."""
    key = block_keys(written)[index]
    edit(written, lambda txn: txn.delete(key))
    first = int.from_bytes(key[-8:], "big")
    expect(written, range(first, first + 3))


def test_the_report_of_a_vanished_block_names_its_first_sequence(written):
    """Edge 28: the block that named the vanished one as its predecessor tells which it was."""
    edit(written, lambda txn: txn.delete(key_of(1, OWNER, 0, 12)))
    assert any("12" in problem and "vanished" in problem for problem in inspect.check_spool(written))
    with qflow.open(written) as broker:
        take(broker.queue("q"))
        assert any("12" in problem and "vanished" in problem for problem in broker.recovery.problems)


def test_a_block_swapped_with_another_queues_is_noticed(written):
    """I10: a block echoes its key, so one that lies under another key is not believed."""

    def change(txn: Any) -> None:
        txn.put(key_of(1, OWNER, 0, 12), txn.get(key_of(1, OWNER, 0, 15)))

    edit(written, change)
    expect(written, range(12, 15), "block 12")


def write_row(spool: Path, **fields: int) -> None:
    def change(txn: Any) -> None:
        rows.write_row(txn, OWNER, 0, read_row(txn, OWNER, 0)._replace(**fields))

    edit(spool, change)


@pytest.mark.parametrize("messages", [29, 31, 1_000])
def test_a_row_that_counts_wrong_is_reported_and_served(messages, written):
    """Edge 28: counts of the row are not believed where blocks say otherwise; `next` is."""
    write_row(written, messages=messages)
    assert any("the row says" in problem for problem in inspect.check_spool(written))
    broker = qflow.open(written)
    queue = broker.queue("q")
    came = {}
    for _ in range(30):
        delivery = in_thread(lambda: queue.get(0))
        came[delivery.sequence] = delivery.body
        delivery.ack()
    assert came == {number: body(number) for number in range(30)}
    with pytest.raises(qflow.QueueEmpty):
        in_thread(lambda: queue.get(0))
    assert len(queue) == 0
    assert any("'q'" in problem for problem in broker.recovery.problems)
    assert queue.put(b"new") == 30
    assert take(queue) == {30: b"new"}
    inside.problems(broker).clear()
    assert broker.check() == []
    broker.close()


def test_next_comes_from_the_row_although_no_block_reaches_there(written):
    """Edge 28, I13: a row whose `next` is far ahead is believed: numbers are never used twice."""
    write_row(written, next=5_000)
    with qflow.open(written) as broker:
        queue = broker.queue("q")
        assert queue.put(b"new") == 5_000
        came = in_thread(lambda: take(queue))
        assert came == {**{number: body(number) for number in range(30)}, 5_000: b"new"}
        inside.problems(broker).clear()
        assert broker.check() == []


def test_a_damaged_row_stops_its_queue_and_no_other(written):
    """Edge 28, I10: a queue whose row is damaged is not served and not overwritten; the others are."""
    flip(written, key_of(1, OWNER, 0, 2**64 - 1), 3)
    assert any("row" in problem for problem in inspect.check_spool(written))
    with qflow.open(written) as broker:
        assert broker.queues() == ["other"]
        assert any("'q'" in problem and "row" in problem for problem in broker.recovery.problems)
        with pytest.raises(qflow.CorruptionError, match="qflow check"):
            broker.declare_queue("q")
        with pytest.raises(qflow.CorruptionError, match="delete_queue"):
            broker.queue("q")
        assert [*take(broker.queue("other")).values()] == [b"o1", b"o2"]
        assert broker.declare_queue("third").put(b"x") == 0
    assert len(block_keys(written)) == 10


@pytest.mark.parametrize("reopened", [False, True])
def test_a_queue_with_a_damaged_row_can_be_deleted_and_declared_again(reopened, written):
    """Edge 28: what cannot be served is not in the way for ever; its blocks go, and nothing of it comes back."""
    flip(written, key_of(1, OWNER, 0, 2**64 - 1), 3)
    with qflow.open(written) as broker:
        broker.delete_queue("q")
        with pytest.raises(qflow.NotFound):
            broker.delete_queue("q")
        if not reopened:
            assert broker.declare_queue("q").put(b"new") == 0
            assert broker.check() == []
            with inside.paused(broker):
                while inside.upkeep(broker).remove_deleted():
                    pass
    with qflow.open(written) as broker:
        assert broker.recovery.problems == ()
        queue = broker.declare_queue("q")
        assert take(queue) == ({} if reopened else {0: b"new"})
        assert broker.check() == []
        with inside.paused(broker):
            while inside.upkeep(broker).remove_deleted():
                pass
    assert block_keys(written) == []
    assert inspect.check_spool(written) == []


def test_a_missing_row_stops_its_queue_and_no_other(written):
    """Edge 28: the same where the row is gone."""
    edit(written, lambda txn: txn.delete(key_of(1, OWNER, 0, 2**64 - 1)))
    with qflow.open(written) as broker:
        assert broker.queues() == ["other"]
        with pytest.raises(qflow.CorruptionError):
            broker.declare_queue("q")


def test_a_damaged_record_of_a_queue_is_reported_and_its_number_is_not_given_again(written):
    """I10: a queue whose registry record is damaged is named by its number; a new queue gets another number."""
    flip(written, queue_key(OWNER), 3)
    assert inspect.check_spool(written)
    with qflow.open(written) as broker:
        assert broker.queues() == ["other"]
        assert any("queue 1" in problem for problem in broker.recovery.problems)
        new = broker.declare_queue("new")
        assert parts_of(new).context.owner not in (OWNER, parts_of(broker.queue("other")).context.owner)
        new.put(b"x")
    assert len(block_keys(written)) == 10


def test_the_highest_numbered_queue_with_a_damaged_record_keeps_its_number(written):
    """I10: nobody is given the number, and so the blocks, of a queue whose record cannot be read."""
    flip(written, queue_key(2), 3)
    with qflow.open(written) as broker:
        assert parts_of(broker.declare_queue("new")).context.owner > 2


def test_a_damaged_mark_brings_messages_again_and_never_loses_any(written):
    """I1: a mark that does not match its checksum settles nothing: at least once."""
    with qflow.open(written) as broker:
        batch = broker.queue("q").get_many(30)
        batch[10].ack(wait=True)
        batch[11].ack(wait=True)
    flip(written, key_of(WINDOWS, OWNER, 0, 0), 0)
    with qflow.open(written) as broker:
        came = in_thread(lambda: take(broker.queue("q")))
        assert set(came) >= set(range(30)) - {10, 11}
        assert came == {number: body(number) for number in came}


@pytest.mark.parametrize("held", [False, True])
def test_a_queue_with_a_damaged_mark_is_not_taken_for_empty(held, written):
    """I1: however many messages a damaged mark brings again, `len` is above 0 as long as one waits."""
    with qflow.open(written) as broker:
        inside.still(broker)  # maintenance would remove the blocks of what is settled
        batch = broker.queue("q").get_many(30)
        broker.queue("q").ack_many([batch[index] for index in range(3, 24)], wait=True)
    flip(written, key_of(WINDOWS, OWNER, 0, 0), 0)
    with qflow.open(written, capacity_bytes=150_000) as broker:
        queue = broker.queue("q")
        first = in_thread(lambda: queue.get(0)) if held else None
        came = []
        while len(queue) > held:
            delivery = in_thread(lambda: queue.get(0))
            came.append(delivery.sequence)
            assert queue.stats().bytes >= 0
            delivery.ack(wait=True)
        assert came == list(range(held, 30))
        if first is not None:
            first.ack(wait=True)
        assert any("more messages" in problem for problem in broker.recovery.problems)
        assert len(queue) == 0
        assert (
            parts_of(queue).logged_lanes[0].row.messages,
            parts_of(queue).logged_lanes[0].row.bytes,
            parts_of(queue).logged_lanes[0].row.marks,
        ) == (0, 0, 0)
        assert broker.check() == []


def test_numbers_that_were_never_logged_are_not_counted_behind_a_backlog(tmp_path, open_spool):
    """I1: a replay that ends before gaps counts what it read, and nothing that could be there."""
    broker = open_spool()
    queue = broker.declare_queue("q")
    queue.put(b"")
    queue.put(b"", durable=False)
    inside.copy_as_killed(broker, tmp_path / "after")
    with qflow.open(tmp_path / "after", capacity_bytes=0) as again:
        batch = again.queue("q").get_many(1, timeout_s=0)
        assert (len(batch), len(again.queue("q"))) == (1, 1)
        assert again.check() == []


def test_the_last_commit_of_a_log_that_was_not_closed_is_read_when_it_is_opened(tmp_path, open_spool):
    """It may be one that failed, of which the disk has a part: what is wrong with it is told before anything is read."""
    broker = open_spool()
    queue = broker.declare_queue("q", priorities=2)
    queue.put_many([body(number) for number in range(9)])
    put_ms = time.time_ns() // 10**6
    until(lambda: time.time_ns() // 10**6 > put_ms)  # two commits of one millisecond are read as one
    queue.put_many([body(number) for number in range(9)])
    queue.put(b"high", priority=1)
    broker.declare_stream("s", topics=["a"])
    broker.publish("a", b"x")
    after = inside.copy_as_killed(broker, tmp_path / "after")
    keys: list[bytes] = []
    edit(after, lambda txn: keys.extend(key for key, _ in txn.cursor()))
    keys = [key for key in keys if key[0] == BLOCKS and key[-8:] != b"\xff" * 8]
    assert len(keys) == 8
    for index, expected in (
        (2, None),
        (3, "'q', lane 0: block 9"),
        (6, "'q', lane 1: block"),
        (7, "'s', lane 0: block 0"),
    ):
        damaged = tmp_path / f"damaged {index}"
        shutil.copytree(after, damaged)
        flip(damaged, keys[index], 60)
        with qflow.open(damaged) as again:
            problems = again.recovery.problems
        assert [expected is not None and expected in problem for problem in problems] == [True] * (index != 2), problems


def test_a_log_whose_data_file_is_gone_is_refused_and_left_alone(written):
    """I10: a `log/` that cannot be opened is never deleted or made anew."""
    (written / "log" / "data.mdb").unlink()
    with pytest.raises(qflow.CorruptionError, match="snapshot"):
        qflow.open(written)
    assert (written / "log").is_dir()


def test_a_log_of_zeros_is_refused_and_left_alone(written):
    """I10: the same for one that is no log any more."""
    (written / "log" / "data.mdb").write_bytes(bytes(65_536))
    with pytest.raises((qflow.StorageError, qflow.CorruptionError), match="left as it is"):
        qflow.open(written)
    assert (written / "log" / "data.mdb").read_bytes() == bytes(65_536)


@pytest.mark.parametrize("name", ["format", "uuid", "state"])
def test_damaged_first_records_are_refused_and_left_alone(name, written):
    """I10: a log whose first records are damaged is not guessed at."""
    flip(written, meta_key(name), 0)
    with pytest.raises(qflow.CorruptionError, match=name):
        qflow.open(written)
    with pytest.raises(qflow.CorruptionError):
        inspect.check_spool(written)


@pytest.mark.parametrize("size", [0, 8, 17])
def test_a_log_that_speaks_of_its_journal_otherwise_is_refused_and_left_alone(size, written):
    """I10: its checksum is right, so another qflow wrote it; an error in a sentence, and not one of `struct`."""
    edit(written, lambda txn: txn.put(STATE_KEY, seal(bytes(size))))
    for look in (qflow.open, inspect.check_spool, inspect.read_spool):
        with pytest.raises(qflow.CorruptionError, match=rf"of its journal is {size} bytes long, not 16"):
            look(written)


@pytest.mark.parametrize("what", ["name", "incarnation", "settings", "deleted", "kind"])
def test_a_record_of_a_queue_that_lacks_something_is_reported_and_left(what, written):
    """I10: likewise; others are served."""

    def change(txn: Any) -> None:
        fields = json.loads(unseal(txn.get(queue_key(OWNER)), "record"))
        del fields[what]
        txn.put(queue_key(OWNER), seal(json.dumps(fields).encode()))

    edit(written, change)
    problem = f"the record of queue {OWNER} does not say its {what}"
    assert any(problem in text for text in inspect.check_spool(written))
    with qflow.open(written) as broker:
        assert broker.queues() == ["other"]
        assert any(problem in text for text in broker.recovery.problems)
    assert len(block_keys(written)) == 10


def test_a_spool_of_a_newer_format_is_refused_before_anything_is_touched(written):
    """Edge 13: FormatTooNew names both versions, and neither log nor spill files change."""

    def change(txn: Any) -> None:
        txn.put(meta_key("format"), seal((FORMAT + 1).to_bytes(4, "little")))

    edit(written, change)
    (written / "spill" / ("q.00000001-" + "0" * 16)).mkdir()
    with pytest.raises(qflow.FormatTooNew, match=rf"format {FORMAT + 1}.*up to {FORMAT}"):
        qflow.open(written)
    with pytest.raises(qflow.FormatTooNew):
        inspect.check_spool(written)
    assert (written / "spill" / ("q.00000001-" + "0" * 16)).is_dir()
    for older in (1, 2):
        value = seal(older.to_bytes(4, "little"))
        edit(written, lambda txn, value=value: txn.put(meta_key("format"), value))
        with pytest.raises(qflow.FormatTooOld, match=rf"format {older}.*this qflow reads {OLDEST_FORMAT}"):
            qflow.open(written)


def test_a_spool_of_the_format_before_is_read_and_carried_over(written):
    """Edge 13: there all that was settled above the floor lies in ranges; those stay until the floor has passed them."""

    def age(txn: Any) -> None:
        key = key_of(MARKS, OWNER, 0, 10)
        txn.put(key, seal(struct.pack("<QI", 12, 0), key))
        row = read_row(txn, OWNER, 0)
        rows.write_row(
            txn, OWNER, 0, row._replace(marks=1, messages=28, bytes=row.bytes - len(body(10)) - len(body(11)))
        )
        txn.put(meta_key("format"), seal(OLDEST_FORMAT.to_bytes(4, "little")))

    edit(written, age)
    assert inspect.check_spool(written) == []
    with qflow.open(written) as broker:
        queue = broker.queue("q")
        batch = queue.get_many(30)
        assert list(batch.sequences) == [*range(10), *range(12, 30)]
        for index in (9, 10, 20):  # beside the range, and apart from it
            batch[index].ack(wait=True)
        assert broker.check() == []
        with broker.engine.log.read() as txn:
            assert txn.get(meta_key("format")) == seal(FORMAT.to_bytes(4, "little"))
    assert inspect.check_spool(written) == []
    with qflow.open(written) as broker:
        batch = broker.queue("q").get_many(30)
        assert list(batch.sequences) == [*range(9), *range(13, 22), *range(23, 30)]
        batch.ack(wait=True)
        assert broker.check() == []
        assert parts_of(broker.queue("q")).logged_lanes[0].row.marks == 0


def test_another_capacity_than_last_time_is_applied(written):
    """Edge 13: config drift: capacity changed in code opens and applies; a behaviour that changed is a conflict."""
    with qflow.open(written, capacity_bytes=100_000) as broker:
        queue = broker.declare_queue("q", capacity_bytes=30_000)
        assert queue.stats().capacity_bytes == 30_000
        with pytest.raises(qflow.SettingsConflict, match=r"limit_messages=None.*limit_messages=5"):
            broker.declare_queue("q", limit_messages=5)
    with qflow.open(written) as broker:
        assert broker.queue("q").stats().capacity_bytes == 30_000


def test_settings_of_a_later_version_are_ignored(written):
    """Edge 13: a field this version does not know does not keep a queue from being served."""

    def change(txn: Any) -> None:
        settings = {"durable": True, "novelty": 7}
        txn.put(queue_key(OWNER), recovery.queue_value("q", 5, settings))

    edit(written, change)
    with qflow.open(written) as broker:
        assert len(broker.queue("q")) == 30


def test_a_row_is_what_it_says():
    """A row that was never written counts nothing."""
    assert Row().next == Row().floor == Row().messages == 0
