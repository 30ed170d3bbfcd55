"""The incident of the runbook, seen and solved in a terminal, by the keys that `qflow top` names."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import incident
from top_terminal import needs_tmux, opened

pytest.importorskip("textual", reason="needs the extra `top`")


@needs_tmux
def test_an_incident_is_seen_and_solved_by_keys(tmp_path: Path) -> None:
    """What is wrong stands on the screens that d and enter open; it goes by a, x and R."""
    spool = tmp_path / "spool"
    with incident.made(spool) as happening, opened(spool, 200) as terminal:

        def choose(name: str) -> None:
            terminal.press("/", "C-u")
            terminal.sees("part of a name")
            terminal.press(*name, "Enter")
            terminal.sees(f"{name}    ", but="orders    ")

        def leave() -> None:
            terminal.press("Escape")
            terminal.sees("lag▾")

        terminal.sees("5 queues: 405 messages, log ", " live of ", "2 findings more, and what to do: press d")
        terminal.press("d")
        terminal.sees(
            f"consumer 'mailer-3' of process {happening.mailer} has held a message of queue 'mail' for 40 minutes",
            f"`kill {happening.mailer};",
            "5 producers blocked for up to 12 s at limit_messages of queue 'payments' (100); nobody takes from it",
            "here: a on the queue raises its limit, x purges it",
            "nobody consumes queue 'audit', and it grows: 300 messages wait",
            "4 dead letters in queue 'dead'; 3 for the commonest reason: 'card declined'",
            "here: enter on the queue shows why each is dead, R redrives them, x purges them",
        )
        leave()
        terminal.press("/", *"mail", "Enter")  # at once, as a slow line brings what is typed
        terminal.sees("mail    ", but="orders    ")
        terminal.press("Enter")
        terminal.sees(f"1 by mailer-3 (pid {happening.mailer}), the oldest for 40m")
        happening.end_mailer(signal.SIGTERM)
        happening.let_pass(1.0)
        terminal.sees("messages 1 ", but="by mailer-3")
        leave()
        choose("payments")
        terminal.press("Enter")
        terminal.sees("5 blocked puts, the longest for ", "at limit_messages")
        terminal.press("a")
        terminal.sees("Change a setting of payments")
        terminal.press("limit_messages=200", "Enter")
        terminal.sees("payments: limit_messages is 200 now, and was 100")
        happening.let_pass(1.0)
        terminal.sees("messages 105 ", but="blocked puts")
        leave()
        choose("audit")
        terminal.press("x")
        terminal.sees("Delete 300 messages of audit?")
        terminal.press("y")
        terminal.sees("messages deleted from audit: 300")
        choose("dead")
        terminal.press("Enter")
        terminal.sees("dead_letter_nack_reason card declined", "dead_letter_nack_reason no such customer")
        terminal.press("R")
        terminal.sees("Move the dead letters in dead back")
        terminal.press("y")
        terminal.sees("messages moved from dead: 4")
        happening.start_consumers()
        happening.let_pass(1.0)
        leave()
        terminal.sees("5 queues: 0 messages", but="producers blocked")
        assert happening.left() == []
