"""What the docs show of Spark is run: their Python, and the example."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, blocks_of, run

PAGES = (
    "README.md",
    "docs/tutorial-spark.md",
    "docs/howto/spark-sink.md",
    "docs/howto/spark-cluster.md",
    "docs/reference/spark.md",
    "docs/explanation/spark.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    spark: Any, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader may paste every block in order, and sees what the comments say."""
    run(page, blocks_of(page), tmp_path, monkeypatch, capsys)


def test_the_example_finds_what_pandas_finds(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a few days, though its publisher is killed."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = runpy.run_path(str(ROOT / "examples" / "spark_flights.py"))
    example["main"](str(tmp_path / "spool"), days=6)
    printed = capsys.readouterr().out
    assert re.search(r"killed while it published 2013-01-04", printed)
    assert re.search(r"started again: [34] of 6 days were there already", printed)
    assert "of 5,025 flights\n0 of them differ" in printed
