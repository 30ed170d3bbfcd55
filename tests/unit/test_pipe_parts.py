"""Parts of `qflow pipe` that go by a clock."""

from __future__ import annotations

from pathlib import Path

import pytest

import qflow
from doors.command_line import NOT_READING
from qflow.cli.command import Command, CommandFailed, Restarts, Run, RunFailed
from qflow.cli.flow import Flow
from qflow.cli.pipe import to_runs
from qflow.cli.pipe_stream import Idle
from qflow.cli.stop import Stop
from unit.clocks import Clock, open_still

CAPACITY = 1024 * 1024


class Recorder(Stop):
    """Writes down for how long it would have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


class Open(Flow):
    """Nothing is read from stdin, and it has not ended."""

    @property
    def input_ended(self) -> bool:
        return False


def test_the_pause_grows_from_failure_to_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as long each time, up to 30 s; a line that was acked, or a good end, begins anew."""
    with open_still(tmp_path, Clock()) as broker:
        stop = Recorder()
        flow = Open(broker.declare_queue("q"), CAPACITY, b"\n", 0, stop)
        restarts = Restarts(None, 0.5, flow)
        for _ in range(2000):
            restarts.failed("it failed", "the lines are back")
        assert stop.pauses[:8] == [0.5, 1, 2, 4, 8, 16, 30, 30]
        assert set(stop.pauses[8:]) == {30}
        restarts.failed("it failed", "the lines are back", progressed=True)
        restarts.failed("it failed", "the lines are back")
        restarts.succeeded()
        restarts.failed("it failed", "the lines are back")
        assert stop.pauses[2000:] == [0.5, 1, 0.5]
        assert flow.restarts == 2003
    assert "it failed; the lines are back; it is started again after 16 s" in capsys.readouterr().err


@pytest.mark.parametrize(("retries", "most"), [(None, 2), (0, 0), (4, 4)])
def test_how_many_failures_are_too_many(tmp_path: Path, retries: int | None, most: int) -> None:
    """As said, or two when stdin has ended; one that got something done is the first again."""
    with open_still(tmp_path, Clock()) as broker:
        stop = Recorder()
        restarts = Restarts(retries, 0, Flow(broker.declare_queue("q"), CAPACITY, b"\n", 0, stop))
        for _ in range(most):
            restarts.failed("it failed", "the lines are back")
        for _ in range(most):
            restarts.failed("it failed", "the lines are back", progressed=True)
        for _ in range(most - 1):
            restarts.failed("it failed", "the lines are back")
        with pytest.raises(CommandFailed, match="it failed.*; the lines are back"):
            restarts.failed("it failed", "the lines are back")
        assert len(stop.pauses) == 2 * most + max(most - 1, 0)


def test_a_command_that_takes_nothing_is_worth_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, when nothing moved for ten seconds though something was there to take."""
    clock = Clock()
    idle = Idle(Command(["slow"]), clock.monotonic)
    for taken, unread in ((0, 0), (10, 5), (11, 4), (20, 0)):
        idle.look(taken, unread)
        clock.advance(11)
    assert capsys.readouterr().err == ""
    for _ in range(3):
        idle.look(20, 7)
        clock.advance(11)
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("qflow: slow has taken nothing of its input for 10 s")
    assert "--timeout TIME" in sentence


def test_a_command_is_given_its_timeout_after_each_byte() -> None:
    """Only one that takes nothing of what is there is ended."""
    clock = Clock()
    idle = Idle(Command(["slow"], 5), clock.monotonic)
    for taken, unread in ((0, 0), (10, 5), (11, 4), (11, 0), (11, 0)):
        clock.advance(4.9)
        idle.look(taken, unread)
    clock.advance(4.9)
    idle.look(11, 1)
    clock.advance(0.1)
    with pytest.raises(RunFailed, match="slow took nothing of its input for 5 s, and was ended"):
        idle.look(11, 1)


def test_what_a_command_holds_is_not_taken_back_while_it_works(tmp_path: Path) -> None:
    """An acknowledgement timeout of the queue would double the lines of a command that lives."""
    clock = Clock()
    with open_still(tmp_path, clock) as broker:
        queue = broker.declare_queue("q", ack_timeout_s=1)
        queue.put_many([b"1", b"2"])
        flow = Flow(queue, CAPACITY, b"\n", 0, Stop())
        batch = flow.take(10, 0)
        assert batch is not None
        assert len(batch) == 2
        clock.advance(1000)
        assert flow.take(10, 0) is None
        batch.nack()
        assert queue.get_many(10, timeout_s=0).bodies == [b"1", b"2"]


def test_a_run_without_time_left_is_given_no_early_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could take that for the end of its input and exit with 0, before the thread that waits for it looks."""
    ends_within = Run.ends_within

    def held_up(run: Run, seconds: float | None) -> bool:
        if run.stdin.closed:
            run.process.wait()
        return ends_within(run, seconds)

    monkeypatch.setattr(Run, "ends_within", held_up)
    with qflow.open(tmp_path / "spool") as broker:
        queue = broker.declare_queue("q")
        queue.put_many([b"x" * 1000] * 200)
        flow = Flow(queue, CAPACITY, b"\n", 0, Stop())
        with pytest.raises(CommandFailed, match="did not end within 0.05 s, and was ended"):
            to_runs(flow, Command(NOT_READING, 0.05), Restarts(0, 0, flow), 200)
        assert len(queue) == 200
