"""What is deployed: the unit, the image and the compose file are sound, and say what `qflow serve` takes."""

from __future__ import annotations

import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")
pytest.importorskip("dockerfile_parse")

import click
import yaml
from dockerfile_parse import DockerfileParser

from layout import ROOT
from qflow.cli.serve import serve

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/qflow.service"
OFFLINE_THRESHOLD = "20"
"""Of `systemd-analyze security`, in tenths: 100 is a service with all rights."""
RESOURCES = {
    "ioprio_set": 251,
    "mbind": 237,
    "migrate_pages": 256,
    "move_pages": 279,
    "sched_setaffinity": 203,
    "sched_setattr": 314,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "set_mempolicy": 238,
    "setpriority": 141,
    "setrlimit": 160,
}
"""System calls of systemd's group @resources, and their numbers on x86-64."""


def instructions() -> list[dict[str, Any]]:
    """Return those of the Dockerfile, in order."""
    structure: list[dict[str, Any]] = DockerfileParser(
        path=str(DEPLOY / "docker/Dockerfile"), cache_content=True
    ).structure
    return [one for one in structure if one["instruction"] != "COMMENT"]


def values(instruction: str) -> list[str]:
    """Return what one says, each time it is there."""
    return [one["value"] for one in instructions() if one["instruction"] == instruction]


def compose() -> dict[str, Any]:
    """Return the compose file."""
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "docker/compose.yml").read_text())
    return loaded


def check_options(arguments: list[str]) -> None:
    """They are parsed as `qflow serve` parses them; nothing is run."""
    serve.make_context("serve", arguments)


def unit_command() -> list[str]:
    """Return what the unit starts."""
    text = UNIT.read_text().replace("\\\n", " ")
    found = re.search(r"^ExecStart=(.+)$", text, re.M)
    assert found is not None
    return shlex.split(found[1])


def test_the_unit_starts_what_there_is() -> None:
    """Its options are those of the command."""
    command = unit_command()
    assert command[1] == "serve"
    check_options(command[2:])
    with pytest.raises(click.UsageError):
        check_options([*command[2:], "--no-such-option"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Without a complaint, and with few rights."""
    unit = tmp_path / "qflow.service"
    unit.write_text(UNIT.read_text().replace(unit_command()[0], sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=120)
    assert [line for line in verified.stderr.splitlines() if "qflow.service" in line] == []
    security = ["systemd-analyze", "security", "--offline=true", f"--threshold={OFFLINE_THRESHOLD}", unit]
    judged = subprocess.run(security, capture_output=True, text=True, timeout=120)
    assert judged.returncode == 0, judged.stdout[-300:]


def forbidden_resources() -> list[int]:
    """Return the numbers of the calls of @resources that the unit forbids: the last line that names one counts."""
    forbidden: set[str] = set()
    for said in re.findall(r"^SystemCallFilter=(.+)$", UNIT.read_text(), re.M):
        named = {call for word in said.lstrip("~").split() for call in (RESOURCES if word == "@resources" else [word])}
        forbidden = forbidden | named if said.startswith("~") else forbidden - named
    return sorted(RESOURCES[call] for call in forbidden & set(RESOURCES))


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="the numbers are those of x86-64")
@pytest.mark.parametrize("module", ["pyarrow.flight", "qflow.cli.server"])
def test_what_a_server_imports_runs_under_the_unit(module: str) -> None:
    """No system call of its imports is forbidden there; `--flight` may be added to the unit as it is."""
    pytest.importorskip(module)
    numbers = ",".join(map(str, forbidden_resources()))
    command = [sys.executable, Path(__file__).with_name("seccomp_run.py"), numbers, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr


def test_the_image_runs_without_root() -> None:
    """As a user of a number, with a health check, from a pinned Python; what it copies is not ignored."""
    assert values("USER") == ["qflow"]
    assert "--uid 10001" in values("RUN")[1]
    assert all(re.fullmatch(r"python:3\.\d+-slim( AS \w+)?", base) for base in values("FROM"))
    assert len(values("HEALTHCHECK")) == 1
    assert json.loads(values("HEALTHCHECK")[0].partition("CMD ")[2])[0] == "python"
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {path for copy in values("COPY") if "--from" not in copy for path in copy.split()[:-1]}
    assert copied == allowed
    assert all((ROOT / path).exists() for path in copied)


def test_the_image_starts_what_there_is() -> None:
    """Its default command has options of `qflow serve`."""
    entry, command = json.loads(values("ENTRYPOINT")[0]), json.loads(values("CMD")[0])
    assert entry[:2] == ["qflow", "serve"]
    check_options([*entry[2:], *command])


def test_the_files_that_compose_mounts_are_there() -> None:
    """All but the users, which are made; ports of people stay on this host."""
    for name, service in compose()["services"].items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose()["volumes"] or (DEPLOY / "docker" / source).is_file(), volume
        if name != "qflow":
            assert all(port.startswith("127.0.0.1:") for port in service["ports"])
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a version is named"
    assert compose()["services"]["qflow"]["read_only"] is True


def test_prometheus_scrapes_where_the_image_listens() -> None:
    """The rules are where its settings look for them, and Grafana asks that Prometheus."""
    settings = yaml.safe_load((DEPLOY / "docker/prometheus.yml").read_text())
    command = json.loads(values("CMD")[0])
    port = command[command.index("--metrics") + 1].rpartition(":")[2]
    assert settings["scrape_configs"][0]["static_configs"][0]["targets"] == [f"qflow:{port}"]
    mounts = compose()["services"]["prometheus"]["volumes"]
    assert any(mount.endswith(f"/etc/prometheus/{settings['rule_files'][0]}:ro") for mount in mounts)
    sources = yaml.safe_load((DEPLOY / "docker/grafana/datasources.yml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"


def test_docker_takes_the_compose_file(tmp_path: Path) -> None:
    """As its own tool reads it."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("docker compose is not installed")
    command = ["docker", "compose", "-f", DEPLOY / "docker/compose.yml", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
