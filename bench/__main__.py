"""`python -m bench`: measure, print ratios first, rankings and details after; or compare two reports or commits.

Exit codes: 0 when it ran to its end, whatever it found; 2 for wrong arguments; 130 after Ctrl-C, with what there is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from bench import compare, engines, machine, plot, report
from bench.errors import CannotRun
from bench.measure import Row, Setup, Workload
from bench.themes import THEMES


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    try:
        chosen = _choose(options.workload)
        contestants = engines.choose(options.engines)
    except KeyError as error:
        parser.error(f"there is no workload, theme, engine or kind {error}; `--help` lists them")
    directory = Path(options.directory)
    if not directory.is_dir():
        parser.error(f"there is no directory {options.directory!r}")
    if options.output and not Path(options.output).absolute().parent.is_dir():
        parser.error(f"there is no directory for {options.output!r}")
    if options.compare:
        return _compare(parser, options, [workload.name for workload in chosen], directory)
    facts = machine.facts(directory, contestants)
    if options.quick:
        facts["sizes"] = "--quick: small, for tests; the figures mean little"
    results: report.Results = []
    remarks: list[str] = []

    def written() -> str:
        return (report.as_json if options.json else report.text)(facts, results, remarks)

    with tempfile.TemporaryDirectory(dir=directory, prefix=".bench-") as scratch:
        setup = Setup(directory=Path(scratch), quick=options.quick, engines=contestants, kept_rounds=options.rounds)
        start = perf_counter()
        whole = True
        for workload in chosen:
            whole = _run(workload, setup, results)
            facts["duration"] = f"{perf_counter() - start:.0f} s"
            if not whole:
                remarks.append(f"INTERRUPTED: {len(results)} of {len(chosen)} workloads were begun")
                break
            _save(written(), options.output)
    if setup.curves and options.output:
        remarks += _draw(setup, Path(options.output).with_suffix(".png"))
    sys.stdout.write(written())
    _save(written(), options.output)
    return 0 if whole else 130


def _parser() -> argparse.ArgumentParser:
    workloads = [f"  {one.name:<22} {one.meaning}" for some in THEMES.values() for one in some]
    listing = [f"  {one.name:<26} {one.kind:<6} {one.promise}: {one.why}" for one in engines.EVERY]
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure qflow against its peers and against the raw floor, in one run.",
        epilog="\n".join(
            [
                f"themes: {', '.join(THEMES)}",
                "",
                "workloads:",
                *workloads,
                "",
                "engines, with kind and promise:",
                *listing,
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="*", help="a workload or a theme (default: all)")
    parser.add_argument(
        "--engines", nargs="+", default=[], metavar="NAME", help="engines or kinds of engines (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, for tests")
    parser.add_argument(
        "--rounds", type=_rounds, metavar="N", help="rounds to keep (default: as many as a row asks for)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="write the report there, too, and a picture beside it")
    parser.add_argument("--directory", default=".", help="where to work (default: the current directory)")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="two reports written with --json, or two git commits, whose workloads are then run in turns",
    )
    return parser


def _rounds(text: str) -> int:
    """Return a number of rounds, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an int of at least 1, got {text!r}")
    return int(text)


def _choose(names: list[str]) -> list[Workload]:
    """Return the workloads of these names or themes, in the order of the list; KeyError names one that is not there."""
    every = [workload for workloads in THEMES.values() for workload in workloads]
    known = {*THEMES, *(workload.name for workload in every)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KeyError(unknown[0])
    named = {workload.name for name in names for workload in THEMES.get(name, [])} | set(names)
    return [workload for workload in every if not names or workload.name in named]


def _run(workload: Workload, setup: Setup, results: report.Results) -> bool:
    """Run a workload and add what it found, row by row; return False if it was interrupted."""
    start = perf_counter()
    rows: list[Row] = []
    results.append((workload, rows))
    try:
        print(f"{workload.name} ...", end=" ", file=sys.stderr, flush=True)
        for row in workload.run(setup):
            rows.append(row)
    except KeyboardInterrupt:
        rows.append(Row(name=workload.name, problem="interrupted"))
        return False
    except Exception as error:
        kind = "" if isinstance(error, CannotRun) else f"{type(error).__name__}: "
        reason = str(error).replace(str(setup.directory), "<directory>")
        rows.append(Row(name=workload.name, problem=f"not measured: {kind}{reason}"))
    print(f"{perf_counter() - start:.0f} s", file=sys.stderr)
    return True


def _compare(parser: argparse.ArgumentParser, options: argparse.Namespace, chosen: list[str], directory: Path) -> int:
    old, new = options.compare
    try:
        if compare.are_reports(old, new):
            found = compare.reports(Path(old), Path(new))
        else:
            found = compare.commits(old, new, chosen, options.engines, directory, quick=options.quick)
    except CannotRun as error:
        parser.error(str(error))
    text = compare.as_json(found) if options.json else compare.text(found)
    sys.stdout.write(text)
    _save(text, options.output)
    return 0 if found.whole else 130


def _save(text: str, output: str | None) -> None:
    """Write what there is, whole or not, so that it outlives this process."""
    if output:
        Path(output).write_text(text, encoding="utf-8")


def _draw(setup: Setup, path: Path) -> list[str]:
    try:
        plot.draw(setup.curves, path)
    except ImportError as error:
        return [f"no picture: {error}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
