"""The parts of the bench that decide: statistics, bounds, rankings, comparisons, engines, and what is missing."""

from __future__ import annotations

import json
import shutil
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # at the end: qflow itself may be the installed one

from bench import cgroup, compare, contest, engines, ranking, report, sampler, stores  # noqa: E402
from bench.engines.base import FLOOR, KILL, MEMORY, PROMISES, SYNCED, Engine, Opened  # noqa: E402
from bench.measure import (  # noqa: E402
    CannotRun,
    Rank,
    Row,
    Series,
    Setup,
    Workload,
    at_least,
    at_most,
    interleave,
    percentile,
    ratio,
)
from bench.oscillation import CountingFiles  # noqa: E402


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(directory=tmp_path, quick=True)


# Statistics --------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_the_first_round_is_thrown_away() -> None:
    """Two rounds of three chunks: the median of the chunks is a round's value, and the order is reversed in turns."""
    order: list[str] = []
    seconds = iter(range(100))

    def side(name: str) -> float:
        order.append(name)
        return float(next(seconds))

    first, second = interleave(2, 3, lambda: side("a"), lambda: side("b"))
    assert order == list("baabba" + "abbaab" + "baabba")
    assert (first, second) == ([9.0, 14.0], [8.0, 15.0])


def test_a_ratio_is_formed_round_by_round() -> None:
    """Not the ratio of the medians: a slow round hits both sides."""
    assert ratio(Series("a", "µs", [1, 10]), Series("b", "µs", [2, 20])).values == [0.5, 0.5]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (0.999, 100), (1.0, 100), (0.0, 1)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    """Nearest rank, no interpolation."""
    assert percentile(list(range(1, 101)), share) == value


def test_growth_is_that_of_a_straight_line() -> None:
    """Only what lies between the two moments counts."""
    seconds = [float(second) for second in range(11)]
    values = [100 if second < 5 else 7 * second for second in range(11)]
    assert sampler.growth(seconds, values, 5, 10) == pytest.approx(35)
    assert sampler.growth([1.0], [5], 0, 2) == 0


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (Row(name="", figure=Series("", "x", [1, 2, 3]), bound=at_most(2)), True),
        (Row(name="", figure=Series("", "x", [1, 2, 3]), bound=at_least(2.5)), False),
        (Row(name="", figure=Series("", "x", [1])), None),
        (Row(name="", bound=at_most(1), problem="gone"), None),
    ],
)
def test_a_bound_is_held_against_the_median(row: Row, reached: bool | None) -> None:
    """Without a bound, or without a figure, nothing is said."""
    assert row.reached is reached


# Reports -----------------------------------------------------------------------------------------------------------


def cell(engine: str, promise: str, value: float, **more: object) -> Row:
    """Make a cell of a ranking table."""
    rank = Rank(table="t", column="c", engine=engine, promise=promise, **more)  # type: ignore[arg-type]
    return Row(name=f"t: {engine}", figure=Series(engine, "µs", [value]), rank=rank)


def test_a_ranking_sorts_within_a_promise_and_ranks_no_floor() -> None:
    """The fastest first; floors and what has no figure stand below, without a place."""
    broken = Row(
        name="x", problem="not measured: it fell over", rank=Rank(table="t", column="c", engine="huey", promise=SYNCED)
    )
    rows = [
        cell("sqlite-full", SYNCED, 3),
        cell("deque", MEMORY, 9),
        cell("lmdb-message", SYNCED, 1, floor=True),
        cell("qflow-files-durable", SYNCED, 2),
        broken,
    ]
    lines = [" ".join(line.split()) for line in ranking.lines(rows)]
    start = lines.index("t; promise: synced before return")
    assert lines[start + 2 : start + 6] == [
        "1 qflow-files-durable 2.00 µs",
        "2 sqlite-full 3.00 µs",
        "floor lmdb-message 1.00 µs",
        "- huey not measured: it fell over",
    ]
    assert lines[lines.index("t; promise: memory") + 2] == "1 deque 9.00 µs"


def test_more_can_be_better() -> None:
    """A table of amounts has the largest first."""
    lines = ranking.lines([cell("deque", MEMORY, 1, more=True), cell("queue.Queue", MEMORY, 2, more=True)])
    assert [line.split()[1] for line in lines[3:5]] == ["queue.Queue", "deque"]


def test_ratios_come_first_and_json_holds_every_round() -> None:
    """The text: table, rankings, details. The JSON can be read back."""
    rows = [
        Row(name="ours over theirs", figure=Series("r", "x", [1, 2, 3]), bound=at_most(1)),
        cell("deque", MEMORY, 5),
    ]
    results: report.Results = [(Workload("w", "what it means", lambda _: iter(())), rows)]
    text = report.text({"CPU": "one"}, results, ["a remark"])
    positions = [text.index(part) for part in ("CPU", "a remark", "ours over theirs", "promise: memory", "Details")]
    assert positions == sorted(positions)
    assert "NOT REACHED" in text
    again = compare.figures(json.loads(report.as_json({}, results, [])))
    assert again["ours over theirs"].values == [1, 2, 3]


# Comparing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "beyond"),
    [
        ([10, 11, 12, 13], [20, 21, 22, 23], True),
        ([10, 11, 12, 13], [11, 12, 13, 14], False),
        ([10, 11, 12, 13, 90], [14, 15, 16, 17, 18], True),
        ([10], [20], None),
    ],
)
def test_a_change_beyond_the_spread_is_told(old: list[float], new: list[float], beyond: bool | None) -> None:
    """The quartiles do not overlap; one value cannot tell."""
    assert compare.Change("row", Series("", "x", old), Series("", "x", new)).beyond_spread is beyond


def test_a_row_of_one_side_is_shown_without_a_change(tmp_path: Path) -> None:
    """A row that was not measured, or is new, has a dash."""
    for name, rows in (
        ("old", [cell("deque", MEMORY, 2)]),
        ("new", [cell("deque", MEMORY, 3), cell("huey", SYNCED, 1)]),
    ):
        written = report.as_json({}, [(Workload("w", "", lambda _: iter(())), rows)], [])
        (tmp_path / name).write_text(written)
    found = compare.reports(tmp_path / "old", tmp_path / "new")
    lines = [" ".join(line.split()) for line in compare.text(found).splitlines()]
    assert "t: deque 2.00 µs 3.00 µs +50.0 % cannot tell" in lines
    assert "t: huey - 1.00 µs cannot tell" in lines


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    """A text report, say."""
    for name in ("old", "new"):
        (tmp_path / name).write_text("CPU one")
    with pytest.raises(CannotRun, match="not a report"):
        compare.reports(tmp_path / "old", tmp_path / "new")


# Engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", engines.EVERY, ids=lambda engine: engine.name)
def test_an_engine_gives_back_what_it_was_given(engine: Engine, tmp_path: Path) -> None:
    """In order, one by one and in batches; what promises to survive is there when it is opened again."""
    bodies = [bytes((number,)) * 100 for number in range(30)]
    try:
        with engine.opened(tmp_path) as opened:
            if opened.put and opened.take:
                for body in bodies:
                    opened.put(body)
                assert [opened.take() for _ in bodies] == bodies
            opened.push(bodies)
            assert list(opened.pull(30)) == bodies
            opened.push(bodies)
    except CannotRun as error:
        pytest.skip(str(error))
    if engine.promise != MEMORY and engine.kind != FLOOR:
        with engine.opened(tmp_path) as opened:
            assert list(opened.pull(30)) == bodies


def test_engines_have_one_promise_each_and_say_why() -> None:
    """Names are unique; of the three promises each has exactly one, with a reason of one line."""
    assert len({engine.name for engine in engines.EVERY}) == len(engines.EVERY)
    assert all(engine.promise in PROMISES and engine.why and "\n" not in engine.why for engine in engines.EVERY)


def test_engines_are_chosen_by_name_and_kind() -> None:
    """In the order of the list; nothing chosen is everything; an unknown name is told."""
    assert [engine.name for engine in engines.choose(["deque", "qflow"])] == [
        "qflow-files",
        "qflow-segments",
        "qflow-files-durable",
        "qflow-segments-durable",
        "deque",
    ]
    assert engines.choose([]) == engines.EVERY
    with pytest.raises(KeyError, match="nonsense"):
        engines.choose(["deque", "nonsense"])


def failing(name: str, error: Exception, *, at_open: bool) -> Engine:
    """Make an engine that fails."""

    def fail(*_: object) -> Opened:
        raise error

    def open_it(path: Path) -> Opened:
        return fail() if at_open else Opened(put=fail, take=lambda: b"", close=lambda: None)

    return Engine(name=name, kind="peer", promise=KILL, why="", open=open_it, package="some-package")


def test_an_engine_that_fails_does_not_stop_the_others(setup: Setup) -> None:
    """Not installed, or failing in the middle: a line says so, and the rest is measured."""
    missing = failing("missing", ModuleNotFoundError("no module"), at_open=True)
    broken = failing("broken", RuntimeError("it fell over"), at_open=False)
    good = engines.by_name("deque")

    def side(opened: Opened) -> float:
        assert opened.put is not None
        opened.put(b"")
        return 1.0

    with contest.opened(setup, [missing, broken, good]) as entrants:
        interleave(1, 1, *(entrant.guarded(side) for entrant in entrants))
    assert [entrant.problem for entrant in entrants] == [
        "not measured: some-package is not installed",
        "not measured: RuntimeError: it fell over",
        "",
    ]


def test_without_a_peer_a_ratio_says_so() -> None:
    """The row is there, with the reason."""
    figure, problem = contest.over_best(Series("ours", "µs", [1]), [Series("sqlite-full", "µs", [1])], [])
    assert figure is None
    assert "no synced peer" in problem


def test_the_best_peer_is_the_fastest() -> None:
    """By time the smallest, by rate the largest; who is no peer does not count."""
    peers = [engine for engine in engines.EVERY if engine.name in {"huey", "persist-queue-sqlite"}]
    for unit, best in (("µs", "huey"), ("/s", "persist-queue-sqlite")):
        series = [Series("huey", unit, [2]), Series("persist-queue-sqlite", unit, [3]), Series("deque", unit, [1])]
        assert contest.best(series, peers).name == best


# What is missing ---------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_beforehand(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload that needs more than there is does not begin."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 0))
    with pytest.raises(CannotRun, match="GiB of disk"):
        setup.need_disk(2**30)
    with pytest.raises(CannotRun, match="GiB of disk"):
        list(stores.contract(setup))


def test_without_a_cgroup_the_reason_is_told(tmp_path: Path) -> None:
    """No hierarchy at all, and one without a memory controller."""
    with pytest.raises(CannotRun, match="there are none"), cgroup.limited(2**20, tmp_path):
        pass
    (tmp_path / "cgroup.controllers").touch()
    with pytest.raises(CannotRun, match="no memory cgroup"), cgroup.limited(2**20, tmp_path):
        pass


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that looks like cgroup version 2 with a memory controller, whose new groups have their files."""
    (tmp_path / "cgroup.controllers").write_text("memory")
    make = Path.mkdir

    def mkdir(path: Path, *arguments: object, **more: object) -> None:
        make(path, *arguments, **more)  # type: ignore[arg-type]
        (path / "memory.max").write_text("max")
        (path / "memory.current").write_text("4096")
        (path / "memory.events").write_text("oom 0\noom_kill 1\n")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(cgroup, "_own_group", lambda: "")
    return iter([tmp_path])


def test_version_2_is_limited_and_read(hierarchy: Iterator[Path]) -> None:
    """Limit, charge and kills are where version 2 has them."""
    with cgroup.limited(2**20, next(hierarchy)) as group:
        assert (group.path / "memory.max").read_text() == str(2**20)
        assert group.usage() == 4096
        assert group.killed()


def test_file_operations_count_once(tmp_path: Path) -> None:
    """Creating includes the first write; statistics renamed into place are not about messages."""
    files, path = CountingFiles(), str(tmp_path / "one")
    fd = files.open(path, 0o101, 0o600)
    files.pwrite(fd, b"new", 0)
    files.pwrite(fd, b"old", 0)
    files.close(fd)
    fd = files.open(path, 0, 0)
    assert files.read(fd, 3) == b"old"
    files.close(fd)
    files.write_replacing(str(tmp_path / "stats.json"), b"{}")
    files.rename(path, path + "~")
    files.unlink(path + "~")
    assert dict(files.counts) == {"create": 1, "overwrite": 1, "read": 1, "rename": 1, "unlink": 1}
