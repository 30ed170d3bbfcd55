"""The screens above the table: one queue, a question, a text to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Static

from qflow.top import one
from qflow.top.look import Board, Key
from qflow.top.widgets import Lines

MARGIN = 4
"""Beside the text: a cell on both sides, and the bar that scrolls."""


class Reading(Screen[None]):
    """Lines to read, made anew with each look.

    Args:
        lines: makes them, for a width.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,left,backspace", "leave", "back"),
        Binding("j", "scroll(1)", "down", show=False),
        Binding("k", "scroll(-1)", "up", show=False),
    ]

    def __init__(self, lines: Callable[[int], list[Text]]) -> None:
        super().__init__()
        self._lines = lines
        self._text = Static(id="text")

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._text
        yield Lines(id="said")
        yield Footer()

    def on_mount(self) -> None:
        self.renew()

    def on_resize(self) -> None:
        self.renew()

    def renew(self) -> None:
        self._text.update(Text("\n").join(self._lines(max(20, self.size.width - MARGIN))))

    def action_leave(self) -> None:
        self.dismiss()

    def action_scroll(self, steps: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=steps, animate=False)


class Opened(Reading):
    """One queue or stream."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "app.purge", "purge"),
        Binding("R", "app.redrive", "redrive"),
    ]

    def __init__(self, board: Board, key: Key) -> None:
        super().__init__(lambda width: one.page(board, key, self.inside, width))
        self.key = key
        self.inside = one.Inside(note="reading its settings and messages ...")


class Question(ModalScreen[bool]):
    """Asks before something is deleted or moved; only `y` is a yes."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Static { width: 90%; max-width: 70; height: auto; padding: 1 2; border: heavy red; }
    Question > Static { background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q,enter", "answer(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._question}\n\n[y] yes   [n] no"), id="question")

    def action_answer(self, is_yes: bool) -> None:
        self.dismiss(is_yes)
