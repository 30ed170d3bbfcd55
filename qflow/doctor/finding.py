"""What a finding is."""

from __future__ import annotations

import enum
from typing import Any

import attrs

from qflow.doctor.words import harmless


class Severity(enum.IntEnum):
    """How bad it is."""

    NOTICE = 1
    """Good to know; nothing is held up."""
    PROBLEM = 2
    """Somebody should do something, today."""
    URGENT = 3
    """Work stands still or messages are in danger, now."""


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that is wrong."""

    severity: Severity
    kind: str
    """Which of `KINDS`: the section of the runbook, and the same for the same trouble in every version."""
    sentence: str = attrs.field(converter=harmless)
    """What is wrong, with the figures. Names are quoted, and escaped where a terminal or page would not show them."""
    remedy: str = attrs.field(converter=harmless)
    """What to do, with the command."""
    queue: str | None = None
    """The queue, or stream, that it is about."""
    facts: dict[str, Any] = attrs.field(factory=dict)
    """The figures in the sentence, for programs."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**attrs.asdict(self), "severity": self.severity.name.lower()}
