"""Worker processes: how much faster several of them do what takes a processor, than one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import sleep, thread_time

import qflow
from bench.measure import Row, Setup, Workload, at_least, interleave, rates, ratio
from bench.timing import timed
from qflow.workers import supervisor
from qflow.workers.job import Reach

WORK_S = 0.005
PROCESSES = 8
LOOK_S = 0.002


def spin(_: qflow.Delivery) -> None:
    """Take so much time of a processor."""
    end = thread_time() + WORK_S
    while thread_time() < end:
        pass


def do_nothing(_: qflow.Delivery) -> None:
    """What is left is the way of a message."""


def of_five_milliseconds(setup: Setup) -> Iterator[Row]:
    """Eight processes and one, in turns."""
    number, several = setup.size(600, 20), setup.size(PROCESSES, 2)
    with setup.scratch() as path, ExitStack() as stack:
        sides = [
            stack.enter_context(_crew(path / str(processes), "spin", processes, number)) for processes in (several, 1)
        ]
        many, one = interleave(setup.few_rounds, 1, *sides)
    figures = rates(f"{several} processes", number, many), rates("1 process", number, one)
    processors = len(os.sched_getaffinity(0))
    yield Row(
        name=f"workers: {several} processes over one, 5 ms of processor time a message, {processors} processors",
        figure=ratio(*figures),
        bound=at_least(1.8),
        details=list(figures),
        notes=["from the put to the last ack; this process owns the spool, and the others have started"],
    )


def of_nothing(setup: Setup) -> Iterator[Row]:
    """What a message costs on its way through a process."""
    number = setup.size(5_000, 50)
    with setup.scratch() as path, _crew(path / "one", "do_nothing", 1, number) as turn:
        (seconds,) = interleave(setup.few_rounds, 1, turn)
    yield Row(
        name="workers: messages through one process, a function that does nothing",
        figure=rates("1 process", number, seconds),
    )


@contextmanager
def _crew(spool: Path, function: str, processes: int, number: int) -> Iterator[Callable[[], float]]:
    """Have processes work; the function puts so many messages, and returns the seconds until all are acked."""
    stop, ready = threading.Event(), threading.Event()
    with qflow.open(spool) as broker:
        queue = broker.declare_queue("jobs")
        job = supervisor.make_job(
            spool, "jobs", f"{__name__}:{function}", processes, None, 1.0, reach=Reach(), sys_path=sys.path
        )
        run = partial(supervisor.supervise, job, {}, tell=_say, ready=lambda _: ready.set(), stop=stop)
        thread = threading.Thread(target=run)
        thread.start()

        @timed
        def turn() -> None:
            queue.put_many([b"%d" % place for place in range(number)])
            while len(queue):
                sleep(LOOK_S)

        try:
            ready.wait()
            yield turn
        finally:
            stop.set()
            thread.join()


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)


WORKLOADS = [
    Workload(
        "workers", "a function that takes 5 ms of a processor, in eight processes and in one", of_five_milliseconds
    ),
    Workload("workers-idle", "a function that does nothing, in one process", of_nothing),
]
