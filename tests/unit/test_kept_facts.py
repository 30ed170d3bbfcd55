"""Records in the log that are not the engine's own: `TransactionLog.keep_facts` and `facts`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

import qflow
from faults.seams import drained
from faults.test_full_disk import disk_of, filled
from inside import copy_as_killed
from qflow.aio.broker import AsyncBroker, in_thread, keep, publish_and_keep
from qflow.errors import CorruptionError
from qflow.storage.log import facts
from qflow.storage.log.transaction_log import TransactionLog

Open = Callable[..., qflow.Broker]


def log_of(broker: qflow.Broker) -> TransactionLog:
    return broker.engine.spool.log


def test_facts_are_kept_by_room_and_key_and_none_forgets_them(open_spool: Open) -> None:
    """Whatever a key is; one room knows nothing of another, also where its name begins as that one's."""
    broker = open_spool()
    log = log_of(broker)
    assert log.facts("amqp") == {}
    kept = {"": b"", "k": b"\0" * 1_000, "ä\0ÿ": b"x", "k" * 400: b"long", "k" * 4_000: b"longer", "k" * 4_001: b"y"}
    log.keep_facts("amqp", kept)
    log.keep_facts("amqp2", {"k": b"other"})
    log.keep_facts("amqp", {})
    assert log.facts("amqp") == kept
    log.keep_facts("amqp", {"k": None, "k" * 4_000: None, "never": None, "": b"new"})
    assert log.facts("amqp") == {"": b"new", "ä\0ÿ": b"x", "k" * 400: b"long", "k" * 4_001: b"y"}
    assert log.facts("amqp2") == {"k": b"other"}
    assert log.facts("amq") == {}


@pytest.mark.parametrize("journal", ["auto", "off"])
@pytest.mark.parametrize("size", [10, 200_000])
def test_what_was_kept_is_there_after_a_kill(journal: str, size: int, open_spool: Open, tmp_path: Path) -> None:
    """Small and large ones, and also while the journal holds what the log does not; so is a put beside it."""
    broker = open_spool(journal=journal)
    queue = broker.declare_queue("q")
    for number in range(40):
        queue.put(b"%d" % number)
        log_of(broker).keep_facts("amqp", {f"key {number}": b"v" * size, f"key {number - 2}": None})
    killed = copy_as_killed(broker, tmp_path / "killed")
    with qflow.open(killed) as again:
        assert log_of(again).facts("amqp") == {f"key {number}": b"v" * size for number in (38, 39)}
        assert len(drained(again.queue("q"))) == 40


def test_a_snapshot_and_a_compaction_hold_them(open_spool: Open, tmp_path: Path) -> None:
    """As they hold everything that was confirmed."""
    broker = open_spool()
    kept = {str(number): b"v" * number for number in range(300)}
    log_of(broker).keep_facts("amqp", kept)
    broker.snapshot(tmp_path / "copy")
    broker.compact()
    assert log_of(broker).facts("amqp") == kept
    broker.close()
    assert log_of(open_spool()).facts("amqp") == kept
    with qflow.open(tmp_path / "copy") as copy:
        assert log_of(copy).facts("amqp") == kept
        assert copy.check() == []


@pytest.mark.parametrize("key", ["short", "long" * 1_000])
def test_one_is_forgotten_if_it_is_as_it_was(key: str, open_spool: Open, tmp_path: Path) -> None:
    """What is in its place by then stays, also if that comes in the same commit; so does one that is damaged."""
    broker = open_spool()
    log = log_of(broker)
    log.keep_facts("amqp", {key: b"old", "changed": b"old", "damaged": b"old"})
    name = facts.fact_key("amqp", "damaged")
    log.commit(log.write(lambda txn: txn.put(name, txn.get(name)[:-1] + b"?")))
    replaced = log.join_facts(facts.Facts({"amqp": {"changed": b"new"}}), soon=False)
    log.commit(log.join_forgetting("amqp", dict.fromkeys([key, "changed", "damaged", "missing"], b"old")))
    log.commit(replaced)
    problems: list[str] = []
    assert log.facts("amqp", problems.append) == {"changed": b"new"}
    assert len(problems) == 1
    copy = copy_as_killed(broker, tmp_path / "copy")
    assert len(qflow.inspect.check_spool(copy)) == 1
    log.keep_facts("amqp", {"damaged": None})


@pytest.mark.parametrize("key", ["short", "long" * 1_000])
def test_a_damaged_one_is_told_and_hides_no_other(key: str, open_spool: Open, tmp_path: Path) -> None:
    """By both checks and by who reads; it can be written anew, or forgotten."""
    broker = open_spool()
    log = log_of(broker)
    log.keep_facts("amqp", {key: b"value", "other": b"o"})
    name = facts.fact_key("amqp", key)

    def damage(txn: object) -> None:
        value = bytearray(txn.get(name))  # type: ignore[attr-defined]
        value[-6] ^= 1
        txn.put(name, bytes(value))  # type: ignore[attr-defined]

    log.commit(log.write(damage))
    problems: list[str] = []
    assert log.facts("amqp", problems.append) == {"other": b"o"}
    assert len(problems) == 1
    assert "of 'amqp' does not match its checksum" in problems[0]
    with pytest.raises(qflow.CorruptionError, match="of 'amqp' does not match its checksum"):
        log.facts("amqp")
    assert broker.check() == problems
    copy = copy_as_killed(broker, tmp_path / "copy")
    assert problems == qflow.inspect.check_spool(copy)
    log.keep_facts("amqp", {key: b"again"})
    assert log.facts("amqp") == {key: b"again", "other": b"o"}
    assert broker.check() == []


@pytest.mark.parametrize("cut", [b"", b"abc", b"\0\0\0\0"])
def test_a_record_of_another_shape_is_told(cut: bytes, open_spool: Open) -> None:
    """One that is cut, and one that stands under the key of another."""
    log = log_of(broker := open_spool())
    name = facts.fact_key("amqp", "k" * 2_000)
    log.commit(log.write(lambda txn: txn.put(name, cut)))
    assert len(broker.check()) == 1
    log.keep_facts("amqp", {"k" * 2_000: b"v"})
    assert log.facts("amqp") == {"k" * 2_000: b"v"}


def test_all_of_one_call_are_kept_or_none(open_spool: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one commit; where that fails, nothing is known of them."""
    broker = open_spool(journal="off")
    log = log_of(broker)
    before = log.commits
    log.keep_facts("amqp", {str(number): b"v" for number in range(5_000)})
    assert log.commits == before + 1
    write = facts.write

    def fails(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        raise qflow.StorageError("no more")

    monkeypatch.setattr(facts, "write", fails)
    with pytest.raises(qflow.StorageError, match="no more"):
        log.keep_facts("amqp", {"0": None, "new": b"v"})
    monkeypatch.undo()
    assert len(log.facts("amqp")) == 5_000


def test_a_full_disk_refuses_new_ones_and_lets_old_ones_be_forgotten(tmp_path: Path) -> None:
    """As it refuses puts and takes acks."""
    with disk_of("4m", tmp_path / "disk") as disk:
        with qflow.open(disk / "spool") as broker:
            log = log_of(broker)
            log.keep_facts("amqp", {str(number): b"v" * 200 for number in range(500)})
            filled(broker.declare_queue("q"), 1_000)
            with pytest.raises(qflow.DiskFull):
                for number in range(1_000):
                    log.keep_facts("amqp", {f"new {number}": b"v" * 1_000})
            for number in range(0, 400, 4):
                log.keep_facts("amqp", {str(number + more): None for more in range(4)})
            assert len([key for key in log.facts("amqp") if "new" not in key]) == 100
            assert broker.check() == []
        with qflow.open(disk / "spool") as broker:
            assert len([key for key in log_of(broker).facts("amqp") if "new" not in key]) == 100


@pytest.mark.parametrize(
    ("room", "fact"),
    [("", {"k": b""}), ("r" * 65, {"k": b""}), ("r", {"k" * 16_385: b""}), ("r", {"k": b"v" * (2**20 + 1)})],
)
def test_what_is_too_large_is_refused(room: str, fact: dict[str, bytes | None], open_spool: Open) -> None:
    """Before anything is written."""
    with pytest.raises(qflow.InvalidArgument, match="bytes"):
        log_of(open_spool()).keep_facts(room, {"fine": b"", **fact})


def test_a_closed_broker_keeps_nothing(open_spool: Open) -> None:
    """And says so."""
    log = log_of(broker := open_spool())
    broker.close()
    with pytest.raises(qflow.BrokerClosed):
        log.keep_facts("amqp", {"k": b"v"})
    with pytest.raises(qflow.BrokerClosed):
        log.facts("amqp")


def test_one_fact_is_read_by_its_key(open_spool: Open) -> None:
    """Short, long, or not there."""
    log = log_of(open_spool())
    log.keep_facts("mqtt", {"k": b"short", "k" * 4_000: b"long", "": b""})
    assert (log.fact("mqtt", "k"), log.fact("mqtt", "k" * 4_000), log.fact("mqtt", "")) == (b"short", b"long", b"")
    assert log.fact("mqtt", "kk") is log.fact("mqt", "k") is log.fact("mqtt", "k" * 4_001) is None


def test_a_room_is_read_in_pages(open_spool: Open) -> None:
    """In the order of the keys, from a prefix on, as many at once as are asked for, long ones too."""
    log = log_of(open_spool())
    keys = [f"a/{number:03}" for number in range(50)] + ["a", "b/1", "a0", "a/" + "x" * 1_000, "a/" + "x" * 1_001]
    log.keep_facts("mqtt", {key: key.encode() for key in keys})
    log.keep_facts("mqtt2", {"a/": b"another room"})
    found: list[tuple[str, bytes]] = []
    position = b""
    while position or not found:
        page = log.facts_page("mqtt", "a/", position, most=7)
        assert 0 < len(page.facts) <= 7
        found += page.facts
        position = page.position
    assert sorted(found) == [(key, key.encode()) for key in sorted(keys) if key.startswith("a/")]
    assert [key for key, _ in found[:50]] == keys[:50]


def test_a_page_goes_on_where_it_is_told_to(open_spool: Open) -> None:
    """What `wanted` passes over is not looked at; a place before the key is no way back."""
    log = log_of(open_spool())
    log.keep_facts("mqtt", {f"{letter}/{number}": b"" for letter in "abc" for number in range(9)})
    asked: list[str] = []

    def wanted(key: str) -> bool | str:
        asked.append(key)
        return {"a/0": "b/7", "b/7": True, "b/8": "a/1"}.get(key, False)

    assert log.facts_page("mqtt", wanted=wanted) == ([("b/7", b"")], b"")
    assert asked == ["a/0", "b/7", "b/8", *(f"c/{number}" for number in range(9))]


def test_a_damaged_fact_is_named_and_left_out(open_spool: Open) -> None:
    """By its key it is refused; a page reports it and goes on."""
    log = log_of(open_spool())
    log.keep_facts("mqtt", {"a": b"1", "b": b"2"})
    log.commit(log.write(lambda txn: txn.put(facts.fact_key("mqtt", "a"), b"no checksum")))
    with pytest.raises(CorruptionError, match="the fact 'a' of 'mqtt'"):
        log.fact("mqtt", "a")
    with pytest.raises(CorruptionError, match="the fact 'a' of 'mqtt'"):
        log.facts_page("mqtt")
    told: list[str] = []
    assert log.facts_page("mqtt", report=told.append) == ([("b", b"2")], b"")
    assert len(told) == 1
    log.keep_facts("mqtt", {"a": None})


@pytest.mark.parametrize("journal", ["auto", "off"])
@pytest.mark.parametrize("bound", [False, True])
def test_facts_are_kept_in_the_commit_of_a_publish(journal: str, bound: bool, open_spool: Open, tmp_path: Path) -> None:
    """Whether the message goes to a stream alone, or to a queue as well, or to nobody; the latest stays."""
    asyncio.run(_published_with_facts(AsyncBroker(open_spool(journal=journal)), bound, tmp_path))


async def _published_with_facts(broker: AsyncBroker, bound: bool, tmp_path: Path) -> None:
    await broker.declare_stream("plant", topics=["plant/#"])
    if bound:
        await broker.declare_queue("q")
        await broker.bind("q", "plant/#")
    sent = [publish_and_keep(broker, "plant/1", b"%d" % n, None, {"mqtt": {"last": b"%d" % n}}) for n in range(9)]
    sent.append(publish_and_keep(broker, "elsewhere", b"", {"a": 1}, {"mqtt": {"gone": None, "other": b"x"}}))
    results = await asyncio.gather(*sent)
    assert [result.offsets for result in results] == [{"plant": n} for n in range(9)] + [{}]
    await keep(broker, {"mqtt": {"alone": b"y"}, "room": {"z": b"z"}})
    killed = copy_as_killed(broker.broker, tmp_path / "killed")
    with qflow.open(killed) as again:
        assert log_of(again).facts("mqtt") == {"last": b"8", "other": b"x", "alone": b"y"}
        assert log_of(again).facts("room") == {"z": b"z"}
        assert [message.body for message in again.stream("plant").query()] == [b"%d" % n for n in range(9)]


def test_a_publish_that_is_refused_keeps_nothing(open_spool: Open) -> None:
    """A fact that is too large, and a message that is."""
    asyncio.run(_refused(AsyncBroker(open_spool())))


async def _refused(broker: AsyncBroker) -> None:
    await broker.declare_stream("plant", topics=["plant/#"], max_message_bytes=100)
    with pytest.raises(qflow.InvalidArgument, match="a fact has a key of at most"):
        publish_and_keep(broker, "plant/1", b"", None, {"mqtt": {"k": b"x" * (facts.MAX_VALUE_BYTES + 1)}})
    with pytest.raises(qflow.MessageTooLarge):
        await publish_and_keep(broker, "plant/1", b"x" * 1_000, None, {"mqtt": {"k": b"x"}})
    assert log_of(broker.broker).facts("mqtt") == {}
    assert await in_thread(broker, lambda: list(broker.broker.stream("plant").query())) == []
