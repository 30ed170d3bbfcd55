"""Runs stand in the order of what they hold, also where messages were taken off their left."""

from __future__ import annotations

import random

import pytest

from qflow.delivery import Segment
from qflow.memory.run import Run, note_expiry
from qflow.memory.run_list import RunList


def filled(count: int) -> RunList:
    """Return a list of so many messages, each of which is its number."""
    runs = RunList()
    runs.tail_for(0, count).extend(b"%d" % number for number in range(count))
    runs.next = count
    return runs


def take(runs: RunList, count: int) -> list[Segment]:
    segments: list[Segment] = []
    runs.take(count, segments)
    return segments


def test_what_is_given_back_before_two_that_were_taken_from_stands_before_both() -> None:
    """The second of them began where the first begins now."""
    runs = filled(4)
    take(runs, 1)
    runs.give_back(0, [b"0"], 2)
    assert [take(runs, 1), take(runs, 1)] == [[Segment(0, [b"0"], 2)], [Segment(1, [b"1"], 0)]]
    runs.give_back(0, [b"0", b"1"], 4)
    take(runs, 1)
    runs.give_back(0, [b"0"], 6)
    assert runs.problems() == []
    assert [segment.first for _ in range(4) for segment in take(runs, 1)] == [0, 1, 2, 3]


def test_a_run_knows_of_its_front_when_that_has_expired() -> None:
    """Of what was given to it one behind the other, each expiring no earlier than those before; of nothing else."""
    run = Run(10)

    def give(count: int, expires_ms: int | None = None) -> None:
        first = run.stop
        run.records.extend([b"x"] * count)
        if expires_ms is not None:
            note_expiry(run, first, count, expires_ms)

    def late(now_ms: int, taken: int) -> int:
        """Return how many of those behind the first ones are known to have expired."""
        rest = run.split(run.first + taken) if taken else run
        try:
            return rest.late(now_ms)
        finally:
            if taken:
                run.records += rest.records

    give(2, 5)
    give(3, 7)
    assert [late(now_ms, 0) for now_ms in (4, 5, 6, 7)] == [0, 0, 0, 5]
    give(1)
    assert (late(7, 0), late(7, 4), late(7, 5)) == (5, 1, 0)
    give(2, 8)
    assert (late(9, 0), late(9, 5), late(9, 6), late(9, 7)) == (0, 0, 2, 1)
    give(2, 3)
    assert (late(9, 6), late(9, 8)) == (0, 2)
    run.split(19)
    assert (run.late(9), late(9, 8)) == (0, 1)
    behind = run.split(18)
    assert (run.late(9), behind.late(9)) == (0, 1)


@pytest.mark.parametrize("seed", range(4, 24))
def test_runs_stay_in_order_whatever_is_taken_given_back_and_cut(seed: int) -> None:
    draw = random.Random(seed)
    runs = filled(30)
    out: set[int] = set()
    for _ in range(400):
        step = draw.choice(["take", "give back", "give back", "cut left", "cut right", "cut out", "remove"])
        resident = [run for run in runs if run.records]
        if step == "give back" and out:
            first = draw.choice(sorted(out))
            length = 1
            while first + length in out and draw.random() < 0.6:
                length += 1
            out -= set(range(first, first + length))
            runs.give_back(first, [b"%d" % number for number in range(first, first + length)], draw.choice([0, 2, 4]))
        elif resident and step == "cut left":
            runs.cut_left(draw.choice(resident), draw.randrange(1, 5))
        elif resident and step == "cut right":
            runs.cut_right(draw.choice(resident), draw.randrange(1, 5))
        elif resident and step == "cut out":
            run = draw.choice(resident)
            first = draw.randrange(run.first, run.stop)
            runs.cut_out(run, first, draw.randrange(first + 1, run.stop + 1))
        elif resident and step == "remove":
            part = runs.remove(runs.cut_right(draw.choice(resident), draw.randrange(1, 3)))
            out.update(range(part.first, part.first + len(part.records)))
        elif step == "take":
            for first, records, _ in take(runs, draw.randrange(1, 6)):
                assert first == min(set(range(30)) - out)
                out.update(range(first, first + len(records)))
        assert runs.problems() == []
        held = [number for run in runs for number in range(run.first, run.stop)]
        assert held == sorted(set(range(30)) - out)
        assert [record for run in runs for record in run.records] == [b"%d" % number for number in held]
