"""A spool that is moved while it is open: another one in its place is never written into, and nothing is lost."""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from qflow.config import SPILL_STORES
from qflow.storage.files import Files
from qflow.storage.joining import LAID_OUT_BYTES
from qflow.storage.lock import acquire_lock
from qflow.storage.log import confirming, writer
from qflow.storage.spill.files import SpillFiles
from qflow.storage.spill.segments import SpillSegments
from qflow.storage.streams.groups import Group
from qflow.troubles import SPOOL_THERE
from unit import handing
from unit.clocks import LONG_S, until


def left_in(spool: Path, copy: Path, queue: str) -> list[bytes]:
    """Return what a crash now would leave in a queue."""
    shutil.copytree(spool, copy, ignore=shutil.ignore_patterns("door", "stats.json*"))
    with qflow.open(copy) as broker:
        assert broker.check() == []
        return broker.queue(queue).get_many(1000).bodies


def found_beside(spool: Path) -> dict[str, dict[str, Any]]:
    """Return what `qflow doctor` finds beside the owner, by kinds."""
    command = [sys.executable, "-m", "qflow", "doctor", str(spool), "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    return {one["kind"]: one for one in told["findings"] if one["severity"] == "urgent" and one["kind"] != "disk-full"}


def untold(fd: int) -> str:
    """Stands in for a system that does not tell where an open directory lies."""
    raise OSError


@pytest.mark.parametrize("is_told", [True, False])
def test_what_lies_where_a_spool_was_is_not_its_own(
    is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts of both are confirmed each to its own log; where a spool cannot be followed, it is not compacted."""
    if not is_told:
        monkeypatch.setattr("qflow.storage.lock._path_of", untold)
    old, new = tmp_path / "spool", tmp_path / "moved"
    with qflow.open(old) as moved:
        moved.declare_queue("one")
        old.rename(new)
        with qflow.open(old) as other:
            other.declare_queue("two")
            bodies = [b"%d" % number for number in range(100)]
            for body in bodies:
                other.queue("two").put(body)
                moved.queue("one").put(body)
            with nullcontext() if is_told else pytest.raises(qflow.StorageError, match="was moved while it was open"):
                moved.compact()
            other.engine.figures.write()
            moved.engine.figures.write()
            assert list(json.loads((old / "stats.json").read_bytes())["queues"]) == ["two"]
            assert left_in(old, tmp_path / "copy of other", "two") == bodies
            assert left_in(new, tmp_path / "copy of moved", "one") == bodies
        if is_told:
            assert list(json.loads((new / "stats.json").read_bytes())["queues"]) == ["one"]
            assert moved.path == str(new)
        else:
            old.rename(tmp_path / "other")
            with pytest.raises(qflow.StorageError, match="was removed from outside"):
                moved.compact()
            new.rename(old)
            moved.compact()
        assert moved.queue("one").get_many(1000).bodies == bodies


@pytest.mark.parametrize("spill", SPILL_STORES)
@pytest.mark.parametrize("then", ["nothing", "directory", "spool"])
def test_what_has_spilled_moves_along(spill: Any, then: str, tmp_path: Path) -> None:
    """What spilled before and what spills then, of a transient queue, whatever is made in the old place; nobody waits."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    bodies = [b"%05d" % number * 400 for number in range(3000)]
    with ExitStack() as stack:
        broker = stack.enter_context(qflow.open(old, capacity_bytes="1MiB", spill=spill))
        queue = broker.declare_queue("q", durable=False)
        queue.put_many(bodies[:1500])
        for _ in range(2):
            batch = queue.get_many(300)
            batch.ack()  # their files are kept, to be used again
        assert queue.stats().spilled_messages
        old.rename(new)
        if then == "directory":
            old.mkdir()
        elif then == "spool":
            stack.enter_context(qflow.open(old)).declare_queue("q", durable=False)
        for body in bodies[1500:]:
            queue.put(body, timeout_s=LONG_S)
        found: list[bytes] = []
        while len(queue):
            batch = queue.get_many(100)
            found += batch.bodies
            batch.ack()
        assert found == bodies[600:]
        assert broker.check() == []
        assert not [path for path in old.rglob("*") if path.parent.name.startswith("q.")]


def test_what_is_handed_in_at_the_new_place_is_adopted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the log of the process says, once, where the spool lies now."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    with qflow.open(old) as broker:
        queue = broker.declare_queue("q")
        broker.bind("q", "q")
        old.rename(new)
        assert handing.hand(new, broker.engine.spool.uuid, [("q", b"x")])
        assert queue.get(LONG_S).body == b"x"
    said = [record.getMessage() for record in caplog.records]
    # Maintenance may come between the move and the look, and has tried again since.
    said = [line for line in said if "maintenance (statistics) failed and is tried again" not in line]
    assert said == [f"{old} was moved while it was open, and is used where it is now: {new}"]


@pytest.mark.parametrize("journal", ["auto", "off"])
def test_a_spool_that_is_removed_takes_nothing_more_and_gives_what_it_has(
    journal: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be confirmed now would be gone with the process; what waits can still be worked off."""
    monkeypatch.setattr(writer, "SOON_S", 1000)  # what is in the journal stays there alone
    monkeypatch.setattr(confirming, "LATE_S", 1000)
    with qflow.open(tmp_path / "spool", journal=journal) as broker:
        queue = broker.declare_queue("q")
        stream = broker.declare_stream("s", topics=["#"])
        for number in range(40):
            queue.put(b"%d" % number)
        shutil.rmtree((tmp_path / "spool").rename(tmp_path / "gone"))  # figures are written there at any moment
        message = "was removed while it was open"
        with pytest.raises(qflow.StorageError, match=message) as raised:
            queue.put(b"x")
        assert raised.type is qflow.StorageError
        with pytest.raises(qflow.StorageError, match=message):
            queue.put_many([b"x", b"y"])
        with pytest.raises(qflow.StorageError, match=message):
            queue.submit(b"x").result()
        with pytest.raises(qflow.StorageError, match=message):
            broker.publish("a/b", b"x")
        with pytest.raises(qflow.StorageError, match=message):
            broker.declare_queue("later")
        queue.get().ack(wait=True)
        held = queue.get_many(39)
        assert held.bodies == [b"%d" % number for number in range(1, 40)]
        held.ack(wait=True)
        assert stream.stats().messages == 0
        assert len(queue) == 0


def test_a_spool_that_is_removed_is_told_of_though_nobody_puts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a second, in the log and in the statistics, until it ends: consumers alone may use it for days."""
    with qflow.open(tmp_path / "spool") as broker:
        assert "whether the spool is there" not in broker.stats().troubles
        shutil.rmtree((tmp_path / "spool").rename(tmp_path / "gone"))  # figures are written there at any moment
        until(lambda: "was removed while it was open" in broker.stats().troubles.get("whether the spool is there", ""))
    told = [record for record in caplog.records if "was removed while it was open" in record.getMessage()]
    assert [record.__dict__["event"] for record in told] == ["maintenance_failed"]


@pytest.mark.parametrize("part", ["log", "log/data.mdb"])
def test_a_log_that_is_removed_is_told_of_and_what_it_holds_can_be_copied(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The spool is there, and who looks from outside finds nothing in it: its owner alone has what waits."""
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("q")
        for number in range(40):
            queue.put(b"%d" % number)
        (tmp_path / "spool" / part).rename(tmp_path / "gone")
        (shutil.rmtree if part == "log" else os.unlink)(tmp_path / "gone")
        until(lambda: SPOOL_THERE in broker.stats().troubles)
        assert "the log of the spool" in broker.stats().troubles[SPOOL_THERE]
        found = found_beside(tmp_path / "spool")
        assert list(found) == ["removed"]
        assert "`broker.snapshot(NEW)`" in found["removed"]["remedy"]
        broker.snapshot(tmp_path / "copy")
    assert caplog.text.count("was removed while it was open") == 1
    with qflow.open(tmp_path / "copy") as broker:
        assert broker.queue("q").get_many(1000).bodies == [b"%d" % number for number in range(40)]
        assert broker.check() == []


@pytest.mark.parametrize("way", ["put", "submit"])
def test_a_spool_that_is_removed_while_it_rests_does_not_confirm_the_first_put_either(way: str, tmp_path: Path) -> None:
    """That one would stand alone, and need only a note in the journal."""
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("q")
        for number in range(40):
            queue.put(b"%d" % number)
        until(lambda: broker.engine.log.turn.open and not broker.engine.log.held_back)
        shutil.rmtree((tmp_path / "spool").rename(tmp_path / "gone"))  # figures are written there at any moment
        with pytest.raises(qflow.StorageError, match="was removed while it was open"):
            queue.put(b"x") if way == "put" else queue.submit(b"x").result()
        held = queue.get_many(41)
        assert len(held) == 40
        held.ack(wait=True)


def test_a_moved_spool_makes_no_journal_in_a_directory_that_was_made_in_its_place(tmp_path: Path) -> None:
    """By whatever begins with a `mkdir -p`: what that journal alone holds would be missed after a kill."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    with qflow.open(old) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q")
        old.rename(new)
        old.mkdir()
        bodies = [b"%d" % number for number in range(40)]
        for body in bodies:
            queue.put(body)
        assert os.listdir(old) == []
        assert left_in(new, tmp_path / "copy", "q") == bodies


def test_a_journal_is_made_where_a_spool_has_been_moved_while_it_was_made(tmp_path: Path) -> None:
    """Not given up for as long as the spool is open."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    with qflow.open(old) as broker:
        inside.still(broker)
        queue, files = broker.declare_queue("q"), broker.engine.spool.files
        sync_file = files.sync_file

        def move_then_sync(path: str) -> None:
            if old.exists():
                old.rename(new)
            sync_file(path)

        files.sync_file = move_then_sync
        bodies = [b"%d" % number for number in range(40)]
        for body in bodies:
            queue.put(body)
        assert (new / "journal").exists()
        assert left_in(new, tmp_path / "copy", "q") == bodies


def test_a_spool_that_was_closed_is_not_followed(tmp_path: Path) -> None:
    """The descriptor of its directory is that of something else then."""
    with qflow.open(tmp_path / "spool") as broker:
        place = broker.engine.spool.place
        (tmp_path / "spool").rename(tmp_path / "moved")
        assert place.has_left(str(tmp_path / "spool"))
    descriptors = [os.open(tmp_path, os.O_RDONLY) for _ in range(64)]
    (tmp_path / "moved").rename(tmp_path / "again")
    place.follow()
    assert broker.path == str(tmp_path / "moved")
    for fd in descriptors:
        os.close(fd)


@pytest.mark.parametrize("spill", SPILL_STORES)
def test_a_copy_that_is_opened_in_the_old_place_spills_under_other_names(spill: Any, tmp_path: Path) -> None:
    """Its queues have the same numbers; nobody writes over the files of the other."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    mine, others = ([b"%s %05d" % (whose, number) * 300 for number in range(2000)] for whose in (b"mine", b"other"))
    with qflow.open(old, capacity_bytes="1MiB", spill=spill) as broker:
        queue = broker.declare_queue("q")
        inside.still(broker)  # which would find soon that it has moved
        queue.put_many(mine[:1500], durable=False)
        for _ in range(10):
            queue.get_many(100).ack()  # their files are kept, to be used again
        old.rename(new)
        shutil.copytree(new, old, ignore=shutil.ignore_patterns("door", "stats.json*"))
        with qflow.open(old, capacity_bytes="1MiB", spill=spill) as copy:
            copy.queue("q").put_many(others, durable=False)
            queue.put_many(mine[1500:], durable=False)
            for one, bodies in ((copy.queue("q"), others), (queue, mine[1000:])):
                found: list[bytes] = []
                while len(one):
                    batch = one.get_many(100)
                    found += batch.bodies
                    batch.ack()
                assert found == bodies


@pytest.mark.parametrize("spill", SPILL_STORES)
def test_a_read_is_made_again_where_another_thread_has_found_the_move(spill: Any, tmp_path: Path) -> None:
    """Between the look for a file and the question whether the spool was moved; all is well right after a move, too."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    bodies = [b"%05d" % number * 400 for number in range(1500)]
    with qflow.open(old, capacity_bytes="1MiB", spill=spill) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q", durable=False)
        queue.put_many(bodies)
        old.rename(new)
        assert broker.check() == []
        new.rename(old)
        files, spool = broker.engine.spool.files, broker.engine.spool
        spool.follow()
        old.rename(new)
        opened = files.open

        def open_beside(path: str, flags: int, mode: int) -> int:
            try:
                return opened(path, flags, mode)
            except FileNotFoundError:
                spool.follow()
                raise

        files.open = open_beside
        found: list[bytes] = []
        while len(queue):
            batch = queue.get_many(100)
            found += batch.bodies
            batch.ack()
        assert found == bodies


@pytest.mark.parametrize("spill", SPILL_STORES)
def test_files_that_are_free_are_used_again_and_removed_where_they_lie_now(spill: str, tmp_path: Path) -> None:
    """Else they would take their room until the next opening."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    old.mkdir()
    lock, files = acquire_lock(old), Files()
    store: Any = SpillFiles(files, lock.place, max_kept=2)
    if spill == "segments":
        store = SpillSegments(files, lock.place, segment_bytes=4096)
    area = store.area("q", 1, 1)
    kept, left = area.write(0, [b"x" * 1000] * 12), area.write(12, [b"x" * 5000] * 2)
    if spill == "segments":
        area.free(kept)
    old.rename(new)
    area.free(left)
    if spill == "segments":
        area.write(14, [b"y" * 1000] * 6)
        assert area.counters().overwritten
        assert len([path for path in new.rglob("spill/*/*") if path.is_file()]) == area.counters().created - 2
    else:
        area.free(kept)
        assert len([path for path in new.rglob("spill/*/*") if path.is_file()]) == 2
    lock.release()


@pytest.mark.parametrize("at", ["open", "sync_directory"])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_compaction_during_which_a_spool_is_moved(
    at: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goes on, or changes nothing; least of all the log of what lies in the old place now."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    with ExitStack() as stack:
        broker = stack.enter_context(qflow.open(old))
        queue = broker.declare_queue("q")
        queue.put(b"x")
        files = broker.engine.spool.files
        work = getattr(files, at)

        def work_then_move(path: str, *rest: Any) -> Any:
            done = work(path, *rest)
            if "log.new" in path and old.exists():
                setattr(files, at, work)
                old.rename(new)
                if is_told:
                    stack.enter_context(qflow.open(old)).declare_queue("q").put(b"y")
            return done

        setattr(files, at, work_then_move)
        if not is_told:
            monkeypatch.setattr("qflow.storage.lock._path_of", untold)
        with nullcontext() if is_told and at == "sync_directory" else pytest.raises(qflow.StorageError) as error:
            broker.compact()
        assert error is None or error.type is qflow.StorageError
        assert not (old / "log.old").exists()
        queue.put(b"z")
        assert left_in(new, tmp_path / "copy", "q") == [b"x", b"z"]


def test_a_group_of_readers_outside_holds_what_it_has_not_read_in_a_moved_spool(tmp_path: Path) -> None:
    """And goes on itself."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    with qflow.open(old) as broker:
        inside.still(broker)
        stream = broker.declare_stream("s", topics=["s"], retention_messages=1)
        broker.publish_many([("s", b"x")] * 10)
        with closing(Group(str(old), "g", str(broker.uuid), Files(), grace_s=0)) as group:
            group.acknowledge({stream.owner: {0: 3}})
            old.rename(new)
            stream.retain()
            assert stream.stats().first_offsets == [3]
            group.acknowledge({stream.owner: {0: 8}})
            stream.retain()
            assert stream.stats().first_offsets == [8]
        assert not old.exists()


def test_a_batch_is_not_refused_because_the_spool_is_moved_while_it_is_adopted(tmp_path: Path) -> None:
    """What is missing of it in the old place is no damage, and nothing is made there."""
    old, new = tmp_path / "spool", tmp_path / "moved"
    with qflow.open(old) as broker:
        inside.still(broker)
        queue = broker.declare_queue("q")
        broker.bind("q", "q")
        assert handing.hand(old, broker.engine.spool.uuid, [("q", b"x")])
        files = broker.engine.spool.files
        opened = files.open

        def move_then_open(path: str, flags: int, mode: int) -> int:
            if path.endswith("-b"):
                files.open = opened
                old.rename(new)
            return opened(path, flags, mode)

        files.open = move_then_open
        broker.engine.adoption.run()
        broker.engine.adoption.run()
        assert queue.get(LONG_S).body == b"x"
        assert not old.exists()
        assert broker.recovery.problems == ()


def test_a_large_message_is_laid_out_in_a_file_where_the_spool_lies_now(tmp_path: Path) -> None:
    """Else it would be in memory twice, from then on."""
    with qflow.open(tmp_path / "spool") as broker:
        inside.still(broker)
        (tmp_path / "spool").rename(tmp_path / "moved")
        broker.engine.spool.follow()
        assert isinstance(broker.engine.log._env.join((b"", bytes(LAID_OUT_BYTES), b"")), mmap.mmap)


@pytest.mark.skipif(sys.platform != "linux", reason="names are text elsewhere")
def test_a_path_need_not_be_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is bytes to the system: a spool is moved there, compacted and opened again."""
    caplog.set_level(logging.CRITICAL, "qflow")  # a report with such a path cannot be sent between processes
    new = Path(os.fsdecode(os.fsencode(tmp_path) + b"/sp\xff"))
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("q").put(b"x")
        (tmp_path / "spool").rename(new)
        broker.compact()
    with qflow.open(new) as broker:
        assert broker.queue("q").get(LONG_S).body == b"x"
