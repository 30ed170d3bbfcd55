"""Has tox look at the Pythons that pyenv holds; its shims answer for those only that are active where tox runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tox.config.sets import CoreConfigSet
from tox.plugin import impl
from tox.session.state import State


@impl
def tox_add_core_config(core_conf: CoreConfigSet, state: State) -> None:
    """Add them to what `--discover` names, the newest first. Free-threaded builds are not among them."""
    held = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    versions = [path for path in held.glob("3.*/bin/python3") if re.fullmatch(r"[\d.]+", path.parts[-3])]
    versions.sort(key=lambda path: [int(part) for part in path.parts[-3].split(".")], reverse=True)
    if hasattr(state.conf.options, "discover"):  # commands that make no environment have no such option
        state.conf.options.discover += map(str, versions)
