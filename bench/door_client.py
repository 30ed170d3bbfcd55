"""A process that uses a spool through its door: `python -m bench.door_client SPOOL` does what lines on stdin say.

Each line is a name of `Tasks` and numbers; its answer is the seconds that it took.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from time import perf_counter

import qflow

BODY = bytes(100)
BATCH = 1000
QUEUE = "through"
"""What the clients use; the owner's own has another name."""


class Tasks:
    """What is measured; each returns seconds."""

    def __init__(self, remote: qflow.RemoteBroker) -> None:
        self._queue = remote.declare_queue(QUEUE)

    def put_many(self, batches: int) -> float:
        bodies = [BODY] * BATCH
        begun = perf_counter()
        for _ in range(batches):
            self._queue.put_many(bodies)
        return perf_counter() - begun

    def put(self, messages: int) -> float:
        begun = perf_counter()
        for _ in range(messages):
            self._queue.put(BODY)
        return perf_counter() - begun

    def put_in_threads(self, threads: int, each: int) -> float:
        return in_threads(threads, lambda: self.put(each))

    def get(self, messages: int) -> float:
        begun = perf_counter()
        while messages > 0:
            batch = self._queue.get_many(BATCH)
            messages -= len(batch.bodies)
            batch.ack(wait=messages <= 0)
        return perf_counter() - begun


def in_threads(threads: int, work: object) -> float:
    """Return the seconds from the moment all threads stand ready until the last one is done."""
    assert callable(work)
    barrier = threading.Barrier(threads + 1)

    def run() -> None:
        barrier.wait()
        work()

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    begun = perf_counter()
    for worker in workers:
        worker.join()
    return perf_counter() - begun


def main(spool: Path) -> None:
    with qflow.connect(spool, timeout_s=60) as remote:
        tasks = Tasks(remote)
        print("ready", flush=True)
        for line in sys.stdin:
            name, *numbers = line.split()
            print(getattr(tasks, name)(*map(int, numbers)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
