"""Where looks come from: an owner, what it writes for others, the log; and the change from one to the next."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest

import qflow
import top_seen
from qflow import doctor, inspect
from qflow.events import EventKind
from qflow.top import acting
from qflow.top.drawing import title
from qflow.top.look import Board, Key, Look, Mode
from qflow.top.source import JUDGED_S, Source, judged, look_at
from unit.clocks import until

JOBS = Key("queue", "jobs")


class Disk(NamedTuple):
    """As `shutil.disk_usage` has it."""

    total: int
    free: int


def waited_for(source: Source, board: Board, shows: Callable[[], bool]) -> None:
    """Look until something is shown: what changed is figured anew twice a second."""
    ends = time.monotonic() + 60
    board.take(source.look())
    while not shows():
        assert time.monotonic() < ends, board.look
        board.take(source.look())


def test_a_spool_is_followed_from_owner_to_owner(spool: Path) -> None:
    """Not owned, owned, not owned, and owned again, by the same source."""
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs").put_many([b"a", b"b"])
    source, board = Source(spool), Board()
    board.take(source.look())
    assert (board.look.mode, board.rows[JOBS].lag) == (Mode.DEAD, 2)
    assert board.look.note == "nobody owns it: read-only, what its log holds"
    for count in (3, 4):
        with qflow.open(spool) as broker:
            broker.queue("jobs").put(b"c")
            waited_for(source, board, lambda count=count: board.rows[JOBS].lag == count)  # type: ignore[misc]
            assert (board.look.mode, board.look.pid) == (Mode.LIVE, os.getpid())
            assert board.look.broker["capacity_bytes"] == broker.settings.capacity_bytes
        board.take(source.look())
        assert (board.look.mode, board.rows[JOBS].lag) == (Mode.DEAD, count)
    source.leave()


def test_events_come_through_the_door(spool: Path) -> None:
    """With the look after them."""
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("jobs", limit_messages=1)
        source = Source(spool)
        source.look()
        queue.put(b"a")
        with pytest.raises(qflow.QueueFull):
            queue.put_nowait(b"b")
        found: list[Any] = []
        while not found:
            found += source.look().events
        assert (found[0].kind, found[0].queue) == (EventKind.LIMIT_REACHED, "jobs")
        source.leave()


def test_what_has_not_changed_is_the_same_object(spool: Path) -> None:
    """So that a thousand queues that stand still cost nothing to show."""
    with qflow.open(spool) as broker:
        jobs = broker.declare_queue("jobs", durable=False)
        broker.declare_queue("still", durable=False)
        source = Source(spool)
        board = Board()
        waited_for(source, board, lambda: "still" in board.look.queues)
        before = board.look
        jobs.put(b"a")
        waited_for(source, board, lambda: board.rows[JOBS].messages == 1)
        assert board.look.queues["still"] is before.queues["still"]
        broker.delete_queue("jobs")
        waited_for(source, board, lambda: JOBS not in board.rows)
        source.leave()


def test_queues_that_are_gone_are_not_shown_however_many_went(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflow.figures.GONE_KEPT", 1)
    with qflow.open(spool) as broker:
        for name in "abc":
            broker.declare_queue(name, durable=False)
        source = Source(spool)
        board = Board()
        waited_for(source, board, lambda: board.look.queues.keys() == set("abc"))
        broker.delete_queue("a")
        broker.delete_queue("b")
        waited_for(source, board, lambda: board.look.queues.keys() == {"c"})
        source.leave()


WRITTEN = "broker.declare_queue('jobs').put(b'a'); broker.engine.figures.write()"


def test_an_owner_that_lets_nobody_in_is_seen_by_what_it_writes(spool: Path) -> None:
    """Read-only, with what the file says and how old it is; nothing can be changed."""
    source = Source(spool)
    with top_seen.owned(spool, WRITTEN, door=False) as process:
        look = source.look()
        assert (look.mode, look.pid) == (Mode.TOLD, process.pid)
        assert look.note == f"process {process.pid} owns it and lets nobody in: read-only, from stats.json"
        assert set(look.queues) == {"jobs"}
        with pytest.raises(qflow.InvalidArgument, match="read-only"):
            acting.purge(source, "jobs")
    assert source.look().mode is Mode.DEAD


def test_figures_that_no_owner_wrote_are_not_shown(spool: Path) -> None:
    """A `stats.json` that is something else: the log is read instead."""
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs").put(b"a")
        broker.engine.figures.write()
    facts = attrs.evolve(inspect.read_spool(spool), owner_pid=os.getpid())
    assert facts.live is not None
    assert look_at(facts).mode is Mode.TOLD
    jobs = facts.live["queues"]["jobs"]
    for strange in (
        {"streams": ["x"]},
        {"streams": {"s": {"messages": 1, "subscriptions": [{"members": "two"}]}}},
        {"queues": {"jobs": jobs | {"put_total": "many"}}},
        {"queues": {"jobs": jobs | {"oldest_unacked_s": None}}},
        {"pid": "me"},
        {"resident_bytes": {}},
    ):
        board = Board()
        board.take(look_at(attrs.evolve(facts, live=facts.live | strange)))
        assert (board.look.mode, board.rows[JOBS].lag) == (Mode.DEAD, 1)
        assert board.look.note == f"process {os.getpid()} owns it: read-only, what its log holds"


def test_a_spool_that_cannot_be_read_is_told_of(spool: Path) -> None:
    """Its directory is gone, and comes back."""
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs")
    source = Source(spool)
    spool.rename(spool.with_name("elsewhere"))
    look = source.look()
    assert look.mode is Mode.FAILED
    assert "there is no spool" in look.note
    spool.with_name("elsewhere").rename(spool)
    assert source.look().mode is Mode.DEAD


@pytest.mark.parametrize(("name", "kind"), [("spill", "obstacle"), ("log/data.mdb", "damage")])
def test_why_a_spool_is_of_no_use_is_found(spool: Path, name: str, kind: str) -> None:
    """As `qflow doctor` finds it: it was said that nothing is wrong."""
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs")
    place = spool / name
    place.unlink() if place.is_file() else place.rmdir()
    place.write_bytes(b"x" * 9000)
    found = Source(spool).look().findings
    assert [one.kind for one in found if one.kind != "disk-full"] == [kind]


def test_an_owner_that_has_written_nothing_is_missed() -> None:
    """It lets nobody in either: nobody knows whether it does anything."""
    look = Look(mode=Mode.DEAD, pid=0, time_s=0.0)
    kinds = {one.kind for one in judged(doctor.Look(path="s"), look)}
    assert kinds == {"silent-owner", "no-door"}


def test_the_disk_is_read_again_only_when_it_has_changed(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process a second would be too many for a spool that nobody writes to."""
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs").put(b"a")
    source = Source(spool)
    first = source.look()
    monkeypatch.setattr("qflow.inspect.read_spool", None)
    assert source.look().queues is first.queues


def test_a_queue_is_opened_with_its_settings_and_first_messages(spool: Path) -> None:
    """On a live spool and on one that nobody owns; of what lies in memory alone only its owner tells."""
    script = (
        "broker.declare_queue('jobs', limit_messages=9).put(b'body')\n"
        "broker.declare_queue('quick', durable=False).put(b'12345')\n"
        "broker.declare_stream('flights', topics=['flights/#'])"
    )
    source = Source(spool)
    with top_seen.owned(spool, script):
        source.look()
        inside = acting.look_inside(source, JOBS, True)
        assert (inside.settings["limit_messages"], inside.messages[0].body, inside.note) == (9, b"body", "")
        quick = acting.look_inside(source, Key("queue", "quick"), False)
        assert (quick.messages[0].size_bytes, quick.note) == (5, "")
        assert acting.look_inside(source, Key("stream", "flights"), True).settings["topics"] == ("flights/#",)
        gone = acting.look_inside(source, Key("queue", "gone"), True)
        assert "gone" in gone.note
    source.look()
    inside = acting.look_inside(source, JOBS, True)
    assert (inside.settings["limit_messages"], inside.messages[0].body) == (9, b"body")
    assert "only its owner" in acting.look_inside(source, Key("queue", "quick"), False).note


def test_messages_are_purged_and_dead_letters_go_back(spool: Path) -> None:
    """Through the door, with a sentence of what was done."""
    with qflow.open(spool) as broker:
        broker.declare_queue("dead")
        jobs = broker.declare_queue("jobs", max_deliveries=1, dead_letter="dead")
        jobs.put_many([b"a", b"b"])
        for _ in range(2):
            jobs.get().nack(requeue=False)
        broker.queue("dead").put(b"of its own")
        source = Source(spool)
        source.look()
        assert acting.redrive(source, "dead").startswith("messages moved from dead: 2; kept: 1 (1: ")
        assert acting.purge(source, "jobs") == "messages deleted from jobs: 2"
        assert len(jobs) == 0
        source.leave()


def test_a_setting_is_altered_and_the_reason_told_if_not(spool: Path) -> None:
    """What would drop messages is for `qflow alter`, which asks."""
    with qflow.open(spool) as broker:
        jobs = broker.declare_queue("jobs", limit_messages=9)
        ring = broker.declare_queue("ring", on_overflow=qflow.Overflow.DROP_OLDEST)
        ring.put_many([b"a", b"b", b"c"])
        source = Source(spool)
        source.look()
        assert acting.alter(source, "jobs", " limit_messages=20") == "jobs: limit_messages is 20 now, and was 9"
        assert acting.alter(source, "jobs", "limit_messages=none") == "jobs: limit_messages is none now, and was 20"
        assert jobs.settings.limit_messages is None
        for change, why in (
            ("limit_messages", "no NAME=VALUE"),
            ("limit_mesages=1", "no setting 'limit_mesages'"),
            ("limit_messages=many", "limit_messages must be"),
        ):
            with pytest.raises(qflow.InvalidArgument, match=why):
                acting.alter(source, "jobs", change)
        with pytest.raises(
            qflow.InvalidArgument, match="that would drop its oldest 1 messages, down to 2, at once: `qflow alter`"
        ):
            acting.alter(source, "ring", "limit_messages=2")
        assert acting.alter(source, "ring", "limit_messages=3").endswith("is 3 now, and was none")
        source.leave()


def test_a_queue_is_paused_and_goes_on(spool: Path) -> None:
    """It says what that means."""
    with qflow.open(spool) as broker:
        jobs = broker.declare_queue("jobs")
        source = Source(spool)
        source.look()
        assert acting.pause_or_resume(source, "jobs", False).startswith("jobs is paused: ")
        assert jobs.stats().paused
        assert acting.pause_or_resume(source, "jobs", True) == "jobs goes on"
        assert not jobs.stats().paused
        source.leave()


def test_findings_come_with_the_look(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that figures at hand tell of; anew when the spool has another owner, else every few seconds."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: Disk(100, 99))
    now_s = [0.0]
    with qflow.open(spool, capacity_bytes="1MiB") as broker:
        jobs = broker.declare_queue("jobs")
        source = Source(spool, clock=lambda: now_s[0])
        assert source.look().findings == ()
        jobs.put(bytes(1000))
        assert source.look().findings == ()
        broker.declare_queue("paused").pause()
        board = Board()
        waited_for(source, board, lambda: board.look.queues.get("paused", {}).get("paused", False))
        assert board.look.findings == ()
        now_s[0] += JUDGED_S
        assert "paused" in [one.kind for one in source.look().findings]
    assert source.look().findings == ()


def test_findings_know_what_only_the_log_tells(spool: Path) -> None:
    """Why letters are dead, as of some seconds ago; how many there are, as of now; how long the log is."""
    script = (
        "jobs = broker.declare_queue('jobs', dead_letter='dead')\n"
        "for reason in ('mail bounced', 'mail bounced', 'no address'):\n"
        "    jobs.put(b'a')\n"
        "    jobs.get().nack(requeue=False, reason=reason)\n"
        "while broker.stats().queues['jobs'].messages: pass\n"
        "broker.queue('dead').put(b'later')"
    )
    now_s = [0.0]
    with top_seen.owned(spool, script):
        source = Source(spool, clock=lambda: now_s[0])
        look = source.look()
        assert 0 < look.inside.log_used_bytes <= look.inside.log_bytes

        def sentence() -> str:
            now_s[0] += JUDGED_S
            found = [one.sentence for one in source.look().findings if one.kind == "dead-letters"]
            return "; ".join(found)  # of a moment ago: there may be none yet

        until(lambda: sentence() == "4 dead letters in queue 'dead'; 2 for the commonest reason: 'mail bounced'")
        assert acting.purge(source, "dead") == "messages deleted from dead: 4"
        board = Board()
        waited_for(source, board, lambda: board.look.queues.get("dead", {}).get("messages") == 0)
        now_s[0] += JUDGED_S
        assert "dead-letters" not in [one.kind for one in source.look().findings]
        source.leave()


def test_a_directory_that_was_removed_under_its_owner_is_urgent(spool: Path, tmp_path: Path) -> None:
    """The owner answers as before: nothing else would tell; another spool in its place is told, too."""
    now_s = [0.0]
    with qflow.open(tmp_path / "backup", capacity_bytes="1MiB"):
        pass
    with top_seen.owned(spool, "broker.declare_queue('jobs').put(b'x')"):
        source = Source(spool, clock=lambda: now_s[0])
        look = source.look()
        assert "removed" not in [one.kind for one in look.findings]
        assert look.broker
        shutil.rmtree(spool.rename(spool.with_name("gone")))  # figures are written there at any moment
        for _ in range(2):
            now_s[0] += JUDGED_S
            look = source.look()
            assert (look.mode, look.findings[0].kind) == (Mode.LIVE, "removed")
            assert str(title(one_board(look), "s", 60)).split() == ["s", "live", "·", "its", "directory", "is", "gone"]
            if not spool.exists():
                (tmp_path / "backup").rename(spool)
        source.leave()


def one_board(look: Look) -> Board:
    """Return what has seen one look."""
    board = Board()
    board.look = look
    return board
