"""A log without queues: units are committed whole or not at all, whatever fails, wherever; and what rides along."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from types import FrameType
from typing import Any

import lmdb
import pytest

import qflow
from faults.bare_log import ALL, Line, Told, bare_log, declared, in_log
from faults.seams import PATIENCE_S, Faults, in_thread
from qflow.storage.log import handing, transaction_log, writer
from qflow.storage.log.marks import read_attempts
from qflow.storage.log.transaction_log import Put, TransactionLog, Unit


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def log(spool, faults):
    with bare_log(spool, faults) as log:
        yield log


class Scene:
    """Two queues in the log with two messages each, one that is not logged, and a unit over all of them."""

    def __init__(self, log: TransactionLog, owner: int = 1) -> None:
        self.log = log
        self.one, self.two = declared(log, owner), declared(log, owner + 1)
        self.loose = Line(2**31 + owner, None)
        for line in (self.one, self.two):
            log.wait(log.put(line.put(b"0", b"1")))
        self.party = Told()
        self.puts = [self.one.put(b"a", b"b"), self.two.put(b"c"), self.loose.put(b"d"), self.one.put(b"e")]
        self.unit = Unit(self.puts, [self.one.settled(0), self.two.settled(1)], [self.party])

    def outcome(self) -> str:
        """Return what became of the unit, by the log; everything else must agree with it."""
        logged = in_log(self.log, self.one), in_log(self.log, self.two)
        if logged == ({1: b"1", 2: b"a", 3: b"b", 4: b"e"}, {0: b"0", 2: b"c"}):
            assert self.one.visible == {0: b"0", 1: b"1", 2: b"a", 3: b"b", 4: b"e"}
            assert self.two.visible == {0: b"0", 1: b"1", 2: b"c"}
            assert self.loose.visible == {0: b"d"}
            assert [put.first for put in self.puts] == [2, 2, 0, 4]
            assert self.party.outcomes == ["committed"]
            assert self.party.firsts == [2, 2, 0, 4]
            assert self.unit.done
            assert self.unit.error is None
            assert [*self.one.refusals, *self.two.refusals, *self.loose.refusals] == []
            return "committed"
        assert logged == ({0: b"0", 1: b"1"}, {0: b"0", 1: b"1"})
        assert (self.one.visible, self.two.visible, self.loose.visible) == ({0: b"0", 1: b"1"}, {0: b"0", 1: b"1"}, {})
        if not self.unit.joined:
            assert self.party.outcomes == []
            return "not joined"
        assert self.party.outcomes == ["refused"]
        assert (self.one.refusals, self.two.refusals) == ([self.puts[0], self.puts[3]], [self.puts[1]])
        assert self.loose.refusals == [self.puts[2]]
        assert self.unit.done
        assert self.unit.error is not None
        assert all(put.error is self.unit.error for put in self.puts)
        return "refused"


def full(*, settles_only: bool, **_: Any) -> None:
    """Stand in for a disk with room for nothing but settles."""
    if not settles_only:
        raise qflow.DiskFull("no room: free some space")


def test_a_unit_is_one_commit_and_its_parties_see_all_of_it(log):
    """Puts get sequences in order, what is not logged is published behind them, and then the parties are told."""
    scene = Scene(log)
    before = log.commits
    batch = log.join(scene.unit)
    log.wait(batch)
    assert log.commits == before + 1
    assert scene.outcome() == "committed"


def test_a_unit_keeps_its_place_among_other_puts(log):
    """I5: what was put before a unit joined comes before its messages, and what was put after it comes behind."""
    line = declared(log, 1)
    log.put(line.put(b"before"))
    unit = Unit([line.put(b"in")])
    log.join(unit)
    log.wait(log.put(line.put(b"after")))
    assert in_log(log, line) == line.visible == {0: b"before", 1: b"in", 2: b"after"}
    assert unit.puts[0].first == 1


def test_a_unit_larger_than_what_is_left_of_a_batch_is_not_cut(log, monkeypatch):
    """A batch that is full is followed by another, at once, which holds all of the unit."""
    monkeypatch.setattr(writer, "BATCH_BYTES", 1_000)
    monkeypatch.setattr(writer, "FLUSH_S", PATIENCE_S)
    line, other = declared(log, 1), declared(log, 2)
    first = log.put(line.put(b"x" * 600))
    unit = Unit([line.put(b"y" * 200), other.put(b"z" * 200)])
    log.wait(log.join(unit))
    assert first.done
    assert unit.batch is not first.batch
    assert in_log(log, line) == {0: b"x" * 600, 1: b"y" * 200}
    assert in_log(log, other) == {0: b"z" * 200}


def test_a_future_of_a_unit_has_what_a_party_left_there(log, faults):
    """A unit that nobody waits for is written by itself, and its future has the result or the error."""
    line = declared(log, 1)

    class Answering(Told):
        def committed(self, unit: Unit) -> None:
            super().committed(unit)
            unit.result = [put.first for put in unit.puts]

    def submitted() -> Future[Any]:
        unit = Unit([line.put(b"a", b"b"), line.put(b"c")], parties=[Answering()])
        unit.future = Future()
        log.join(unit)
        return unit.future

    assert submitted().result(timeout=PATIENCE_S) == [0, 2]
    faults.fail("begin", qflow.StorageError("no"), times=1)
    assert isinstance(submitted().exception(timeout=PATIENCE_S), qflow.StorageError)


# What is refused ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_refuses_a_unit_whole_and_nobody_else(log, monkeypatch):
    """I3, I12: what a unit settles is not written without its puts; a plain settle in its batch is, and a put is not."""
    scene = Scene(log)
    other = declared(log, 5)
    log.wait(log.put(other.put(b"0", b"1", b"2")))
    monkeypatch.setattr(log._env, "make_room", lambda *_, settles_only: full(settles_only=settles_only))
    plain = other.put(b"3")
    settles = Unit((), [other.settled(1)], [acking := Told()])
    loose = Unit([scene.loose.put(b"loose")], [other.settled(2)], [publishing := Told()])
    log.settle(*other.settled(0))
    log.put(plain)
    log.join(settles)
    log.join(loose)
    log.wait(log.join(scene.unit))
    assert scene.loose.visible == {0: b"loose"}
    scene.loose.visible.clear()
    assert scene.outcome() == "refused"
    assert isinstance(scene.unit.error, qflow.DiskFull)
    assert other.refusals == [plain]
    assert (acking.outcomes, publishing.outcomes) == (["committed"], ["committed"])
    assert in_log(log, other) == {}
    assert settles.error is loose.error is None


def test_a_unit_that_only_settles_uses_the_reserve_of_the_disk(log, monkeypatch):
    """I12: acks in a unit go on where the disk is full."""
    line = declared(log, 1)
    log.wait(log.put(line.put(b"0", b"1")))
    monkeypatch.setattr(log._env, "make_room", lambda *_, settles_only: full(settles_only=settles_only))
    unit = Unit((), [line.settled(0)], [party := Told()])
    log.wait(log.join(unit))
    assert party.outcomes == ["committed"]
    assert in_log(log, line) == {1: b"1"}


@pytest.mark.parametrize("step", ["make_room", "begin"])
@pytest.mark.parametrize("error", [lmdb.Error("no"), MemoryError("no"), qflow.StorageError("no"), qflow.DiskFull("no")])
def test_a_unit_whose_batch_fails_is_refused_with_what_it_settles(step, error, log, faults):
    """I3: units are not carried on to the next batch as plain settles are, not even those that only settle."""
    scene = Scene(log)
    other = declared(log, 5)
    log.wait(log.put(other.put(b"0", b"1")))
    settles = Unit((), [other.settled(1)], [party := Told()])
    faults.fail(step, error)
    log.settle(*other.settled(0))
    log.join(settles)
    log.wait(log.join(scene.unit))
    faults.heal()
    assert scene.outcome() == "refused"
    assert party.outcomes == ["refused"]
    log.drain()
    assert in_log(log, other) == {1: b"1"}


@pytest.mark.parametrize("late", [False, True], ids=["not on disk", "on disk"])
def test_a_unit_in_doubt_is_there_whole_or_not_at_all_after_reopening(late, spool, faults):
    """Edge 21, I3: the caller gets InDoubt; the next open finds all of the unit or nothing."""
    with bare_log(spool, faults) as log:
        scene = Scene(log)
        faults.fail("commit", lmdb.Error("Input/output error"), times=1, late=late)
        log.wait(log.join(scene.unit))
        assert isinstance(scene.unit.error, qflow.InDoubt)
        assert scene.party.outcomes == ["refused"]
        assert len(scene.one.refusals) == 2
        with pytest.raises(qflow.BrokerFailed):
            log.join(Unit([scene.one.put(b"x")]))
    with bare_log(spool, faults) as log:
        expected = ({1: b"1", 2: b"a", 3: b"b", 4: b"e"}, {0: b"0", 2: b"c"}) if late else ({0: b"0", 1: b"1"},) * 2
        assert (in_log(log, scene.one), in_log(log, scene.two)) == expected


def test_a_unit_survives_a_map_that_is_full(log, faults):
    """Edge 22: the batch is done again as a whole, and nothing twice."""
    for step in ("make_room", "begin", "commit"):
        scene = Scene(log, {"make_room": 1, "begin": 3, "commit": 5}[step])
        faults.fail(step, lmdb.MapFullError("full"), times=1)
        log.wait(log.join(scene.unit))
        assert scene.outcome() == "committed"


# Interrupts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("step", "late"), [("make_room", False), ("make_room", True), ("begin", False)])
def test_whatever_is_raised_before_a_commit_refuses_a_unit_whole(error, step, late, log, faults):
    """Edge 26: also what no handler of errors expects; those who wait are told, and the next unit is committed."""
    scene = Scene(log)
    faults.fail(step, error(), times=1, late=late)
    in_thread(lambda: log.wait(log.join(scene.unit)))
    assert isinstance(scene.unit.error, error)
    assert scene.outcome() == "refused"
    again = Scene(log, 3)
    in_thread(lambda: log.wait(log.join(again.unit)))
    assert again.outcome() == "committed"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("late", [False, True], ids=["not on disk", "on disk"])
def test_whatever_is_raised_in_a_commit_leaves_a_unit_in_doubt(error, late, spool, faults):
    """Edges 21, 26: the next open finds all of it or nothing."""
    with bare_log(spool, faults) as log:
        scene = Scene(log)
        faults.fail("commit", error(), times=1, late=late)
        in_thread(lambda: log.wait(log.join(scene.unit)))
        assert isinstance(scene.unit.error, qflow.InDoubt)
        assert scene.party.outcomes == ["refused"]
        with pytest.raises(qflow.BrokerFailed):
            log.join(Unit([scene.one.put(b"x")]))
    with bare_log(spool, faults) as log:
        expected = ({1: b"1", 2: b"a", 3: b"b", 4: b"e"}, {0: b"0", 2: b"c"}) if late else ({0: b"0", 1: b"1"},) * 2
        assert (in_log(log, scene.one), in_log(log, scene.two)) == expected


class Calls:
    """Raises an interrupt at the `n`-th place in the log's own code where one could strike the calling thread.

    That is where a function of it begins, and behind each call of a built-in one.
    """

    files = (transaction_log.__file__, handing.__file__)

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename in self.files and event in ("call", "c_return"):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def run(self, work: Any) -> bool:
        """Do some work; return whether it was interrupted."""
        sys.setprofile(self)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        return self.left < 0


def test_a_unit_interrupted_at_any_call_of_its_handing_over_was_handed_over_or_not(log):
    """Edge 26: one that was is committed by itself, and one that was not can be handed over again."""
    outcomes = []
    interrupted = True
    while interrupted:
        scene = Scene(log, 1 + 2 * len(outcomes))
        scene.unit.future = Future()
        interrupted = Calls(len(outcomes)).run(lambda: log.join(scene.unit))  # noqa: B023
        if scene.unit.joined:
            scene.unit.future.result(PATIENCE_S)  # nobody waits, nobody rings: it is written all the same
        else:
            log.drain()
        outcomes.append(scene.outcome())
        assert scene.unit.joined is (outcomes[-1] == "committed")
        if not scene.unit.joined:
            log.wait(log.join(scene.unit))
            assert scene.outcome() == "committed"
    assert "not joined" in outcomes
    assert outcomes[-2:] == ["committed", "committed"]


@pytest.mark.parametrize("fate", ["committed", "refused"])
def test_a_unit_whose_caller_is_interrupted_at_any_call_of_its_wait_is_done(fate, log, monkeypatch):
    """Edge 26: at whichever call the interrupt strikes, the unit is committed or refused, once, and everybody is told."""
    count = 0
    interrupted = True
    if fate == "refused":
        monkeypatch.setattr(log._env, "make_room", lambda *_, settles_only: full(settles_only=settles_only))
    while interrupted:
        with monkeypatch.context() as healed:
            healed.setattr(log._env, "make_room", lambda *_, settles_only: None)
            scene = Scene(log, 1 + 2 * count)
        scene.unit.future = Future()
        log.join(scene.unit)
        interrupted = Calls(count).run(lambda: log.wait(scene.unit))  # noqa: B023
        if fate == "committed":
            assert scene.unit.future.result(timeout=PATIENCE_S) is None
        else:
            assert isinstance(scene.unit.future.exception(timeout=PATIENCE_S), qflow.DiskFull)
        assert scene.outcome() == fate
        count += 1
    assert count > 5


# Several lanes at once ---------------------------------------------------------------------------------------------------


def test_a_purge_of_several_lanes_is_one_commit(log):
    """Edge 16: all lanes of a queue are purged together, and each hears of its own end."""
    lines = [declared(log, 1), declared(log, 2), declared(log, 3)]
    for count, line in enumerate(lines, 1):
        log.wait(log.put(line.put(*[b"x"] * count)))
    before = log.commits
    log.wait(log.purge(line.lane for line in lines))
    assert log.commits == before + 1
    assert [line.purged_to for line in lines] == [1, 2, 3]
    assert [in_log(log, line) for line in lines] == [{}, {}, {}]


def test_a_lane_that_is_not_logged_leaves_no_trace_in_the_log(log):
    """A unit of nothing but such puts is published all the same, in its turn."""
    line, loose = declared(log, 1), Line(2**31, None)
    put: Put = line.put(b"logged")
    log.put(put)
    unit = Unit([loose.put(b"a"), loose.put(b"b", b"c")], parties=[party := Told()])
    log.wait(log.join(unit))
    assert loose.visible == {0: b"a", 1: b"b", 2: b"c"}
    assert party.firsts == [0, 1]
    with log.read() as txn, txn.cursor() as cursor:
        assert not any(key[1:5] == (2**31).to_bytes(4, "big") for key in cursor.iternext(values=False))


# Counts of deliveries ----------------------------------------------------------------------------------------------------


def counts(log: TransactionLog, line: Line) -> list[tuple[int, int, int]]:
    """Return what the log knows of earlier deliveries."""
    with log.read() as txn:
        return read_attempts(txn, line.lane.owner, line.lane.lane, 0, ALL)


def test_counts_of_deliveries_ride_the_commits(log):
    """Edge 18: the last number given holds; what is settled, in the same commit or before, is left out."""
    line, purged = declared(log, 1), declared(log, 2)
    for some in (line, purged):
        log.wait(log.put(some.put(*[b"x"] * 10)))
    log.attempts(line.lane, [(0, 6, 1), (8, 10, 1)])
    log.settle(*line.settled(0, 1, 2))
    log.attempts(purged.lane, [(0, 10, 1)])
    log.purge([purged.lane])
    log.wait(log.attempts(line.lane, [(4, 5, 2)]))
    assert counts(log, line) == [(3, 4, 1), (4, 5, 2), (5, 6, 1), (8, 10, 1)]
    assert counts(log, purged) == []
    log.wait(log.attempts(line.lane, [(0, 10, 3)]))
    assert counts(log, line) == [(3, 10, 3)]
    assert in_log(log, line) == dict.fromkeys(range(3, 10), b"x")


def test_counts_of_deliveries_use_the_reserve_of_the_disk(log, monkeypatch):
    """I12: a nack goes on where the disk is full, beside a put that is refused."""
    line = declared(log, 1)
    log.wait(log.put(line.put(b"0", b"1")))
    monkeypatch.setattr(log._env, "make_room", lambda *_, settles_only: full(settles_only=settles_only))
    log.put(line.put(b"2"))
    log.wait(log.attempts(line.lane, [(0, 1, 1)]))
    assert counts(log, line) == [(0, 1, 1)]
    assert len(line.refusals) == 1


@pytest.mark.parametrize("step", ["make_room", "begin"])
def test_counts_of_a_batch_that_failed_are_written_with_the_next(step, log, faults):
    """Edge 18: a nack nobody waited for is not forgotten; a newer count of the same message is not overwritten."""
    line = declared(log, 1)
    log.wait(log.put(line.put(*[b"x"] * 4)))
    faults.fail(step, qflow.StorageError("no"), times=1)
    newer = log.attempts(line.lane, [(0, 4, 1)])
    faults.before[step] = lambda: (faults.before.clear(), log.attempts(line.lane, [(1, 2, 2)]))
    log.wait(newer)
    assert isinstance(newer.error, qflow.StorageError)
    log.drain()
    assert counts(log, line) == [(0, 1, 1), (1, 2, 2), (2, 4, 1)]
