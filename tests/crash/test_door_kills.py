"""kill -9 of owners and of clients at the door, at random, and what their histories must hold together."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from crash import door_client
from crash.door_history import History, look
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
KILLS = int(os.environ.get("QFLOW_DOOR_KILLS", "200" if TORTURE else "12"))
"""The long run is `QFLOW_DOOR_KILLS=1000`."""
ROLES = ("owner", "putter", "taker", "taker", "mover", "publisher", "reader", "reader", "tasks")
CROWDS = ("owner", "crowd", "crowd", "herd", "publisher")
CROWD_KILLS = KILLS // 4
PROGRESS = 10_000
"""So many bytes of reports are told between two kills, at most."""
PATIENCE_S = 60.0
SECONDS_A_KILL = 3


class Beings:
    """The processes around one spool."""

    def __init__(self, directory: Path, seed: int, module: str) -> None:
        self.spool, self.reports, self.seed = directory / "spool", directory / "reports", seed
        self.module = module
        self.reports.mkdir()
        self.started = 0
        self.living: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def start(self, role: str) -> None:
        """Begin one."""
        arguments = [str(self.spool), str(self.reports), role, str(self.seed), str(self.started)]
        command = [sys.executable, "-X", "faulthandler", "-m", self.module, *arguments]
        where = os.pathsep.join((str(Path(door_client.__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": where})
        self.living.append((role, process, self.reports / f"{role}-{self.started}"))
        self.started += 1

    def kill(self, number: int) -> str:
        """Kill one; return what it was."""
        role, process, _ = self.living.pop(number)
        process.kill()
        process.wait()
        return role

    def told(self) -> int:
        """Return how many bytes those that live have told."""
        told = 0
        for role, process, report in self.living:
            assert process.poll() is None, f"a process ended by itself: {role}"
            told += report.stat().st_size if report.exists() else 0
        return told

    def go_on(self, size: int) -> None:
        """Return when so much was told."""
        deadline = time.monotonic() + PATIENCE_S
        wanted = self.told() + size
        while self.told() < wanted:
            assert time.monotonic() < deadline, "nobody goes on"
            threading.Event().wait(0.005)


@pytest.mark.timeout(120 + SECONDS_A_KILL * KILLS)
def test_what_was_confirmed_through_the_door_survives_kills_of_both_sides(tmp_path: Path) -> None:
    """Nothing confirmed is lost, nothing acked comes again, batches and transactions are whole, numbers stored once."""
    live_and_die(Beings(tmp_path, SEED, "crash.door_client"), ROLES, KILLS, PROGRESS)


@pytest.mark.timeout(120 + 4 * SECONDS_A_KILL * CROWD_KILLS)
def test_ordinary_days_of_crowds_leave_nothing_wrong(tmp_path: Path) -> None:
    """Many tasks and threads of each connection, a tenth of the calls cancelled, and an owner that closes beside them."""
    live_and_die(Beings(tmp_path, SEED, "crash.door_crowd"), CROWDS, CROWD_KILLS, 10 * PROGRESS)


def live_and_die(beings: Beings, roles: Sequence[str], kills: int, progress: int) -> None:
    """Begin processes, kill one after the other, each when so much was told, and look at their histories."""
    print(f"seed {SEED} (set QFLOW_SEED)")
    chance = random.Random(SEED)
    door_client.own(str(beings.spool)).close()  # who comes first finds the stream, too
    try:
        for role in roles:
            beings.start(role)
        for _ in range(kills):
            beings.go_on(chance.randrange(progress))
            victim = 0 if chance.random() < 0.3 else chance.randrange(len(beings.living))
            owners = [number for number, (role, _, _) in enumerate(beings.living) if role == "owner"]
            beings.start(beings.kill(owners[0] if victim == 0 else victim))
        beings.go_on(progress)
    finally:
        while beings.living:
            beings.kill(chance.randrange(len(beings.living)))
    history = History(beings.reports)
    print(
        f"{len(history.put)} put, {len(history.got)} got, {len(history.acked)} acked, {len(history.offsets)} published"
    )
    print(f"connections that were lost: {dict(history.lost)}")
    problems = history.problems(*look(beings.spool))
    assert not problems, problems[:20]
    assert history.acked
    assert history.offsets
