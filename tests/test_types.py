"""What type checkers see of the public surface."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_type_checkers_take_what_is_right_and_refuse_what_is_wrong() -> None:
    """Each wrong use in `typed_uses.py` is an error where it says so, and nothing else is one: 4 s of mypy."""
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={os.devnull}", "tests/typed_uses.py"]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr
