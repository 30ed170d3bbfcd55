"""What the figures were measured on, without naming the host or any path."""

from __future__ import annotations

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

import qflow
from qflow.storage.files import filesystem_type


def facts(directory: Path) -> dict[str, str]:
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
        "qflow": qflow.__version__,
        "load": f"{os.getloadavg()[0]:.1f} at the start",
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
