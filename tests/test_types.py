"""What mypy sees: the types of the package, and what it takes and refuses of uses of its public surface."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [] if os.environ.get("TOX_ENV_NAME", "py") == "py" else ["tests/typed_uses.py"]
"""All that `pyproject.toml` names; with packages at chosen versions, whose types differ, the uses alone."""


def test_the_package_is_typed_and_wrong_uses_are_refused() -> None:
    """Each wrong use in `typed_uses.py` is an error where it says so, and nothing else is one. 20 s of mypy at first."""
    checked = subprocess.run([sys.executable, "-m", "mypy", *FILES], capture_output=True, text=True, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr
