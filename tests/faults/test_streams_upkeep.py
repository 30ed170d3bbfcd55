"""Upkeep of streams where something is wrong: damaged blocks under retention, a full disk, a job that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

import inside
import qflow
from qflow.storage.blocks import read_header
from qflow.storage.log import bodies
from qflow.storage.log.keys import BLOCKS, key_of
from unit.clocks import LONG_S, Clock, open_still

OWNER = 1
BLOCK = 50
Damage = Callable[[bytearray], bytearray]


def flip_header(value: bytearray) -> bytearray:
    value[20] ^= 1
    return value


def cut(value: bytearray) -> bytearray:
    return value[:80]


def lengthen_names(value: bytearray) -> bytearray:
    value[read_header(value, where="").columns_end] ^= 0x10
    return value


def flip_lengths(value: bytearray) -> bytearray:
    value[60] ^= 0xFF
    return value


def damage(spool: Path, number: int, change: Damage) -> None:
    """Change a block of the first stream in a closed log."""
    env = lmdb.open(str(spool / "log"), map_size=2**30, lib_version=0)
    with env.begin(write=True) as txn:
        key = key_of(BLOCKS, OWNER, 0, BLOCK * number)
        txn.put(key, bytes(change(bytearray(txn.get(key)))))
    env.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written(spool: Path, clock: Clock) -> Path:
    """A spool with two streams of four blocks each, ten seconds apart."""
    broker = open_still(spool, clock)
    for name in ("a", "z"):
        broker.declare_stream(name, topics=[name])
    for _ in range(4):
        for name in ("a", "z"):
            broker.publish_many([(name, bytes(1000)) for _ in range(BLOCK)])
        clock.advance(10)
    broker.close()
    return spool


@pytest.fixture
def reopen(written: Path, clock: Clock) -> Iterator[Callable[[], qflow.Broker]]:
    opened: list[qflow.Broker] = []

    def open_it() -> qflow.Broker:
        opened.append(open_still(written, clock))
        return opened[-1]

    yield open_it
    for broker in opened:
        broker.close()


def maintain(broker: qflow.Broker) -> None:
    while broker.engine.streams.tick(inside.upkeep(broker).attempt) or inside.upkeep(broker).remove_settled():
        pass


def held(broker: qflow.Broker, name: str = "a") -> tuple[int, int]:
    """Return the first offset of a stream, and how many messages its row counts."""
    stats = broker.stats().streams[name]
    return stats.first_offsets[0], stats.messages


KINDS = [flip_header, cut, lengthen_names]


@pytest.mark.parametrize("change", KINDS)
def test_a_damaged_block_stays_until_a_limit_asks_for_it(
    written: Path, reopen: Callable[[], qflow.Broker], change: Damage
) -> None:
    """It may be repaired; nothing that can be read goes in its place."""
    damage(written, 0, change)
    broker = reopen()
    for limits in ({"retention_messages": 10**6}, {"retention_s": 10**6}, {"retention_bytes": 10**9}):
        broker.alter_stream("a", **{"retention_messages": None, "retention_s": None, "retention_bytes": None, **limits})
        maintain(broker)
        assert held(broker) == (0, 200)
    broker.alter_stream("a", retention_bytes=None, retention_messages=151)
    maintain(broker)
    assert held(broker) == (0, 200)  # a part of it cannot go
    broker.alter_stream("a", retention_messages=150)
    maintain(broker)
    assert held(broker) == (50, 150)


@pytest.mark.parametrize("change", KINDS)
@pytest.mark.parametrize("limits", [{"retention_s": 25}, {"retention_bytes": 100_000}, {"retention_messages": 100}])
def test_a_damaged_block_goes_with_those_behind_it(
    written: Path, reopen: Callable[[], qflow.Broker], change: Damage, limits: dict[str, Any]
) -> None:
    """Its time and its bytes are not known: what lies behind it tells."""
    damage(written, 0, change)
    broker = reopen()
    broker.alter_stream("a", **limits)
    maintain(broker)
    first, messages = held(broker)
    assert first + messages == 200
    assert 99 <= first <= 101
    assert [message.offset for message in broker.stream("a").query()] == list(range(first, 200))


@pytest.mark.parametrize("change", [*KINDS, flip_lengths])
@pytest.mark.parametrize("number", [1, 3])
def test_damage_anywhere_leaves_retention_going(
    written: Path, reopen: Callable[[], qflow.Broker], change: Damage, number: int
) -> None:
    """Message by message past a damaged block, also where it is the last one, and the one at the border."""
    damage(written, number, change)
    broker = reopen()
    before = 0
    for most in range(190, 0, -9):
        broker.alter_stream("a", retention_messages=most)
        broker.stream("a").retain()
        first, messages = held(broker)
        assert first + messages == 200
        assert before <= first <= 200 - most
        assert messages - most < BLOCK
        before = first


@pytest.mark.parametrize("change", KINDS)
def test_a_damaged_block_stays_for_who_is_still_to_be_told(
    written: Path, reopen: Callable[[], qflow.Broker], change: Damage
) -> None:
    """A durable subscription in the middle of it holds all of it back."""
    broker = reopen()
    broker.alter_stream("a", retain_until_consumed=True, retention_messages=10)
    with broker.subscribe("a", name="panel", start="earliest") as panel:
        panel.get_many(60).ack(wait=True)
    broker.close()
    damage(written, 1, change)
    broker = reopen()
    maintain(broker)
    assert held(broker) == (50, 150)
    broker.delete_subscription("a", "panel")
    maintain(broker)
    assert held(broker) == (190, 10)


def test_a_block_cut_before_its_times_has_none(spool: Path, clock: Clock) -> None:
    """One that grew has a time for each message: it is not looked for where the block has ended."""
    broker = open_still(spool, clock)
    broker.declare_stream("a", topics=["a"], retention_s=60)
    for _ in range(10):
        broker.publish("a", b"small")
        clock.advance(1)
    broker.close()
    damage(spool, 0, cut)
    broker = open_still(spool, clock)
    clock.advance(1000)
    maintain(broker)
    assert inside.troubles(broker) == {}
    assert held(broker) == (0, 10)
    broker.publish_many([("a", bytes(70_000)), ("a", b"new")])
    clock.advance(1000)
    maintain(broker)
    assert held(broker) == (12, 0)
    broker.close()


def test_lengths_that_do_not_add_up_are_not_counted_with(written: Path, reopen: Callable[[], qflow.Broker]) -> None:
    """They are looked at where a part of a block is to go."""
    damage(written, 0, flip_lengths)
    broker = reopen()
    broker.alter_stream("a", retention_bytes=199_000)
    maintain(broker)
    assert held(broker) == (0, 200)
    assert broker.stats().streams["a"].bytes == 200_000
    broker.alter_stream("a", retention_bytes=150_000)
    maintain(broker)
    assert held(broker) == (50, 150)
    assert broker.stats().streams["a"].bytes == 150_000


def test_a_job_that_fails_stops_no_other_and_is_reported_once(
    reopen: Callable[[], qflow.Broker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither that of another stream nor the one behind it; a new error is a new line, a bug one with its place."""
    broker = reopen()
    broker.declare_queue("q")
    errors: list[Exception] = [qflow.CorruptionError("broken"), ValueError("a bug")]

    def fail(*_: object) -> bool:
        raise errors[0]

    monkeypatch.setattr(broker.stream("a"), "retain", fail)
    monkeypatch.setattr("qflow.upkeep.tick", fail)
    upkeep = inside.upkeep(broker)
    monkeypatch.setattr(upkeep, "sweep", fail)
    done: list[str] = []
    for name in ("remove_settled", "remove_deleted", "hollow"):
        monkeypatch.setattr(upkeep, name, lambda name=name: done.append(name))
    monkeypatch.setattr(broker.engine.figures, "write", lambda: done.append("write"))
    broker.alter_stream("z", retention_messages=10)
    for _ in errors:
        for _ in range(3):
            rounds = iter((False, True))
            monkeypatch.setattr(upkeep._bell, "wait", lambda *_, rounds=rounds: next(rounds))
            monkeypatch.setattr(upkeep._bell, "ended", False)
            inside.is_due(broker)
            with caplog.at_level(logging.WARNING, "qflow"):
                upkeep._run()
        errors.reverse()
    assert held(broker, "z") == (190, 10)
    assert set(done) == {"remove_settled", "remove_deleted", "hollow", "write"}
    texts = [record.getMessage() for record in caplog.records if "failed and is tried again" in record.getMessage()]
    assert sum("broken" in text for text in texts) == 3
    assert sum("a bug" in text for text in texts) == 3
    assert sum("retention of stream 'a'" in text for text in texts) == 2
    assert all(bool(record.exc_info) == ("a bug" in record.getMessage()) for record in caplog.records)


def test_what_is_deleted_leaves_no_trouble_behind(
    reopen: Callable[[], qflow.Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What failed of a queue or a stream is told as long as it is there."""
    broker = reopen()
    queue = broker.declare_queue("q")
    upkeep = inside.upkeep(broker)

    def fail(*_: object) -> bool:
        raise ValueError("broken")

    def tick() -> set[str]:
        inside.is_due(broker)
        upkeep.tick(upkeep.attempt)
        return set(broker.stats().troubles)

    monkeypatch.setattr(broker.stream("a"), "retain", fail)
    monkeypatch.setattr("qflow.upkeep.tick", fail)
    queue.put(b"1")
    assert tick() == tick() == {"queue 'q'", "retention of stream 'a'"}
    broker.delete_queue("q")
    assert tick() == {"retention of stream 'a'"}
    broker.delete_stream("a")
    assert tick() == set()


def test_a_full_disk_puts_the_index_off_and_nothing_else(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be forgotten is forgotten: it gives room back."""
    with qflow.open(spool) as broker, inside.paused(broker), monkeypatch.context() as patch:
        stream = broker.declare_stream("s", topics=["#"])
        for number in range(40):
            broker.publish_many([(f"t/{number}", bytes(2000)) for _ in range(40)])
        env = broker.engine.log._env
        room = env.make_room

        def refuse(value_bytes: int, values: int, *, settles_only: bool) -> None:
            if not settles_only:
                raise qflow.DiskFull("no room")
            room(value_bytes, values, settles_only=settles_only)

        while stream.index(least=20):
            pass
        broker.publish_many([("t", bytes(2000)) for _ in range(2000)])
        broker.alter_stream("s", retention_messages=500)
        patch.setattr(env, "make_room", refuse)
        while stream.retain():
            pass
        assert stream.index(least=1)  # segments that went
        while stream.index(least=1):
            pass
        assert stream._indexing._forgotten_to == {0: stream.partitions[0].floor}
        patch.setattr(env, "make_room", room)
        assert stream.index(least=1)
        while stream.index(least=1):
            pass
        assert stream.history.problems() == []


def test_the_index_asks_for_room_for_each_topic(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take a page: a commit that has not that room may fail in the middle of a full disk."""
    with qflow.open(spool) as broker, inside.paused(broker), monkeypatch.context() as patch:
        stream = broker.declare_stream("s", topics=["#"])
        for number in range(0, 3000, 100):
            broker.publish_many([(f"{number + more}/t", bytes(1000)) for more in range(100)])
        env = broker.engine.log._env
        room = env.make_room
        asked: list[int] = []

        def note(value_bytes: int, values: int, *, settles_only: bool) -> None:
            asked.append(values)
            room(value_bytes, values, settles_only=settles_only)

        patch.setattr(env, "make_room", note)
        assert stream.index(least=1)
        assert max(asked) > 2000


# What retention drops ------------------------------------------------------------------------------------------------


def test_what_is_dropped_counts_when_it_is_committed(
    reopen: Callable[[], qflow.Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, whatever failed before, and also if the caller was interrupted on the way."""
    broker = reopen()
    stream = broker.stream("a")
    broker.alter_stream("a", retention_messages=180)
    with monkeypatch.context() as patch:
        patch.setattr(
            broker.engine.log._env, "make_room", lambda *_, **__: (_ for _ in ()).throw(qflow.DiskFull("full"))
        )
        for _ in range(2):
            with pytest.raises(qflow.DiskFull):
                stream.retain()
        assert stream.stats().dropped_total == 0
    broker.alter_stream("a", retention_messages=170)
    stream.retain()
    assert (held(broker), stream.stats().dropped_total) == ((30, 170), 30)
    broker.alter_stream("a", retention_messages=150)
    with monkeypatch.context() as patch:
        patch.setattr(broker.engine.log, "wait", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stream.retain()
    for _ in range(2):
        stream.retain()
        assert (held(broker), stream.stats().dropped_total) == ((50, 150), 50)


def test_a_durable_subscription_begins_while_nothing_is_dropped(
    reopen: Callable[[], qflow.Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the question where it begins until retention knows of it; then it holds messages back."""
    broker = reopen()
    broker.alter_stream("a", retain_until_consumed=True, retention_messages=10)
    stream = broker.stream("a")
    seen: list[bool] = []
    starts, write = broker.engine.streams._sessions._starts, broker.engine.spool.records.add

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen.append(stream.retention.held_back().locked())  # type: ignore[attr-defined]
            return real(*arguments)

        return call

    monkeypatch.setattr(broker.engine.streams._sessions, "_starts", noting(starts))
    monkeypatch.setattr(broker.engine.spool.records, "add", noting(write))
    with broker.subscribe("a", name="panel", start="earliest") as panel:
        assert seen == [True, True]
        maintain(broker)
        assert panel.get(timeout_s=LONG_S).offset == 0


# Shared bodies -------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(spool: Path) -> Path:
    """Twenty bodies that two streams share, in one block of each; every second one has another topic."""
    with qflow.open(spool) as broker:
        for name in ("a", "b"):
            broker.declare_stream(name, topics=["#"])
        broker.publish_many([(f"t/{number % 2}", bytes([number]) * BODY) for number in range(20)])
    return spool


BODY = 100_000


def test_a_block_of_references_is_read_in_parts(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bodies as there is room for, at least one; together all of them, each once."""
    with qflow.open(shared) as broker:
        stream = broker.stream("a")
        for most_bytes, count in ((1, 1), (BODY, 1), (3 * BODY + 1, 3), (10**9, 20)):
            sizes, got, position = [], [], 0
            while position < 20:
                found = stream.history.read(0, position, 20, most_bytes, None)
                sizes.append(sum(len(piece.records) for piece in found.pieces))
                got += [sequence for piece in found.pieces for sequence in piece.sequences]
                assert found.pieces[0].start == position
                assert found.pieces[-1].end == found.position
                position = found.position
            assert (got, max(sizes)) == (list(range(20)), count)
            assert len(sizes) <= -(-20 // count) + 1, sizes  # they lie in two blocks
        found = stream.history.read(0, 0, 20, 10**9, stream.history.interest("t/1"), 2)
        assert [list(piece.sequences) for piece in found.pieces] == [[1, 3]]
        assert found.position == 5
        fetched: list[int] = []
        fetch = bodies.fetch
        monkeypatch.setattr(bodies, "fetch", lambda txn, one: fetched.append(one.number) or fetch(txn, one))
        assert next(iter(stream.query(limit=1))).body == bytes(BODY)
        assert len(fetched) == 1
        assert [message.body[0] for message in stream.query("t/0", skip=2, limit=5)] == [4, 6, 8, 10, 12]


def test_a_damaged_body_is_a_gap_of_one_message(shared: Path) -> None:
    """Whatever is around it is served, in each stream."""
    env = lmdb.open(str(shared / "log"), map_size=2**30, lib_version=0)
    with env.begin(write=True) as txn:
        numbers = [int.from_bytes(key[-8:], "big") for key, _ in txn.cursor() if key[0] == bodies.BODIES]
        stored = sorted(number for number in numbers if number and number % 2 == 0)
        for index in (0, 6, 7, 19):
            value = bytearray(txn.get(bodies.key_of_body(stored[index])))
            value[-2000] ^= 1
            txn.put(bodies.key_of_body(stored[index]), bytes(value))
    env.close()
    whole = [number for number in range(20) if number not in (0, 6, 7, 19)]
    with qflow.open(shared) as broker:
        for name in ("a", "b"):
            with broker.subscribe(name, start="earliest", follow=False, on_gap="skip") as reader:
                assert [message.body[0] for message in reader] == whole
                assert reader.stats().gap_total == 4
        with broker.subscribe("a", start="earliest", follow=False) as reader:
            gaps, got = [], []
            while len(got) < len(whole) or len(gaps) < 4:
                try:
                    got.append(reader.get(timeout_s=LONG_S).offset)
                except qflow.GapError as gap:
                    gaps.append((gap.first, gap.end))
        assert gaps == [(0, 1), (6, 7), (7, 8), (19, 20)]
        with broker.subscribe("a", "t/1", start="earliest", follow=False, on_gap="skip") as reader:
            assert [message.offset for message in reader] == [1, 3, 5, 9, 11, 13, 15, 17]
            assert reader.stats().gap_total == 2
        assert [message.offset for message in broker.stream("a").query()] == whole


@pytest.mark.parametrize("name", ["newest", "limit", "skip"])
def test_a_number_no_stream_reaches_is_refused(shared: Path, name: str) -> None:
    with qflow.open(shared) as broker:
        stream = broker.stream("a")
        with pytest.raises(qflow.InvalidArgument, match=f"{name} must be at most"):
            stream.query(**{name: 2**60 + 1})
        assert list(stream.query(skip=2**60, limit=2**60)) == []
        for value in (2**60, 20):
            assert len(list(stream.query(**{name: value}))) == (0 if name == "skip" else 20)
