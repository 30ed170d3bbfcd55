"""What it takes to look at a spool from the shell: `qflow --help`, `ls`, `doctor` and `check`.

Each is a process of its own, timed on the clock from its start to its end, imports included. A peak is that of its RSS,
the pages of the log that it has mapped included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter

import attrs

import qflow
from bench import children, talking
from bench.measure import Row, Series, Setup, Workload, at_least, at_most, interleave, ratio
from bench.watched import named
from qflow import doctor

BODY = bytes(100)
BATCH = 1000
ROOM = "4GiB"
"""The capacity of the child that fills, so that nothing spills and the run stays short."""
MIB = 2**20
READ_BYTES = MIB
QFLOW = (sys.executable, "-m", "qflow")


# In the parent -----------------------------------------------------------------------------------------------------


def helped(setup: Setup) -> Iterator[Row]:
    """`qflow --help`, and in turns with it an interpreter that does nothing."""
    measured = interleave(
        setup.rounds, setup.size(5, 1), partial(_seconds, *QFLOW, "--help"), partial(_seconds, sys.executable, "-c", "")
    )
    ours, bare = (_milliseconds(name, taken) for name, taken in zip(("qflow", "python"), measured, strict=True))
    yield Row(
        name="`qflow --help`, from start to end",
        figure=ours,
        bound=at_most(80, "ms"),
        details=[attrs.evolve(bare, name="of that, an interpreter that does nothing")],
    )


def listed(setup: Setup) -> Iterator[Row]:
    spool = _filled(setup)
    for where, owner in _owners(setup, spool):
        with owner:
            taken = _launched(setup, "ls", spool)
        yield _timed(setup, "ls", where, taken, at_most_ms=500)
        yield Row(
            name=f"the same: peak RSS, {where}",
            figure=Series("RSS", "MiB", [one.peak_bytes / MIB for one in taken]),
            bound=at_most(80, "MiB"),
        )


def doctored(setup: Setup) -> Iterator[Row]:
    spool = _filled(setup)
    for where, owner in _owners(setup, spool):
        with owner:
            taken = _launched(setup, "doctor", spool)
        yield _timed(setup, "doctor", where, taken, at_most_ms=2000)


def checked(setup: Setup) -> Iterator[Row]:
    """`qflow check`, and in turns with it the log's file read from its begin to its end; neither is in the cache."""
    spool = _filled(setup)
    file = spool / "log" / "data.mdb"
    used, whole = doctor.look_inside(spool).log_used_bytes, file.stat().st_size

    def check() -> float:
        _forget(file)
        return _seconds(*QFLOW, "check", str(spool))

    def read() -> float:
        _forget(file)
        return _read(file)

    measured = interleave(setup.few_rounds, 1, check, read)
    figures = [
        Series(name, "MiB/s", [size / seconds / MIB for seconds in taken])
        for name, size, taken in zip(("qflow check", "plain read"), (used, whole), measured, strict=True)
    ]
    yield Row(
        name=f"`qflow check`, {_contents(setup)}: rate over a plain read of the log's file",
        figure=ratio(*figures),
        bound=at_least(0.5),
        details=[*figures, _milliseconds("qflow check, from start to end", measured[0])],
        notes=[f"{used / MIB:.0f} MiB of the file's {whole / MIB:.0f} are in use: those count for the check"],
    )


@attrs.frozen
class Launched:
    """What a command took."""

    seconds: float
    peak_bytes: int
    code: int


def launch(*command: str) -> Launched:
    found = subprocess.run(
        [sys.executable, "-m", "bench.launched", *command], stdout=subprocess.PIPE, text=True, check=True
    )
    return Launched(*json.loads(found.stdout))


def _seconds(*command: str) -> float:
    taken = launch(*command)
    if taken.code:
        raise AssertionError(f"{command} ended with {taken.code}")
    return taken.seconds


def _launched(setup: Setup, name: str, spool: Path) -> list[Launched]:
    """Return what a command took in each round; the first round warms up and is thrown away."""
    taken = [launch(*QFLOW, name, str(spool)) for _ in range(setup.rounds + 1)]
    if {one.code for one in taken} - set(_CODES[name]):
        raise AssertionError(f"qflow {name} ended with {[one.code for one in taken]}")
    return taken[1:]


_CODES = {"ls": (0,), "doctor": (0, 1, 6)}
"""`doctor` says in them what it has found: nobody consumes these queues."""


def _timed(setup: Setup, command: str, where: str, taken: list[Launched], at_most_ms: float) -> Row:
    figure = _milliseconds("from start to end", [one.seconds for one in taken])
    name = f"`qflow {command}`, {_contents(setup)}, {where}"
    return Row(name=name, figure=figure, bound=at_most(at_most_ms, "ms"))


def _milliseconds(name: str, seconds: list[float]) -> Series:
    return Series(name, "ms", [one * 1e3 for one in seconds])


def _sizes(setup: Setup) -> tuple[int, int]:
    """Return how many queues there are, and messages in each."""
    return setup.size(1_000, 10), setup.size(10_000, 100)


def _contents(setup: Setup) -> str:
    queues, each = _sizes(setup)
    return f"{queues * each:,} messages in {queues:,} queues"


def _filled(setup: Setup) -> Path:
    """Return a spool that is made once for all rows, and closed: filling takes longer than all looks at it."""
    spool = setup.directory.absolute() / "looked-at"
    if not spool.exists():
        queues, each = _sizes(setup)
        setup.need_disk(queues * each * 200)
        made = spool.with_name("being-filled")
        children.run("fill-queues", made, queues, each)
        made.rename(spool)
    return spool


def _owners(setup: Setup, spool: Path) -> list[tuple[str, AbstractContextManager[object]]]:
    owner = talking.started("bench.watched", spool, _sizes(setup)[0], "durable")
    return [("without an owner", nullcontext()), ("beside its owner", owner)]


def _forget(file: Path) -> None:
    """Have the system drop the pages of a file that it keeps; of others, which may be used meanwhile, it keeps them."""
    with open(file, "rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(file: Path) -> float:
    """Return the seconds that it takes to read a file from its begin to its end."""
    buffer = bytearray(READ_BYTES)
    begun = perf_counter()
    with open(file, "rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass
    return perf_counter() - begun


WORKLOADS = [
    Workload("look-help", "`qflow --help`, from start to end", helped),
    Workload("look-ls", "`qflow ls` of ten million messages in 1,000 queues: time and peak memory", listed),
    Workload("look-doctor", "`qflow doctor` of the same", doctored),
    Workload("look-check", "`qflow check` of the same, and a plain read of the log's file, neither cached", checked),
]


# In a child --------------------------------------------------------------------------------------------------------


def _fill(path: str, queues: str, each: str) -> None:
    with qflow.open(path, capacity_bytes=ROOM) as broker:
        for queue in broker.declare_queues(named(int(queues))):
            for first in range(0, int(each), BATCH):
                queue.put_many([BODY] * min(BATCH, int(each) - first))
    children.report(int(queues) * int(each))


ROLES: dict[str, Callable[..., None]] = {"fill-queues": _fill}
