"""The incident of the runbook, seen and solved from a shell, by the commands that `qflow doctor` names."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import incident
from qflow.cli.main import app


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def doctor(spool: Path) -> tuple[int, list[dict[str, Any]]]:
    done = CliRunner().invoke(app, ["doctor", str(spool), "--json"])
    return done.exit_code, json.loads(done.stdout)["findings"]


def test_an_incident_is_seen_and_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Each finding in turn goes by the command of its remedy, and then nothing is left."""
    usage = SimpleNamespace(total=2**40, free=2**39)
    monkeypatch.setattr("qflow.doctor.looking.shutil.disk_usage", lambda path: usage)
    spool = tmp_path / "spool"

    def got(queue: str) -> list[bytes]:
        run("get", spool, queue)
        return capfdbinary.readouterr().out.splitlines()

    with incident.made(spool) as happening:
        code, found = doctor(spool)
        assert code == 6
        told = {one["kind"]: one for one in found}
        assert list(told) == ["held-too-long", "blocked-producers", "no-consumer", "dead-letters"]
        held = f"consumer 'mailer-3' of process {happening.mailer} has held a message of queue 'mail' for 40 minutes"
        assert told["held-too-long"]["sentence"].startswith(held)
        assert told["blocked-producers"]["sentence"] == (
            "5 producers blocked for up to 12 s at limit_messages of queue 'payments' (100); nobody takes from it"
        )
        assert told["no-consumer"]["sentence"].startswith(
            "nobody consumes queue 'audit', and it grows: 300 messages wait"
        )
        assert told["dead-letters"]["sentence"] == (
            "4 dead letters in queue 'dead'; 3 for the commonest reason: 'card declined'"
        )
        assert f"`kill {happening.mailer};" in told["held-too-long"]["remedy"]
        happening.end_mailer(signal.SIGTERM)
        assert f"`qflow purge {spool} audit`" in told["no-consumer"]["remedy"]
        run("purge", spool, "audit", "--yes")
        assert f"`qflow redrive {spool} dead`" in told["dead-letters"]["remedy"]
        assert "  card declined  " in run("peek", spool, "dead")
        run("redrive", spool, "dead")
        assert got("orders") == [b"an order"] * 4
        assert f"`qflow get {spool} payments`" in told["blocked-producers"]["remedy"]
        taken = 0
        while taken < incident.LIMIT + incident.PRODUCERS:
            taken += len(got("payments"))
        assert got("mail") == [b"to somebody" * 1000]
        assert doctor(spool) == (0, [])
