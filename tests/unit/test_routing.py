"""Routes that are remembered: which topics, and how many."""

from __future__ import annotations

from pathlib import Path

import pytest

import qflow
from qflow import routing
from qflow.routing import Routing


def test_topics_are_remembered_however_many_there_were_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """After more topics than are kept the next ones are kept again; never more of them than may be."""
    monkeypatch.setattr(routing, "ROUTES_KEPT", 8)
    routes = Routing()
    first = routes.route("first")
    assert routes.route("first") is first
    for number in range(20):
        topic = f"t/{number}"
        assert routes.route(topic) is routes.route(topic)
    assert routes.route("first") is not first  # it made room


def test_topics_of_many_queues_take_no_more_memory_than_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As many queues are kept in routes as may be, however many have one topic."""
    monkeypatch.setattr(routing, "QUEUES_KEPT", 10)
    with qflow.open(tmp_path / "spool") as broker:
        for name in "abcd":
            broker.bind(broker.declare_queue(name), "t/#")
        routes = broker.engine.routing
        found = [routes.route(f"t/{number}") for number in range(20)]
        is_kept = [routes.route(f"t/{number}") is one for number, one in enumerate(found)]
        assert routes.route("t/19") is routes.route("t/19")
    assert is_kept.count(True) <= 2


def test_a_topic_of_many_characters_is_not_kept() -> None:
    """It would take memory that nothing is charged for."""
    routes = Routing()
    topic = "t" * 1000
    assert routes.route(topic) is not routes.route(topic)
    assert routes.route(topic) == routes.route(topic)
