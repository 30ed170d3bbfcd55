"""A spool that is moved while it is open: another one in its place is never written into, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from unit import handing
from unit.clocks import LONG_S, until


def left_in(spool: Path, copy: Path, queue: str) -> list[bytes]:
    """Return what a crash now would leave in a queue."""
    shutil.copytree(spool, copy, ignore=shutil.ignore_patterns("door"))
    with qflow.open(copy) as broker:
        assert broker.check() == []
        return broker.queue(queue).get_many(1000).bodies


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


@pytest.mark.parametrize("spill", ["files", "segments"])
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
    assert said == [f"{old} was moved while it was open, and is used where it is now: {new}"]


@pytest.mark.parametrize("journal", ["auto", "off"])
def test_a_spool_that_is_removed_takes_nothing_more_and_gives_what_it_has(journal: Any, tmp_path: Path) -> None:
    """What would be confirmed now would be gone with the process; what waits can still be worked off."""
    with qflow.open(tmp_path / "spool", journal=journal) as broker:
        queue = broker.declare_queue("q")
        stream = broker.declare_stream("s", topics=["#"])
        for number in range(40):
            queue.put(b"%d" % number)
        shutil.rmtree((tmp_path / "spool").rename(tmp_path / "gone"))  # figures are written there at any moment
        message = "was removed while it was open"
        with pytest.raises(qflow.StorageError, match=message) as raised:
            queue.put_many([b"x", b"y"])
        assert raised.type is qflow.StorageError
        with pytest.raises(qflow.StorageError, match=message):
            queue.put(b"x")
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


@pytest.mark.parametrize("way", ["put", "submit"])
def test_a_spool_that_is_removed_while_it_rests_does_not_confirm_the_first_put_either(way: str, tmp_path: Path) -> None:
    """That one would stand alone, and need only a note in the journal."""
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("q")
        for number in range(40):
            queue.put(b"%d" % number)
        until(lambda: broker.engine.log.turn.open and not broker.engine.log.held_back)
        shutil.rmtree(tmp_path / "spool")
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


def test_a_spool_that_was_closed_is_not_followed(tmp_path: Path) -> None:
    """The descriptor of its directory is that of something else then."""
    with qflow.open(tmp_path / "spool") as broker:
        place = broker.engine.spool.place
        (tmp_path / "spool").rename(tmp_path / "moved")
        assert place.follow()
    descriptors = [os.open(tmp_path, os.O_RDONLY) for _ in range(64)]
    (tmp_path / "moved").rename(tmp_path / "again")
    assert not place.follow()
    assert broker.path == str(tmp_path / "moved")
    for fd in descriptors:
        os.close(fd)
