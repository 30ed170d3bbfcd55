"""Workers, their supervisor and the owner are killed at random: every message is done, and none is left.

QFLOW_TORTURE=1 QFLOW_SEED=... pytest tests/workers/test_killed.py
"""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

import qflow
from doors.command_line import CommandLine
from thorough import TORTURE
from workers.conftest import Working, kill, owner

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
KILLS = 60 if TORTURE else 4
PROCESSES = 3
LONGEST_S = 0.6
"""Between two kills."""


class Scene:
    """An owner beside the workers or none, a supervisor with its workers, and who is killed next."""

    def __init__(self, cli: CommandLine, chance: random.Random, *, beside: bool) -> None:
        self.cli = cli
        self.chance = chance
        self.stack = ExitStack()
        self.beside = beside
        self.killed: Counter[str] = Counter()
        self.working: Working | None = None
        self.owner: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start who is not there."""
        if self.beside and self.owner is None:
            self.owner = self.stack.enter_context(owner(self.cli.spool))
        if self.working is None:
            self.working = Working(self.cli, "note", "--processes", PROCESSES)
            self.working.until(f"{PROCESSES} processes work")

    def kill(self) -> None:
        """Kill one, and see that it is dead."""
        assert self.working is not None
        whom = self.chance.choice(["worker", "worker", "supervisor", "owner" if self.beside else "worker"])
        self.killed[whom] += 1
        if whom == "worker":
            for number in self.working.workers()[:1]:
                kill(number)
        elif whom == "supervisor":
            kill(self.working.process.pid)
            self.working.end()  # its workers end, too
            self.working = None
        else:
            assert self.owner is not None
            self.owner.kill()
            self.owner.wait()
            self.owner = None


def note_of(path: Path) -> Counter[int]:
    """Return how often each message was done."""
    return Counter(map(int, path.read_text().split())) if path.exists() else Counter()


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-an-owner"])
@pytest.mark.timeout(900 if TORTURE else 300)
def test_every_message_is_done_whoever_is_killed(cli: CommandLine, tmp_path: Path, beside: bool) -> None:
    chance = random.Random(SEED)
    number = 300 * KILLS
    with qflow.open(cli.spool) as broker:
        broker.declare_queue("jobs").put_many([b"%d" % place for place in range(number)])
    scene = Scene(cli, chance, beside=beside)
    with scene.stack:
        for _ in range(KILLS):
            scene.begin()
            Event().wait(chance.uniform(0, LONGEST_S))
            scene.kill()
        scene.begin()
        while len(done := note_of(tmp_path / "done")) < number:
            Event().wait(0.05)
        assert scene.working is not None
        scene.working.signal()
        scene.working.end()
    with qflow.open(cli.spool) as broker:
        assert len(broker.queue("jobs")) == 0, (SEED, scene.killed)
    assert set(done) == set(range(number)), (SEED, scene.killed)
