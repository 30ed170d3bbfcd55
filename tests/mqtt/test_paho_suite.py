"""The interoperability suite of Eclipse Paho, unmodified and whole, for MQTT 3.1.1 and 5.

No package has it, so a checkout of its repository is needed: the environment variable QFLOW_PAHO_TESTING names its
directory. The suite was counted at commit 9d7bb80.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qflow.aio
from qflow.mqtt import serve
from qflow.mqtt.server.access import Gate

SOURCE = "QFLOW_PAHO_TESTING"
WATCHDOG_S = 300
FORBIDDEN = "test/nosubscribe"
FAILS = {"test_subscribe_failure"}
"""Its decoder knows no SUBACK with the code of MQTT 5 for what is not allowed, 0x87; mosquitto fails, too."""
LOOSE = """
import sys, unittest
import client_test as suite
suite.host, suite.port = "127.0.0.1", int(sys.argv.pop())
suite.topics = ("TopicA", "TopicA/B", "Topic/C", "TopicA/C", "/TopicA")
suite.wildtopics = ("TopicA/+", "+/C", "#", "/#", "/+", "+/+", "TopicA/#")
suite.nosubscribe_topics = ("test/nosubscribe",)
unittest.main(module=suite, argv=["client_test", "-v"])
"""
"""What the file for 3.1.1 does when it is run as a program, which fails at its own options there."""

pytestmark = pytest.mark.timeout(WATCHDOG_S)


class AllButOne:
    """What the suite expects of a broker: one topic that nobody may subscribe to."""

    user_name = ""

    def may_publish(self, topic: str) -> bool:
        return True

    def may_subscribe(self, topic_filter: str) -> bool:
        return topic_filter != FORBIDDEN


@pytest.fixture
def source() -> Path:
    """The suite's directory."""
    if not (named := os.environ.get(SOURCE)):
        pytest.skip(f"{SOURCE} names no checkout of https://github.com/eclipse-paho/paho.mqtt.testing")
    path = Path(named).absolute() / "interoperability"
    assert path.is_dir(), f"{path} is no directory"
    return path


def test_the_suite_for_3_1_1(source: Path, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(source, spool, monkeypatch, ["-c", LOOSE]) == (10, set())


def test_the_suite_for_5(source: Path, spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(source, spool, monkeypatch, ["client_test5.py", "-v", "-p"]) == (27, FAILS)


def run(source: Path, spool: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> tuple[int, set[str]]:
    """Return how many tests there were, and which failed."""

    async def login(*_: Any) -> AllButOne:
        return AllButOne()

    async def scenario() -> str:
        async with qflow.aio.open(spool) as broker, await serve(broker, port=0, max_keep_alive_s=60) as server:
            whole = [sys.executable, *command, str(server.port)]
            options: dict[str, Any] = {"cwd": source, "capture_output": True, "text": True, "timeout": WATCHDOG_S}
            return (await asyncio.to_thread(subprocess.run, whole, **options)).stderr

    monkeypatch.setattr(Gate, "login", login)
    said = asyncio.run(scenario())
    print(said[-4000:])
    count = re.search(r"^Ran (\d+) tests", said, re.MULTILINE)
    assert count is not None, said
    return int(count[1]), set(re.findall(r"^(?:FAIL|ERROR): (\w+)", said, re.MULTILINE))
