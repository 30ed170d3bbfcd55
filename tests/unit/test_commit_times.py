"""How long commits and syncs took is counted, in buckets."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
from qflow.stats import TIME_BOUNDS_S, TimeStats
from qflow.storage.environment import Environment
from qflow.storage.log import confirming, direct, timing, writer
from qflow.storage.log.journal import Journal
from qflow.storage.log.timing import Timer, Timers
from unit.clocks import Clock, until


def test_every_commit_is_counted_once(tmp_path: Path) -> None:
    """As many times as `commits_total` has commits, by the log first and by the journal then; each of them synced."""
    with qflow.open(tmp_path / "spool") as broker:
        jobs = broker.declare_queue("jobs")
        for number in range(40):
            jobs.put(b"%d" % number)
        told = broker.stats()
    assert sum(told.commit_times.counts) == told.commits_total > 40
    assert sum(told.sync_times.counts) >= told.commits_total
    assert told.sync_times.sum_s > 0 < told.commit_times.sum_s


def test_a_time_is_in_the_bucket_whose_bound_it_does_not_exceed() -> None:
    """Bounds are included, and what is longer than all of them has a bucket of its own."""
    timer = Timer()
    for seconds in (0.0, TIME_BOUNDS_S[0], TIME_BOUNDS_S[0] * 1.01, TIME_BOUNDS_S[-1], 99.0):
        timer.note(seconds)
    counts = timer.figures()["counts"]
    assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 1, 1, 1)
    assert sum(counts) == 5
    assert TimeStats().counts == (0,) * len(counts)


def test_the_longest_of_this_minute_and_of_the_one_before_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And forgotten after that, whether something is counted meanwhile or not."""
    clock = Clock()
    monkeypatch.setattr(timing, "monotonic", clock.monotonic)
    timer = Timer()
    longest = []
    for now_s, took_s in ((600, 2.0), (601, 1.0), (660, 0.5), (719, None), (720, None), (780, None), (841, 0.1)):
        clock.monotonic_s = now_s
        if took_s is not None:
            timer.note(took_s)
        longest.append(timer.figures()["longest_s"])
    assert longest == [2.0, 2.0, 2.0, 2.0, 0.5, 0.0, 0.1]


def test_they_are_in_what_is_written_for_those_outside(tmp_path: Path) -> None:
    """`stats.json` has both, as lists."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("jobs").put(b"x")
        broker.engine.figures.write()
        told = json.loads((tmp_path / "spool" / "stats.json").read_text())
    assert sum(told["commit_times"]["counts"]) == told["commits_total"]
    assert len(told["sync_times"]["counts"]) == len(TIME_BOUNDS_S) + 1


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a journal from the first small batch on, and nothing applied that is not asked for."""
    monkeypatch.setattr(confirming, "FIRST_BATCHES", 0)
    monkeypatch.setattr(confirming, "LATE_S", 1000)
    monkeypatch.setattr(writer, "SOON_S", 1000)


@pytest.mark.usefixtures("at_rest")
@pytest.mark.parametrize(
    ("put", "others"),
    [
        (lambda queue: queue.put(b"x"), 0),
        (lambda queue: queue.put(b"x"), 1),
        (lambda queue: queue.submit(b"x").result(), 0),
        (lambda queue: queue.put(bytes(2**20)), 0),
    ],
    ids=["a thread", "a thread, and the writer for it", "the writer", "the log"],
)
def test_a_sync_that_stands_still_is_told_and_counted_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[qflow.Queue], object], others: int
) -> None:
    """From its first moment on, also where the writer goes on with what a thread has begun, for others wait."""
    monkeypatch.setattr(direct, "PATIENCE_S", 0 if others else 1000)
    goes_on, waiting = threading.Event(), []

    def standing(sync: Callable[..., object]) -> Callable[..., object]:
        def wait(*arguments: Any) -> object:
            waiting.append(arguments)
            goes_on.wait()
            return sync(*arguments)

        return wait

    with inside.without_maintenance(), qflow.open(tmp_path / "spool") as broker:
        jobs = broker.declare_queue("jobs")
        for number in range(4):
            jobs.put(b"%d" % number)
        assert broker.stats().sync_times.under_way_s == 0
        files = broker.engine.spool.files
        monkeypatch.setattr(files, "sync_data", standing(files.sync_data))
        monkeypatch.setattr(Environment, "commit", standing(Environment.commit))
        until(lambda: broker.engine.log.turn.open)  # the writer rests: a put that stands alone is its thread's
        producer = threading.Thread(target=put, args=(jobs,))
        producer.start()
        try:
            until(lambda: len(waiting) == 1)
            behind = [jobs.submit(b"y") for _ in range(others)]
            until(lambda: len(waiting) == 1 + others)
            seen_s = [broker.stats().sync_times.under_way_s for _ in range(2)]
        finally:
            goes_on.set()
            producer.join()
        assert [one.result() for one in behind] == [5][:others]
        told = broker.stats()
    assert 0 < seen_s[0] < seen_s[1] < told.sync_times.longest_s
    assert seen_s[1] < told.commit_times.longest_s
    assert told.sync_times.under_way_s == 0
    assert sum(told.commit_times.counts) == told.commits_total


@pytest.mark.usefixtures("at_rest")
def test_a_sync_that_failed_is_not_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has failed, and nobody waits for that sync any more."""

    def fail(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    with inside.without_maintenance(), qflow.open(tmp_path / "spool") as broker:
        jobs = broker.declare_queue("jobs")
        for number in range(4):
            jobs.put(b"%d" % number)
        monkeypatch.setattr(broker.engine.spool.files, "sync_data", fail)
        with pytest.raises(qflow.InDoubt):
            jobs.put(b"x")
        assert broker.stats().sync_times.under_way_s == 0


@pytest.mark.usefixtures("at_rest")
def test_a_sync_that_was_given_up_is_not_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there was no memory for its record: the next one would be told as one that takes very long."""

    def failing(error: Exception) -> Callable[..., None]:
        def fail(*_: object) -> None:
            raise error

        return fail

    with inside.without_maintenance(), qflow.open(tmp_path / "spool") as broker:
        jobs = broker.declare_queue("jobs")
        for number in range(4):
            jobs.put(b"%d" % number)
        until(lambda: broker.engine.log.turn.open)  # the writer rests: the put is its thread's, and then the writer's
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "write_alone", failing(OSError(5, "Input/output error")))
            patch.setattr(Journal, "write_record", failing(MemoryError()))  # by the writer, which tries it again
            with pytest.raises(MemoryError):
                jobs.put(b"x")
        assert broker.stats().sync_times.under_way_s == 0
        jobs.put(b"y")
        told = broker.stats()
    assert sum(told.commit_times.counts) == told.commits_total


@pytest.mark.usefixtures("at_rest")
def test_a_thread_that_counts_late_does_not_end_the_sync_of_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn was taken from it, and the writer has begun the next one."""
    monkeypatch.setattr(direct, "PATIENCE_S", 0)
    counts, syncs, goes_on = threading.Event(), threading.Event(), threading.Event()
    note_alone = Timers.note_alone

    def late(timers: Timers, took_s: float) -> None:
        counts.set()
        syncs.wait()
        note_alone(timers, took_s)

    def standing(fd: int) -> None:
        syncs.set()
        goes_on.wait()
        os.fdatasync(fd)

    with inside.without_maintenance(), qflow.open(tmp_path / "spool") as broker:
        jobs = broker.declare_queue("jobs")
        for number in range(4):
            jobs.put(b"%d" % number)
        until(lambda: broker.engine.log.turn.open)  # the writer rests: the put is its thread's
        monkeypatch.setattr(Timers, "note_alone", late)
        producer = threading.Thread(target=jobs.put, args=(b"x",))
        producer.start()
        try:
            counts.wait()
            monkeypatch.setattr(broker.engine.spool.files, "sync_data", standing)
            behind = jobs.submit(b"y")
            syncs.wait()
            producer.join()
            assert broker.stats().sync_times.under_way_s > 0
        finally:
            goes_on.set()
        assert behind.result() == 5
