"""What it takes to keep an eye on a program with 1,000 queues: `qflow top`, the page in a browser, and Prometheus.

The program is a process of its own, in which a message comes and one goes each second, in a few queues or in all of
them. The share of a core is processor time over time on the clock, as the system counts it for a process; what the
program spends for those who look is what it spends with them beyond what it does without, in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from bench import talking, terminal
from bench.measure import Row, Series, Setup, Workload, at_most, ratio
from bench.watched import HOST, named

COLUMNS = (80, 200)
SHARE = at_most(3, "%")
TICKS = os.sysconf("SC_CLK_TCK")
SETTLE_S = 3
"""After the first look, before a share is measured: a look's own cost says how often there is one."""
TAB_S = 2.0
"""How often each open page asks, as `qflow/web/static/page.js` has it."""
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""What it accepts. Where no names may be escaped as they are, as of Prometheus 2, prometheus-client takes twice as long
for the text."""
LIVE = {"X-Live": "1", "Accept": "text/html"}
Found = dict[str, list[float]]


# Watching --------------------------------------------------------------------------------------------------------


def top(setup: Setup) -> Iterator[Row]:
    """In each round: nobody looks, then `qflow top` on one terminal after the other."""
    for spool, owner, changing in _changing(setup):
        alone: list[float] = []
        terminals: dict[int, Found] = {columns: {"top": [], "owner": [], "pause": []} for columns in COLUMNS}
        for _ in range(_rounds(setup)):
            alone += shares([owner.pid], partial(sleep, _window_s(setup)))
            for columns, found in terminals.items():
                with terminal.top(spool, columns, named(1)[0]) as screen:
                    sleep(setup.size(SETTLE_S, 0))
                    drawn = screen.draws
                    its, owners = shares([screen.pid, owner.pid], partial(sleep, _window_s(setup)))
                    found["pause"].append(_window_s(setup) / max(1, screen.draws - drawn))
                found["top"].append(its)
                found["owner"].append(owners)
        for columns, found in terminals.items():
            yield Row(
                name=f"`qflow top`, {columns} columns, {_queues(setup, changing)}: share of a core",
                figure=Series("qflow top", "%", found["top"]),
                bound=SHARE,
                details=[
                    *_of_owner(found["owner"], alone),
                    Series("from one drawing to the next", "s", found["pause"]),
                ],
            )


def page(setup: Setup) -> Iterator[Row]:
    """In each round: nobody looks, then a browser has the overview open, and the list of queues beside it."""
    for _, owner, changing in _changing(setup):
        port = talking.ask(owner, "page")
        browse(port, min(TAB_S, _window_s(setup)))  # what is made for the first one is made now
        alone: list[float] = []
        watched: list[float] = []
        for _ in range(_rounds(setup)):
            alone += shares([owner.pid], partial(sleep, _window_s(setup)))
            watched += shares([owner.pid], partial(browse, port, _window_s(setup)))
        beyond, *details = _of_owner(watched, alone)
        yield Row(
            name=f"the page, overview and queues open, {_queues(setup, changing)}: share of a core",
            figure=beyond,
            bound=SHARE,
            details=details,
            notes=[f"each of the two pages asks every {TAB_S:g} s, in turns, what the page's script asks"],
        )


def _changing(setup: Setup) -> Iterator[tuple[Path, subprocess.Popen[str], int]]:
    """Give a spool, its owner, and in how many of its queues something happens each second: few, then all."""
    queues = setup.size(1_000, 4)
    for changing in _few_and_all(setup):
        with setup.scratch() as path:
            spool = path.absolute() / "spool"
            with talking.started("bench.watched", spool, queues, "transient") as owner:
                talking.ask(owner, f"change {changing}")
                yield spool, owner, changing


def _few_and_all(setup: Setup) -> tuple[int, int]:
    return setup.size(10, 1), setup.size(1_000, 4)


def _queues(setup: Setup, changing: int) -> str:
    return f"{changing:,} of {setup.size(1_000, 4):,} queues change each second"


def _rounds(setup: Setup) -> int:
    """A round takes minutes."""
    return min(3, setup.few_rounds)


def _window_s(setup: Setup) -> float:
    """As long as `qflow top` takes to come round to all that it reads seldom."""
    return 0.1 if setup.quick else 30


def shares(pids: list[int], meanwhile: Callable[[], object]) -> list[float]:
    """Return the shares of a core, in percent, that processes have while something is done here."""
    begun, before = perf_counter(), [_processor_s(pid) for pid in pids]
    meanwhile()
    used = [_processor_s(pid) - so_far for pid, so_far in zip(pids, before, strict=True)]
    seconds = perf_counter() - begun
    return [one / seconds * 100 for one in used]


def _processor_s(pid: int) -> float:
    """Return the processor time of a process until now, its own and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _of_owner(watched: list[float], alone: list[float]) -> list[Series]:
    beyond = [one - other for one, other in zip(watched, alone, strict=True)]
    return [
        Series("the program, for it", "%", beyond),
        Series("the program while somebody looks", "%", watched),
        Series("the program while nobody does", "%", alone),
    ]


def browse(port: int, seconds: float) -> None:
    """Ask as two open pages do, the overview and the list of queues, each when half of its time has passed."""
    since = 0.0
    end = due = perf_counter()
    end += seconds
    with _connection(port) as connection:
        while due < end:
            found = json.loads(_get(connection, f"/api/live?since={since}", {}))
            since = found["points"][-1]["at_s"] if found["points"] else since
            _get(connection, "/", LIVE)
            due = _pause(due + TAB_S / 2, end)
            _get(connection, "/queues", LIVE)
            due = _pause(due + TAB_S / 2, end)


def _pause(until: float, end: float) -> float:
    """Sleep until a moment, or the end if that is before; return the moment."""
    sleep(max(0.0, min(until, end) - perf_counter()))
    return until


# Scraping --------------------------------------------------------------------------------------------------------


def scrape(setup: Setup) -> Iterator[Row]:
    """In each round: puts alone, and puts while Prometheus asks each second; in the other order in the next one."""
    for kind in ("transient", "durable"):
        for changing in _few_and_all(setup):
            yield from _scraped(setup, kind, changing)


def _scraped(setup: Setup, kind: str, changing: int) -> Iterator[Row]:
    queues, seconds = setup.size(1_000, 4), setup.size(10, 1)
    alone: list[dict[str, float]] = []
    beside: list[dict[str, float]] = []
    scrapes: list[list[float]] = []
    with setup.scratch() as path, talking.started("bench.watched", path / "spool", queues, kind) as owner:
        port = talking.ask(owner, "metrics")
        for turn in range(setup.few_rounds + 1):
            for is_scraped in (True, False) if turn % 2 else (False, True):
                talking.tell(owner, f"puts {seconds} {changing}")
                if is_scraped:
                    scrapes.append(_scrape(port, seconds))
                (beside if is_scraped else alone).append(talking.answer(owner))
    said = f"a {kind} put each ms, into {changing:,} of {queues:,} queues in turns"
    yield Row(
        name=f"a scrape, {said}",
        figure=Series("the median of a round", "ms", [median(some) * 1e3 for some in scrapes[1:]]),
        bound=at_most(50, "ms"),
        details=[Series("the slowest of a round", "ms", [max(some) * 1e3 for some in scrapes[1:]])],
        notes=["once a second, over HTTP; 100 queues have series of their own, as many as without `named=`"],
    )
    sides = {"a scrape each second": beside[1:], "no scrapes": alone[1:]}
    p99, *others = (
        [Series(f"{what}, {side}", "µs", [one[what] for one in taken]) for side, taken in sides.items()]
        for what in ("p99", "median", "slowest")
    )
    yield Row(
        name=f"p99 of puts, {said}: with a scrape each second over without",
        figure=ratio(*p99),
        bound=at_most(1.1),
        details=[
            *p99,
            *others[0],
            *others[1],
            *(Series(f"puts, {side}", "/s", [one["rate"] for one in taken]) for side, taken in sides.items()),
        ],
    )


def _scrape(port: int, times: int) -> list[float]:
    """Scrape each second; return what each took, from the request to the last byte."""
    taken = []
    due = perf_counter()
    for _ in range(times):
        begun = perf_counter()
        with _connection(port) as connection:
            _get(connection, "/metrics", {"Accept": PROMETHEUS_3})
        taken.append(perf_counter() - begun)
        due = _pause(due + 1, due + 1)
    return taken


def _connection(port: int) -> closing[HTTPConnection]:
    return closing(HTTPConnection(HOST, port, timeout=60))


def _get(connection: HTTPConnection, path: str, headers: dict[str, str]) -> bytes:
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise AssertionError(f"{path} was answered with {response.status}: {body[:200]!r}")
    return body


WORKLOADS = [
    Workload("look-top", "`qflow top` on 80 and 200 columns, 1,000 queues: share of a core, and the owner's", top),
    Workload("look-page", "the page in a browser, 1,000 queues: share of a core", page),
    Workload("look-scrape", "a scrape beside puts into 1,000 queues: its time, and the p99 of the puts", scrape),
]
