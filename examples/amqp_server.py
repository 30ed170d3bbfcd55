"""A server of AMQP for the examples: `qflow serve` in a process of its own."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def serving(spool: str) -> Iterator[str]:
    """Serve a spool until the block ends; give the URL for clients. For the URL of a broker that runs, just that."""
    if spool.startswith("amqp://"):
        yield spool
        return
    command = [sys.executable, "-m", "qflow", "serve", spool, "--amqp", "127.0.0.1:0", "--grace", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = server.stdout.readline().split()  # amqp on 127.0.0.1:40123
        if ready[:2] != ["amqp", "on"]:
            raise SystemExit(f"qflow serve ended with {server.wait()}")
        try:
            yield f"amqp://guest:guest@{ready[2]}"
        finally:
            server.send_signal(signal.SIGTERM)  # clients have a second to finish; it ends with 143
            server.wait()
