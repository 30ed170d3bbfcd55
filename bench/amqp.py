"""AMQP 0-9-1: `qflow serve` against RabbitMQ, with the same code of the same clients, in turns.

Messages are persistent, in a durable queue, 1 KiB each. A confirm of qflow's is a sync; RabbitMQ documents its as sent
once the message was persisted to disk. The client runs in the process of the bench and takes most of a core, the broker
has the other one. What it takes of that for a message, and a bare write and sync of one, are told with each rate: about
as fast a broker could be that took no time itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple

from bench import amqp_clients, brokers
from bench.amqp_brokers import RABBITMQ, starters
from bench.amqp_clients import AioPika, Pika, control, waiting
from bench.brokers import QFLOW, Broker
from bench.errors import CannotRun
from bench.measure import Bound, Row, Series, Setup, Workload, at_least, at_most, interleave, rates, ratio
from bench.restart import drop_caches
from bench.timing import timed

MIB = 2**20
WINDOW = amqp_clients.WINDOW
Client = AioPika | Pika
Connect = Callable[[Broker, ExitStack], Client]
Turn = Callable[[Client, int], float]
SYNCS = 50


class Found(NamedTuple):
    """What was measured in turns."""

    rates: dict[str, Series]
    """Of the brokers."""
    sync: Series
    clients: list[Series]
    """What the client took in the turns of each broker: how that sends has a part in it."""


def publish(setup: Setup) -> Iterator[Row]:
    what = f"AMQP publish, confirms in windows of {amqp_clients.WINDOW}"
    yield from _in_turns(
        setup, what, at_least(1.3), setup.size(5_000, 500), lambda client, some: client.publish(some, WINDOW)
    )


def consume(setup: Setup) -> Iterator[Row]:
    what = f"AMQP consume, an ack for {amqp_clients.ACK_EVERY}"
    yield from _in_turns(
        setup, what, at_least(0.9), setup.size(10_000, 500), lambda client, some: client.consume(some), filled=True
    )


def one_by_one(setup: Setup) -> Iterator[Row]:
    what = "AMQP publish, confirmed one by one"
    yield from _in_turns(setup, what, at_least(2), setup.size(200, 20), lambda client, some: client.publish(some, 1))


def at_once(setup: Setup) -> Iterator[Row]:
    times, connections = setup.size(40, 2), setup.size(amqp_clients.CONNECTIONS, 5)

    def turn(client: Client, _: int) -> float:
        assert isinstance(client, AioPika)
        return client.publish_at_once(times)

    with brokers.running(setup, *starters(setup)) as (there, problem):
        found = _measure(
            setup, there, lambda broker, stack: AioPika(broker, stack, connections), times * connections, turn
        )
        what = f"AMQP publish, {connections} connections at once, one message each, confirmed, aio-pika"
        yield _row(what, found, at_least(1.5), problem)


def _in_turns(setup: Setup, what: str, bound: Bound, number: int, turn: Turn, *, filled: bool = False) -> Iterator[Row]:
    """Let the brokers take turns with so many messages, by each of the clients."""
    with brokers.running(setup, *starters(setup)) as (there, problem):
        for kind in (AioPika, Pika):
            found = _measure(setup, there, kind, number, turn, filled=filled)
            yield _row(f"{what}, {kind.name}", found, bound, problem)


def _measure(
    setup: Setup, there: dict[str, Broker], connect: Connect, number: int, turn: Turn, *, filled: bool = False
) -> Found:
    """Return what was measured; the queue is filled before, or emptied after a turn, which is not timed."""
    worked: dict[str, list[float]] = {broker: [] for broker in there}
    with setup.scratch() as directory, ExitStack() as stack:
        sides = [_syncs(directory, stack)]
        for name, broker in there.items():
            channel = stack.enter_context(control(broker))
            filler = Pika(broker, stack) if filled else None
            sides.append(_side(connect(broker, stack), channel, filler, number, turn, worked[name]))
        synced, *seconds = interleave(setup.few_rounds, setup.size(3, 1), *sides)
    return Found(
        {broker: rates(broker, number, taken) for broker, taken in zip(there, seconds, strict=True)},
        Series("a bare write and sync of one message", "µs", [taken / SYNCS * 1e6 for taken in synced]),
        [
            Series(f"the client, its processor time for a message of {broker}", "µs", [median(took) / number * 1e6])
            for broker, took in worked.items()
        ],
    )


def _syncs(directory: Path, stack: ExitStack) -> Callable[[], float]:
    fd = os.open(directory / "bare", os.O_RDWR | os.O_CREAT)
    stack.callback(os.close, fd)
    os.pwrite(fd, bytes(SYNCS * len(amqp_clients.BODY)), 0)
    os.fsync(fd)

    @timed
    def side() -> None:
        for number in range(SYNCS):
            os.pwrite(fd, amqp_clients.BODY, number * len(amqp_clients.BODY))
            os.fdatasync(fd)

    return side


def _side(
    client: Client, channel: Any, filler: Pika | None, number: int, turn: Turn, worked: list[float]
) -> Callable[[], float]:
    def side() -> float:
        if filler is not None:
            filler.publish(number, amqp_clients.WINDOW)
        begun = process_time()
        seconds = turn(client, number)
        worked.append(process_time() - begun)
        if filler is None and waiting(channel) != number:
            raise AssertionError(f"{waiting(channel)} of {number} confirmed messages are there")
        channel.queue_purge(amqp_clients.QUEUE)
        return seconds

    return side


def _row(name: str, found: Found, bound: Bound, problem: str) -> Row:
    """Return the row of a ratio; of what there is, and why there is no more, if a broker is missing."""
    name = f"{name}: rate over {RABBITMQ}"
    details = [*found.rates.values(), *found.clients, found.sync]
    if len(found.rates) < 2:
        return Row(name=name, problem=f"not measured: {problem}", details=details)
    return Row(name=name, figure=ratio(found.rates[QFLOW], found.rates[RABBITMQ]), bound=bound, details=details)


# A backlog -----------------------------------------------------------------------------------------------------------


def backlog(setup: Setup) -> Iterator[Row]:
    """Fill a queue, look at the memory, kill the broker, and start it again."""
    number = setup.size(2**20, 2_000)
    setup.need_disk(number * 1024 * 6)
    memory: dict[str, Series] = {}
    restart: dict[str, Series] = {}
    cold = ""
    started, problems = starters(setup)
    for name, start in started.items():
        with setup.scratch() as directory:
            try:
                with start(directory, brokers.free_port()) as broker, ExitStack() as stack:
                    brokers.wait_until_it_listens(broker)
                    stack.enter_context(control(broker))
                    Pika(broker, stack).publish(number, amqp_clients.WINDOW)
                    memory[name] = Series(name, "MiB", [broker.anonymous_bytes() / MIB])
                taken = []
                for _ in range(setup.few_rounds):
                    cold = drop_caches(setup)
                    taken.append(_seconds_to_deliver(start, directory))
                restart[name] = Series(name, "s", taken)
            except CannotRun as error:
                problems[name] = str(error)
    body = f"{number * 1024 / MIB:,.0f} MiB of 1 KiB"
    capacity = f"its capacity is {brokers.CAPACITY}"
    yield brokers.own(f"AMQP: RssAnon of the broker, {body} waiting", memory, at_most(160, "MiB"), problems, [capacity])
    what = f"AMQP: a broker killed and started, {number:,} messages waiting, to the first delivery"
    yield brokers.own(what, restart, at_most(1, "s"), problems, [f"from the start of the process; {cold}"])


def _seconds_to_deliver(start: brokers.Start, directory: Any) -> float:
    """Start a broker on what a killed one left, and take one message as soon as it is given; it is not acked."""
    import pika

    begun = perf_counter()
    with start(directory, brokers.free_port()) as broker:
        brokers.wait_until_it_listens(broker)
        deadline = begun + brokers.PATIENCE_S
        while True:
            try:
                with control(broker) as channel:
                    _, _, body = next(channel.consume(amqp_clients.QUEUE, inactivity_timeout=amqp_clients.PATIENCE_S))
                    seconds = perf_counter() - begun
                    if body != amqp_clients.BODY:
                        raise AssertionError("the first message came back changed, or none did")
                    return seconds
            except pika.exceptions.AMQPError as error:
                if perf_counter() > deadline:
                    raise CannotRun(f"{broker.name} let nobody in: {error!r}") from error
                sleep(brokers.LOOK_S)


WORKLOADS = [
    Workload(
        "amqp-publish", "a client publishes with 500 confirms under way; qflow serve and RabbitMQ in turns", publish
    ),
    Workload("amqp-consume", "a client takes what waits with an ack for every hundred; both in turns", consume),
    Workload("amqp-at-once", "50 connections publish one message each at the same time; both in turns", at_once),
    Workload("amqp-singles", "a client waits for the confirm of each message; both in turns", one_by_one),
    Workload("amqp-backlog", "1 GiB waits: memory of the broker, and its start after SIGKILL", backlog),
]
