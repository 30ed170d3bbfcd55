"""Who survives pushing far more than fits: each engine in a process of its own, in a cgroup of 256 MiB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from bench import cgroup, children
from bench.contest import Entrant
from bench.engines import by_name
from bench.engines.base import Engine
from bench.errors import CannotRun
from bench.measure import Row, Series, Setup, Workload

MIB = 2**20
BODY_BYTES = 64 * 1024
"""Large, so that an engine that syncs each message comes to the end, too."""
BATCH = 16
REPORT_BYTES = 4 * MIB
PATIENCE_S = 300


# In the parent -----------------------------------------------------------------------------------------------------


def kill_at_256(setup: Setup) -> Iterator[Row]:
    total, limit = setup.size(4096, 48) * MIB, setup.size(256, 64) * MIB
    capacity = limit // 4
    for engine in setup.engines:
        setup.need_disk(total * 3 // 2)
        yield _pushed(setup, engine, total, limit, capacity)


def _pushed(setup: Setup, engine: Engine, total: int, limit: int, capacity: int) -> Row:
    entrant = Entrant(engine)
    pushed = peak = 0.0
    verdict = ""
    try:
        with setup.scratch() as path, cgroup.limited(limit) as group:
            ended = children.watch("push", path, engine.name, total, capacity, group=group)
            killed = group.killed()
        if ended.lines:
            pushed, peak = ended.lines[-1]
        verdict = "survived" if pushed >= total else "stopped" if not ended.code else "KILLED" if killed else "FAILED"
    except CannotRun as error:
        entrant.problem = f"not measured: {error}"
    return entrant.row(
        f"{total // MIB:,} MiB pushed through a cgroup of {limit // MIB} MiB",
        "pushed",
        Series("pushed", "MiB", [pushed / MIB]),
        more=True,
        verdict=verdict,
        details=[Series("RssAnon at the last report", "MiB", [peak / MIB])],
    )


WORKLOADS = [
    Workload(
        "kill-256",
        f"4 GiB pushed and never taken, in a cgroup of 256 MiB; `stopped` is after {PATIENCE_S} s",
        kill_at_256,
    )
]


# In a child --------------------------------------------------------------------------------------------------------


def _push(path: str, name: str, total_text: str, capacity: str) -> None:
    total, pushed, reported = int(total_text), 0, 0
    number = 0
    deadline = monotonic() + PATIENCE_S
    with by_name(name).opened(Path(path), int(capacity)) as engine:
        while pushed < total and monotonic() < deadline:
            engine.push([(number + some).to_bytes(BODY_BYTES, "big") for some in range(BATCH)])
            number += BATCH
            pushed += BATCH * BODY_BYTES
            if pushed - reported >= REPORT_BYTES or pushed >= total:
                reported = pushed
                children.report([pushed, children.memory_now()[0]])


ROLES: dict[str, Callable[..., None]] = {"push": _push}
