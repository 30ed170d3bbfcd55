"""What the docs show is run: the Python of the README and the tutorial, and every example."""

from __future__ import annotations

import codeop
import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mqtt_served
from amqp_clients import serving
from local_servers import entry_points
from pages import ROOT, blocks_in, blocks_of, needs_spark, run

HOWTOS = (
    "spill-stores",
    "overflow-policies",
    "embed",
    "ingestion-buffer",
    "publish",
    "streams",
    "exactly-once",
    "sizing-memory",
    "retries-and-dead-letters",
    "asyncio",
    "snapshots",
    "connect",
    "deduplicate",
    "schedules",
    "migrate-from-queue",
)
PAGES = [
    "README.md",
    "docs/tutorial.md",
    *(f"docs/howto/{name}.md" for name in HOWTOS),
    "docs/reference/amqp.md",
    "docs/explanation/scale.md",
]
if importlib.util.find_spec("prometheus_client") is not None:
    PAGES.append("docs/howto/metrics.md")
if all(importlib.util.find_spec(name) is not None for name in ("pyarrow", "duckdb")):
    PAGES.append("docs/reference/flight.md")
NOT_HERE = ("flights.py", "usage.py", "amqp_server.py", "spark_flights.py")
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in NOT_HERE)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader may paste every block in order, and sees what the comments say. Spark's are in tests/spark."""
    run(page, [block for block in blocks_of(page) if not needs_spark(block)], tmp_path, monkeypatch, capsys)


def test_pages_can_be_followed_one_after_the_other_in_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one page leaves there is not in the way of the next, nor of the README when somebody comes back to it."""
    for page in [*PAGES, "README.md"]:
        run(page, [block for block in blocks_of(page) if not needs_spark(block)], tmp_path, monkeypatch, capsys)


def test_the_tutorial_of_amqp_runs_with_a_server_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server is where the page says, on a port of its own, and is killed and stopped where the page does that."""
    page = "docs/tutorial-amqp.md"
    sections = re.split(r"^## (Kill it|In a program of your own)$", (ROOT / page).read_text(), flags=re.M)

    def read(section: str, port: int) -> None:
        run(page, [block.replace("5672", str(port)) for block in blocks_in(section)], tmp_path, monkeypatch, capsys)

    with serving(tmp_path / "spool") as (server, process):
        read(sections[0], server.port)
        process.kill()
        process.wait()
    with serving(tmp_path / "spool") as (server, _):
        read(sections[2], server.port)
    read(sections[4], 0)


# A client of paho's closes two sockets of its own when it is collected, which may be after the sockets are.
PAHO = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@PAHO
def test_the_tutorial_of_mqtt_runs_with_a_server_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server is where the page says, on a port of its own, and is killed and stopped where the page does that."""
    page = "docs/tutorial-mqtt.md"
    sections = re.split(r"^## (Kill it|In a program of your own)$", (ROOT / page).read_text(), flags=re.M)

    def blocks(section: str, port: int) -> list[str]:
        return [block.replace("1883", str(port)) for block in blocks_in(section)]

    with mqtt_served.serving(tmp_path, "--mqtt", "127.0.0.1:0") as (_, ports):
        device, *rest = blocks(sections[0], ports["mqtt"][0])
        run(page, [device, *rest], tmp_path, monkeypatch, capsys)
    helper = device[: device.index("valve, _ =")].replace(str(ports["mqtt"][0]), "1883")
    with mqtt_served.serving(tmp_path, "--mqtt", "127.0.0.1:0") as (process, ports):
        run(page, blocks(f"```python\n{helper}```{sections[2]}", ports["mqtt"][0]), tmp_path, monkeypatch, capsys)
        process.send_signal(signal.SIGTERM)
        process.wait()
    run(page, blocks(sections[4], 0), tmp_path, monkeypatch, capsys)


@PAHO
def test_the_page_about_replay_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a server on a port of its own."""
    page = "docs/howto/replay.md"
    with mqtt_served.serving(tmp_path, "--mqtt", "127.0.0.1:0") as (_, ports):
        blocks = [block.replace("1883", str(ports["mqtt"][0])) for block in blocks_of(page)]
        run(page, blocks, tmp_path, monkeypatch, capsys)


def test_the_tests_that_a_page_shows_pass(tmp_path: Path) -> None:
    """`# name.py` begins a file, which later blocks go on with; none is skipped but, where none can be had, a full disk."""
    blocks = "\n\n".join(blocks_of("docs/howto/test-your-broker.md"))
    for name, text in re.findall(r"^# (\w+\.py)\n(.*?)(?=^# \w+\.py\n|\Z)", blocks, re.S | re.M):
        (tmp_path / name).write_text(text)
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"--basetemp={tmp_path / 'base'}", "test_shop.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert re.search(r"^(7 passed|6 passed, 1 skipped) ", shown.stdout, re.M), shown.stdout + shown.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    """Each example does what it says on a fresh spool; its own assertions tell."""
    result = subprocess.run(
        [sys.executable, str(example), str(tmp_path / "spool")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(entry_points(tmp_path)), os.environ.get("PYTHONPATH", "")]),
        },
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_can_be_pasted_at_a_prompt(page: Path) -> None:
    """There an empty line ends what is indented, and nothing else does; a page that is read there says no other."""
    for block in blocks_in(page.read_text()):
        compiler = codeop.CommandCompiler()
        typed = ""
        for line in [*block.splitlines(), ""]:
            typed += f"{line}\n"
            if (
                compiler(typed.removesuffix("\n"), page.name, "single") is not None
            ):  # else a SyntaxError, or more to come
                typed = ""


def test_nobody_is_told_to_install_qflow_by_its_name() -> None:
    """The package of that name in PyPI is another one: qflow is installed from a clone."""
    for path in [*TEXTS, *(ROOT / "qflow").rglob("*.py")]:
        found = re.search(r"pip install (-\S+ )*[\"']?qflow\b.*", path.read_text())
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]}"


def test_every_link_of_the_docs_leads_somewhere() -> None:
    """No page points at a file that is not there."""
    for page in TEXTS:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_has_exactly_two_set_up_commands() -> None:
    """One runs the main job, one passes the tests, each on one line."""
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 2
    assert "qflow demo" in commands[0]
    assert "tox" in commands[1]
