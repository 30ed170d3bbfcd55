"""The door of a spool: other processes against the process that owns it, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import qflow
from bench import talking
from bench.door_client import BATCH, BODY, QUEUE, in_threads
from bench.measure import Row, Setup, Workload, at_least, at_most, by_side, interleave, micros, rates, ratio
from bench.timing import timed

OWN = "beside the owner"
THROUGH = "through the door"
CLIENT = "bench.door_client"
PROCESSES = 8
CALLERS = 64
Ask = Callable[[str], float]


def put_many(setup: Setup) -> Iterator[Row]:
    """Batches of a thousand, each confirmed before the next one."""
    batches = setup.size(20, 2)
    with _served(setup) as (broker, ask):
        own = broker.declare_queue("own")
        bodies = [BODY] * BATCH

        @timed
        def beside() -> None:
            for _ in range(batches):
                own.put_many(bodies)

        through = _emptied(broker.queue(QUEUE), partial(ask, f"put_many {batches}"))
        measured = interleave(setup.rounds, setup.size(5, 1), _emptied(own, beside), through)
    figures = by_side(rates, (OWN, THROUGH), batches * BATCH, measured)
    name = "door: put_many, 1,000 x 100 B, confirmed: rate over the owner's"
    yield Row(name=name, figure=ratio(figures[1], figures[0]), bound=at_least(0.8), details=figures)


def put(setup: Setup) -> Iterator[Row]:
    """One message after the other, each confirmed before the next one."""
    number = setup.size(200, 20)
    with _served(setup) as (broker, ask):
        own = broker.declare_queue("own")

        @timed
        def beside() -> None:
            for _ in range(number):
                own.put(BODY)

        measured = interleave(setup.rounds, setup.size(5, 1), beside, partial(ask, f"put {number}"))
    figures = by_side(micros, (OWN, THROUGH), number, measured)
    name = "door: put one by one, 100 B, confirmed: time over the owner's"
    yield Row(name=name, figure=ratio(figures[1], figures[0]), bound=at_most(1.5), details=figures)


def together(setup: Setup) -> Iterator[Row]:
    """As many callers on both sides: threads of the owner, and threads of eight processes."""
    processes, callers = setup.size(PROCESSES, 2), setup.size(CALLERS, 4)
    each = setup.size(100, 5)
    with setup.scratch() as path, ExitStack() as stack:
        broker = stack.enter_context(qflow.open(path / "spool"))
        own = broker.declare_queue("own")
        clients = [stack.enter_context(talking.started(CLIENT, path / "spool")) for _ in range(processes)]

        def beside() -> float:
            return in_threads(callers, lambda: [own.put(BODY) for _ in range(each)])

        @timed
        def through() -> None:
            for client in clients:
                talking.tell(client, f"put_in_threads {callers // processes} {each}")
            for client in clients:
                talking.answer(client)

        measured = interleave(setup.few_rounds, setup.size(3, 1), beside, through)
    figures = by_side(rates, (OWN, THROUGH), callers * each, measured)
    name = (
        f"door: put, 100 B, {processes} processes of {callers // processes} threads: rate over {callers} of the owner"
    )
    yield Row(name=name, figure=ratio(figures[1], figures[0]), bound=at_least(0.7), details=figures)


def get(setup: Setup) -> Iterator[Row]:
    """What waits is fetched and acked, a thousand at a time."""
    number = setup.size(100_000, 2_000)
    with _served(setup) as (broker, ask):
        queue = broker.declare_queue(QUEUE)

        def turn() -> float:
            for _ in range(number // BATCH):
                queue.put_many([BODY] * BATCH)
            return ask(f"get {number}")

        (seconds,) = interleave(setup.few_rounds, setup.size(3, 1), turn)
    figure = rates(THROUGH, number, seconds)
    yield Row(name="door: get_many(1000) and ack, 100 B", figure=figure, bound=at_least(1e6, "/s"))


def _emptied(queue: qflow.Queue, turn: Callable[[], float]) -> Callable[[], float]:
    """Return a turn after which the queue is empty again."""

    def run() -> float:
        seconds = turn()
        queue.purge()
        return seconds

    return run


@contextmanager
def _served(setup: Setup) -> Iterator[tuple[qflow.Broker, Ask]]:
    """A spool that this process owns, and a client of it, which is asked for seconds."""
    with (
        setup.scratch() as path,
        qflow.open(path / "spool") as broker,
        talking.started(CLIENT, path / "spool") as client,
    ):
        yield broker, partial(talking.ask, client)


WORKLOADS = [
    Workload("door-put-many", "batches of a thousand through the door, and beside the owner", put_many),
    Workload("door-put", "one message after the other through the door, and beside the owner", put),
    Workload("door-together", "eight processes of eight threads, and 64 threads of the owner", together),
    Workload("door-get", "messages fetched and acked through the door, a thousand at a time", get),
]
