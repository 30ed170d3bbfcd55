"""Groups of readers outside: what they keep, and what retention keeps for them."""

from __future__ import annotations

import builtins
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qflow
from faults.seams import in_thread
from faults.test_full_disk import disk_of, fill
from qflow.storage import lock
from qflow.storage.files import Files
from qflow.storage.streams import groups
from qflow.storage.streams.groups import EXPIRY_S, GRACE_S, Group
from unit.clocks import Clock

Open = Callable[..., qflow.Broker]
Join = Callable[[qflow.Broker, str], Group]


@pytest.fixture
def join(clock: Clock) -> Iterator[Join]:
    """Take the lease of a group, under the clock of the test."""
    found: list[Group] = []

    def join_it(broker: qflow.Broker, name: str) -> Group:
        group = Group(str(broker.path), name, str(broker.uuid), Files(), clock=clock.wall)
        found.append(group)
        return group

    yield join_it
    for group in found:
        group.close()


def declare(broker: qflow.Broker, name: str = "s", **settings: Any) -> qflow.Stream:
    return broker.declare_stream(name, topics=[name], **(settings or {"retention_messages": 1}))


def read_by_group(open_at: Open, join: Join) -> tuple[qflow.Broker, qflow.Stream]:
    """Return a broker and its stream of thirty messages, of which a group that is not there now has had twenty."""
    broker = open_at()
    stream = declare(broker)
    broker.publish_many([("s", b"x")] * 30)
    group = join(broker, "g")
    group.acknowledge({stream.owner: {0: 20}})
    group.close()
    return broker, stream


def first(stream: qflow.Stream) -> int:
    """Return where a stream begins when retention has done what it may."""
    while stream.retain():
        pass
    return stream.stats().first_offsets[0]


def test_the_slowest_group_holds(open_at: Open, join: Join, clock: Clock) -> None:
    """In each stream and partition for itself; what it has had goes when the grace time is over."""
    broker = open_at()
    a, b = declare(broker, "a"), declare(broker, "b")
    broker.publish_many([(topic, b"x") for topic in "ab" for _ in range(100)])
    slow, fast = join(broker, "1"), join(broker, "2")
    slow.acknowledge({a.owner: {0: 10}, b.owner: {0: 70}})
    fast.acknowledge({a.owner: {0: 60}, b.owner: {0: 20}})
    assert (first(a), first(b)) == (10, 20)
    slow.acknowledge({a.owner: {0: 50}, b.owner: {0: 80}})
    assert (first(a), first(b)) == (10, 20)
    clock.advance(GRACE_S)
    assert (first(a), first(b)) == (50, 20)


def test_a_group_is_enough_to_consume_a_stream(open_at: Open, join: Join) -> None:
    """With `retain_until_consumed`, no limit and no subscription: what the group has had goes."""
    broker = open_at()
    stream = declare(broker, retain_until_consumed=True)
    broker.publish_many([("s", b"x")] * 10)
    assert first(stream) == 0
    join(broker, "g").acknowledge({stream.owner: {0: 7}})
    assert first(stream) == 7


def test_a_group_that_somebody_has_holds_however_far_the_clock_jumps(open_at: Open, join: Join, clock: Clock) -> None:
    """What nobody reads as holds for its expiry time."""
    broker = open_at()
    stream = declare(broker)
    broker.publish_many([("s", b"x")] * 30)
    group = join(broker, "g")
    group.acknowledge({stream.owner: {0: 20}})
    clock.wall_s += EXPIRY_S + 1
    assert first(stream) == 20
    group.close()
    assert first(stream) == 29


def test_a_group_that_is_seen_holds_for_as_long_after(open_at: Open, join: Join, clock: Clock) -> None:
    """That it is seen is written once a minute, however often it is; one that has read nothing leaves no file."""
    broker = open_at()
    stream = declare(broker)
    broker.publish_many([("s", b"x")] * 30)
    empty, group = join(broker, "empty"), join(broker, "g")
    empty.keep_seen()
    assert not list(Path(broker.path).glob("cursors/empty/*.json"))
    group.acknowledge({stream.owner: {0: 20}})
    file = Path(broker.path) / "cursors/g/offsets.json"
    written = set()
    for seconds in (59, 0, EXPIRY_S, 59):
        clock.advance(seconds)
        group.keep_seen()
        written.add(json.loads(file.read_bytes())["seen_s"])
    assert len(written) == 2
    group.close()
    clock.advance(EXPIRY_S - 59)
    assert first(stream) == 20
    clock.advance(1)
    assert first(stream) == 29


def test_a_clock_that_is_set_back_lets_go_of_what_a_group_has_had_after_the_grace_time(
    open_at: Open, join: Join, clock: Clock
) -> None:
    """A moment that was ahead stayed the one that counts until the clock came to it, by a day or by years."""
    broker = open_at()
    stream = declare(broker)
    broker.publish_many([("s", b"x")] * 100)
    group = join(broker, "g")
    group.acknowledge({stream.owner: {0: 10}})
    clock.wall_s -= 86_400
    for offset in range(20, 60):
        group.acknowledge({stream.owner: {0: offset}})
        clock.advance(GRACE_S / 10)
    assert first(stream) in range(40, 51)


def test_a_fifo_in_the_place_of_offsets_holds_up_nobody(
    open_at: Open, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    """It is no file of offsets, and is not waited for: so retention keeps everything, and the group is refused."""
    broker, stream = read_by_group(open_at, join)
    file = Path(broker.path) / "cursors/g/offsets.json"
    file.unlink()
    os.mkfifo(file)
    assert in_thread(lambda: first(stream)) == 0
    (record,) = caplog.records
    assert "retention keeps everything" in record.getMessage()
    with pytest.raises(qflow.CorruptionError, match="damaged"):
        in_thread(lambda: join(broker, "g"))


def test_a_group_whose_lock_cannot_be_looked_at_holds_everything(
    open_at: Open, join: Join, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can tell whether it is read as."""
    broker, stream = read_by_group(open_at, join)
    clock.advance(EXPIRY_S + 1)
    with monkeypatch.context() as patched:
        patched.setattr(lock.os, "open", unreadable(os.path.join(broker.path, groups.CURSORS, "g")))
        assert first(stream) == 0
    (record,) = caplog.records
    assert "retention keeps everything until this group can be read" in record.getMessage()
    assert first(stream) == 29


def unreadable(path: str) -> Callable[..., Any]:
    """Return an `open` or `stat` for which one file belongs to another user."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", path)

    return refuse


def without(name: str) -> Callable[[Path], object]:
    def change(file: Path) -> None:
        kept = json.loads(file.read_bytes())
        del kept[name]
        file.write_text(json.dumps(kept))

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.write_bytes(b"{"),
        lambda file: file.write_bytes(b"[" * 100_000),
        lambda file: file.write_text('{"history": [[1, {"1": {"0": null}}]]}'),
        *map(without, ("uuid", "seen_s", "expiry_s", "grace_s", "history")),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: (file.unlink(), file.symlink_to(file)),
    ],
)
def test_a_damaged_group_holds_everything_and_is_reported_once(
    open_at: Open, join: Join, caplog: pytest.LogCaptureFixture, change: Callable[[Path], object]
) -> None:
    """Nobody can tell what it has had; when it is removed retention goes on. No other stream is stopped by it."""
    broker = open_at()
    streams = [declare(broker, "a", retention_messages=1, partitions=2), declare(broker, "b")]
    broker.publish_many([(topic, b"x", b"%d" % n) for topic in "ab" for n in range(30)])
    group = join(broker, "g")
    group.acknowledge({stream.owner: {0: 20, 1: 20} for stream in streams})
    directory = Path(broker.path) / groups.CURSORS / "g"
    change(directory / "offsets.json")
    with caplog.at_level(logging.ERROR, "qflow"):
        for _ in range(2):
            for stream in streams:
                while stream.retain():
                    pass
                assert set(stream.stats().first_offsets) == {0}
    (record,) = caplog.records
    assert str(directory) in record.getMessage()
    assert "retention keeps everything" in record.getMessage()
    shutil.rmtree(directory)
    assert first(streams[1]) == 29


def test_what_is_no_group_is_passed_over(open_at: Open, join: Join, caplog: pytest.LogCaptureFixture) -> None:
    """A file that a desktop left behind, and a directory where nobody has read yet."""
    broker = open_at()
    stream = declare(broker)
    broker.publish_many([("s", b"x")] * 30)
    join(broker, "g").acknowledge({stream.owner: {0: 20}})
    cursors = Path(broker.path) / groups.CURSORS
    (cursors / ".DS_Store").touch()
    (cursors / "gone").symlink_to("nowhere")
    (cursors / "empty").mkdir()
    assert first(stream) == 20
    shutil.rmtree(cursors)
    cursors.touch()
    assert first(stream) == 29
    assert not caplog.records
    cursors.unlink()


def test_groups_that_cannot_be_listed_hold_everything(
    open_at: Open, join: Join, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For as long as that is so."""
    broker = open_at()
    stream = declare(broker)
    broker.publish_many([("s", b"x")] * 30)
    join(broker, "g").acknowledge({stream.owner: {0: 20}})
    cursors = os.path.join(broker.path, groups.CURSORS)
    with monkeypatch.context() as patched:
        patched.setattr(groups.os, "scandir", unreadable(cursors))
        assert first(stream) == 0
        assert first(stream) == 0
    (record,) = caplog.records
    assert cursors in record.getMessage()
    assert first(stream) == 20


def test_a_group_that_did_not_go_on_is_not_read_again(
    open_at: Open, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many streams and partitions there are: retention looks every second."""
    broker = open_at()
    streams = [declare(broker, name, retention_messages=1, partitions=8) for name in "abc"]
    broker.publish_many([(name, b"x", b"%d" % n) for name in "abc" for n in range(100)])
    group = join(broker, "g")
    reads: list[str] = []
    looks: list[str] = []
    read, scandir = groups._read, os.scandir
    monkeypatch.setattr(groups, "_read", lambda path: reads.append(path) or read(path))
    monkeypatch.setattr(groups.os, "scandir", lambda path: looks.append(path) or scandir(path))
    for done in (1, 2):
        group.acknowledge({stream.owner: dict.fromkeys(range(8), done) for stream in streams})
        for stream in streams:
            stream.retain()
        assert (len(reads), len(looks)) == (done, 3 * done)


def test_what_was_known_of_groups_that_were_removed_is_forgotten(open_at: Open, join: Join, clock: Clock) -> None:
    """As those of queries that each had a name of their own: they took memory until the owner ended."""
    broker, stream = read_by_group(open_at, join)
    held = groups.Held(str(broker.path), str(broker.uuid), clock.wall)
    for number in range(5):
        group = join(broker, f"query-{number}")
        group.acknowledge({stream.owner: {0: number}})
        group.close()
        assert held(stream.owner) == {0: number}
        shutil.rmtree(Path(broker.path, "cursors", f"query-{number}"))
    assert held(stream.owner) == {0: 20}
    assert len(held._known) == 1


def test_a_lease_is_given_back_where_offsets_cannot_be_read(
    open_at: Open, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the next attempt in this process finds the group free."""
    broker = open_at()
    group = join(broker, "g")
    group.acknowledge({1: {0: 5}})
    group.close()
    file = os.path.join(broker.path, groups.CURSORS, "g", "offsets.json")
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", unreadable(file))
        with pytest.raises(qflow.StorageError, match="keep the offsets of a group"):
            join(broker, "g")
    assert join(broker, "g").committed() == {1: {0: 5}}


def test_a_disk_without_room_for_a_group_is_told_so(tmp_path: Path) -> None:
    """Nothing is said of the spool, which is not what is locked."""
    with disk_of("1m", tmp_path / "disk") as disk:
        (disk / "cursors" / "g").mkdir(parents=True)
        fill(disk)
        group = Group(str(disk), "g", "uuid", Files())
        try:
            with pytest.raises(
                qflow.DiskFull, match=r"^cannot keep the offsets of a group \(.*/cursors/g/offsets.json\): No space"
            ):
                group.acknowledge({1: {0: 5}})
        finally:
            group.close()


def test_offsets_are_on_the_disk_before_they_are_in_their_place(open_at: Open) -> None:
    """A power cut leaves these or the ones of before, never an empty file."""
    steps: list[tuple[str, str]] = []

    class Watched(Files):
        def sync_file(self, path: str) -> None:
            steps.append(("sync", os.path.basename(path)))

        def rename(self, old: str, new: str) -> None:
            steps.append(("rename", os.path.basename(old)))
            super().rename(old, new)

        def sync_directory(self, path: str) -> None:
            steps.append(("sync", os.path.basename(path)))

    broker = open_at()
    group = Group(str(broker.path), "g", str(broker.uuid), Watched())
    assert steps == [("sync", os.path.basename(broker.path)), ("sync", "cursors")]
    steps.clear()
    group.acknowledge({1: {0: 5}})
    assert steps == [("sync", "offsets.json.new"), ("rename", "offsets.json.new"), ("sync", "g")]
    group.close()
