"""The recovery report: what is found damaged while the spool is open, however much that is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import qflow
from qflow import problems

Open = Callable[..., qflow.Broker]


def test_a_report_keeps_the_first_problems_and_counts_the_others(
    open_spool: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made when somebody asks, not at each problem, and is a plain value that stays as it was.

    Python's log has the same lines, and one that there are more.
    """
    broker = open_spool()
    made: list[int] = []
    lines = problems.Problems.lines
    monkeypatch.setattr(problems.Problems, "lines", lambda problems: made.append(1) or lines(problems))
    before = broker.recovery
    for number in range(1_500):
        broker.engine.spool.report(f"problem {number}", damaged_blocks=1)
    assert len(made) == 1
    found = broker.recovery
    assert found.problems[:1_000] == tuple(f"problem {number}" for number in range(1_000))
    assert found.problems[1_000:] == ("500 more",)
    assert found.quarantined_blocks == 1_500
    assert (before.problems, before.quarantined_blocks, before.clean) == ((), 0, found.clean)
    broker.close()
    told = [record.message for record in caplog.records if record.name == "qflow.damage"]
    assert [line.split(": ")[1] for line in told[:1_000]] == list(found.problems[:1_000])
    assert ["more is damaged" in line for line in told[1_000:]] == [True]
