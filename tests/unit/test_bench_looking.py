"""How the bench looks at those who look: a command's own peak, `qflow top` on a terminal, a child that is talked to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # at the end: qflow itself may be the installed one

from bench import looking, talking, terminal, watching  # noqa: E402
from bench.errors import CannotRun  # noqa: E402
from bench.watched import named  # noqa: E402


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_peak_of_a_command_is_its_own() -> None:
    """The system counts what a process takes over from the one that started it, which is large here."""
    large = b"x" * (200 * looking.MIB)
    found = looking.launch(sys.executable, "-c", "raise SystemExit(3)")
    assert found.code == 3
    assert 0 < found.peak_bytes < len(large) / 2


def test_a_page_and_a_terminal_are_watched_and_leave(tmp_path: Path) -> None:
    """Both see the queues of a program that lives on, a page by what its script asks; `qflow top` is gone after."""
    pytest.importorskip("textual", reason="needs the extra `top`")
    with talking.started("bench.watched", tmp_path / "spool", 3, "transient") as owner:
        watching.browse(talking.ask(owner, "page"), 0.01)
        with terminal.top(tmp_path / "spool", 80, named(3)[2]) as screen:
            (share,) = watching.shares([screen.pid], lambda: None)
            assert share >= 0
            assert screen.draws
        assert not Path(f"/proc/{screen.pid}").exists()
        assert talking.ask(owner, "change 1") == 1


def test_what_ends_too_early_is_told(tmp_path: Path) -> None:
    """A top of what is no spool, and a child that does not know what it is told."""
    with (
        pytest.raises(CannotRun, match="ended before it showed a queue: qflow: .*is not a spool"),
        terminal.top(tmp_path, 80, "queue"),
    ):
        pass
    with (
        talking.started("bench.watched", tmp_path / "spool", 1, "durable") as child,
        pytest.raises(CannotRun, match="ended before it answered"),
    ):
        talking.ask(child, "nonsense")
