"""The spill stores by themselves: write, read and free through their contract, no queue around."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from bench import loops
from bench.engines.qflow_queues import STORES, open_broker
from bench.measure import Bound, Row, Setup, Workload, at_most, by_side, interleave, micros, ratio
from bench.timing import timed
from qflow.message import Record
from qflow.storage.blocks import SINGLE_BYTES

BODY = bytes(1024)
RUN = 64
"""Records a call, as many as a queue of 1 KiB messages spills at once."""
ROOM = 2**30
"""More than a run takes."""
BOUNDS: dict[str, Bound] = {"segments": at_most(3)}


def contract(setup: Setup) -> Iterator[Row]:
    runs = setup.size(400, 20)
    for spill in STORES:
        yield _store(setup, spill, runs)


def _store(setup: Setup, spill: str, runs: int) -> Row:
    count = runs * RUN
    setup.need_disk(count * 2 * 4096)
    block = bytes(len(BODY) + SINGLE_BYTES)
    with ExitStack() as stack:
        path = stack.enter_context(setup.scratch())
        try:
            broker = stack.enter_context(open_broker(path / "spool", spill=spill))
        except Exception as error:
            return Row(name=_name(spill), problem=f"not measured: {error}")
        area = broker.engine.spool.store.area("bench", 2**31 - 1, 1)
        files = stack.enter_context(loops.append_files(path))
        records: list[Record] = [BODY] * RUN
        first = 0

        @timed
        def mine() -> None:
            nonlocal first
            slots = [area.write(first + number * RUN, records) for number in range(runs)]
            for number, some in enumerate(slots):
                found, problems = area.read(first + number * RUN, some, ROOM, len(BODY))
                if len(found) != RUN or problems:
                    raise AssertionError(f"{len(found)} of {RUN} records came back, with {len(problems)} problems")
                area.free(some)
            first += count

        def raw(file: loops.AppendFile) -> float:
            return file.append(count, block) + file.read(count, block)

        sides = [partial(raw, file) for file in files.values()]
        measured = interleave(setup.few_rounds, setup.size(3, 1), mine, *sides)
    names = ("write + read + free", *(f"{name} + pread" for name in files))
    ours, appended, overwritten = by_side(micros, names, count, measured)
    return Row(
        name=_name(spill),
        figure=ratio(ours, appended),
        bound=BOUNDS.get(spill),
        details=[ours, appended, overwritten, ratio(ours, overwritten)],
        notes=[f"{count:,} records, {RUN} a call: all written, then each call's read and freed"],
    )


def _name(spill: str) -> str:
    return f"spill to {spill}, 1 KiB, write + read + free: time over raw append + pread"


WORKLOADS = [Workload("spill-stores", "write, read and free of each spill store, over append and pread", contract)]
