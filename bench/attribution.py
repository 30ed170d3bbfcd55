"""Who allocates what: memray's peak and its five largest sites, for each engine while a backlog grows.

qflow is given a quarter of the backlog as its capacity, so that the rest has to leave. Every object is
traced where it is made; a body is made by the producer, in this file, whoever keeps it afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

from bench import children
from bench.contest import Entrant
from bench.engines import by_name
from bench.errors import CannotRun
from bench.measure import Row, Series, Setup, Workload

MIB = 2**20
BODY_BYTES = 1024
BATCH = 256
SITES = 5
PATIENCE_S = 120
MAP_BYTES = 2**30
"""LMDB maps its whole limit from the start, a TiB of address space and no memory: whole GiB at a site are left out."""


# In the parent -----------------------------------------------------------------------------------------------------


def attributed(setup: Setup) -> Iterator[Row]:
    total = setup.size(64, 1) * MIB
    for engine in setup.engines:
        setup.need_disk(total * 5)
        entrant = Entrant(engine)
        figure, notes, verdict = Series("peak", "MiB", [0.0]), [], ""
        try:
            with setup.scratch() as path:
                found = children.run("attribute", path, engine.name, total, total // 4)
            figure = Series("peak", "MiB", [found["peak"] / MIB])
            notes = [f"{size / MIB:8.2f} MiB  {site}" for site, size in found["sites"]]
            if found["pushed"] < total:
                verdict = f"at {found['pushed'] / MIB:.0f} MiB"
        except CannotRun as error:
            entrant.problem = f"not measured: {error}"
        table = f"memray: peak while a backlog of {total // MIB} MiB grows"
        yield entrant.row(table, "peak", figure, verdict=verdict, notes=notes)


WORKLOADS = [
    Workload(
        "memray",
        f"a growing backlog of 1 KiB messages under memray: peak, and the five largest sites; {PATIENCE_S} s at most",
        attributed,
    )
]


# In a child --------------------------------------------------------------------------------------------------------


def _attribute(path: str, name: str, total_text: str, capacity: str) -> None:
    try:
        import memray
    except ImportError as error:
        raise CannotRun("memray is not installed") from error
    total, pushed = int(total_text), 0
    scratch = Path(path) / "engine"
    scratch.mkdir()
    recorded = Path(path) / "recorded"
    deadline = monotonic() + PATIENCE_S
    with memray.Tracker(recorded, trace_python_allocators=True), by_name(name).opened(scratch, int(capacity)) as engine:
        while pushed < total and monotonic() < deadline:
            engine.push([number.to_bytes(BODY_BYTES, "big") for number in range(BATCH)])
            pushed += BATCH * BODY_BYTES
    reader = memray.FileReader(recorded)
    sites: Counter[str] = Counter()
    for record in reader.get_high_watermark_allocation_records(merge_threads=True):
        frames = record.stack_trace(max_stacks=1)
        sites[_site(*frames[0]) if frames else "the interpreter"] += record.size % MAP_BYTES
    children.report({"peak": sites.total(), "pushed": pushed, "sites": sites.most_common(SITES)})


def _site(function: str, file: str, line: int) -> str:
    """Write a place in the code without where it is installed."""
    parts = Path(file).parts
    for top in ("site-packages", "qflow", "bench"):
        if top in parts:
            position = len(parts) - 1 - parts[::-1].index(top)
            parts = parts[position + (top == "site-packages") :]
            break
    else:
        parts = parts[-2:]
    return f"{function} ({'/'.join(parts)}:{line})"


ROLES: dict[str, Callable[..., None]] = {"attribute": _attribute}
