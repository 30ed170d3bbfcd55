"""A real Prometheus scrapes the page and the metrics of the incident, and the rules of `deploy/` make it alert."""

from __future__ import annotations

import json
import re
import select
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("yaml")

import yaml

import incident
import qflow
import web_served
from layout import ROOT
from processes import free_port

PEM = ROOT / "tests/serving/certificates"
DEADLINE_S = 120
pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


def settings(page: int, metrics: int) -> dict[str, Any]:
    """Return what docs/howto/metrics.md has of a server and of its page, with looks each second."""
    scraped = {
        "job_name": "page",
        "scheme": "https",
        "tls_config": {"ca_file": str(PEM / "ca.pem")},
        "basic_auth": {"username": "anna", "password": web_served.PASSWORD},
        "static_configs": [{"targets": [f"localhost:{page}"]}],
    }
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": "door", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]},
            scraped,
        ],
    }


class Prometheus:
    """As it is asked by HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port

    def asked(self, path: str) -> Any:
        """Return the data of an answer; None as long as there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=60) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until that is so, at most `DEADLINE_S`."""
        ends = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < ends, (self.asked("targets"), self.firing())
            select.select((), (), (), 0.1)

    def firing(self) -> set[tuple[str, str, str]]:
        """Return which alerts there are: job, alert, queue."""
        alerts = (self.asked("alerts") or {}).get("alerts", [])
        labels = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
        return {(one["job"], one["alertname"], one.get("queue", "")) for one in labels}


@contextmanager
def running(directory: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """Run one until the context ends, with the rules as they are, but that none waits before it alerts."""
    rules = (ROOT / "deploy/prometheus/rules.yml").read_text()
    (directory / "rules.yml").write_text(re.sub(r"for: \w+", "for: 0s", rules))
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--log.level=error"]
    with subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], cwd=directory) as process:
        try:
            yield Prometheus(port)
        finally:
            process.terminate()


def test_the_incident_makes_the_right_alerts_fire(tmp_path: Path) -> None:
    """By the page, over TLS and with a password, and by the metrics door, alike; nothing else alerts."""
    with (
        incident.made(tmp_path / "spool", "https") as happening,
        running(tmp_path, settings(*happening.ports)) as prometheus,
        qflow.connect(tmp_path / "spool") as broker,
    ):
        prometheus.until(lambda: len((prometheus.asked("query?query=qflow_up==1") or {}).get("result", ())) == 2)
        broker.queue("audit").put(b"one more")
        broker.queue("orders").put(b"an order")
        broker.queue("orders").get().nack(requeue=False, reason="card declined")
        expected = {
            (job, alert, queue)
            for job in ("door", "page")
            for alert, queue in (
                ("QflowProducersBlocked", "payments"),
                ("QflowHeldTooLong", "mail"),
                ("QflowNoConsumer", "audit"),
                ("QflowDeadLetters", "orders"),
            )
        }
        of_their_queue = {(job, "QflowNoConsumer", "dead") for job in ("door", "page")}
        prometheus.until(lambda: prometheus.firing() >= expected)
        found = {one for one in prometheus.firing() if one[1] != "QflowDiskFilling"}
        assert expected <= found <= expected | of_their_queue
