"""The page about tracing runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk")

from pages import ROOT, blocks_of


def test_the_page_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """A process has one provider of traces; what is printed is what the comments say."""
    block, _function_of_workers = blocks_of("docs/howto/tracing.md")
    run = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stderr == ""
    assert run.stdout.splitlines() == re.findall(r"^ *print\(.*\)  # (.+)$", block, flags=re.M)
