"""`python -m bench` runs from end to end; what it measures is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = (
    "transient put+get+ack, 100 B",
    "transient put_many, get_many, .bodies, ack, 1,000 x 100 B",
    "the same with `for delivery in batch`",
    "durable put, 1 KiB, one thread",
    "durable put, 1 KiB, 64 threads",
    "durable put_many, 1,000 x 100 B",
    "durable get_many + ack, batches of 1,000, resident",
    "the same from the log, after a reopen",
    "spill through files, 1 KiB, drained and filled again",
    "the first fill, on fresh files",
    "1 GiB backlog of 1 KiB messages",
    "1,000,000 x 100 B put one by one",
    "memory over the body of a waiting message of 100 B",
    "open after SIGKILL to the first get",
)


def test_a_quick_run_measures_every_row(tmp_path: Path) -> None:
    """Each row of the table is there, with a figure; text and picture are written where they were asked for."""
    output = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "bench",
        "--quick",
        "--json",
        "--output",
        str(output),
        "--directory",
        str(tmp_path),
    ]
    found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    rows = [row for workload in json.loads(output.read_text())["workloads"] for row in workload["rows"]]
    assert [row["problem"] for row in rows if row["problem"]] == []
    names = [row["name"] for row in rows]
    assert [row for row in ROWS if not any(name.startswith(row) for name in names)] == []
    assert str(tmp_path) not in found.stdout
