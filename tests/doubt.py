"""A commit that reaches the disk, and says that it failed: nobody knows then whether it holds."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from qflow.storage.log.confirming import Confirming


class Doubt:
    """Once it is `armed`, the next commit holds, and fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed = False
        confirm = Confirming.confirm

        def fail(confirming: Confirming, txn: Any) -> None:
            confirm(confirming, txn)
            if self.armed:
                self.armed = False
                raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(Confirming, "confirm", fail)
