"""A real cluster of Spark, on whose hosts no spool can be seen, copies streams of three brokers; it and they are killed."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

import qflow
from processes import free_port
from spark import cluster, networks
from spark.cluster import Cluster
from spark.networks import Loopback, Network
from spark.trees import Trees, left_in_inbox, said
from unit.clocks import until

pytest.importorskip("pyspark", reason="PySpark is not installed: pip install .[spark]")
pytest.importorskip("pyarrow.flight", reason="Arrow Flight is not installed: pip install .[net]")

KILLS = int(os.environ.get("QFLOW_CLUSTER_KILLS", "0")) or 2
SEED = int(os.environ.get("QFLOW_SEED", "0")) or Random().randrange(10**6)
TOKEN = "tests-of-the-cluster"
PEM = Path(__file__).parent.parent / "serving" / "certificates"
LOOK_S = 0.2
COUNT = 500
"""Messages that a broker publishes each time it is started."""


class Brokers:
    """Three of them, in processes of their own, which are started again at the same places."""

    def __init__(self, directory: Path, trees: Trees, host: str, pem: Path, ca: Path) -> None:
        self._trees, self._host, self._pem, self.ca = trees, host, pem, ca
        self.spools = [directory / name for name in ("one", "two", "three")]
        self._ports = [free_port() for _ in self.spools]
        self.tokens = directory / "tokens"  # no worker sees it
        self.tokens.write_text(f"{TOKEN}\n")
        self.confirmed: dict[str, int] = {}
        for spool in self.spools:
            with qflow.open(spool) as broker:
                broker.declare_stream("plants", topics=["plant/#"], partitions=2)
                broker.declare_stream("copies", topics=["copy/#"])
        self.urls = [f"grpc+tls://{host}:{port}" for port in self._ports]
        self._running = [self._start(number) for number in range(len(self.spools))]
        for process in self._running:
            assert said(process) == "ready\n"

    def kill(self, number: int) -> None:
        """Kill one, and start it again."""
        self._stop(number)
        self._running[number] = self._start(number)

    def _start(self, number: int) -> subprocess.Popen[str]:
        where = self.spools[number], self._host, self._ports[number]
        return self._trees.start("flight_owner.py", *where, COUNT, self.tokens, self._pem)

    def _stop(self, number: int) -> None:
        name = self.spools[number].name
        for line in self._trees.kill(self._running[number]):
            if line.startswith("pub "):
                self.confirmed[name] = int(line.split()[1])

    def stop(self) -> None:
        """Kill all."""
        for number in range(len(self.spools)):
            self._stop(number)

    def ends(self) -> dict[str, int]:
        """Return how many messages the streams hold, by name, after a rest: others use the processors, too."""
        from qflow.spark.places.calls import Door
        from qflow.spark.places.flight import FlightPlace

        Event().wait(LOOK_S)
        found: Counter[str] = Counter()
        for url in self.urls:
            for name, stream in FlightPlace(Door(url, TOKEN, None, self.ca.read_bytes())).look().streams.items():
                found[name] += sum(stream.bounds(number)[1] for number in stream.numbers)
        return found


@pytest.fixture
def spools(tmp_path: Path) -> Path:
    """The directory of the spools, which no worker sees into."""
    found = tmp_path / "spools"
    found.mkdir()
    reason = cluster.why_not(found)
    if reason is not None:
        pytest.skip(reason)
    return found


@pytest.fixture
def network(spools: Path) -> Iterator[Network | Loopback]:
    """Two hosts, and this one, where the brokers are."""
    found = networks.network_of(2)
    yield found
    found.close()


@pytest.fixture
def brokers(spools: Path, trees: Trees, network: Network | Loopback) -> Brokers:
    if isinstance(network, Loopback):
        return Brokers(spools, trees, network.here, PEM, PEM / "ca.pem")
    pem = spools.parent / "certificates"
    pem.mkdir()
    networks.certify(pem, network.here)
    return Brokers(spools, trees, network.here, pem, pem / "server.pem")


@pytest.fixture
def workers(tmp_path: Path, spools: Path, network: Network | Loopback) -> Iterator[Cluster]:
    directory = tmp_path / "cluster"
    directory.mkdir()
    found = Cluster(directory, spools, network)
    yield found
    found.close()


def test_kills_of_executors_and_brokers_lose_and_double_nothing(
    tmp_path: Path, brokers: Brokers, workers: Cluster, trees: Trees, network: Network | Loopback
) -> None:
    """What was confirmed to the one who published is in the copies once, by whichever host it went."""
    draw = Random(SEED)
    print("seed", SEED)
    checkpoint = tmp_path / "checkpoint"
    urls = ",".join(brokers.urls)
    where = workers.url, network.here, urls, checkpoint, brokers.spools[0]
    driver = trees.start("cluster_driver.py", *where, brokers.tokens, brokers.ca)
    assert said(driver).startswith(f"InvalidArgument Spark runs tasks by {workers.url}, on hosts that may not see")
    assert said(driver) == "running\n"
    until(lambda: brokers.ends()["copies"] > 0)
    killed: Counter[str] = Counter()
    for number in range(KILLS):
        if number % 2 and workers.executors():
            workers.kill_an_executor(draw)
            killed["executors"] += 1
        else:
            brokers.kill(draw.randrange(len(brokers.spools)))
            killed["brokers"] += 1
        before = brokers.ends()["copies"]
        until(lambda before=before: brokers.ends()["copies"] > before or _all_copied(brokers))  # type: ignore[misc]
    until(lambda: _all_copied(brokers))
    failures = [line for line in trees.kill(driver) if line.startswith("failed")]
    brokers.stop()
    check(brokers)
    print(f"{dict(killed)} killed, {brokers.confirmed} confirmed, queries that failed: {failures}")


def _all_copied(brokers: Brokers) -> bool:
    ends = brokers.ends()
    return ends["copies"] >= ends["plants"] >= COUNT * len(brokers.spools)


def check(brokers: Brokers) -> None:
    """Check that the copies are what was published."""
    published: list[bytes] = []
    copied: list[bytes] = []
    keys: list[set[Any]] = []
    for spool in brokers.spools:
        with qflow.open(spool) as broker:
            bodies = [message.body for message in broker.stream("plants").query()]
            assert len(bodies) > brokers.confirmed.get(spool.name, -1)
            published += bodies
            copies = list(broker.stream("copies").query())
            copied += [message.body for message in copies]
            keys.append({message.key for message in copies})
            until(lambda spool=spool: left_in_inbox(spool) == [])  # type: ignore[misc]
            assert broker.check() == []
    assert sorted(copied) == sorted(published)
    assert len(set(published)) == len(published)
    assert sum(map(len, keys)) == len(set().union(*keys))
