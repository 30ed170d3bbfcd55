"""Threads that put together wait for each other, as long as they come again; whoever does not is not waited for."""

from __future__ import annotations

import threading

import pytest

from qflow.remote.client import gathering
from qflow.remote.client.gathering import IN_VAIN, Gathering

PATIENT_S = 60.0
"""As good as without end."""


class Clock:
    """Time passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(gathering, "LONGEST_S", PATIENT_S)
        monkeypatch.setattr(gathering, "perf_counter", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def answer(gather: Gathering, clock: Clock, number: int, took_s: float) -> None:
    """So many are answered."""
    gather.begin()
    clock.now_s += took_s
    gather.end(number)


def check_it_waits_for(gather: Gathering, came: list[int], number: int) -> None:
    """Have so many come, while a thread waits for them; nobody goes before the last of them has come."""
    there: list[int] = []

    def wait() -> None:
        gather.begin()
        there.append(len(came))

    thread = threading.Thread(target=wait)
    thread.start()
    for one in range(number):
        came.append(one)
        gather.arrived()
    thread.join(60)
    assert not thread.is_alive()
    assert there == [number]


def test_those_who_were_answered_are_waited_for(clock: Clock) -> None:
    """And those who came meanwhile, who are there already."""
    came: list[int] = []
    gather = Gathering(came)
    answer(gather, clock, 3, PATIENT_S)
    check_it_waits_for(gather, came, 3)
    came[:] = [8, 9]
    gather.end(1)
    came.append(7)
    gather.begin()


def test_nobody_is_waited_for_any_more_when_the_line_has_ended(clock: Clock) -> None:
    """They go another way."""
    gather = Gathering([])
    answer(gather, clock, 3, PATIENT_S)
    gather.end(0)
    gather.begin()


def test_nobody_is_waited_for_after_it_was_in_vain(clock: Clock) -> None:
    """A few times; then it is tried again."""
    came: list[int] = []
    gather = Gathering(came)
    answer(gather, clock, 2, 0.0)
    answer(gather, clock, 2, PATIENT_S)  # they did not come again in time
    for _ in range(IN_VAIN):
        answer(gather, clock, 2, PATIENT_S)
    check_it_waits_for(gather, came, 2)
