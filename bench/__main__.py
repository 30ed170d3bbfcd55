"""`python -m bench`: measure, print ratios first, details after.

Exit codes: 0 when it ran to its end, whatever it found; 2 for wrong arguments; 130 after Ctrl-C, with what there is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import qflow
from bench import durable, hot_path, machine, memory, plot, report, restart, spill
from bench.measure import CannotRun, Row, Setup, Workload

THEMES = {
    "hot_path": hot_path.WORKLOADS,
    "durable": durable.WORKLOADS,
    "spill": spill.WORKLOADS,
    "memory": memory.WORKLOADS,
    "restart": restart.WORKLOADS,
}


def main() -> int:
    options = _parser().parse_args()
    chosen = _choose(options.workload)
    directory = Path(options.directory)
    facts = machine.facts(directory)
    if options.quick:
        facts["sizes"] = "--quick: small, for tests; the figures mean little"
    remarks: list[str] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix=".bench-") as scratch:
        setup = Setup(directory=Path(scratch), quick=options.quick)
        start = perf_counter()
        results, whole = _run(chosen, setup)
        facts["duration"] = f"{perf_counter() - start:.0f} s"
    if not whole:
        remarks.append(f"INTERRUPTED: {len(results)} of {len(chosen)} workloads were begun")
    if setup.curves and options.output:
        remarks += _draw(setup, Path(options.output).with_suffix(".png"))
    written = (report.as_json if options.json else report.text)(facts, results, remarks)
    sys.stdout.write(written)
    if options.output:
        Path(options.output).write_text(written, encoding="utf-8")
    return 0 if whole else 130


def _parser() -> argparse.ArgumentParser:
    listing = [f"  {one.name:<18} {one.meaning}" for workloads in THEMES.values() for one in workloads]
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure qflow against its peers and against the raw floor, in one run.",
        epilog=f"themes: {', '.join(THEMES)}\n\nworkloads:\n" + "\n".join(listing),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="*", help="a workload or a theme (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, for tests")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="write the report there, too, and a picture beside it")
    parser.add_argument("--directory", default=".", help="where to work (default: the current directory)")
    return parser


def _choose(names: list[str]) -> list[Workload]:
    every = [workload for workloads in THEMES.values() for workload in workloads]
    known = {*THEMES, *(workload.name for workload in every)}
    unknown = [name for name in names if name not in known]
    if unknown:
        _parser().error(f"there is no workload or theme {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    named = {workload.name for name in names for workload in THEMES.get(name, [])} | set(names)
    return [workload for workload in every if not names or workload.name in named]


def _run(chosen: Iterable[Workload], setup: Setup) -> tuple[report.Results, bool]:
    """Run workloads; return what they found, and whether all of them came to an end."""
    results: report.Results = []
    for workload in chosen:
        print(f"{workload.name} ...", file=sys.stderr, flush=True)
        rows: list[Row] = []
        results.append((workload, rows))
        try:
            for row in workload.run(setup):
                rows.append(row)
        except KeyboardInterrupt:
            rows.append(Row(name=workload.name, problem="interrupted"))
            return results, False
        except (CannotRun, OSError, ImportError, qflow.QflowError) as error:
            reason = str(error).replace(str(setup.directory), "<directory>")
            rows.append(Row(name=workload.name, problem=f"not measured: {reason}"))
    return results, True


def _draw(setup: Setup, path: Path) -> list[str]:
    try:
        plot.draw(setup.curves, path)
    except ImportError as error:
        return [f"no picture: {error}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
