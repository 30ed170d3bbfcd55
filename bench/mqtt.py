"""MQTT: `qflow serve` against mosquitto, with the same clients, in turns.

A PUBACK of qflow's is a sync; mosquitto's says that the message is in its memory. The clients run in the process of the
bench and take most of a core, the broker has the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter

from bench import brokers
from bench.brokers import QFLOW
from bench.errors import CannotRun
from bench.measure import Bound, Row, Series, Setup, Workload, at_least, at_most, interleave, rates, ratio
from bench.mqtt_brokers import MOSQUITTO, SAVING, starters
from bench.mqtt_clients import Clients, clients
from bench.restart import drop_caches

MIB = 2**20
CAPACITY_MIB = 64
SMALL = bytes(100)
LARGE = bytes(1024)
CONNECTIONS = 50
TOPIC = "bench/sleep"

Turn = Callable[[Clients], float]


def publish(setup: Setup) -> Iterator[Row]:
    each = setup.size(400, 20)
    connections = setup.size(CONNECTIONS, 5)
    what = f"MQTT publish, QoS 1, 100 bytes, {connections} clients"
    number = each * connections
    yield _in_turns(setup, what, at_least(0.6), number, lambda clients: clients.publish(connections, each, SMALL))
    few = setup.size(100, 2)

    def kept(clients: Clients) -> float:
        return clients.publish(connections, few, SMALL, TOPIC)

    yield _in_turns(setup, f"{what}, for a session that waits", at_least(5), few * connections, kept, saves=True)


def fan_out(setup: Setup) -> Iterator[Row]:
    subscribers, batch = setup.size(1_000, 20), 10
    number = setup.size(50, 10)
    for qos in (0, 1):
        what = f"MQTT deliveries, 1 publisher to {subscribers:,} subscribers, QoS {qos}, 100 bytes"

        def turn(clients: Clients, qos: int = qos) -> float:
            return clients.fan_out(subscribers, number, batch, SMALL, qos)

        yield _in_turns(setup, what, at_least(0.5), number * subscribers, turn)


def _in_turns(setup: Setup, what: str, bound: Bound, number: int, turn: Turn, *, saves: bool = False) -> Row:
    """Let the brokers take turns with so many messages.

    Args:
        saves: mosquitto is the one that saves each change, and a session waits for the messages.
    """
    other = SAVING if saves else MOSQUITTO
    with brokers.running(setup, *starters(setup, saves)) as (there, problem), ExitStack() as stack:
        sides = []
        for broker in there.values():
            some = stack.enter_context(clients(broker))
            if saves:
                some.fall_asleep(1, TOPIC)
            sides.append(partial(turn, some))
        seconds = interleave(setup.few_rounds, setup.size(3, 1), *sides)
    found = {broker: rates(broker, number, taken) for broker, taken in zip(there, seconds, strict=True)}
    name = f"{what}: rate over {other}"
    if len(found) == 2:
        ours, theirs = found[QFLOW], found[other]
        return Row(name=name, figure=ratio(ours, theirs), bound=bound, details=[ours, theirs])
    return Row(name=name, problem=f"not measured: {problem}", details=[*found.values()])


# Sleepers ------------------------------------------------------------------------------------------------------------


def sleepers(setup: Setup) -> Iterator[Row]:
    """Publish to sessions whose clients are away, look at memory and disk, and wake some."""
    sessions, number = setup.size(10_000, 50), setup.size(1_000, 50)
    more = setup.size(100_000, 10_000)
    memory: dict[str, Series] = {}
    waking: dict[str, Series] = {}
    disk: list[float] = []
    started, problems = starters(setup)
    for name, start in started.items():
        with setup.scratch() as directory:
            try:
                with start(directory.absolute(), brokers.free_port()) as broker, clients(broker) as some:
                    brokers.wait_until_it_listens(broker)
                    some.fall_asleep(sessions, TOPIC)
                    some.publish(1, number, LARGE, TOPIC)
                    memory[name] = Series(name, "MiB", [broker.anonymous_bytes() / MIB])
                    woken = range(setup.few_rounds)
                    taken = [some.wake(index, TOPIC, LARGE, number) * 1000 for index in woken]
                    waking[name] = Series(name, "ms", taken)
                    if name == QFLOW:
                        before = _bytes_of(directory)
                        some.publish(1, more, LARGE, TOPIC)
                        disk.append((_bytes_of(directory) - before) / (more * len(LARGE)))
            except CannotRun as error:
                problems[name] = str(error)
    what = f"MQTT: {sessions:,} sleeping sessions, {number:,} messages of 1 KiB for each"
    figures = {QFLOW: Series(QFLOW, "x", disk)} if disk else {}
    notes = [f"{more:,} messages more, as files of a few MiB are made before there is something in them"]
    growth = (
        f"MQTT: {sessions:,} sleeping sessions, {more:,} messages of 1 KiB: bytes on the disk over those of one copy"
    )
    bound = at_most(CAPACITY_MIB + 96, "MiB")
    yield brokers.own(
        f"{what}: RssAnon of the broker", memory, bound, problems, [f"its capacity is {brokers.CAPACITY}"]
    )
    yield brokers.own(growth, figures, at_most(3), problems, notes)
    what = f"MQTT: one of {sessions:,} sleeping sessions wakes, to the last of {number:,} messages, QoS 1"
    yield brokers.own(what, waking, at_most(150, "ms"), problems, ["from the connection on"])


def _bytes_of(directory: Path) -> int:
    """Return how much of the disk the files of a directory take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


# Restart -------------------------------------------------------------------------------------------------------------


def restart(setup: Setup) -> Iterator[Row]:
    """Kill a broker that has sessions and retained messages, and start it again."""
    sessions, retained, connections = setup.size(10_000, 50), setup.size(1_000_000, 500), setup.size(CONNECTIONS, 5)
    setup.need_disk(retained * 1024)
    started, problems = starters(setup)
    taken: list[float] = []
    cold = ""
    with setup.scratch() as directory:
        start = started[QFLOW]
        try:
            with start(directory.absolute(), brokers.free_port()) as broker, clients(broker) as some:
                brokers.wait_until_it_listens(broker)
                some.fall_asleep(sessions, TOPIC)
                some.retain(connections, retained // connections, SMALL)
            for _ in range(setup.few_rounds):
                cold = drop_caches(setup)
                begun = perf_counter()
                with start(directory.absolute(), brokers.free_port()) as broker, clients(broker) as some:
                    brokers.wait_until_it_listens(broker)
                    taken.append(perf_counter() - begun)
                    some.answer()
        except CannotRun as error:
            problems[QFLOW] = str(error)
    what = f"MQTT: a broker killed and started, {sessions:,} sessions and {retained:,} retained messages, to a CONNACK"
    found = {QFLOW: Series(QFLOW, "s", taken)} if taken else {}
    yield brokers.own(what, found, at_most(1.5, "s"), problems, [f"from the start of the process; {cold}"])


WORKLOADS = [
    Workload("mqtt-publish", "50 clients publish with QoS 1, 20 under way each; qflow serve and mosquitto", publish),
    Workload("mqtt-fan-out", "one client publishes to a thousand subscribers; both in turns", fan_out),
    Workload("mqtt-sleepers", "ten thousand sessions whose clients are away: disk, memory, and waking one", sleepers),
    Workload("mqtt-restart", "sessions and a million retained messages: the start after SIGKILL", restart),
]
