"""The screens as text, at the widths of terminals."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from rich.cells import cell_len

import qflow
import top_seen
from qflow.top import drawing, one
from qflow.top.look import Board, Key, Look, Mode
from top_dumps import DUMPS, dumped


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Events have the time of the place."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("width", top_seen.WIDTHS)
def test_the_pages_are_as_they_were(width: int) -> None:
    """`python tests/top_dumps.py` writes them anew, to be read before they are committed."""
    assert dumped(width) == (DUMPS / f"{width}.txt").read_text()


@pytest.mark.parametrize("width", [*range(20, 60), 79, 100, 160, 300])
def test_no_line_is_wider_than_the_terminal_and_none_controls_it(width: int) -> None:
    """Names with escapes and wide letters included."""
    board = top_seen.board()
    board.take(top_seen.look(11, note="a \x1b[2Jnote " * 20, queues={"日本" * 30: top_seen.queue("日本" * 30)}))
    lines = (
        top_seen.page(board, width) if width >= 40 else [line.plain for line in drawing.head(board, "/a/b" * 30, width)]
    )
    assert [line for line in lines if cell_len(line) > width] == []
    assert "".join(lines).isprintable()


def test_what_cannot_be_read_says_why() -> None:
    """With the sentence of the error, and no figures."""
    board = Board()
    board.take(Look(mode=Mode.FAILED, note="the log of spool is damaged", time_s=0.0))
    lines = [line.plain.rstrip() for line in drawing.head(board, "spool", 60)]
    assert lines[0].endswith("unreadable")
    assert lines[1:] == ["the log of spool is damaged", "0 queues: 0 messages"]


def test_figures_of_a_file_have_their_age() -> None:
    """An owner that lets nobody in writes them from time to time."""
    board = Board()
    board.take(Look(mode=Mode.TOLD, pid=7, note="process 7 owns it", time_s=0.0, age_s=65.0))
    lines = [line.plain.rstrip() for line in drawing.head(board, "spool", 60)]
    assert lines[:2] == ["spool" + "read-only · pid 7".rjust(55), "process 7 owns it, 1m05 old"]


def test_an_owner_that_does_not_answer_is_told_of() -> None:
    """What is shown is from before."""
    lines = [line.plain.rstrip() for line in drawing.head(top_seen.board(), "spool", 60, silent_s=75.0)]
    assert lines[1] == "no answer for 1m15; what is shown is as old"


def test_what_was_opened_may_be_gone() -> None:
    """Somebody deletes the queue that is looked at."""
    lines = one.page(top_seen.board(), Key("queue", "gone\x1b"), one.Inside(), 60)
    assert [line.plain for line in lines] == [r"queue gone\x1b is not there any more"]


def test_settings_are_shown_as_they_are_typed() -> None:
    """`none` takes a limit away; topics have commas between them."""
    settings = {
        "limit_messages": None,
        "topics": ("a/#", "b\x1b"),
        "durable": True,
        "on_overflow": qflow.Overflow.REJECT,
    }
    key = Key("stream", next(iter(top_seen.board().look.streams)))
    lines = [line.plain for line in one.page(top_seen.board(), key, one.Inside(settings=settings), 90)]
    assert r"limit_messages none · topics a/#,b\x1b · durable True · on_overflow reject" in [
        line.rstrip() for line in lines
    ]


def test_all_findings_are_read_with_their_remedies() -> None:
    """And a spool without any says so."""
    lines = [line.plain for line in drawing.every_finding(top_seen.board())]
    assert lines[-2:] == [r"notice: nobody takes na\x1b[31mme", "  open it"]
    board = Board()
    assert drawing.every_finding(board)[0].plain == "reading the spool ..."
    board.take(top_seen.look(0))
    assert "nothing is wrong" in drawing.every_finding(board)[0].plain
