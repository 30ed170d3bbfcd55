"""What models of a broker share: a spool in memory, a broker that does nothing by itself, and its crash."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis.stateful import RuleBasedStateMachine

import inside
import qflow
import scratch
from qflow import inspect
from qflow.storage.log import confirming, writer


class SpoolMachine(RuleBasedStateMachine):
    """A model with a spool of its own; `patch` is undone and the spool removed at its end."""

    broker: qflow.Broker

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(confirming, "FIRST_BATCHES", 0)
        self.directory = Path(tempfile.mkdtemp(prefix="qflow-model-", dir=scratch.in_memory()))
        self.number = 0
        self._steps = 0

    @property
    def path(self) -> Path:
        return self.directory / str(self.number)

    def still(self, broker: qflow.Broker) -> None:
        """Go on with a broker in which nothing happens by itself, so that an example always runs the same."""
        self.broker = broker
        inside.still(broker)  # maintenance is a step of the model
        self.patch.setattr(writer, "FLUSH_S", threading.TIMEOUT_MAX / 2)  # no commit comes by itself, either
        self.patch.setattr(writer, "SOON_S", threading.TIMEOUT_MAX / 2)
        self.patch.setattr(confirming, "LATE_S", threading.TIMEOUT_MAX / 2)

    def check_now_and_then(self) -> None:
        """Compare memory and log: not after each step, for whoever reads the log has in it what the journal holds."""
        self._steps += 1
        if self._steps % 8 == 0:
            assert self.broker.check() == []

    def crash_broker(self) -> None:
        """Leave what a kill would: the log as it is at its last commit, and whatever else lies around."""
        after = self.directory / str(self.number + 1)
        after.mkdir()
        shutil.copytree(self.path / "spill", after / "spill")
        inside.copy_as_killed(self.broker, after)
        assert inspect.check_spool(after) == []
        self.broker.close()
        self.number += 1

    def teardown(self) -> None:
        if hasattr(self, "broker"):
            self.broker.close()
        shutil.rmtree(self.directory)
        self.patch.undo()
