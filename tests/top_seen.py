"""A spool as it is looked at in tests: the same figures each time, and what a screen shows, as text."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.cells import cell_len

from qflow import doctor
from qflow.doctor import Finding, Severity
from qflow.events import Event, EventKind
from qflow.top import drawing
from qflow.top.look import Board, Look, Mode, Order
from qflow.top.widgets import layout

PATH = "/var/lib/shop/spool"
WIDTHS = (40, 80, 120, 200)


def queue(name: str, **figures: Any) -> dict[str, Any]:
    """Return figures of a queue: 0 unless they are given."""
    plain: dict[str, Any] = {
        "name": name,
        "durable": True,
        "messages": 0,
        "lag_messages": 0,
        "acquired_messages": 0,
        "oldest_unacked_s": 0.0,
        "resident_bytes": 0,
        "spilled_bytes": 0,
        "capacity_bytes": 2**20,
        "put_total": 0,
        "delivered_total": 0,
        "acked_total": 0,
        "consumers_total": 0,
        "consumers": (),
        "holders": (),
        "blocked_putters": 0,
        "blocked_longest_s": 0.0,
        "blocked_on": "",
    }
    return plain | figures


def stream(name: str, published: int) -> dict[str, Any]:
    subscription = {
        "name": "billing",
        "group": True,
        "filter": "#",
        "members": 2,
        "lag_messages": 30,
        "unsettled_messages": 4,
        "delivered_total": published - 30,
        "acked_total": published - 34,
    }
    return {"name": name, "messages": 5000, "published_total": published, "subscriptions": [subscription]}


def look(second: int, **changes: Any) -> Look:
    """Return what is there after so many seconds."""
    payments = queue(
        "payments",
        messages=2000,
        lag_messages=1999,
        acquired_messages=1,
        oldest_unacked_s=2400.0 + second,
        resident_bytes=1_000_000,
        spilled_bytes=7_340_032,
        put_total=2000,
        delivered_total=1,
        consumers_total=1,
        consumers=({"name": "mailer-3", "pid": 4711, "kind": "consumer", "since_s": 2400.0},),
        holders=({"consumer": "mailer-3", "pid": 4711, "messages": 1, "oldest_s": 2400.0 + second},),
        blocked_putters=5,
        blocked_longest_s=12.0,
        blocked_on="limit_messages",
    )
    moved = sum(10 * (one % 7) for one in range(second + 1))
    jobs = queue(
        "jobs",
        messages=40,
        lag_messages=30,
        acquired_messages=10,
        oldest_unacked_s=0.4,
        resident_bytes=40_960,
        put_total=moved + 40,
        delivered_total=moved + 10,
        acked_total=moved,
        consumers_total=3,
    )
    hostile = queue("na\x1b[31mme\n\u202e", durable=False, put_total=3 * second, messages=3 * second)
    found: dict[str, Any] = {
        "mode": Mode.LIVE,
        "pid": 4711,
        "time_s": float(second),
        "broker": {"capacity_bytes": 4 * 2**20, "resident_bytes": 1_240_960, "spilled_bytes": 7_340_032},
        "queues": {one["name"]: one for one in (payments, jobs, hostile)},
        "streams": {"flights": stream("flights", 5000 + 100 * second)},
        "inside": doctor.Look(
            path=PATH, log_bytes=64 * 2**20, log_used_bytes=20 * 2**20, disk_bytes=2**40, disk_free_bytes=2**38
        ),
    }
    return Look(**(found | changes))


EVENTS = (
    Event(EventKind.SPILL_STARTED, "payments", "", 1_000_000_000.0),
    Event(EventKind.LIMIT_REACHED, "payments", "limit_messages is 2000", 1_000_000_002.0),
    Event(EventKind.CONSUMER_FAILED, "na\x1b[31mme", "ValueError: \x07", 1_000_000_003.0),
)
FINDINGS = (
    Finding(
        severity=Severity.URGENT,
        kind="blocked-producers",
        sentence="5 producers blocked for up to 12 s at limit_messages of queue 'payments' (2,000)",
        remedy="start consumers",
        queue="payments",
    ),
    Finding(
        severity=Severity.PROBLEM,
        kind="held-too-long",
        sentence="consumer 'mailer-3' of process 4711 has held a message of queue 'payments' for 40 min",
        remedy="look at mailer-3",
        queue="payments",
    ),
    Finding(severity=Severity.NOTICE, kind="not-closed", sentence="nobody takes na\x1b[31mme", remedy="open it"),
)


def board(seconds: int = 10) -> Board:
    """Return a board that was looked at each second, with events and findings at the end."""
    made = Board()
    for second in range(seconds):
        made.take(look(second))
    made.take(look(seconds, events=EVENTS, findings=FINDINGS))
    return made


def page(shown: Board, width: int) -> list[str]:
    """Return the lines of the first screen, without the keys."""
    rows = shown.shown(Order())
    shape = layout(width, [row.key.name for row in rows])
    lines = drawing.head(shown, PATH, width)
    lines += [shape.heading(Order()), *(shape.line(shown, row) for row in rows)]
    lines += drawing.events(list(shown.events), width)
    return [line.plain.rstrip() for line in lines]


def text_of(svg: str) -> list[str]:
    """Return the lines of a picture that Textual has made of a screen."""
    found: dict[float, list[tuple[float, str]]] = {}
    widths = []
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        text = (element.text or "").strip("\n").replace("\xa0", " ")
        if "clip-path" not in element.attrib or not text:
            continue
        found.setdefault(float(element.attrib["y"]), []).append((float(element.attrib["x"]), text))
        widths.append(float(element.attrib["textLength"]) / cell_len(text))
    lines = []
    for _, parts in sorted(found.items()):
        line = ""
        for x, text in sorted(parts):
            line = line.ljust(round(x / widths[0])) + text
        lines.append(line.rstrip())
    return lines


@contextmanager
def owned(spool: Path, script: str, *, door: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Have another process own a spool, after it has run a script with its `broker`, until the context ends."""
    program = (
        "import sys, qflow\n"
        f"with qflow.open(sys.argv[1], door={door}) as broker:\n"
        "    exec(sys.argv[2])\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", program, str(spool), script]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait()
