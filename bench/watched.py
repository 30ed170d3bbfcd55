"""A program that is looked at: `python -m bench.watched SPOOL QUEUES durable|transient` does what lines on stdin say.

It owns the spool, with so many queues. Each line is a name of `Tasks` and numbers; the answer is a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from itertools import cycle
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import qflow
import qflow.metrics
import qflow.web
from bench.measure import percentile
from bench.talking import READY
from qflow.serving.loops import loop_factory

BODY = bytes(100)
EACH_S = 1.0
PACE_S = 0.001
HOST = "127.0.0.1"


def named(queues: int) -> list[str]:
    """Return the names of so many queues."""
    return [f"queue-{number:04}" for number in range(queues)]


class Tasks:
    """What the program does."""

    def __init__(self, broker: qflow.Broker, queues: list[qflow.Queue]) -> None:
        self._broker = broker
        self._queues = queues
        self._changing = 0
        self._ends = threading.Event()
        self._changes = threading.Thread(target=self._change)
        self._changes.start()

    def end(self) -> None:
        """Leave the queues alone."""
        self._ends.set()
        self._changes.join()

    def _change(self) -> None:
        while not self._ends.wait(EACH_S):
            for queue in self._queues[: self._changing]:
                queue.put(BODY)
                queue.get(0).ack()

    def change(self, queues: int) -> int:
        """From now on, have a message come and one go in so many queues, each second."""
        self._changing = queues
        return queues

    def puts(self, seconds: int, queues: int) -> dict[str, float]:
        """Put a message each millisecond, into so many queues in turns; return µs of the calls, and puts a second."""
        taken = []
        due = begun = perf_counter()
        end = begun + seconds
        for queue in cycle(self._queues[:queues]):
            due += PACE_S
            sleep(max(0.0, due - perf_counter()))
            start = perf_counter()
            queue.put(BODY)
            taken.append((perf_counter() - start) * 1e6)
            if start > end:
                break
        rate = len(taken) / (perf_counter() - begun)
        for queue in self._queues:
            queue.purge()
        taken.sort()
        return {
            "median": percentile(taken, 0.5),
            "p99": percentile(taken, 0.99),
            "slowest": taken[-1],
            "rate": rate,
        }

    def metrics(self) -> int:
        """Answer Prometheus at the port that is returned, as a program with an exporter of its own does."""
        import prometheus_client

        registry = prometheus_client.CollectorRegistry()
        registry.register(qflow.metrics.collector(self._broker))
        server, _ = prometheus_client.start_http_server(0, HOST, registry)
        return server.server_port

    def page(self) -> int:
        """Show the page to browsers at the port that is returned."""
        loop = (loop_factory() or asyncio.new_event_loop)()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._serve(), loop).result().port

    async def _serve(self) -> qflow.web.Server:
        return await qflow.web.serve(self._broker, host=HOST, port=0)


def main(spool: Path, queues: int, kind: str) -> None:
    with qflow.open(spool) as broker:
        tasks: Any = Tasks(broker, broker.declare_queues(named(queues), durable=kind == "durable"))
        print(READY, flush=True)
        try:
            for line in sys.stdin:
                name, *numbers = line.split()
                print(json.dumps(getattr(tasks, name)(*map(int, numbers))), flush=True)
        finally:
            tasks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
