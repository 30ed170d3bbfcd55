"""Small shell scripts that start other programs, in a directory that only this user can write to."""

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

    It is in the temporary directory, where a cleaner may remove it: for scripts that are run at once.

    Raises:
        NotFound: the directory belongs to another user, or others may write to it.
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
"""Part of the package: in a temporary directory a cleaner could remove it during a session."""
_CHECK = "import sys, importlib.util as u; sys.exit(not (u.find_spec('pyspark') and u.find_spec('py4j')))"


def worker_python() -> str:
    """Return a program that runs this Python, given in `QFLOW_PYTHON`, with PySpark from where it is installed.

    Spark's workers import PySpark from a zip file, which compiles it anew: 0.4 s each time a streaming query
    starts. If PySpark is installed only there, or the program cannot be run, this Python itself is returned.

    Cost: 50 ms.
    """
    os.environ["QFLOW_PYTHON"] = sys.executable
    try:
        tried = subprocess.run([_WORKER, "-c", _CHECK], cwd="/", capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a file system mounted noexec, for example
        return sys.executable
    return sys.executable if tried.returncode else str(_WORKER)
