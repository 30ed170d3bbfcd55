"""Threads share one heap of the allocator: what one frees, the next one uses, whoever that is."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_stats"), reason="it is not that of glibc")

THREADS = """
import ctypes, sys, threading
import qflow

with qflow.open(sys.argv[1], capacity_bytes="1MiB") as broker:
    queue = broker.declare_queue("jobs")
    begun = threading.Barrier(4)

    def work():
        begun.wait()  # none ends before all have begun, so none takes over the heap of another
        queue.put(bytes(400_000))
        queue.get().ack()
        begun.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
ctypes.CDLL(None).malloc_stats()
"""
TASKS = """
import asyncio, ctypes, sys
import qflow.aio

async def work(queue):
    await queue.put(bytes(400_000))
    await (await queue.get()).ack()

async def main():
    async with qflow.aio.open(sys.argv[1], capacity_bytes="1MiB") as broker:
        queue = await broker.declare_queue("jobs")
        await asyncio.gather(*(work(queue) for _ in range(10)))

asyncio.run(main())
ctypes.CDLL(None).malloc_stats()
"""
SERVE = """
import atexit, ctypes, sys
from qflow.cli.main import main

atexit.register(ctypes.CDLL(None).malloc_stats)
sys.argv = ["qflow", "serve", sys.argv[1], "--amqp", "127.0.0.1:0"]
main()
"""


def count_heaps(program: str, spool: Path, **told: str) -> int:
    """Return how many heaps a program has at its end, in an environment that says nothing else of the allocator."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
    }
    command = [sys.executable, "-c", program, str(spool)]
    with subprocess.Popen(command, env=environment | told, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        if program is SERVE:
            assert process.stdout.readline().startswith(b"amqp on ")
            process.terminate()
        _, said = process.communicate(timeout=60)
    lines = said.decode().splitlines()
    assert any(line.startswith("Total") for line in lines), said
    return sum(line.startswith("Arena ") for line in lines)


@pytest.mark.parametrize("program", [THREADS, TASKS, SERVE], ids=["threads", "tasks", "serve"])
def test_all_threads_share_one_heap(program: str, tmp_path: Path) -> None:
    assert count_heaps(program, tmp_path / "spool") == 1


@pytest.mark.parametrize(
    "told", [{"MALLOC_ARENA_MAX": "3"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=3"}], ids=["variable", "tunable"]
)
def test_what_the_environment_says_of_heaps_holds(told: dict[str, str], tmp_path: Path) -> None:
    assert count_heaps(THREADS, tmp_path / "spool", **told) == 3
