"""How long commits and syncs took is counted, in buckets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import qflow
from qflow.stats import TIME_BOUNDS_S, TimeStats
from qflow.storage.log import timing
from qflow.storage.log.timing import Timer
from unit.clocks import Clock


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
