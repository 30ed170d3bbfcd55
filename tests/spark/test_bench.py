"""The theme `spark` of the bench runs, at a tiny scale; what it measures is nobody's business here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from thorough import TORTURE

sys.path.append(str(Path(__file__).parents[2]))  # at the end: qflow itself may be the installed one

from bench.measure import Setup, Workload
from bench.themes import THEMES

ROWS = {
    "spark-read": [
        "batch read of 10,000 x 100 B to `noop`: rate over Parquet's",
        "batch read of 10,000 x 100 B to `noop`: rate over JSON lines'",
        "batch read of 10,000 x 1 KiB to `noop`: rate over Parquet's",
        "batch read of 10,000 x 1 KiB to `noop`: rate over JSON lines'",
    ],
    "spark-stream": [
        "streaming, available-now, 10,000 x 100 B in one batch to `noop`: rate over the batch read's",
    ],
    "spark-filter": [
        "filtered read, 1 % of 1,000 topics in 1 % of the batches, of 100,000 x 100 B: blocks read over those that match",
        "filtered read, 1 % of 1,000 topics in 1 % of the batches, of 100,000 x 100 B: time of reading all over the "
        "filter's, both beyond an empty read's",
    ],
    "spark-trigger": [
        "a trigger with 10 rows: time beyond that of rate-micro-batch with 10 rows",
        "a trigger with nothing to do: time beyond that of rate-micro-batch with 10 rows",
    ],
    "spark-sink": [
        "sink, a batch of 10,000 x 100 B, owner alive in another process",
        "sink, a batch of 10,000 x 100 B, no owner",
    ],
    "spark-flight": [
        "batch read over Flight of 10,000 x 100 B to `noop`: rate over the direct read's",
        "batch read over Flight of 10,000 x 1 KiB to `noop`: rate over the direct read's",
    ],
    "spark-flight-sink": ["sink over Flight, a batch of 10,000 x 100 B: rate over that into the path"],
}


def test_every_workload_is_in_the_table() -> None:
    assert [workload.name for workload in THEMES["spark"]] == list(ROWS)


FEW = {"spark-filter", "spark-sink"}
"""The others take half a minute: `tox -e torture` runs them."""


@pytest.mark.parametrize(
    "workload",
    [workload for workload in THEMES["spark"] if TORTURE or workload.name in FEW],
    ids=lambda workload: workload.name,
)
def test_a_quick_run_measures_every_row(spark: Any, workload: Workload, tmp_path: Path) -> None:
    """Each row has a figure, and the session goes on; a filter reads no more blocks than its bound says."""
    rows = list(workload.run(Setup(directory=tmp_path, quick=True, kept_rounds=1)))
    assert [row.name for row in rows] == ROWS[workload.name]
    assert [row.problem for row in rows if row.problem or row.figure is None] == []
    assert [row.reached for row in rows if "blocks read" in row.name] == [True] * (workload.name == "spark-filter")
    assert spark.range(3).count() == 3
    assert list(tmp_path.iterdir()) == []
