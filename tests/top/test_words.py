"""Figures in few characters."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from qflow.top import words


@pytest.mark.parametrize(
    ("number", "shown"),
    [(None, "-"), (0, "0"), (0.4, "0.4"), (9.0, "9"), (999, "999"), (999.6, "1.0k"), (1234, "1.2k"), (99_949, "99.9k"),
     (123_456, "123k"), (999_999, "1.0M"), (4_100_000, "4.1M"), (2**63, "9.2E")],
)  # fmt: skip
def test_a_count_takes_five_characters_at_most(number: float | None, shown: str) -> None:
    """Also where rounding makes it a digit longer."""
    assert words.count(number) == shown
    assert len(shown) <= 5


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (1023, "1023"), (1024, "1.0K"), (2**20 - 1, "1.0M"), (64 * 2**20, "64.0M"), (2**60, "1.0E")],
)
def test_a_size_is_in_powers_of_1024(number: int, shown: str) -> None:
    """As capacities are given."""
    assert words.size(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.4, "0s"),
        (59.9, "59s"),
        (185, "3m05"),
        (2400, "40m"),
        (7800, "2h10"),
        (86_400, "24h"),
        (432_000, "5d"),
    ],
)
def test_an_age_is_cut_to_what_matters(seconds: float | None, shown: str) -> None:
    """Seconds matter for ten minutes, minutes for ten hours."""
    assert words.age(seconds) == shown


def test_a_curve_goes_from_zero_to_its_largest_value() -> None:
    """What is not nothing is above the lowest line; the newest value is at the right."""
    assert words.curve([0, 0.001, 50, 100], 6) == "  ▁▂▅█"
    assert words.curve([1, 2, 4], 2) == "▅█"
    assert words.curve([], 3) == "   "
    assert words.curve([1], 0) == ""


def test_a_bar_shows_something_of_all_that_is_not_nothing() -> None:
    """And is never longer than its room."""
    assert words.bar(0, 100, 4) == "····"
    assert words.bar(1, 10**9, 4) == "▏···"
    assert words.bar(50, 100, 4) == "██··"
    assert words.bar(200, 100, 4) == "████"
    assert words.bar(None, 100, 4) == words.bar(1, None, 4) == "    "


@pytest.mark.parametrize("name", ["plain", "日本語の長い名前です", "a\x1b[2J\x07\n\u202e\u200b", "é" * 30, ""])
@pytest.mark.parametrize("width", [0, 1, 7, 12])
def test_a_fitted_text_takes_exactly_its_cells_and_controls_nothing(name: str, width: int) -> None:
    """Wide letters count twice."""
    shown = words.fitted(name, width)
    assert cell_len(shown) == width
    assert shown.isprintable()
