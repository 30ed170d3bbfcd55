"""The checker of histories at the door finds what must not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from crash.door_history import History, Place

SOUND = (
    "1 try left a b",
    "2 put left 0 a b",
    "3 try right c",
    "4 put right 0 c",
    "5 number 0 publisher-0-0",
    "6 pub 0 publisher-0-0 1 0",
    "10 got left 0 a 0 1 9",
    "11 ack left 0",
    "12 acked left 0",
    "14 got left 1 b 0 1 13",
    "20 got left 1 b 1 2 19",
)
LEFT: dict[Place, str] = {("left", 1): "b", ("right", 0): "c", ("s/1", 0): "publisher-0-0"}
STORED: list[tuple[Place, str]] = [(("s/1", 0), "publisher-0-0")]


def problems(
    reports: Path, *lines: str, left: dict[Place, str] = LEFT, stored: list[tuple[Place, str]] = STORED
) -> str:
    """Return what is wrong with these lines, as one text."""
    (reports / "client").write_text("".join(f"{line}\n" for line in lines))
    return "\n".join(History(reports).problems(left, stored))


def test_a_sound_history_has_no_problems(tmp_path: Path) -> None:
    """Nor has a line that was not told to its end."""
    assert problems(tmp_path, *SOUND) == ""
    (tmp_path / "other").write_text("30 put left 7")
    assert History(tmp_path).problems(LEFT, STORED) == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("30 got left 0 a 1 2 29", "came after its ack was confirmed"),
        ("30 got left 1 b 0 1 29", "came again as if new"),
        ("30 got left 1 a 1 3 29", "is a and b"),
        ("30 got left 7 x 0 1 29", "nobody put x"),
        ("30 put left 7 z", "lost: ('left', 7) z"),
        ("30 put right 7 z", "moved to nowhere: z"),
        ("30 try left b y", "half of a batch"),
        ("30 pub 0 publisher-0-0 0 5", "confirmed at ('s/0', 5)"),
        ("30 wrong KeyError x", "client: KeyError x"),
    ],
)
def test_what_must_not_be_is_found(tmp_path: Path, line: str, found: str) -> None:
    """One line too much."""
    assert found in problems(tmp_path, *SOUND, line)


def test_what_is_left_must_be_what_was_confirmed(tmp_path: Path) -> None:
    """Nothing is missing, nothing is there twice, nor after its ack."""
    without = {place: token for place, token in LEFT.items() if place != ("left", 1)}
    assert "lost: ('left', 1) b" in problems(tmp_path, *SOUND, left=without)
    assert "left after its ack" in problems(tmp_path, *SOUND, left={**LEFT, ("left", 0): "a"})
    assert "there 2 times: c" in problems(tmp_path, *SOUND, left={**LEFT, ("out", 0): "c"})
    assert "not stored" in problems(tmp_path, *SOUND, stored=[])
    assert "stored 2 times" in problems(tmp_path, *SOUND, stored=[*STORED, (("s/1", 1), "publisher-0-0")])
    assert "out of order" in problems(
        tmp_path,
        *SOUND,
        "30 number 1 publisher-0-1",
        stored=[(("s/1", 0), "publisher-0-1"), (("s/1", 1), "publisher-0-0")],
    )
