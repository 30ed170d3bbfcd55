"""Tables on terminals of any width, colour, and progress: what people see, and programs do not."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import qflow
from qflow.cli import progress
from qflow.cli.facts import PADDED, cells, cut, laid_out, readable
from qflow.cli.main import app

HEADINGS = ["queue", "messages", "bytes", "floor", "next"]
NAMES = ["q", "a name that is rather long, for a queue", readable("\x1b[31mred\n"), "日本語の長い長い長い長い名前"]
ROWS = [[name, "1,000", "3,500,000", "500", "1,500"] for name in NAMES]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_fits_the_terminal(width: int) -> None:
    """No line is wider, every number is whole, and a name is cut rather than a number."""
    lines = [click.unstyle(line) for line in laid_out(HEADINGS, ROWS, width)]
    assert max(map(cells, lines)) <= width
    assert sum("3,500,000" in line for line in lines) == len(ROWS)
    assert all(line.isprintable() for line in lines)


def test_a_table_that_cannot_be_cut_is_stacked() -> None:
    """Below what the numbers take, each row is a heading and a value a line."""
    lines = [click.unstyle(line) for line in laid_out(HEADINGS, ROWS[:2], 30)]
    assert lines[:2] == ["queue     q", "messages  1,000"]
    assert lines[5] == ""
    assert lines[6] == "queue     a name that is ra..."
    assert max(map(cells, lines)) <= 30


def test_what_is_no_terminal_gets_whole_lines() -> None:
    """A pipe has no width."""
    assert max(map(len, laid_out(HEADINGS, ROWS, None))) > 60
    assert [click.unstyle(line) for line in laid_out(HEADINGS, [], 40)] == ["queue  messages  bytes  floor  next"]


def test_one_long_name_does_not_make_every_line_long() -> None:
    """It is whole where no terminal is, for a program; the other rows are aligned among themselves."""
    rows = [["x" * 1000, "1", "2"], *([name, "3", "4"] for name in ("a", "b" * PADDED))]
    long, *lines = map(click.unstyle, laid_out(["queue", "messages", "bytes"], rows, None)[1:])
    assert long.split() == rows[0]
    assert lines == [f"{name:{PADDED}}  {'3':>8}  {'4':>5}" for name in ("a", "b" * PADDED)]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("กิน", 2),
        ("ดื่มน้ำ", 4),
        ("か\N{COMBINING KATAKANA-HIRAGANA VOICED SOUND MARK}", 2),
        ("e\N{COMBINING ACUTE ACCENT}", 1),
        ("a\N{COMBINING ENCLOSING CIRCLE}", 1),
    ],
)
def test_columns_are_aligned_behind_letters_with_marks(name: str, taken: int) -> None:
    """A mark takes no cell of its own, of Thai neither."""
    marked, plain = laid_out(["queue", "state"], [[name, "paused"], ["q", "paused"]], 80)[1:]
    assert marked == name + " " * (plain.index("paused") - taken) + "paused"


@pytest.mark.parametrize("most", [2, 3, 4, 12])
@pytest.mark.parametrize("letter", ["e", "กิ", "か\N{COMBINING KATAKANA-HIRAGANA VOICED SOUND MARK}", "日"])
def test_what_is_cut_off_is_told_by_dots_behind_letters_with_marks(letter: str, most: int) -> None:
    """Cells are counted, and not the marks."""
    letters = max(0, most - 3) // cells(letter)
    assert cut(20 * letter, most) == letters * letter + "..."[:most]


@pytest.mark.parametrize(
    ("options", "variables", "coloured"),
    [
        ([], {}, False),
        (["--color", "always"], {}, True),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {}, False),
        ([], {"NO_COLOR": "1"}, False),
    ],
)
def test_colour_is_for_terminals_and_for_those_who_ask(
    tmp_path: Path, options: list[str], variables: dict[str, str], coloured: bool
) -> None:
    """No escape reaches a file unless it was asked for by name."""
    with qflow.open(tmp_path / "spool") as broker:
        broker.declare_queue("q")
    done = CliRunner().invoke(app, [*options, "stats", str(tmp_path / "spool")], env=variables)
    assert done.exit_code == 0
    assert ("\x1b[" in done.stdout) is coloured


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What takes long shows a bar on stderr, with the name of what is done as it is."""
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.counting("[red]export", 10) as advance:
        advance(5)
        click.echo("a line of stdout")
    assert "[red]export" in terminal.getvalue()
    assert "50%" in terminal.getvalue()
    assert capsys.readouterr().out == "a line of stdout\n"


@pytest.mark.parametrize("shown", [progress.working, lambda what: progress.counting(what, 10)])
def test_nobody_is_shown_progress_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, shown: Callable[[str], object]
) -> None:
    """A log file that stderr goes to has no bars in it."""
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    with shown("export") as advance:  # type: ignore[attr-defined]
        if advance is not None:
            advance(5)
    assert heard.getvalue() == ""
