"""A process that serves is not held up by Python's garbage collector while clients hold a great many messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_what_is_held_is_looked_at_rarely_and_not_in_the_end(tmp_path: Path) -> None:
    """All of it was looked at again and again as it came to be held, and once more before the process ended."""
    with subprocess.Popen(
        [sys.executable, str(HERE / "fake_serve.py"), "serve", "spool", "--amqp", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"FAKE_HOLDS": "300000"},
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        said += process.stdout.read().splitlines()
    assert said[0] == "looked at all 0 times"
    assert said[2:] == ["drain 10", "closed", "0 of all to look at"]
    assert process.returncode == 128 + signal.SIGTERM
