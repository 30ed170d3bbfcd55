"""A time of day that is set while a process measures by it."""

from __future__ import annotations

from qflow.steps import KEPT, Steps


class Times:
    """Two clocks."""

    def __init__(self) -> None:
        self.monotonic = 1000.0
        self.wall = 1_500_000_000.0
        self.steps = Steps(lambda: self.wall, lambda: self.monotonic, 60.0)

    def passes(self, seconds: float) -> float:
        """Let time pass; return what time it is."""
        self.monotonic += seconds
        self.wall += seconds
        self.steps.look()
        return self.wall

    def is_set(self, seconds: float) -> None:
        """Set the clock."""
        self.wall += seconds
        self.steps.look()


def test_moments_of_before_are_as_far_away_after_the_clock_was_set_forward() -> None:
    """Also if it is set twice, and where one was written down anew in between."""
    times = Times()
    earlier = times.wall - 5
    first, second = times.passes(0), times.passes(10)
    times.passes(30)
    times.is_set(1e8)
    assert [times.steps.moment(one) for one in (earlier, first, second)] == [earlier, first + 1e8, second + 1e8]
    anew, third = times.steps.moment(second), times.passes(10)
    assert times.steps.moment(anew) == anew
    times.passes(30)
    times.is_set(1e7)
    assert [times.steps.moment(one) for one in (second, anew, third)] == [second + 1.1e8, anew + 1e7, third + 1e7]
    assert times.steps.moment(times.passes(1)) == times.wall
    assert times.steps.count == 2


def test_other_steps_change_nothing() -> None:
    """Set back, by a little, or forward by less than the time that has passed, moments could be of before or after."""
    times = Times()
    first = times.passes(1)
    times.is_set(50)
    times.passes(10_000)
    times.is_set(9000)
    times.is_set(-8000)
    second = times.passes(1)
    assert [times.steps.moment(one) for one in (first, second)] == [first, second]
    times.is_set(8000)  # what was wrong is put right
    assert [times.steps.moment(one) for one in (first, second)] == [first, second + 8000]


def test_a_clock_that_is_set_by_mistake_and_set_right_changes_nothing() -> None:
    """Moments of before, and of the time in between; and none is later than now."""
    times = Times()
    first = times.passes(10)
    times.passes(10)
    times.is_set(3e7)
    second = times.passes(10)
    times.passes(10)
    times.is_set(-3e7)
    assert [times.steps.moment(one) for one in (first, second)] == [first, second - 3e7]
    assert times.steps.moment(times.passes(1)) == times.wall
    assert times.steps.moment(times.wall + 10) == times.wall


def test_few_steps_are_remembered() -> None:
    times = Times()
    first = times.passes(0)
    for _ in range(KEPT):
        times.is_set(1e6)
    assert times.steps.moment(first) == first + KEPT * 1e6
    times.is_set(1e6)
    assert times.steps.moment(first) == first
    assert len(times.steps._steps) == KEPT
