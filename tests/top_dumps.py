"""Writes the pages that `top/test_pages.py` compares with: `PYTHONPATH=. python tests/top_dumps.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import top_seen
from qflow.inspect import MessageFacts
from qflow.top import one
from qflow.top.look import Key

DUMPS = Path(__file__).with_name("top") / "dumps"


def dumped(width: int) -> str:
    """Return the first screen, and each kind of what is opened."""
    board = top_seen.board()
    headers = {"dead_letter_queue": "orders\x1b", "try": 3, "dead_letter_nack_reason": "card\ndeclined"}
    letter = MessageFacts(
        queue="payments", sequence=7, body=b"\x07order", headers=headers, time_ms=0, settled=False, size_bytes=6
    )
    settings = {"limit_messages": 2000, "capacity_bytes": 2**20}
    inside = one.Inside(settings=settings, messages=[letter], note="the rest was not read")
    parts = [top_seen.page(board, width)]
    for key in (Key("queue", "payments"), Key("stream", "flights")):
        parts.append([line.plain.rstrip() for line in one.page(board, key, inside, width)])
    return "".join("\n".join([f"{'=' * width}", *part, ""]) for part in parts)


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    DUMPS.mkdir(exist_ok=True)
    for width in top_seen.WIDTHS:
        (DUMPS / f"{width}.txt").write_text(dumped(width))
