"""`qflow serve` in a process of its own, with doors for MQTT."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOORS = ("amqp", "amqps", "mqtt", "mqtts", "ws", "wss", "metrics", "http", "https")
Ports = dict[str, list[int]]


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Ports]]:
    """Serve `spool` in a directory until the block ends, which kills it; give the ports of its doors by their names."""
    command = [sys.executable, "-m", "qflow", "serve", "spool", *options]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ports: Ports = {}
            for _ in [option for option in options if option.removeprefix("--") in DOORS]:
                name, _, address = process.stdout.readline().strip().partition(" on 127.0.0.1:")
                assert name, process.communicate()
                ports.setdefault(name, []).append(int(address))
            yield process, ports
        finally:
            process.kill()
            process.communicate()
