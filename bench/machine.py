"""What the figures were measured on, without naming the host or any path."""

from __future__ import annotations

import os
import platform
import sqlite3
import subprocess
from collections.abc import Iterable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import qflow
from bench.engines.base import Engine
from qflow.storage.files import filesystem_type


def facts(directory: Path, engines: Iterable[Engine]) -> dict[str, str]:
    """Return the facts that matter, in order."""
    return {
        "date": date.today().isoformat(),
        "CPU": _cpu(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "file system": filesystem_type(directory) or "unknown",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "lmdb": version("lmdb"),
        "SQLite": sqlite3.sqlite_version,
        "qflow": qflow.__version__ + _commit(),
        "peers": _versions({engine.package for engine in engines if engine.package}),
        "load": f"{os.getloadavg()[0]:.1f} at the start",
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    """Return the commit of the sources, if they are a git checkout."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" at {found.stdout.strip()}"


def _versions(packages: Iterable[str]) -> str:
    found = []
    for package in sorted(packages):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found) or "none"
