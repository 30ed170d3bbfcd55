"""How often `qflow top` looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qflow.top import watching
from qflow.top.look import Look, Mode
from qflow.top.watching import Watcher


class _Looks:
    """A spool that is looked at in no time."""

    def look(self) -> Look:
        return Look(mode=Mode.LIVE, time_s=0.0)

    def leave(self) -> None: ...


@pytest.mark.parametrize(("drawn_s", "pause_s"), [(0.001, 1.0), (0.03, 1.5), (1.0, 10.0)])
def test_what_it_takes_to_draw_a_look_counts_as_the_look_does(
    drawn_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wider the terminal, and the more has changed, the longer that takes."""
    used_s, pauses = [0.0], list[float]()
    monkeypatch.setattr(watching, "time", SimpleNamespace(process_time=lambda: used_s[0], monotonic=lambda: 0.0))

    def draw(_: object) -> None:
        used_s[0] += drawn_s

    watcher: Any = Watcher(_Looks(), draw)  # type: ignore[arg-type]

    class Bell:
        def wait(self, seconds: float) -> None:
            pauses.append(seconds)
            watcher._stopped = len(pauses) == 5

        def clear(self) -> None: ...

    watcher._wake = Bell()
    watcher._run()
    assert pauses[4] == pytest.approx(pause_s)
