"""The process that the demo kills: a fast producer and a slow consumer on one durable queue.

Every 50 ms it prints what it did so far as a line of JSON. Run by `qflow demo` as
`python -P -m qflow.cli.demo.worker` with the fields of `Task` as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import attrs

import qflow
from qflow.cli.demo import evidence, flights

REPORT_S = 0.05
SLOWNESS = 3
"""While flights are put, the consumer takes one for so many confirmed."""
QUEUE = "flights"


@attrs.frozen(kw_only=True)
class Task:
    """What a worker is to do."""

    spool: str
    evidence: str
    capacity_bytes: int
    batch: int
    start: int
    """First flight to put."""
    end: int
    """One past the last flight to put."""
    linger: bool
    """When all flights are put, wait to be killed."""


class Worker:
    """Puts flights and takes them."""

    def __init__(self, task: Task, broker: qflow.Broker) -> None:
        self._task = task
        self._broker = broker
        self._queue = broker.declare_queue(QUEUE)
        self._turn = threading.Condition()
        self._first: int | None = None
        self._confirmed = 0
        self._taken = 0
        self._all_put = False
        self._ended = False

    def put_flights(self) -> None:
        """Put the flights in batches, as fast as they can be read."""
        task = self._task
        batch: list[bytes] = []
        for message in flights.messages(task.start, task.end):
            batch.append(message)
            if len(batch) == task.batch:
                self._put(batch)
                batch = []
        if batch:
            self._put(batch)
        with self._turn:
            self._all_put = not task.linger
            self._turn.notify()

    def _put(self, batch: list[bytes]) -> None:
        sequences = self._queue.put_many(batch)
        with self._turn:
            if self._first is None:
                self._first = sequences[0]
            self._confirmed += len(batch)
            self._turn.notify()

    def take_flights(self) -> None:
        """Take flights in batches: write down the evidence, wait for the turn, ack."""
        descriptor = os.open(self._task.evidence, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            while not self._ended:
                everything_put = self._all_put
                batch = self._queue.get_many(self._task.batch, timeout_s=REPORT_S)
                if batch:
                    evidence.append(descriptor, batch)
                    self._wait_for_turn(len(batch))
                    batch.ack()
                elif everything_put:
                    return
        finally:
            os.close(descriptor)

    def _wait_for_turn(self, count: int) -> None:
        with self._turn:
            self._taken += count
            self._turn.wait_for(lambda: self._all_put or self._ended or self._taken * SLOWNESS <= self._confirmed)

    def end(self) -> None:
        """Let the consumer go."""
        with self._turn:
            self._ended = True
            self._turn.notify()

    def progress(self) -> dict[str, Any]:
        """Return what happened so far and what memory holds now."""
        stats = self._broker.stats()
        return {
            "first_sequence": self._first,
            "confirmed": self._confirmed,
            "taken": self._taken,
            "backlog_messages": stats.messages,
            "backlog_bytes": stats.queues[QUEUE].bytes,
            "resident_bytes": stats.resident_bytes,
            "spilled_bytes": stats.spilled_bytes,
            **memory(),
        }


def memory() -> dict[str, int]:
    """Return RssAnon and RssFile of this process in bytes, from /proc where there is one.

    RssAnon is what the process itself needs. RssFile is what it has mapped of files, here the log: the system takes it
    back when it needs the memory.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {
        field: int(found.get(name, "0 kB").split()[0]) * 1024
        for field, name in (("rss_anon_bytes", "RssAnon"), ("rss_file_bytes", "RssFile"))
    }


def run(task: Task) -> None:
    """Do a task; print a line of JSON when the spool is open, every 50 ms, and at the end."""
    before = memory()["rss_anon_bytes"]
    with (
        ThreadPoolExecutor(2) as threads,
        qflow.open(task.spool, capacity_bytes=task.capacity_bytes) as broker,
    ):
        _print({**attrs.asdict(broker.recovery), "rss_anon_before_bytes": before})
        worker = Worker(task, broker)
        try:
            parts = [threads.submit(worker.put_flights), threads.submit(worker.take_flights)]
            left = set(parts)
            while left:
                _print(worker.progress())
                done, left = wait(left, timeout=REPORT_S)
                for part in done:
                    part.result()
            _print(worker.progress())
        finally:
            worker.end()


def _print(facts: dict[str, Any]) -> None:
    print(json.dumps({"time_s": time.monotonic(), **facts}), flush=True)


if __name__ == "__main__":
    run(Task(**json.loads(sys.argv[1])))
