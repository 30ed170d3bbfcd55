"""`qflow serve --metrics`: what a server counts, for Prometheus."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

import mqtt_served
import qflow


def test_a_server_answers_prometheus(tmp_path: Path) -> None:
    """In OpenMetrics where that is asked for, of the queues it has now, and of the process."""
    with mqtt_served.serving(tmp_path, "--metrics", "127.0.0.1:0") as (_, ports):
        with qflow.connect(tmp_path / "spool") as broker:
            broker.declare_queue("jobs").put(b"x")
        asked = urllib.request.Request(
            f"http://127.0.0.1:{ports['metrics'][0]}/metrics",
            headers={"Accept": "application/openmetrics-text;version=1.0.0"},
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            text, kind = answer.read().decode(), answer.headers["Content-Type"]
    assert kind.startswith("application/openmetrics-text")
    assert 'qflow_queue_messages{queue="jobs"} 1.0' in text
    assert "process_resident_memory_bytes" in text
