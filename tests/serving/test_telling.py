"""Warnings about clients: one in ten seconds."""

from __future__ import annotations

import pytest

from doors.event_loop import run, until
from qflow.loggers import get_logger
from qflow.serving import telling
from qflow.serving.telling import TOLD_EACH_S, Telling


def test_what_was_left_out_is_told_when_nothing_follows(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the ten seconds are over, which are none here, or at the end."""
    monkeypatch.setattr(telling, "TOLD_EACH_S", 0.01)
    now_s = 5.0
    told = Telling(get_logger("qflow.test"), clock=lambda: now_s)

    async def scenario() -> None:
        for number in range(3):
            told.tell("client %d", number)
        await until(lambda: len(caplog.messages) == 2)
        told.tell("client %d", 3)

    run(scenario())
    for _ in range(2):
        told.end()
    assert caplog.messages == ["client 0", "client 2 (and 1 more since the last line)", "client 3"]


def test_one_line_in_ten_seconds_says_how_many_there_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 5.0
    told = Telling(get_logger("qflow.test"), clock=lambda: now_s)
    for number in range(4):
        told.tell("client %d: closed, %s", number, "100 %")
    now_s += TOLD_EACH_S
    told.tell("client %d", 4)
    now_s += TOLD_EACH_S
    told.tell("the last")
    assert caplog.messages == [
        "client 0: closed, 100 %",
        "client 4 (and 3 more since the last line)",
        "the last",
    ]
