"""pika's own acceptance suite, unmodified and whole, against a broker.

Packages of pika come without its tests, so a checkout of its repository is needed: the environment variable
QFLOW_PIKA_SOURCE names its directory. The suite was counted at commit 2126d43 (of August 2026).
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from amqp_clients import ROOT, Server
from amqp_redirect import SITECUSTOMIZE, TARGET

SOURCE = "QFLOW_PIKA_SOURCE"
WATCHDOG_S = 600
ADAPTERS = ("blocking_adapter_test", "async_adapter_tests", "enforce_one_basicget_test", "thread_safe_connection_test")
"""Those of the suite that talk to a broker through pika's own adapters; 373 of their tests run, 40 need kqueue."""
TWISTED = ("twisted_adapter_tests",)
SKIPS = "kqueue not supported"
OF_RABBITMQ_4 = {"TestInvalidExchangeTypeRaisesConnectionClosed.test"}
"""Fails on RabbitMQ 3.10, which closes the connection (503) where RabbitMQ 4 closes the channel (406)."""

pytestmark = pytest.mark.timeout(WATCHDOG_S)


@pytest.fixture
def source() -> Path:
    """A checkout of pika."""
    if not (named := os.environ.get(SOURCE)):
        pytest.skip(f"{SOURCE} names no checkout of https://github.com/pika/pika, and packages have no tests")
    path = Path(named).absolute()
    assert (path / "tests" / "acceptance").is_dir(), f"{path} has no tests/acceptance"
    return path


def test_pikas_adapters_pass_their_acceptance_suite(source: Path, amqp_server: Server, tmp_path: Path) -> None:
    """Blocking, select, poll, epoll, gevent, tornado, asyncio and thread-safe: 373 of 373; what is skipped has a reason."""
    outcome = _run(source, ADAPTERS, amqp_server, tmp_path)
    assert set(outcome["failed"]) - (set() if amqp_server.is_qflow else OF_RABBITMQ_4) == set()
    assert {reason.split(": ")[-1] for reason in outcome["skipped"]} <= {SKIPS}
    assert len(outcome["passed"]) + len(outcome["failed"]) == 373


def test_pikas_twisted_adapter_passes_its_acceptance_suite(source: Path, amqp_server: Server, tmp_path: Path) -> None:
    """Most of it is without a broker."""
    pytest.importorskip("twisted", reason="twisted is not installed")
    outcome = _run(source, TWISTED, amqp_server, tmp_path)
    assert outcome["failed"] == []
    assert outcome["passed"]


def _run(source: Path, files: tuple[str, ...], server: Server, directory: Path) -> dict[str, list[str]]:
    """Run files of the suite; return the names that passed and failed, and why others were skipped."""
    report = directory / "report.xml"
    (directory / "sitecustomize.py").write_text(SITECUSTOMIZE)
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(f"--junitxml={report}", f"--rootdir={source}"),
            *(f"tests/acceptance/{name}.py" for name in files),
        ],
        cwd=source,
        env={
            **os.environ,
            TARGET: f"{server.host}:{server.port}",
            "PYTHONPATH": os.pathsep.join(map(str, (directory, source, ROOT / "tests"))),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        timeout=WATCHDOG_S,
        check=False,
    )
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    names: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        names[name] += 1
        kinds = {child.tag: child.get("message", "") for child in case}
        if "skipped" in kinds:
            found["skipped"].append(kinds["skipped"])
        else:
            found["failed" if {"failure", "error"} & set(kinds) else "passed"].append(name)
    assert names, "the suite did not begin"
    return found
