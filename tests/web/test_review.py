"""What a reading of the page and its API found, each with a test."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest

pytest.importorskip("starlette")
pytest.importorskip("jinja2")
pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

import qflow
import qflow.aio
from qflow.errors import NotFound, StorageError
from qflow.serving import presence
from qflow.web import reading, rights
from qflow.web.figures import Figures, Look
from web_served import run, served, users


def test_a_name_that_is_not_there_is_compared_with_few(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop: with twenty thousand queues, a link to one that was deleted stopped all doors for 0.8 s."""
    monkeypatch.setattr(rights, "MOST_COMPARED", 3)

    async def test() -> None:
        async with served(spool, users()) as site:
            api = site.api()
            await site.broker.declare_queues(["jobs-1", "jobs-2", "mails"])
            answer = await api.get("/api/queue", params={"queue": "jobs"})
            assert answer.status_code == 404
            assert "did you mean" in answer.json()["error"]
            await site.broker.declare_queue("more")
            monkeypatch.setattr(rights, "choices", None)
            answer = await api.get("/api/queue", params={"queue": "jobs"})
            assert answer.status_code == 404
            assert answer.json()["error"] == "there is no queue 'jobs'; there are 4: `qflow ls` lists them"

    run(test)


def test_a_flag_is_true_or_false(spool: Path) -> None:
    """As clients in Python write it, too; anything else was taken for false without a word."""

    async def test() -> None:
        async with served(spool, users()) as site:
            api = site.api()
            queues = await site.broker.declare_queues(["few", "many"])
            await queues[1].put_many([b"x", b"y"])
            for said, first in (("True", "many"), ("true", "many"), ("False", "few"), ("", "few")):
                asked = {"sort": "messages", "descending": said, "text": ""}
                found = (await api.get("/api/queues", params=asked)).json()["queues"]
                assert found[0]["name"] == first, said
            answer = await api.get("/api/queues", params={"descending": "yep"})
            assert answer.status_code == 400
            assert answer.json()["error"] == "'descending' must be true or false, not 'yep'"

    run(test)


def test_a_path_that_is_no_utf_8_is_told(tmp_path: Path) -> None:
    """As JSON has it, by an escape; it was a fault of the server."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/spool-\xff"))

    async def test() -> None:
        async with served(path, users()) as site:
            api = site.api()
            assert (await api.get("/api/overview")).json()["path"] == str(path)
            assert "spool-\\udcff" in (await api.get("/")).text
            await site.broker.close()
            answer = await api.get("/api/overview")
            assert answer.status_code == 503
            assert str(path) in answer.json()["error"]

    run(test)


@pytest.mark.parametrize("page", ["/", "/api/overview"])
def test_the_answer_to_a_fault_is_kept_safe_too(spool: Path, page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes past the guard, and it has the form to log out."""

    async def fault(_: object) -> None:
        raise LookupError

    monkeypatch.setattr(Figures, "look", fault)

    async def test() -> None:
        async with served(spool, users()) as site:
            answer = await (await site.browser()).get(page)
            assert answer.status_code == 500
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["cache-control"] == "no-store"

    run(test)


def test_what_metrics_need_is_imported_beside_the_loop(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scrape held up the clients of all doors for a tenth of a second."""
    threads: list[threading.Thread] = []
    real = importlib.import_module

    def noting(name: str, *more: Any) -> Any:
        if name == "qflow.metrics.collecting":
            threads.append(threading.current_thread())
        return real(name, *more)

    monkeypatch.setattr(importlib, "import_module", noting)

    async def test() -> None:
        async with served(spool, users()) as site:
            assert (await site.api().get("/metrics")).status_code == 200
            assert threads
            assert threading.current_thread() not in threads

    run(test)


def test_charts_begin_anew_where_the_clock_is_set_back(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stood still until it was as late again; and rates are of the time that has passed, whatever it says."""
    now_s, wall_s, puts = [100.0], [50_000.0], [0]
    read = Figures._timed

    def timed(figures: Figures) -> tuple[Look, float]:
        look, cost_s = read(figures)
        puts[0] += 1
        return attrs.evolve(look, totals={**look.totals, "put_total": puts[0]}), cost_s

    monkeypatch.setattr(Figures, "_timed", timed)

    async def test() -> None:
        async with await qflow.aio.open(spool) as broker:
            figures = Figures(broker, clock=lambda: now_s[0], now=lambda: wall_s[0])
            await figures.look()
            for gone_s in (2.0, -3600.0, 1.0):
                now_s[0] += 20
                wall_s[0] += gone_s
                await figures.look()
            points = figures.points()
            assert [point["at_s"] for point in points] == [46_402.0, 46_403.0]
            assert [point["put"] for point in points] == [0.05, 0.05]

    run(test)


def test_thousands_of_connections_and_subscriptions_are_told_beside_the_loop(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make plain values of ten thousand takes a tenth of a second."""
    threads: list[threading.Thread] = []
    real = attrs.asdict

    def noting(one: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return real(one, **options)

    monkeypatch.setattr(attrs, "asdict", noting)

    async def test() -> None:
        async with served(spool, users()) as site:
            await site.broker.declare_stream("log", topics=["log/#"])
            door, one = object(), presence.Connected("mqtt", "sensor", "anna", "10.0.0.7", 1.0)
            presence.enter(site.broker.broker, door, lambda: [one])
            api = site.api()
            found = (await api.get("/api/connections")).json()["connections"]
            assert [connection["name"] for connection in found] == ["sensor"]
            assert (await api.get("/api/stream", params={"stream": "log"})).json()["stats"]["subscriptions"] == []
            assert threads
            assert threading.current_thread() not in threads

    run(test)


def test_a_queue_that_is_deleted_while_it_is_read_tells_no_other_names(tmp_path: Path) -> None:
    """What the log has instead is for who may know of all of it."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queues(["secret-1", "secret-2"])
        with pytest.raises(NotFound, match="^queue 'secret' was deleted meanwhile$"):
            reading.first_messages(broker.path, "secret", 1)
    with pytest.raises(NotFound, match="nowhere"):
        reading.first_messages(str(tmp_path / "nowhere"), "secret", 1)


def test_a_package_that_was_upgraded_under_the_server_is_told(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads the log has the new one: findings were without what the log tells, and nothing said why."""
    told = {"letters": [], "readers": [], "what_comes_later": 1}
    monkeypatch.setattr(reading, "_told", lambda *_: {"health": told})
    with pytest.raises(StorageError, match="restart this process"):
        reading.health(str(spool))
