"""What keys do, in Textual without a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import qflow
import top_seen

pytest.importorskip("textual", reason="needs the extra `top`")

from textual.pilot import Pilot
from textual.widgets import Input

from qflow.top.app import Source, Top
from qflow.top.look import Look, Mode, Order

DEADLINE_S = 60


def played(
    script: Callable[[Top, Pilot[int]], Awaitable[None]], *, spool: Any = top_seen.PATH, width: int = 120
) -> Top:
    """Run a script against what is shown, and return it when it has ended."""
    top = Top(Source(spool), watches=False)

    async def run() -> None:
        async with top.run_test(size=(width, 30)) as pilot:
            for second in range(11):
                top.take(top_seen.look(second))
            top.take(top_seen.look(11, events=top_seen.EVENTS, findings=top_seen.FINDINGS))
            await pilot.pause()
            await script(top, pilot)

    asyncio.run(run())
    return top


def text(top: Top) -> str:
    """Return what the screen shows."""
    return "\n".join(top_seen.text_of(top.export_screenshot()))


async def until(pilot: Pilot[int], shows: Callable[[], bool]) -> None:
    """Wait until Textual has drawn what a key did, or a thread has asked the owner."""
    ends = time.monotonic() + DEADLINE_S
    while not shows():
        assert time.monotonic() < ends, text(pilot.app)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)


async def sees(pilot: Pilot[int], *parts: str) -> None:
    """Wait until all of these are on the screen."""
    await until(pilot, lambda: all(part in text(pilot.app) for part in parts))  # type: ignore[arg-type]


def names(top: Top) -> list[str]:
    """Return the names in the table, from the first row on."""
    return [row.key.name for row in top.table.rows]


@pytest.mark.parametrize("width", top_seen.WIDTHS)
def test_the_screen_is_the_page(width: int) -> None:
    """Textual shows the lines as they were made, at every width, and the keys below."""

    async def script(top: Top, pilot: Pilot[int]) -> None:
        page, events = top_seen.page(top.board, width), len(top_seen.EVENTS)

        def is_shown() -> bool:
            lines = top_seen.text_of(top.export_screenshot())
            above, below = lines[: len(page) - events], lines[-1 - events : -1]
            return above == page[:-events] and below == page[-events:] and "quit" in lines[-1]

        await until(pilot, is_shown)

    played(script, width=width)


def test_rows_are_sorted_turned_and_chosen_by_kind() -> None:
    """The heading tells by what."""

    async def script(top: Top, pilot: Pilot[int]) -> None:
        assert names(top)[0] == "payments"
        await pilot.press("s", "s", "s")
        await sees(pilot, "in/s▾")
        assert names(top)[0] == "flights"
        await pilot.press("r")
        await sees(pilot, "in/s▴")
        assert names(top)[-1] == "flights"
        await pilot.press("S", "tab")
        assert "flights" not in names(top)
        await pilot.press("tab")
        assert names(top) == ["flights"]
        await pilot.press("tab")
        assert len(names(top)) == 4

    played(script)


def test_a_part_of_a_name_filters_and_escape_shows_all() -> None:
    """In the table, and for the keys that act on a row."""

    async def script(top: Top, pilot: Pilot[int]) -> None:
        await pilot.press("slash", *"OB", "enter", "enter")
        assert names(top) == ["jobs"]
        await sees(pilot, "queue jobs")
        await pilot.press("escape", "escape")
        assert "payments" in names(top)
        await pilot.press("slash", *"?!", "enter")
        await sees(pilot, "no queue and no stream to show")
        await pilot.press("enter", "x", "down")
        assert len(top.screen_stack) == 1

    played(script)


def test_the_cursor_stays_on_its_row_wherever_that_goes() -> None:
    """Rows change places with each look."""

    async def script(top: Top, pilot: Pilot[int]) -> None:
        await pilot.press("down", "down", "r", "enter")
        await sees(pilot, "queue jobs")
        await pilot.press("escape", "home", "enter")
        await sees(pilot, "queue na")
        await pilot.press("escape", "end", "pageup", "pagedown", "enter")
        await sees(pilot, "queue payments")

    played(script)


def test_a_queue_is_opened_and_followed_and_may_go() -> None:
    """Its page is made anew with each look, also at the look that has it no more."""

    async def script(top: Top, pilot: Pilot[int]) -> None:
        await pilot.press("enter")
        await sees(
            pilot,
            "there is no spool",
            "1 by mailer-3 (pid 4711), the oldest for 40m",
            "5 blocked puts, the longest for 12s, at limit_messages",
        )
        top.take(top_seen.look(12, queues={}))
        await sees(pilot, "queue payments is not there any more")
        await pilot.press("q")
        await until(pilot, lambda: names(top) == ["flights"])

    played(script)


@pytest.mark.parametrize("key", ["x", "p", "R", "a"])
def test_nothing_is_asked_of_a_queue_that_is_gone(key: str) -> None:
    """A sentence says so, on its page and behind it."""

    async def script(top: Top, pilot: Pilot[int]) -> None:
        await pilot.press("enter")
        await sees(pilot, "queue payments")
        top.take(top_seen.look(12, queues={}))
        await sees(pilot, "queue payments is not there any more")
        await pilot.press(key)
        await until(pilot, lambda: top.said == "queue payments is not there any more")
        assert len(top.screen_stack) == 2

    played(script)


def test_events_findings_and_keys_are_read_on_screens_of_their_own() -> None:
    """Escape leads back; keys of the table do nothing there."""

    async def script(top: Top, pilot: Pilot[int]) -> None:
        await pilot.press("d")
        await sees(pilot, "look at mailer-3")
        await pilot.press("escape", "e")
        await sees(pilot, r"consumer failed na\x1b[31mme ValueError: \x07")
        await pilot.press("escape", "question_mark")
        await sees(pilot, "purge: delete all messages of a queue")
        await pilot.press("s", "slash", "e", "x", "a", "p", "q")
        assert (top.order, top.said, len(top.screen_stack)) == (Order(), "", 1)

    played(script)


def test_nothing_is_changed_where_that_cannot_be() -> None:
    """A stream, and a spool that is not live: a sentence says so, and nobody is asked."""

    async def script(top: Top, pilot: Pilot[int]) -> None:
        await pilot.press("down", "x")
        await sees(pilot, "choose a queue for that")
        queues = top.board.look.queues
        for mode, note, said in (
            (
                Mode.DEAD,
                "",
                "nobody owns it: in a shell, `qflow purge`, `redrive` and `alter` do it, which own it meanwhile",
            ),
            (Mode.TOLD, "7 lets nobody in", "nothing is changed from here: 7 lets nobody in"),
        ):
            top.take(Look(mode=mode, time_s=1.0, note=note, pid=7 if note else None, queues=queues))
            await pilot.press("x", "R", "p", "a")
            await sees(pilot, said)
        assert len(top.screen_stack) == 1

    played(script)


def test_a_purge_is_asked_about_and_done_on_yes_alone(spool: Path) -> None:
    """Any other answer leaves the messages; errors of the owner are told."""
    with qflow.open(spool) as broker:
        payments = broker.declare_queue("payments")
        payments.put_many([b"a", b"b"])
        source, ends = Source(spool), time.monotonic() + DEADLINE_S
        while source.look().queues["payments"]["messages"] < 2:  # what changed is figured anew twice a second
            assert time.monotonic() < ends
        top = Top(source, watches=False)

        async def run() -> None:
            async with top.run_test(size=(100, 30)) as pilot:
                for no in ("n", "enter", "escape"):
                    top.take(source.look())
                    await pilot.press("x")
                    await sees(pilot, "Delete 2 messages of payments?")
                    await pilot.press(no)
                    assert len(payments) == 2
                await pilot.press("x", "y")
                await sees(pilot, "messages deleted from payments: 2")
                assert len(payments) == 0
                await pilot.press("R", "y")
                await sees(pilot, "messages moved from payments: 0")
                broker.delete_queue("payments")
                await pilot.press("x", "y")
                await sees(pilot, "there is no queue")

        asyncio.run(run())
        source.leave()


def test_a_setting_is_altered_where_it_is_shown(spool: Path) -> None:
    """What is entered is done on enter alone, and the settings are read again."""
    with qflow.open(spool) as broker:
        payments = broker.declare_queue("payments", ttl_s=7)
        source = Source(spool)
        top = Top(source, watches=False)

        async def run() -> None:
            async with top.run_test(size=(100, 30)) as pilot:
                top.take(source.look())
                await pilot.press("enter")
                await sees(pilot, "ttl_s 7")
                await pilot.press("a", *"ttl_s=8", "escape", "a", "enter")
                assert (payments.settings.ttl_s, len(top.screen_stack)) == (7, 2)
                await pilot.press("a", *"ttl_s=9", "enter")
                await sees(pilot, "payments: ttl_s is 9.0 now, and was 7.0", "· ttl_s 9.0")
                await pilot.press("escape", "slash", *"a/a")
                assert top.query_one(Input).value == "a/a"

        asyncio.run(run())
        source.leave()


def test_it_ends_with_an_exit_code() -> None:
    """0 for q; 130 for Ctrl-C, from every screen."""

    async def leave(top: Top, pilot: Pilot[int]) -> None:
        await pilot.press("q")

    async def interrupt(top: Top, pilot: Pilot[int]) -> None:
        await pilot.press("enter", "ctrl+c")

    assert played(leave).return_value == 0
    assert played(interrupt).return_value == 130
