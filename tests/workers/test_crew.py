"""Which worker processes are started, started again, told to end and killed: without processes, on a clock by hand."""

from __future__ import annotations

import errno
import math
import os
import signal
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from qflow.workers.crew import DEADLY, FIRST_PAUSE_S, LONGEST_PAUSE_S, Crew, State
from qflow.workers.ending import LONGEST_END_S
from qflow.workers.job import AWAY, READY, REFUSED
from workers.shared import slots


class Child:
    """A process that does what a test says."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.said: list[tuple[str, str]] = []
        self.code: int | None = None
        self.drained = self.killed = False

    def reports(self) -> list[tuple[str, str]]:
        said, self.said = self.said, []
        return said

    def exit_code(self) -> int | None:
        return self.code

    def drain(self) -> None:
        self.drained = True

    def kill(self) -> None:
        self.killed = True
        self.code = -signal.SIGKILL


class Scene:
    """A crew, and all that it sees."""

    def __init__(self, workers: int) -> None:
        self.now = 1000.0
        self.told: list[str] = []
        self.started: list[Child] = []
        self.broken: OSError | None = None
        self.slots = slots(workers)
        self.crew = Crew("jobs", self.slots, start=self._start, tell=self.told.append, clock=lambda: self.now)

    def _start(self, seat: int) -> Child:
        if self.broken is not None:
            raise self.broken
        self.started.append(Child(100 + len(self.started)))
        return self.started[-1]

    @property
    def states(self) -> list[str]:
        return [seat.state.value for seat in self.crew.seats]

    def work(self) -> None:
        """Have all that were started say that they work."""
        self.crew.step()
        for child in self.started:
            if child.code is None:
                child.said.append((READY, ""))
        self.crew.step()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.crew.step()


def test_all_are_started_and_are_complete_when_they_say_so() -> None:
    scene = Scene(3)
    scene.crew.step()
    assert scene.states == ["starting"] * 3
    assert not scene.crew.complete
    scene.work()
    assert scene.states == ["working"] * 3
    assert scene.crew.complete
    assert len(scene.started) == 3
    assert scene.told == []


def test_one_that_dies_is_started_again_after_a_pause_that_grows() -> None:
    """And shrinks again once it has done something."""
    scene = Scene(1)
    scene.work()
    pauses = []
    for _ in range(11):
        scene.started[-1].code = -signal.SIGSEGV
        before = len(scene.started)
        due = scene.crew.step()
        assert scene.states == ["resting"]
        pauses.append(due - scene.now)
        scene.advance(due - scene.now - 0.001)
        assert len(scene.started) == before
        scene.advance(0.002)
        assert len(scene.started) == before + 1
    assert pauses == pytest.approx([min(FIRST_PAUSE_S * 2**tries, LONGEST_PAUSE_S) for tries in range(11)])
    assert scene.told[0] == "worker 1 (process 100) was ended by SIGSEGV; it is started again after 0.1 s"
    scene.slots[0].begin(5)
    scene.slots[0].end(failed=False)
    scene.started[-1].code = 3
    assert scene.crew.step() - scene.now == pytest.approx(FIRST_PAUSE_S)
    assert scene.told[-1].endswith("exited with 3; it is started again after 0.1 s")


def test_a_death_names_the_message_at_hand() -> None:
    scene = Scene(1)
    scene.work()
    scene.slots[0].begin(17)
    scene.started[0].code = -signal.SIGKILL
    scene.crew.step()
    (told,) = scene.told
    assert "was ended by SIGKILL at message 17 of queue 'jobs', which goes back; it is started again" in told
    scene.advance(FIRST_PAUSE_S)
    assert scene.slots[0].read().deadline == 0


def test_a_message_that_ends_one_worker_after_the_other_is_told_of_with_the_remedy() -> None:
    """Once; another message between them begins anew."""
    scene = Scene(1)
    scene.work()

    def die_at(sequence: int, times: int) -> None:
        for _ in range(times):
            scene.slots[0].begin(sequence)
            scene.started[-1].code = -signal.SIGSEGV
            scene.crew.step()
            scene.advance(LONGEST_PAUSE_S)

    die_at(17, DEADLY - 1)
    die_at(18, 1)
    die_at(17, DEADLY - 1)
    assert not any("in a row" in one for one in scene.told)
    die_at(17, DEADLY)
    (told,) = (one for one in scene.told if "in a row" in one)
    assert f"message 17 of queue 'jobs' has ended {DEADLY} workers in a row" in told
    assert "max_deliveries" in told


def test_one_that_holds_a_message_past_its_lease_is_killed_and_replaced_at_once() -> None:
    scene = Scene(2)
    scene.work()
    scene.slots[1].begin(17, scene.now + 30)
    scene.slots[0].begin(16)  # without a lease
    assert scene.crew.step() == scene.now + 30
    scene.advance(29.9)
    assert not scene.started[1].killed
    scene.advance(0.2)
    assert scene.started[1].killed
    assert not scene.started[0].killed
    (told,) = scene.told
    assert told.startswith("worker 2 (process 101) has held message 17 of queue 'jobs' for longer than its lease")
    scene.crew.step()
    assert len(scene.started) == 3
    assert len(scene.told) == 1
    assert scene.states == ["working", "starting"]


def test_an_extended_lease_ends_later() -> None:
    scene = Scene(1)
    scene.work()
    scene.slots[0].begin(1, scene.now + 10)
    scene.slots[0].extend(scene.now + 50)
    scene.slots[0].extend(scene.now + 20)
    scene.advance(49)
    assert not scene.started[0].killed
    scene.advance(2)
    assert scene.started[0].killed


def test_what_a_killed_one_said_before_changes_nothing() -> None:
    scene = Scene(1)
    scene.work()
    scene.slots[0].begin(1, scene.now + 10)
    scene.advance(11)
    scene.started[0].said.append((READY, ""))
    scene.crew.step()
    assert len(scene.started) == 2


@pytest.mark.parametrize("others", [0, 1])
def test_one_that_cannot_work_ends_a_crew_that_never_did(others: int) -> None:
    """Its function or its queue is not there."""
    scene = Scene(1 + others)
    scene.crew.step()
    scene.started[0].said.append((REFUSED, "there is no module 'jbos'"))
    scene.started[0].code = 2
    scene.crew.step()
    assert scene.crew.refusal == "there is no module 'jbos'"
    assert all(child.drained for child in scene.started[1:])
    for child in scene.started[1:]:
        child.said.append((REFUSED, "there is no module 'jbos'"))
        child.code = 2
    scene.crew.step()
    assert scene.crew.ended
    assert scene.told == []
    assert len(scene.started) == 1 + others


def test_one_that_cannot_work_later_is_tried_again() -> None:
    scene = Scene(2)
    scene.work()
    scene.started[0].said.append((REFUSED, "broken.py cannot be imported"))
    scene.started[0].code = 2
    scene.crew.step()
    assert scene.crew.refusal is None
    assert scene.told == [
        "worker 1 (process 100) cannot work: broken.py cannot be imported",
        "worker 1 (process 100) exited with 2; it is started again after 0.1 s",
    ]


def test_an_owner_that_is_away_is_told_of_once_and_when_it_is_back() -> None:
    scene = Scene(2)
    scene.work()
    for child in scene.started:
        child.said += [(AWAY, "nobody owns the spool")] * 3
    scene.crew.step()
    assert scene.states == ["away", "away"]
    scene.started[0].said.append((READY, ""))
    scene.crew.step()
    assert scene.told == ["nobody owns the spool: the workers wait"]
    scene.started[1].said.append((READY, ""))
    scene.crew.step()
    assert scene.told[1:] == ["the workers go on"]
    assert scene.crew.complete


def test_a_drain_waits_for_those_that_work_and_starts_nobody() -> None:
    scene = Scene(3)
    scene.work()
    scene.started[2].code = 1
    scene.slots[0].begin(3)
    scene.slots[1].begin(4)
    scene.crew.step()
    scene.crew.drain()
    scene.crew.drain()
    assert [child.drained for child in scene.started] == [True, True, False]
    scene.advance(100)
    assert len(scene.started) == 3
    assert not scene.crew.ended
    scene.slots[0].end(failed=False)
    scene.started[0].code = 0
    scene.started[1].code = -signal.SIGKILL
    scene.crew.step()
    assert scene.crew.ended
    assert scene.told[1:] == [
        "worker 2 (process 101) was ended by SIGKILL at message 4 of queue 'jobs', which goes back"
    ]


def test_a_drain_does_not_wait_for_one_past_its_lease() -> None:
    scene = Scene(1)
    scene.work()
    scene.slots[0].begin(1, scene.now + 10)
    scene.crew.drain()
    scene.advance(11)
    assert scene.started[0].killed
    scene.crew.step()
    assert scene.crew.ended
    assert len(scene.told) == 1


def test_a_drain_does_not_wait_for_one_with_nothing_at_hand_for_good() -> None:
    """It is stopped, or hangs in an import. One that has something at hand, without a lease, is waited for."""
    scene = Scene(2)
    scene.work()
    scene.slots[1].begin(4)
    scene.advance(1000)
    scene.crew.drain()
    assert scene.crew.step() == scene.now + LONGEST_END_S
    scene.advance(LONGEST_END_S - 1)
    assert not scene.started[0].killed
    scene.advance(2)
    assert [child.killed for child in scene.started] == [True, False]
    assert scene.told == ["worker 1 (process 100) has nothing at hand and does not end: it is killed"]
    scene.advance(1000)
    scene.slots[1].end(failed=False)
    scene.advance(LONGEST_END_S - 1)
    assert not scene.started[1].killed
    scene.advance(2)
    assert scene.started[1].killed
    scene.crew.step()
    assert scene.crew.ended


def test_one_that_cannot_be_started_is_tried_again() -> None:
    scene = Scene(1)
    scene.broken = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    scene.crew.step()
    assert scene.told == [
        "worker 1 cannot be started: Resource temporarily unavailable; it is started again after 0.1 s"
    ]
    scene.broken = None
    scene.advance(FIRST_PAUSE_S)
    assert scene.states == ["starting"]


def test_all_are_killed_at_once_if_that_is_asked_for() -> None:
    scene = Scene(2)
    scene.work()
    scene.crew.kill()
    assert all(child.killed for child in scene.started)
    assert State.WORKING in {seat.state for seat in scene.crew.seats}  # it is the last that a supervisor does


def test_what_workers_have_at_hand_is_on_no_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full one ended the supervisor by a signal, and the broker in it, at the first write."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    first, second = slots(2)
    second.begin(7)
    assert (first.read(), second.read()) == ((0.0, 0, 0, 0), (math.inf, 7, 0, 0))


@pytest.mark.parametrize("is_refused", [True, False])
def test_where_that_cannot_be_the_room_is_taken_before(monkeypatch: pytest.MonkeyPatch, is_refused: bool) -> None:
    """A Python that was built for an old libc has no files in memory; a system with `vm.memfd_noexec=2` refuses them."""
    if is_refused:
        monkeypatch.setattr(os, "memfd_create", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    else:
        monkeypatch.delattr(os, "memfd_create")
    first, second = slots(2)
    second.begin(7)
    assert (first.read(), second.read()) == ((0.0, 0, 0, 0), (math.inf, 7, 0, 0))
