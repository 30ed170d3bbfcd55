"""The application: what it shows, and what its keys do."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Footer, Input

from qflow.errors import QflowError
from qflow.names import printable
from qflow.top import acting, drawing, one
from qflow.top.look import Board, Key, Look, Mode, Order
from qflow.top.one import Inside
from qflow.top.source import Source
from qflow.top.watching import Watcher
from qflow.top.widgets import Change, Lines, Opened, Question, Reading, Table

KINDS = (("queue", "stream"), ("queue",), ("stream",))
SILENT_S = 3.0
"""A look that takes longer is told of."""
EVENT_LINES = 4
LEAVING_S = 3.0
"""A terminal has so long to take the last that is drawn."""
LOW = 18
"""Lines of a terminal that has no room for events, nor for more than one finding."""
OF_TABLE = {"filter", "sort", "turn", "kinds", "all", "keys", "events", "findings"}
"""What keys do where the table is."""
OF_QUEUE = {"pause", "purge", "redrive", "alter"}
"""What they do where a queue is chosen or opened."""
BEFORE_TEXT = {"filter", "alter"}
"""Text follows these: they are done before the next key is looked at, and are letters where text is entered."""
HELP = """\
up, down, page up, page down, home, end   choose a queue or a stream
enter       open it: figures, consumers, who holds what, limits, first messages
/           show only names with this part; escape shows all again
tab         queues and streams, queues alone, streams alone
s, S        sort by the next column, or the one before; r turns the order round
p           pause a queue, or let it go on
x           purge: delete all messages of a queue; asks before
R           redrive: move dead letters back to where they came from; asks before
a           alter a setting of a queue, such as its limit_messages
d, e        what qflow doctor finds and what to do about it; all events
q, ctrl+c   leave

In front of a name: ! puts are blocked, P paused, ~ a stream.
lag: messages that nobody has taken; unack: delivered and not acked; oldest: for
how long the oldest of those is held; memory: against what the queue may use.
"""


class _Terminal(LinuxDriver):
    """Passes over what is no UTF-8, such as an umlaut of a terminal that writes Latin-1."""

    def run_input_thread(self) -> None:
        """Read keys until the end. What came in one piece with such a byte is lost with it."""
        while True:
            try:
                return super().run_input_thread()
            except UnicodeDecodeError:
                continue


class Looked(Message):
    """The watcher has seen something, or failed."""

    def __init__(self, look: Look | Exception) -> None:
        super().__init__()
        self.look = look


class Did(Message):
    """Something that was asked for is done, or was refused."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said


class Read(Message):
    """What is inside one that was opened is known."""

    def __init__(self, screen: Opened, inside: Inside) -> None:
        super().__init__()
        self.opened = screen
        self.inside = inside


class Top(App[int]):
    """`qflow top`; its result is the exit code. `watches`: a thread takes looks, else `take` is given them."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    VerticalScroll { scrollbar-gutter: stable; }
    #text { height: auto; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave(0)", "quit"),
        Binding("ctrl+c", "leave(130)", "quit", show=False, priority=True),
        Binding("slash", "filter", "find", priority=True),
        Binding("s", "sort(1)", "sort", show=False),
        Binding("S", "sort(-1)", "sort", show=False),
        Binding("r", "turn", "turn", show=False),
        Binding("tab", "kinds", "kinds", show=False, priority=True),
        Binding("p", "pause", "pause"),
        Binding("x", "purge", "purge"),
        Binding("R", "redrive", "redrive"),
        Binding("a", "alter", "alter", priority=True),
        Binding("d", "findings", "doctor"),
        Binding("e", "events", "events", show=False),
        Binding("question_mark", "keys", "keys"),
        Binding("escape", "all", "all", show=False),
    ]

    def __init__(self, source: Source, *, watches: bool = True) -> None:
        super().__init__(driver_class=_Terminal)
        self.board = Board()
        self.order = Order()
        self._source = source
        self._kinds = 0
        self._silent_s = 0.0
        self.said = ""
        """What became of what was asked for last; escape takes it away."""
        self._watcher = Watcher(source, lambda look: self.post_message(Looked(look))) if watches else None
        self.table = Table(self.board)
        self.failure: Exception | None = None
        """What ended it, that should not have."""

    def compose(self) -> ComposeResult:
        yield Lines(id="head")
        yield self.table
        yield Lines(id="events")
        yield Lines(id="said")
        yield Input(id="filter", placeholder="part of a name")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.table.focus()
        self.show()
        if self._watcher is None:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, partial(self._signalled, loop))
        self._watcher.start()
        self.set_interval(1.0, self._listen)

    def on_resize(self) -> None:
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Tell whether a key does something here: those of the table do nothing on another screen."""
        if action in BEFORE_TEXT and isinstance(self.focused, Input):
            return False
        is_table = len(self.screen_stack) == 1
        return is_table or (action not in OF_TABLE and (action not in OF_QUEUE or isinstance(self.screen, Opened)))

    def on_looked(self, message: Looked) -> None:
        if isinstance(message.look, Exception):
            self.failure = message.look
            self.exit(1)
        else:
            self.take(message.look)

    def take(self, look: Look) -> None:
        """Show a look."""
        self._silent_s = 0.0
        self.board.take(look)
        self.show()

    def _listen(self) -> None:
        """Say so if the owner does not answer."""
        assert self._watcher is not None
        before, silent_s = self._silent_s, self._watcher.silent_s
        self._silent_s = silent_s if silent_s > SILENT_S else 0.0
        if before or self._silent_s:
            self.show()

    def show(self) -> None:
        """Draw what is seen."""
        if isinstance(self.screen, ModalScreen):
            return
        self.screen.query_one("#said", Lines).show(drawing.sentence(self.said, self.size.width))
        if isinstance(self.screen, Reading):
            self.screen.renew()
            return
        width, height = self.size
        is_low = height < LOW
        head = drawing.head(self.board, self._source.path, width, self._silent_s, is_low=is_low)
        self.query_one("#head", Lines).show(head)
        wanted = self.query_one("#filter", Input).value
        self.table.show(self.board.shown(self.order, wanted, KINDS[self._kinds]), self.order)
        last = [*self.board.events][len(self.board.events) if is_low else -EVENT_LINES :]
        self.query_one("#events", Lines).show(drawing.events(last, width))

    # Keys ---------------------------------------------------------------------------------------------------------

    def _signalled(self, loop: asyncio.AbstractEventLoop, number: int, _frame: FrameType | None) -> None:
        """Leave, also if the loop waits for a terminal that takes nothing more: one that is stopped, or gone."""

        def end(*_: object) -> None:
            os._exit(128 + number)

        if loop.is_closed() or not os.isatty(0):
            end()
        if not signal.getitimer(signal.ITIMER_REAL)[0]:  # else another signal has set the end
            signal.signal(signal.SIGALRM, end)
            signal.setitimer(signal.ITIMER_REAL, LEAVING_S)
        loop.call_soon_threadsafe(self.action_leave, 128 + number)

    def action_leave(self, code: int) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        self.exit(code)

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        self.screen.set_focus(field)  # at once: what is typed next is a part of the name

    def on_input_changed(self) -> None:
        self.show()

    def on_input_submitted(self, message: Input.Submitted) -> None:
        message.input.display = bool(message.value)
        self.table.focus()

    def action_all(self) -> None:
        field = self.query_one("#filter", Input)
        field.value, field.display, self.said = "", False, ""
        self.table.focus()
        self.show()

    def action_sort(self, steps: int) -> None:
        self.order = self.order.moved(steps)
        self.show()

    def action_turn(self) -> None:
        self.order = self.order.turned()
        self.show()

    def action_kinds(self) -> None:
        self._kinds = (self._kinds + 1) % len(KINDS)
        self.show()

    def _open(self, screen: Reading) -> None:
        def left(_: None) -> None:
            self.call_later(self.show)

        self.push_screen(screen, left)

    def action_keys(self) -> None:
        self._open(Reading(lambda width: [Text(HELP)]))

    def action_findings(self) -> None:
        self._open(Reading(lambda width: drawing.every_finding(self.board)))

    def action_events(self) -> None:
        def lines(width: int) -> list[Text]:
            newest_first = [*self.board.events][::-1]
            return drawing.events(newest_first, width) or [Text("nothing has happened since this began to look")]

        self._open(Reading(lines))

    def on_table_opened(self, message: Table.Opened) -> None:
        screen = Opened(self.board, message.key)
        self._open(screen)
        self._read(screen)

    def _read(self, screen: Opened) -> None:
        """Have settings and first messages of what is opened read, as they are now."""
        key = screen.key
        facts = (self.board.look.queues if key.kind == "queue" else self.board.look.streams).get(key.name, {})
        is_durable = bool(facts.get("durable", True))
        self._beside(lambda: self.post_message(Read(screen, acting.look_inside(self._source, key, is_durable))))

    def on_read(self, message: Read) -> None:
        message.opened.inside = message.inside
        if message.opened is self.screen:
            message.opened.renew()

    # What changes a spool -----------------------------------------------------------------------------------------

    def _queue(self) -> str | None:
        """Return the queue that a key is for; tell why there is none."""
        key: Key | None = self.screen.key if isinstance(self.screen, Opened) else self.table.chosen
        if key is None or key.kind != "queue":
            self._say("choose a queue for that")
        elif self.board.look.mode is not Mode.LIVE:
            self._say(_why_not(self.board.look))
        elif key not in self.board.rows:
            self._say(one.gone(key))
        else:
            return key.name
        return None

    def action_purge(self) -> None:
        if (name := self._queue()) is not None:
            row = self.board.rows[Key("queue", name)]
            self._ask(
                f"Delete {row.messages:,} messages of {printable(name)}? What consumers hold is deleted, too.",
                partial(acting.purge, self._source, name),
            )

    def action_redrive(self) -> None:
        if (name := self._queue()) is not None:
            self._ask(
                f"Move the dead letters in {printable(name)} back to the queues they came from?",
                partial(acting.redrive, self._source, name),
            )

    def action_alter(self) -> None:
        if (name := self._queue()) is not None:

            def entered(change: str | None) -> None:
                if change:
                    self._do(partial(acting.alter, self._source, name, change))

            self.said = ""
            self.push_screen(Change(printable(name)), entered)

    def action_pause(self) -> None:
        if (name := self._queue()) is not None:
            is_paused = self.board.rows[Key("queue", name)].is_paused
            self._do(partial(acting.pause_or_resume, self._source, name, is_paused))

    def _ask(self, question: str, act: Callable[[], str]) -> None:
        def answered(is_yes: bool | None) -> None:
            if is_yes:
                self._do(act)

        self.said = ""
        self.push_screen(Question(question), answered)

    def _do(self, act: Callable[[], str]) -> None:
        def run() -> None:
            try:
                self.post_message(Did(act()))
            except (QflowError, OSError) as error:
                self.post_message(Did(" ".join(str(error).split())))

        self._beside(run)

    def _beside(self, work: Callable[[], object]) -> None:
        """Have a thread wait for the owner; one that hangs does not keep the process from ending."""
        threading.Thread(target=work, name="qflow-top-act", daemon=True).start()

    def on_did(self, message: Did) -> None:
        self._say(message.said)
        if isinstance(self.screen, Opened):
            self._read(self.screen)
        if self._watcher is not None:
            self._watcher.look_now()

    def _say(self, sentence: str) -> None:
        self.said = sentence
        self.show()


def run(source: Source) -> int:
    """Show a spool until somebody leaves; return the exit code.

    Raises:
        What ended the looks, if it is no error of the spool.
    """
    top = Top(source)
    code = top.run()
    if top.failure is not None:
        raise top.failure
    if code is None:
        return 1 if top.return_code is None else top.return_code  # None: Textual has shown what went wrong
    return code


def _why_not(look: Look) -> str:
    """Return why nothing can be changed from here, and what does it where something can."""
    if look.mode is Mode.DEAD and look.pid is None:
        return "nobody owns it: in a shell, `qflow purge`, `redrive` and `alter` do it, which own it meanwhile"
    return f"nothing is changed from here: {look.note}"
