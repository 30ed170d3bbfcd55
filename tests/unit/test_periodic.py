"""Schedules: messages that are put again and again, each moment once, in threads, in tasks and through the door."""

from __future__ import annotations

import asyncio
import json
import sys
import zoneinfo
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import qflow
import qflow.aio
from qflow import importing
from qflow.cli.main import app
from qflow.periodic import AT_ONCE
from unit.clocks import Clock, open_still


def pass_time(broker: qflow.Broker, clock: Clock, seconds: float) -> None:
    """Let time pass, and maintenance do what it does then."""
    clock.advance(seconds)
    broker.engine.upkeep.tick()


@pytest.mark.parametrize("terms", [{"every_s": "1m"}, {"cron": "* * * * *"}], ids=["every", "cron"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_clock_that_was_ahead_holds_nothing_up(
    spool: Path, clock: Clock, is_open: bool, terms: dict[str, Any]
) -> None:
    """Nor does it where the spool was opened anew."""
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        clock.wall_s += 86_400
        broker.schedule("poll", jobs, b"look", **terms)
        pass_time(broker, clock, 60)
        assert jobs.purge() == 1
        if is_open:
            clock.wall_s -= 86_400
            pass_time(broker, clock, 1)
            pass_time(broker, clock, 60)
            assert len(jobs) == 1
    if not is_open:
        clock.wall_s -= 86_400
        with open_still(spool, clock) as broker:
            pass_time(broker, clock, 1)
            pass_time(broker, clock, 60)
            assert len(broker.queue("jobs")) == 1


@pytest.mark.parametrize("terms", [{"every_s": "1h"}, {"cron": "0 * * * *"}], ids=["every", "cron"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_clock_that_was_ahead_before_the_first_moment_holds_nothing_up(
    spool: Path, clock: Clock, is_open: bool, terms: dict[str, Any]
) -> None:
    """That moment had its message ahead of time, and has no other; the next one has its own, in its time."""
    clock.wall_s = clock.wall_s // 3600 * 3600
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        broker.schedule("hourly", jobs, b"x", **terms)
        clock.wall_s += 365 * 86_400
        pass_time(broker, clock, 60)
        assert jobs.purge() == 1
        clock.wall_s -= 365 * 86_400
        if is_open:
            hours_pass(broker, clock)
    if not is_open:
        with open_still(spool, clock) as broker:
            hours_pass(broker, clock)


def hours_pass(broker: qflow.Broker, clock: Clock) -> None:
    """See that nothing comes for the first hour, and a message for each that follows."""
    jobs = broker.queue("jobs")
    pass_time(broker, clock, 1)
    for number in range(4):
        pass_time(broker, clock, 3600)
        assert len(jobs) == number


def test_a_message_comes_each_time_and_missed_ones_come_together(spool: Path, clock: Clock) -> None:
    """On the grid of the first moment, also after the spool was closed."""
    start = clock.wall_s
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        made = broker.schedule("poll", jobs, b"look", every_s="1m", headers={"kind": "mail"})
        assert (made.next_s, made.every_s, made.last_s) == (start + 60, 60, None)
        pass_time(broker, clock, 59)
        assert len(jobs) == 0
        pass_time(broker, clock, 1)
        pass_time(broker, clock, 1)
        assert len(jobs) == 1
        delivery = jobs.get()
        assert delivery.body == b"look"
        assert delivery.headers == {"schedule": "poll", "scheduled_for_s": start + 60, "kind": "mail"}
        delivery.ack()
        pass_time(broker, clock, 300)
        assert len(jobs) == 1
        (now,) = broker.schedules()
        assert (now.next_s, now.last_s) == (start + 420, start + 120)
    clock.advance(1000)
    with open_still(spool, clock) as broker:
        jobs = broker.queue("jobs")
        broker.engine.upkeep.tick()
        assert len(jobs) == 2
        again = broker.schedule("poll", "jobs", b"look", every_s=60, headers={"kind": "mail"})
        assert again == broker.schedules()[0]
        assert again.next_s == start + 1380
        other = broker.schedule("poll", "jobs", b"look", every_s=30)
        assert other.next_s == clock.wall_s + 30
        broker.cancel_schedule("poll")
        pass_time(broker, clock, 1000)
        assert (len(jobs), broker.schedules()) == (2, [])
        with pytest.raises(qflow.NotFound, match="no schedule 'poll'"):
            broker.cancel_schedule("poll")
    with open_still(spool, clock) as broker:
        assert broker.schedules() == []


def test_what_has_no_room_comes_later_and_once(spool: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """A full queue, and one that was deleted; nothing else waits for it."""
    with open_still(spool, clock) as broker:
        full, gone = broker.declare_queue("full", limit_messages=1), broker.declare_queue("gone", durable=False)
        full.put(b"fills it")
        for queue in (full, gone):
            broker.schedule(queue.name, queue, b"x", every_s=10)
        broker.delete_queue("gone")
        for _ in range(5):
            pass_time(broker, clock, 10)
        assert len(full) == 1
        assert "no queue 'gone'" in broker.schedules()[1].trouble
        troubles = {f"schedule {one.name!r}": one.trouble for one in broker.schedules()}
        assert broker.stats().troubles == troubles, "so that the doctor and the page tell of them"
        assert [record.getMessage().count("later") for record in caplog.records] == [1, 1]
        full.get().ack()
        gone = broker.declare_queue("gone", durable=False)
        broker.engine.upkeep.hurry()
        pass_time(broker, clock, 1)
        assert (len(full), len(gone)) == (1, 1)
        assert [one.trouble for one in broker.schedules()] == ["", ""]
        assert broker.stats().troubles == {}


class Commits:
    """How many messages each commit has put, or was to put."""

    def __init__(self, broker: qflow.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sizes: list[int] = []
        commit = broker.engine.together.commit

        def count(inserts: list[Any], *args: Any, **options: Any) -> Any:
            self._sizes.append(len(inserts))
            return commit(inserts, *args, **options)

        monkeypatch.setattr(broker.engine.together, "commit", count)

    def since(self) -> list[int]:
        """Return those since this was asked for last."""
        sizes, self._sizes[:] = list(self._sizes), []
        return sizes


def test_what_is_due_together_is_put_together_and_maintenance_goes_on_between(
    spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number at a time; each moment has one message, also for whoever opens the spool as it is then."""
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        names = {broker.schedule(f"s{number}", jobs, b"x", every_s=10).name for number in range(AT_ONCE * 2 + 50)}
        commits = Commits(broker, monkeypatch)
        clock.advance(10)
        assert [broker.engine.upkeep.tick() for _ in range(3)] == [True, True, False]
        assert commits.since() == [AT_ONCE, AT_ONCE, 50]
        broker.snapshot(spool.with_name("copy"))
        pass_time(broker, clock, 1)
        assert commits.since() == []
    for path in (spool, spool.with_name("copy")):
        with open_still(path, clock) as broker:
            pass_time(broker, clock, 1)
            batch = broker.queue("jobs").get_many(1000, timeout_s=0)
            assert len(batch) == len(names)
            assert {one.headers["schedule"] for one in batch} == names


def test_large_messages_are_put_a_few_at_a_time(spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a commit takes in memory is bounded."""
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        for number in range(5):
            broker.schedule(f"s{number}", jobs, bytes(600_000), every_s=10)
        commits = Commits(broker, monkeypatch)
        clock.advance(10)
        while broker.engine.upkeep.tick():
            pass
        assert commits.since() == [2, 2, 1]


def test_where_one_has_no_room_the_others_are_put_together_the_next_time(
    spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_still(spool, clock) as broker:
        jobs, full = broker.declare_queue("jobs"), broker.declare_queue("full", limit_messages=1)
        full.put(b"fills it")
        for number in range(5):
            broker.schedule(f"s{number}", full if number == 2 else jobs, b"x", every_s=10)
        commits = Commits(broker, monkeypatch)
        pass_time(broker, clock, 10)
        assert commits.since() == [5, 1, 1, 1, 1, 1]
        assert (len(jobs), [bool(one.trouble) for one in broker.schedules()]) == (4, [False, False, True, False, False])
        pass_time(broker, clock, 10)
        assert commits.since() == [4, 1]
        full.get().ack()
        pass_time(broker, clock, 10)
        assert commits.since() == [4, 1]
        assert (len(jobs), len(full), broker.schedules()[2].trouble) == (12, 1, "")


def test_a_ring_that_is_smaller_than_what_is_due_has_the_others_put_together(
    spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that never fits it would take all of them alone, each time."""
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        ring = broker.declare_queue("ring", limit_messages=2, on_overflow=qflow.Overflow.DROP_OLDEST)
        for number in range(6):
            broker.schedule(f"s{number}", ring if number < 3 else jobs, b"x", every_s=10)
        commits = Commits(broker, monkeypatch)
        pass_time(broker, clock, 10)
        assert commits.since() == [3, 1, 1, 1]
        assert (len(jobs), len(ring)) == (3, 2)


def test_what_is_turned_away_at_a_limit_turns_no_other_away(spool: Path, clock: Clock) -> None:
    """As it is by puts one after the other."""
    with open_still(spool, clock) as broker:
        for name, policy in (("drops", qflow.Overflow.DROP_NEWEST), ("dead", qflow.Overflow.DEAD_LETTER)):
            dead_letter = "letters" if name == "dead" else None
            queue = broker.declare_queue(name, limit_messages=3, on_overflow=policy, dead_letter=dead_letter)
            queue.put(b"first")
            for number in range(3):
                broker.schedule(f"{name} {number}", queue, b"x", every_s=10)
        pass_time(broker, clock, 10)
        assert [len(broker.queue(name)) for name in ("drops", "dead", "letters")] == [3, 3, 1]


def test_those_that_stay_due_hold_no_other_up(spool: Path, clock: Clock) -> None:
    """However many: they come last in their turn again."""
    with open_still(spool, clock) as broker:
        jobs, full = broker.declare_queue("jobs"), broker.declare_queue("full", limit_messages=1)
        full.put(b"fills it")
        for number in range(AT_ONCE + 1):
            broker.schedule(f"s{number}", full, b"x", every_s=10)
        broker.schedule("last", jobs, b"x", every_s=10)
        for number in range(3):
            clock.advance(10)
            assert [broker.engine.upkeep.tick() for _ in range(2)] == [True, False]
            assert len(jobs) == number + 1


def test_one_that_cannot_be_told_holds_no_other_up(spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner without the package for cron: it says so, and puts what needs none."""
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        broker.schedule("a-nightly", jobs, b"c", cron="* * * * *")
        broker.schedule("b-poll", jobs, b"e", every_s=10)
        monkeypatch.setitem(sys.modules, "cronsim", None)
        monkeypatch.delitem(importing._found, "cronsim")
        pass_time(broker, clock, 60)
        assert jobs.get_many(9, timeout_s=0).bodies == [b"e"]
        assert ["cronsim" in one.trouble for one in broker.schedules()] == [True, False]


@pytest.mark.parametrize("every_s", [2, 4.7, 1 / 0.3])
def test_a_clock_set_back_brings_no_moment_again(spool: Path, clock: Clock, every_s: float) -> None:
    """Whatever the span, and though several moments had one message."""
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        for number in range(20):
            broker.schedule(f"s{number}", jobs, b"x", every_s=every_s)
            clock.advance(0.37)
        pass_time(broker, clock, 60 * every_s)
        had = [one.headers["scheduled_for_s"] for one in jobs.get_many(99, timeout_s=0)]
        clock.wall_s -= 3
        for _ in range(3):
            pass_time(broker, clock, 1)
        had += [one.headers["scheduled_for_s"] for one in jobs.get_many(99, timeout_s=0)]
        assert len(had) == len(set(had)) >= 20


@pytest.mark.parametrize("terms", [{"every_s": "1m"}, {"cron": "* * * * *"}], ids=["every", "cron"])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_clock_set_back_past_a_moment_has_it_once(
    spool: Path, clock: Clock, is_open: bool, terms: dict[str, Any]
) -> None:
    """By some seconds, as a time server does; the next moment has its message."""
    clock.wall_s = clock.wall_s // 60 * 60
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        broker.schedule("poll", jobs, b"look", **terms)
        pass_time(broker, clock, 61)
        clock.wall_s -= 5
        if is_open:
            pass_time(broker, clock, 1)
            pass_time(broker, clock, 5)
    with open_still(spool, clock) as broker:
        jobs = broker.queue("jobs")
        pass_time(broker, clock, 1)
        pass_time(broker, clock, 5)
        assert len(jobs) == 1
        pass_time(broker, clock, 60)
        assert len(jobs) == 2


def test_a_broker_that_is_closed_meanwhile_is_no_trouble(
    spool: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """What was due is put by the next owner."""
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        for name in ("one", "two"):
            broker.schedule(name, jobs, b"x", every_s=10)
        clock.advance(10)
        periodic = broker.engine.periodic
    with suppress(qflow.BrokerClosed):
        periodic.put_due()
    assert caplog.records == []
    with open_still(spool, clock) as broker:
        pass_time(broker, clock, 1)
        assert len(broker.queue("jobs")) == 2


def test_headers_of_a_schedule_do_not_say_who_it_is(spool: Path, clock: Clock) -> None:
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        made = broker.schedule("poll", jobs, b"x", every_s=10, headers={"schedule": "other", "scheduled_for_s": 0})
        pass_time(broker, clock, 10)
        assert jobs.get().headers == {"schedule": "poll", "scheduled_for_s": made.next_s}


def test_cron_says_when_and_where(spool: Path, clock: Clock) -> None:
    """In the time of a place, also over the change of its clocks."""
    pytest.importorskip("cronsim")
    clock.wall_s = datetime(2026, 3, 28, 12, tzinfo=UTC).timestamp()
    with open_still(spool, clock) as broker:
        broker.declare_queue("jobs")
        made = broker.schedule("nightly", "jobs", b"x", cron="0 3 * * *", time_zone="Europe/Berlin")
        assert datetime.fromtimestamp(made.next_s, UTC) == datetime(2026, 3, 29, 1, tzinfo=UTC)
        pass_time(broker, clock, 86_400)
        assert len(broker.queue("jobs")) == 1
        assert datetime.fromtimestamp(broker.schedules()[0].next_s, UTC) == datetime(2026, 3, 30, 1, tzinfo=UTC)
        for cron in ("0 3 * *", "soon", "0 0 30 2 *", "* * * * * * *", "\0"):
            with pytest.raises(qflow.InvalidArgument, match="cron must be five fields"):
                broker.schedule("bad", "jobs", b"x", cron=cron)
        for zone in ("Nowhere/Else", "../etc/passwd", ""):
            with pytest.raises(qflow.InvalidArgument, match="time_zone must be"):
                broker.schedule("bad", "jobs", b"x", cron="0 3 * * *", time_zone=zone)
        assert len(broker.schedules()) == 1


@contextmanager
def no_zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A system that has no data of time zones."""
    for name in ("tzdata", *(name for name in sys.modules if name.startswith("tzdata."))):
        monkeypatch.setitem(sys.modules, name, None)
    zoneinfo.reset_tzpath(to=[])
    zoneinfo.ZoneInfo.clear_cache()
    try:
        yield
    finally:
        zoneinfo.reset_tzpath()


def test_a_system_without_time_zones_says_so(spool: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a schedule that was made on another; what needs none goes on."""
    pytest.importorskip("cronsim")
    with open_still(spool, clock) as broker:
        jobs = broker.declare_queue("jobs")
        broker.schedule("berlin", jobs, b"x", cron="* * * * *", time_zone="Europe/Berlin")
        with no_zones(monkeypatch):
            broker.schedule("utc", jobs, b"y", cron="* * * * *")
            with pytest.raises(qflow.InvalidArgument, match="no time-zone data: pip install tzdata"):
                broker.schedule("paris", jobs, b"x", cron="* * * * *", time_zone="Europe/Paris")
            pass_time(broker, clock, 60)
            assert jobs.get_many(9, timeout_s=0).bodies == [b"y"]
            assert ["pip install tzdata" in one.trouble for one in broker.schedules()] == [True, False]


@pytest.mark.two_drivers
def test_bad_schedules_are_refused(open_spool: Callable[..., Any]) -> None:
    """With a sentence; nothing is kept."""
    broker = open_spool()
    broker.declare_queue("jobs")
    for options, sentence in (
        ({}, "one of them"),
        ({"every_s": 1, "cron": "0 3 * * *"}, "one of them"),
        ({"every_s": "500ms"}, "every_s must be at least 1 s"),
        ({"every_s": "soon"}, "every_s must be from 0 to"),
        ({"every_s": 5, "headers": {"a": []}}, "header"),
        ({"every_s": 5, "time_zone": "Europe/Berlin"}, "leave it out with every_s"),
        ({"cron": "0 3 * * * *"}, "five fields"),
        ({"cron": "0,1," * 250 + "2 3 * * *"}, "five fields"),
    ):
        with pytest.raises(qflow.InvalidArgument, match=sentence):
            broker.schedule("bad", "jobs", b"x", **options)
    with pytest.raises(qflow.InvalidArgument, match="schedule name"):
        broker.schedule("", "jobs", b"x", every_s=5)
    with pytest.raises(qflow.NotFound, match="no queue 'other'"):
        broker.schedule("bad", "other", b"x", every_s=5)
    with pytest.raises(qflow.InvalidArgument, match="schedule 'bad' takes 1066.* and may take 1048476: keep what is"):
        broker.schedule("bad", "jobs", bytes(800_000), every_s=5)
    made = broker.schedule("good", "jobs", b"\xff\0", every_s="1h")
    assert broker.schedules() == [made]
    assert made.body == b"\xff\0"
    broker.cancel_schedule("good")
    assert broker.schedules() == []


def test_tasks_have_schedules_too(spool: Path) -> None:
    """Beside the broker, and through its door."""

    async def main() -> None:
        async with qflow.aio.open(spool) as broker, qflow.aio.connect(spool) as remote:
            jobs = await broker.declare_queue("jobs")
            made = await broker.schedule("a", jobs, b"x", every_s="1h")
            assert await remote.schedule("a", "jobs", b"x", every_s=3600) == made
            assert await remote.schedules() == broker.schedules() == [made]
            await remote.cancel_schedule("a")
            assert broker.schedules() == []

    asyncio.run(main())


def test_the_command_line_shows_adds_and_cancels(spool: Path) -> None:
    """With and without an owner; names are made readable."""
    run = CliRunner().invoke
    with qflow.open(spool) as broker:
        broker.declare_queue("jobs")
        add = ["schedules", str(spool), "--add", "po\x1bll", "--queue", "jobs", "--every", "1m"]
        assert run(app, add).exit_code == 0
        assert broker.schedules()[0].every_s == 60
    shown = run(app, ["schedules", str(spool)])
    assert "every 60 s" in shown.output
    assert "\x1b" not in shown.output
    assert json.loads(run(app, ["schedules", str(spool), "--json"]).output)[0]["queue"] == "jobs"
    for wrong in (["--every", "1m"], ["--add", "x"], ["--add", "x", "--queue", "jobs"], ["--cancel", "x"]):
        done = run(app, ["schedules", str(spool), *wrong])
        assert done.exit_code != 0
        assert "Traceback" not in done.output
    assert run(app, ["schedules", str(spool), "--cancel", "po\x1bll"]).exit_code == 0
    assert json.loads(run(app, ["schedules", str(spool), "--json"]).output) == []
