"""What pyright says of the surface: `tox -e surface`; fails where a type that users meet is not told.

The modules are all public for `pyright --verifytypes`, for none has an underscore. Here only what users get is looked
at: what the modules for users export, with the names of each object that do not begin with an underscore.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import qflow
import qflow.aio
import qflow.bridge
import qflow.compat
import qflow.doctor
import qflow.inspect
import qflow.metrics
import qflow.workers

FOR_USERS = (
    qflow,
    qflow.aio,
    qflow.bridge,
    qflow.compat,
    qflow.doctor,
    qflow.inspect,
    qflow.metrics,
    qflow.workers,
)
OF_PARTS = {"qflow.broker.Broker.engine"}
"""Not for users; where one is a part of something else, that is not their type."""


def surface() -> set[str]:
    """Return the dotted names of what users get, where it is defined."""
    found = set()
    for module in FOR_USERS:
        for name in module.__all__:
            thing = getattr(module, name)
            if not hasattr(thing, "__qualname__"):  # a constant, or the name of a type that has no class of its own
                found.add(f"{module.__name__}.{name}")
                continue
            own = [one for one in getattr(thing, "__mro__", [thing]) if one.__module__.startswith("qflow")]
            found |= {f"{one.__module__}.{one.__qualname__}" for one in own if not one.__name__.startswith("_")}
    return found


def main() -> int:
    """Print what is not told; return 1 if there is something."""
    command = [sys.executable, "-m", "pyright", "--verifytypes", "qflow", "--ignoreexternal", "--outputjson"]
    said = subprocess.run(command, capture_output=True, text=True)
    symbols: list[dict[str, Any]] = json.loads(said.stdout)["typeCompleteness"]["symbols"]
    wanted = surface()
    known = {symbol["name"]: symbol for symbol in symbols}
    missing = {name for name in wanted if name not in known}
    untold = []
    for name, symbol in known.items():
        of = name if name in wanted else name.rpartition(".")[0]
        if of in wanted and name not in OF_PARTS:
            messages = [one["message"] for one in symbol["diagnostics"]]
            own = [text for text in messages if "partially unknown" not in text and "docstring" not in text]
            untold += [f"{name}: {message}" for message in own]
    print(*untold, *(f"{name}: pyright does not know it" for name in sorted(missing)), sep="\n")
    print(f"{len(wanted)} objects and functions, {len(untold)} names whose type is not told")
    return bool(untold or missing)


if __name__ == "__main__":
    sys.exit(main())
