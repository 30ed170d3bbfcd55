"""Textual's widgets: lines of text, the table with its cursor; and the screens above it: a queue, a question, text."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Footer, Input, Static

from qflow.top import one
from qflow.top.drawing import layout
from qflow.top.look import Board, Key, Order, Row

WHEEL = 3
MARGIN = 4
"""Beside the text: a cell on both sides, and the bar that scrolls."""


class Lines(Widget):
    """Some lines, as high as they are many."""

    DEFAULT_CSS = "Lines { height: 0; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._lines: list[Text] = []

    def show(self, lines: list[Text]) -> None:
        if len(lines) != len(self._lines):
            self.styles.height = len(lines)
        self._lines = lines
        self.refresh()

    def render(self) -> Text:
        return Text("\n").join(self._lines)


class Table(Widget, can_focus=True):
    """The rows of a board; only those that are seen are drawn."""

    DEFAULT_CSS = "Table { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home,g", "move(-1000000)", "first", show=False),
        Binding("end,G", "move(1000000)", "last", show=False),
        Binding("enter", "open", "open"),
    ]

    class Opened(Message):
        """A row was chosen."""

        def __init__(self, key: Key) -> None:
            super().__init__()
            self.key = key

    def __init__(self, board: Board) -> None:
        super().__init__(id="table")
        self._board = board
        self.rows: list[Row] = []
        self._order = Order()
        self._first = 0
        self.chosen: Key | None = None
        """The row that the cursor is on, wherever it goes."""

    def show(self, rows: list[Row], order: Order) -> None:
        self.rows, self._order = rows, order
        self._place()
        self.refresh()

    def _place(self) -> int:
        """Return where the cursor is; a row that is gone leaves it at the top."""
        place = next((place for place, row in enumerate(self.rows) if row.key == self.chosen), 0)
        self.chosen = self.rows[place].key if self.rows else None
        return place

    def render(self) -> Text:
        place, height = self._place(), max(1, self.size.height - 1)
        self._first = max(0, min(self._first, place, len(self.rows) - height), place - height + 1)
        seen = self.rows[self._first : self._first + height]
        shape = layout(self.size.width, [row.key.name for row in seen])
        lines = [shape.heading(self._order)]
        for number, row in enumerate(seen, self._first):
            line = shape.line(self._board, row)
            if number == place:
                line.pad_right(max(0, self.size.width - line.cell_len))
                line.stylize("reverse")
            lines.append(line)
        if not seen:
            lines.append(Text("  no queue and no stream to show", "dim"))
        return Text("\n").join(lines)

    def action_move(self, steps: int) -> None:
        if self.rows:
            place = min(len(self.rows) - 1, max(0, self._place() + steps))
            self.chosen = self.rows[place].key
            self.refresh()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 2))

    def action_open(self) -> None:
        if self.rows:
            self._place()
        if self.chosen is not None:
            self.post_message(self.Opened(self.chosen))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self.action_move(WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self.action_move(-WHEEL)

    def on_click(self, event: events.Click) -> None:
        place = self._first + event.y - 1
        if event.y > 0 and place < len(self.rows):
            is_again = self.rows[place].key == self.chosen
            self.chosen = self.rows[place].key
            self.refresh()
            if is_again:
                self.action_open()


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
