"""Where the page has the remedy of a finding: links, by its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

OPEN, LOOK = ("Open the queue", "/queue", ""), ("Look at messages", "/messages", "")
ALTER, REDRIVE, PURGE = ("Alter…", "/queue", "alter"), ("Redrive…", "/queue", "move"), ("Purge…", "/confirm/purge", "")
"""What a link says, its page, and a place there."""
REMEDIES = {
    "held-too-long": (OPEN, ALTER),
    "blocked-producers": (OPEN, ALTER, PURGE),
    "no-consumer": (LOOK, PURGE),
    "paused": (OPEN,),
    "coming-back": (LOOK, ALTER),
    "dead-letters": (LOOK, REDRIVE, PURGE),
    "slow-consumers": (OPEN,),
}


def links(finding: Mapping[str, Any], may_act: bool) -> list[tuple[str, str]]:
    """Return what a finding offers: what to say, and where that leads."""
    query = urlencode({"queue": finding["queue"] or ""})
    return [
        (says, f"{page}?{query}" + (f"#{place}" if place else ""))
        for says, page, place in REMEDIES.get(finding["kind"], ())
        if may_act or (says, page, place) in (OPEN, LOOK)
    ]
