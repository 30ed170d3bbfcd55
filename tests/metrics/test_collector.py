"""A collector of prometheus-client tells what a broker counts, of so many queues as it is to name."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as of_openmetrics
from prometheus_client.parser import text_string_to_metric_families as of_text

import qflow
import qflow.aio
import qflow.metrics
from qflow.errors import InvalidArgument, NotFound
from qflow.metrics.collecting import Exposition, SpoolCollector
from qflow.metrics.names import listed
from qflow.metrics.sources import Asked, source_of

Values = dict[str, float]


def values(collector: SpoolCollector) -> Values:
    """Return each sample, as what is scraped names it."""
    found: Values = {}
    for family in of_text(Exposition(collector).text().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, "a series is there twice"
            found[key] = sample.value
    return found


def fill(broker: qflow.Broker, names: Iterable[str], messages: int = 1) -> None:
    """Put messages into queues."""
    for name in names:
        broker.declare_queue(name, durable=False).put_many([b"x"] * messages)


def test_what_the_broker_tells_is_told(tmp_path: Path) -> None:
    """In base units, with the names of Prometheus, each metric of the list."""
    with qflow.open(tmp_path / "spool") as broker:
        jobs = broker.declare_queue("jobs", limit_messages=10)
        jobs.put_many([b"abc"] * 5)
        jobs.get().ack()
        held = jobs.get()
        stream = broker.declare_stream("flights", topics=["flights/#"])
        with broker.subscribe(stream, name="board", start="earliest"):
            broker.publish("flights/UA", b"x")
            found = values(qflow.metrics.collector(broker))
            told = broker.stats()
        held.ack()
    assert found["qflow_up"] == 1
    assert found[f"qflow_build_info{{version={qflow.__version__}}}"] == 1
    assert found["qflow_queue_messages{queue=jobs}"] == 4
    assert found["qflow_queue_unacked_messages{queue=jobs}"] == 1
    assert found["qflow_queue_bytes{queue=jobs}"] == 12
    assert found["qflow_queue_limit_messages{queue=jobs}"] == 10
    assert "qflow_queue_limit_bytes{queue=jobs}" not in found, "it has none"
    assert found["qflow_queue_put_messages_total{queue=jobs}"] == 5
    assert found["qflow_queue_acked_messages_total{queue=jobs}"] == 1
    assert found["qflow_stream_published_messages_total{stream=flights}"] == 1
    assert found["qflow_subscription_lag_messages{stream=flights,subscription=board}"] == 1
    assert found["qflow_commit_duration_seconds_count"] == told.commits_total == found["qflow_commits_total"]
    assert found["qflow_commit_duration_seconds_bucket{le=+Inf}"] == told.commits_total
    assert found["qflow_memory_capacity_bytes"] == told.capacity_bytes
    assert found["qflow_disk_free_bytes"] > 0 < found["qflow_log_file_bytes"]
    known = {one.name for one in listed()}
    for name in {key.partition("{")[0] for key in found}:
        assert name in known or name.rpartition("_")[0] in known, f"{name} is not in the list"


def test_a_registry_takes_one_collector(tmp_path: Path) -> None:
    """Each series would be there twice; a registry for each spool has its own, and gives those that are asked for."""
    with qflow.open(tmp_path / "spool") as one, qflow.open(tmp_path / "other") as other:
        fill(one, ["jobs"], messages=1)
        fill(other, ["jobs"], messages=2)
        registry, beside = CollectorRegistry(), CollectorRegistry()
        registry.register(qflow.metrics.collector(one))
        for broker in (one, other):
            with pytest.raises(ValueError, match="Duplicated timeseries"):
                registry.register(qflow.metrics.collector(broker))
        beside.register(qflow.metrics.collector(other))
        found = [each.get_sample_value("qflow_queue_messages", {"queue": "jobs"}) for each in (registry, beside)]
        assert found == [1, 2]
        names = [each.name for each in listed() if each.type != "histogram"]
        for name in sorted({sample.name for family in registry.collect() for sample in family.samples} & {*names}):
            picked = list(registry.restricted_registry([name]).collect())
            assert {sample.name for family in picked for sample in family.samples} == {name}


def test_the_disk_of_a_moved_spool_is_told(tmp_path: Path) -> None:
    """Where it is now."""
    with qflow.open(tmp_path / "spool") as broker:
        collector = qflow.metrics.collector(broker)
        before = values(collector)
        (tmp_path / "spool").rename(tmp_path / "moved")
        broker.engine.spool.follow()
        assert values(collector).keys() == before.keys()


def test_openmetrics_is_given_to_who_asks_for_it(tmp_path: Path) -> None:
    """What Prometheus sends as `Accept` gets OpenMetrics, which its parser takes; a browser gets text."""
    with qflow.open(tmp_path / "spool") as broker:
        fill(broker, ['"quoted" \\ name', "line\nend", "ü"])
        exposition = Exposition(qflow.metrics.collector(broker))
        body, kind = exposition.answer("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
        text, plain = exposition.answer("text/html,*/*")
    assert kind.startswith("application/openmetrics-text")
    assert plain.startswith("text/plain")
    families = {family.name: family for family in of_openmetrics(body.decode())}
    queues = {sample.labels["queue"] for sample in families["qflow_queue_messages"].samples}
    assert queues == {'"quoted" \\ name', "line\\nend", "ü"}
    assert families["qflow_sync_duration_seconds"].type == "histogram"
    assert b"# EOF" not in text


def test_queues_above_the_limit_are_summed(tmp_path: Path) -> None:
    """The first ones by name keep their series, whoever comes; a metric says how many do not have one."""
    with qflow.open(tmp_path / "spool") as broker:
        fill(broker, "bcd", messages=2)
        collector = qflow.metrics.collector(broker, named=2)
        found = values(collector)
        assert {key for key in found if key.startswith("qflow_queue_messages")} == {
            "qflow_queue_messages{queue=b}",
            "qflow_queue_messages{queue=c}",
            "qflow_queue_messages{queue=other}",
        }
        assert (found["qflow_queues"], found["qflow_queues_summed"]) == (3, 1)
        fill(broker, "ae", messages=3)
        found = values(collector)
        assert found["qflow_queue_messages{queue=other}"] == 8
        assert found["qflow_queue_messages{queue=b}"] == 2
        assert "qflow_queue_capacity_bytes{queue=other}" not in found, "a sum of limits says nothing"
        assert (found["qflow_queues"], found["qflow_queues_summed"]) == (5, 3)


def test_counters_of_what_is_summed_never_fall(tmp_path: Path) -> None:
    """Neither where a queue is deleted, nor where it is made anew; and nobody who was summed gets a series."""
    with qflow.open(tmp_path / "spool") as broker:
        fill(broker, "abc", messages=5)
        collector = qflow.metrics.collector(broker, named=1)
        name = "qflow_queue_put_messages_total{queue=other}"
        assert values(collector)[name] == 10
        broker.delete_queue("b")
        assert values(collector)[name] == 10
        fill(broker, "b", messages=2)
        assert values(collector)[name] == 12
        broker.delete_queue("c")
        fill(broker, "c", messages=1)
        assert values(collector)[name] == 13
        broker.delete_queue("a")
        found = values(collector)
        assert found[name] == 13
        assert "qflow_queue_messages{queue=b}" not in found
        fill(broker, "n")
        assert values(collector)["qflow_queue_messages{queue=n}"] == 1, "a new one takes the place"


def test_names_that_would_be_the_same_label_are_summed(tmp_path: Path) -> None:
    """A queue called `other`, and one whose name is what another one's is escaped to: no series is there twice."""
    with qflow.open(tmp_path / "spool") as broker:
        fill(broker, ["other", "\x1b[2J", "\\x1b[2J", "plain"])
        found = values(qflow.metrics.collector(broker))
    assert found["qflow_queue_messages{queue=other}"] == 2
    assert found["qflow_queue_messages{queue=\\x1b[2J}"] == 1
    assert found["qflow_queues_summed"] == 2


def test_subscriptions_without_a_name_are_summed(tmp_path: Path) -> None:
    """They come and go: none has a series of its own."""
    with qflow.open(tmp_path / "spool") as broker:
        stream = broker.declare_stream("s", topics=["#"])
        with broker.subscribe(stream), broker.subscribe(stream), broker.subscribe(stream, name="kept"):
            broker.publish("t", b"x")
            found = values(qflow.metrics.collector(broker))
    assert found["qflow_subscription_lag_messages{stream=other,subscription=other}"] == 2
    assert found["qflow_subscription_lag_messages{stream=s,subscription=kept}"] == 1
    assert (found["qflow_subscriptions"], found["qflow_subscriptions_summed"]) == (3, 2)


def test_a_broker_that_is_closed_is_down(tmp_path: Path) -> None:
    """The other metrics of an exporter go on."""
    with qflow.open(tmp_path / "spool") as broker:
        collector = qflow.metrics.collector(broker)
    found = values(collector)
    assert found["qflow_up"] == 0
    assert not any(key.startswith("qflow_queue") for key in found)


def test_a_connected_broker_tells_the_same(tmp_path: Path) -> None:
    """Until its owner has gone."""
    with qflow.open(tmp_path / "spool") as broker:
        fill(broker, ["jobs"], messages=3)
        with qflow.connect(tmp_path / "spool") as remote:
            found = values(qflow.metrics.collector(remote))
            ours = values(qflow.metrics.collector(broker))
    names = {key for key in ours if not key.startswith("qflow_disk")}
    assert {key: found[key] for key in names} == {key: ours[key] for key in names}
    assert found.keys() == ours.keys()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the owner of a spool in a process of its own."""
    program = (
        f"import sys, qflow\nbroker = qflow.open({str(tmp_path / 'spool')!r})\n"
        "broker.declare_queue('jobs').put(b'x')\nprint(flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.send_signal(signal.SIGCONT)
        process.communicate()


def scrape_a_stopped_owner(
    collector: SpoolCollector,
    owner: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    under_way: Callable[[], int],
) -> None:
    """Have an owner stand still, and go on; `under_way` counts what was asked and not answered."""
    assert values(collector)["qflow_up"] == 1
    while under_way():
        pass
    owner.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
    with monkeypatch.context() as patch, ThreadPoolExecutor(8) as many:
        patch.setattr("qflow.metrics.sources.ANSWER_S", 0.0)
        found = list(many.map(values, [collector] * 24))
    assert {told["qflow_up"] for told in found} == {0}
    assert not any(key.startswith("qflow_queue") for told in found for key in told)
    assert under_way() == 1
    owner.send_signal(signal.SIGCONT)
    while (told := values(collector))["qflow_up"] == 0:
        pass
    assert told["qflow_queue_messages{queue=jobs}"] == 1


def test_an_owner_that_stands_still_is_down(
    tmp_path: Path, owner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is scraped, one look waits for it; when it goes on, so do its metrics."""

    def under_way() -> int:
        return [one.name for one in threading.enumerate()].count("qflow-metrics-look")

    with qflow.connect(tmp_path / "spool") as remote:
        scrape_a_stopped_owner(qflow.metrics.collector(remote), owner, monkeypatch, under_way)


def test_an_owner_that_stands_still_is_down_to_tasks(
    tmp_path: Path, owner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to threads."""

    async def ask() -> None:
        async with qflow.aio.connect(tmp_path / "spool") as remote:
            loop, others = asyncio.get_running_loop(), len(asyncio.all_tasks())

            def under_way() -> int:
                async def count() -> int:
                    return len(asyncio.all_tasks()) - 1

                return asyncio.run_coroutine_threadsafe(count(), loop).result() - others

            collector = qflow.metrics.collector(remote)
            await asyncio.to_thread(scrape_a_stopped_owner, collector, owner, monkeypatch, under_way)

    asyncio.run(ask())


def test_scrapes_share_a_look_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have what it brings; the next one looks anew."""
    looks: list[Future[Any]] = []
    asked = Asked(lambda: looks.append(Future()) or looks[-1])
    come = threading.Semaphore(0)
    monkeypatch.setattr("qflow.metrics.sources.told_by", lambda stats: stats)
    monkeypatch.setattr("qflow.metrics.sources.wait", lambda *given: (come.release(), wait(*given))[1])
    with ThreadPoolExecutor(3) as many:
        shared = [many.submit(asked.look) for _ in range(3)]
        for _ in shared:
            come.acquire()
        looks[0].set_result("told")
        assert [one.result() for one in shared] == ["told"] * 3
        again = many.submit(asked.look)
        come.acquire()
        looks[1].set_exception(qflow.BrokerClosed("closed"))
        with pytest.raises(qflow.BrokerClosed):
            again.result()
    assert len(looks) == 2


def test_brokers_of_tasks_are_asked_from_other_threads(tmp_path: Path) -> None:
    """One that is connected cannot be asked in the thread of its event loop, which is said."""

    async def ask() -> tuple[Values, Values]:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            await (await broker.declare_queue("jobs")).put(b"x")
            async with qflow.aio.connect(tmp_path / "spool") as remote:
                collector = qflow.metrics.collector(remote)
                with pytest.raises(InvalidArgument, match="collect in another thread"):
                    values(collector)
                return values(qflow.metrics.collector(broker)), await asyncio.to_thread(values, collector)

    here, there = asyncio.run(ask())
    assert here["qflow_queue_messages{queue=jobs}"] == 1 == there["qflow_queue_messages{queue=jobs}"]


@pytest.mark.parametrize("named", [-1, 10_001, "5", True, 1.5])
def test_how_many_are_named_is_a_number(tmp_path: Path, named: object) -> None:
    """Within bounds."""
    with qflow.open(tmp_path / "spool") as broker, pytest.raises(InvalidArgument, match="named must be a number"):
        qflow.metrics.collector(broker, named=named)  # type: ignore[arg-type]


def test_what_is_no_broker_is_refused() -> None:
    """With a sentence."""
    with pytest.raises(InvalidArgument, match="metrics are of a broker, not of 'spool'"):
        qflow.metrics.collector("spool")  # type: ignore[arg-type]


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the other extras."""
    monkeypatch.setitem(__import__("sys").modules, "qflow.metrics.collecting", None)
    monkeypatch.setattr(
        "importlib.import_module",
        lambda name: (_ for _ in ()).throw(ModuleNotFoundError("no", name="prometheus_client")),
    )
    with qflow.open(tmp_path / "spool") as broker, pytest.raises(NotFound, match="pip install prometheus_client"):
        qflow.metrics.collector(broker)


def test_queues_that_are_gone_are_not_told_however_many_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qflow.metrics.sources.ASKED", 0)
    monkeypatch.setattr("qflow.figures.LOOK_S", 0.0)
    monkeypatch.setattr("qflow.figures.GONE_KEPT", 1)
    with qflow.open(tmp_path / "spool") as broker:
        source = source_of(broker)
        for name in "abc":
            broker.declare_queue(name)
        assert set(source.look().queues) == set("abc")
        broker.delete_queue("a")
        broker.delete_queue("b")
        assert set(source.look().queues) == {"c"}


def test_of_many_queues_only_those_that_changed_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told is the same, once it was noted; a queue that is deleted is gone."""
    monkeypatch.setattr("qflow.metrics.sources.ASKED", 0)
    monkeypatch.setattr("qflow.figures.LOOK_S", 0.0)
    with qflow.open(tmp_path / "spool") as broker:
        fill(broker, "abc", messages=2)
        jobs = broker.declare_queue("jobs", limit_messages=9)
        jobs.put_many([b"xyz"] * 3)
        broker.engine.figures.note_changed([broker.queue(name) for name in broker.queues()])
        collector = qflow.metrics.collector(broker)

        def same() -> bool:
            cached = values(collector)
            monkeypatch.setattr("qflow.metrics.sources.ASKED", 1000)
            exact = values(qflow.metrics.collector(broker))
            monkeypatch.setattr("qflow.metrics.sources.ASKED", 0)
            left = {key for key in exact if key.startswith("qflow_queue")}
            return cached.keys() == exact.keys() and all(cached[key] == exact[key] for key in left)

        assert same()
        broker.queue("a").get()
        broker.delete_queue("b")
        jobs.put(b"more")
        broker.engine.figures.note_changed([broker.queue("a"), jobs])
        found = values(collector)
        assert found["qflow_queue_unacked_messages{queue=a}"] == 1
        assert found["qflow_queue_messages{queue=jobs}"] == 4
        assert found["qflow_messages"] == 8
        assert "qflow_queue_messages{queue=b}" not in found
    assert values(collector)["qflow_up"] == 0
