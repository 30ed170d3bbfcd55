"""`/metrics` beside the pages: what Prometheus scrapes there, and whom it is not told."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from web_served import run, served, users


def test_prometheus_finds_metrics_in_its_format(spool: Path) -> None:
    """Without users, from this machine; the second scrape has the names of the first."""

    async def test() -> None:
        async with served(spool) as site:
            jobs = await site.broker.declare_queue("jobs")
            client = site.client()
            for number in range(2):
                await jobs.put(b"x")
                answer = await client.get("/metrics", headers={"Accept": "text/plain"})
                assert answer.headers["content-type"].startswith("text/plain")
                names = {family.name for family in text_string_to_metric_families(answer.text)}
                assert {"qflow_up", "qflow_queue_messages"} <= names, number
            opened = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
            assert opened.headers["content-type"].startswith("application/openmetrics-text")
            assert opened.text.endswith("# EOF\n")

    run(test)


def test_with_users_it_is_for_those_who_may_see_everything(spool: Path) -> None:
    """An administrator by HTTP Basic; nobody without a login, nor a user with a few queues."""

    async def test() -> None:
        async with served(spool, users(bert=("", "", "jobs"))) as site:
            assert "qflow_up" in (await site.api().get("/metrics")).text
            unknown = await site.client().get("/metrics")
            assert (unknown.status_code, unknown.headers["www-authenticate"][:5]) == (401, "Basic")
            refused = await site.api("bert").get("/metrics")
            assert refused.status_code == 403
            assert "monitoring" in refused.text

    run(test)
