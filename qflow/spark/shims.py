"""Small programs that start another one in a better way, in a directory for this user alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from qflow.errors import NotFound


def write_shim(name: str, script: str) -> Path:
    """Write a shell script to `<a directory>/bin/<name>`, and return that directory: each script has its own.

    It lies in the temporary directory, from which a cleaner may remove it: for what is run at once.

    Raises:
        NotFound: the place for it belongs to somebody else, or others may write there.
    """
    mine = Path(tempfile.gettempdir()) / f"qflow-{os.getuid()}"
    mine.mkdir(mode=0o700, exist_ok=True)
    found = mine.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise NotFound(f"others may write to {mine}: remove it, or set TMPDIR to a directory of your own")
    home = mine / xxh3_64_hexdigest(script.encode())
    (home / "bin").mkdir(parents=True, exist_ok=True)
    staged = home / "bin" / f"{name}.{os.getpid()}"
    staged.write_text(script)
    staged.chmod(0o755)
    staged.replace(home / "bin" / name)
    return home


_WORKER = Path(__file__).with_name("worker-python")
"""Lies with the package, for as long as that does: a cleaner may empty any other place while a session lives."""
_CHECK = "import sys, importlib.util as u; sys.exit(not (u.find_spec('pyspark') and u.find_spec('py4j')))"


def worker_python() -> str:
    """Return a program that is this Python, by `QFLOW_PYTHON`, and takes PySpark from where it is installed.

    Spark has its workers import PySpark from a zip file, which compiles it anew: 0.4 s each time a streaming query
    starts. Where a worker would not find it but there, or the program cannot be run, this Python itself is returned.

    Cost: 50 ms.
    """
    os.environ["QFLOW_PYTHON"] = sys.executable
    try:
        tried = subprocess.run([_WORKER, "-c", _CHECK], cwd="/", capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a file system where nothing may be run
        return sys.executable
    return sys.executable if tried.returncode else str(_WORKER)
