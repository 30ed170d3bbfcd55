"""How often something is called."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def count(monkeypatch: pytest.MonkeyPatch, counts: Counter[str], kind: Any, name: str, key: str) -> None:
    """Count calls of a method, or of a function of a module, under a key."""
    called = getattr(kind, name)

    def call(*arguments: Any, **named: Any) -> Any:
        counts[key] += 1
        return called(*arguments, **named)

    monkeypatch.setattr(kind, name, call)
