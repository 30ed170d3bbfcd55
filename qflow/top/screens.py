"""The screens above the table: one queue, a question, a text to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Input, Static

from qflow.top import one
from qflow.top.look import Board, Key
from qflow.top.widgets import Lines

MARGIN = 4
"""Beside the text: a cell on both sides, and the bar that scrolls."""


class Reading(Screen[None]):
    """Lines to read, made anew with each look, for a width."""

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
        Binding("a", "app.alter", "alter", priority=True),
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


class Change(ModalScreen[str]):
    """Asks for a change of a queue's settings; empty: none."""

    DEFAULT_CSS = """
    Change { align: center middle; }
    Change > Vertical { width: 90%; max-width: 70; height: auto; padding: 1 2; border: heavy yellow; }
    Change > Vertical { background: $surface; }
    Change Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "no")]

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(f"Change a setting of {self._name}: NAME=VALUE"))
            yield Input(placeholder="limit_messages=1000, ack_timeout_s=600, on_overflow=reject")
            yield Static(Text("[enter] change it   [esc] no; the value none takes a limit away"))

    def on_input_submitted(self, message: Input.Submitted) -> None:
        message.stop()
        self.dismiss(message.value)

    def action_cancel(self) -> None:
        self.dismiss("")
