"""Engines side by side: all of one contest are open at once and take turns; one that fails leaves, the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import attrs

from bench.engines.base import FLOOR, PEER, SYNCED, Engine, Opened
from bench.errors import CannotRun
from bench.measure import Rank, Row, Series, Setup, interleave, ratio

NO_PEER = "no synced peer is installed and chosen"


@attrs.define
class Entrant:
    """An engine in a contest, and why it is not in it any more."""

    engine: Engine
    opened: Opened | None = None
    problem: str = ""

    def guarded(self, side: Callable[[Opened], float]) -> Callable[[], float]:
        """Return a side for `interleave`; what an engine raises ends its part alone."""

        def run() -> float:
            if self.opened is None or self.problem:
                return 0.0
            try:
                return side(self.opened)
            except Exception as error:
                self.problem = f"not measured: {type(error).__name__}: {error}"
                return 0.0

        return run

    def row(
        self,
        table: str,
        column: str,
        figure: Series,
        *,
        more: bool = False,
        verdict: str = "",
        notes: Sequence[str] = (),
        details: Sequence[Series] = (),
    ) -> Row:
        """Return its cell in a ranking table."""
        engine = self.engine
        return Row(
            name=f"{table}, {column}: {engine.name}",
            figure=None if self.problem else figure,
            problem=self.problem,
            rank=Rank(
                table=table,
                column=column,
                engine=engine.name,
                promise=engine.promise,
                floor=engine.kind == FLOOR,
                more=more,
            ),
            verdict=verdict,
            notes=list(notes),
            details=list(details),
        )


@contextmanager
def opened(setup: Setup, engines: Iterable[Engine]) -> Iterator[list[Entrant]]:
    """Open each engine in a directory of its own, which is gone afterwards."""
    with ExitStack() as stack:
        entrants = []
        for engine in engines:
            path = stack.enter_context(setup.scratch())
            try:
                entrants.append(Entrant(engine, stack.enter_context(engine.opened(path))))
            except Exception as error:
                entrants.append(Entrant(engine, problem=f"not measured: {error}"))
        yield entrants


def synced_peers(setup: Setup) -> list[Engine]:
    return [engine for engine in setup.engines if engine.kind == PEER and engine.promise == SYNCED]


def against(
    setup: Setup,
    engines: Iterable[Engine],
    chunks: int,
    side: Callable[[Opened], float],
    *mine: Callable[[], float],
    rounds: int | None = None,
) -> tuple[list[list[float]], dict[str, list[float]]]:
    """Let our sides and engines take turns; return the seconds of ours, and by name of those that came to the end."""
    with opened(setup, engines) as entrants:
        sides = [entrant.guarded(side) for entrant in entrants]
        seconds = interleave(rounds or setup.rounds, chunks, *mine, *sides)
    theirs = {
        entrant.engine.name: taken
        for entrant, taken in zip(entrants, seconds[len(mine) :], strict=True)
        if not entrant.problem
    }
    return seconds[: len(mine)], theirs


def best(series: Sequence[Series], peers: Iterable[Engine]) -> Series:
    """Return the series of the fastest of these engines; a series is named as its engine, times or rates.

    Raises:
        CannotRun: there is none.
    """
    names = {engine.name for engine in peers}
    found = [one for one in series if one.name in names]
    if not found:
        raise CannotRun(NO_PEER)
    pick = max if found[0].unit == "/s" else min
    return pick(found, key=lambda one: one.median)


def over_best(ours: Series, theirs: Sequence[Series], peers: Iterable[Engine]) -> tuple[Series | None, str]:
    """Return ours over the best of these engines, or None and why."""
    try:
        return ratio(ours, best(theirs, peers)), ""
    except CannotRun as error:
        return None, f"not measured: {error}"
