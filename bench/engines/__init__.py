"""The engines that are measured, and how they are chosen by name or by kind."""

from __future__ import annotations

from collections.abc import Iterable

from bench.engines import floors, peers, qflow_queues, standard
from bench.engines.base import KINDS, Engine

EVERY: list[Engine] = [*qflow_queues.ENGINES, *standard.ENGINES, *peers.ENGINES, *floors.ENGINES]


def by_name(name: str) -> Engine:
    """Return the engine of this name; it exists."""
    return next(engine for engine in EVERY if engine.name == name)


def choose(names: Iterable[str]) -> list[Engine]:
    """Return the engines of these names or kinds, in the order of the list; all of them for no name.

    Raises:
        KeyError: there is no such engine or kind.
    """
    wanted = set(names)
    unknown = sorted(wanted - {*KINDS, *(engine.name for engine in EVERY)})
    if unknown:
        raise KeyError(unknown[0])
    return [engine for engine in EVERY if not wanted or {engine.name, engine.kind} & wanted]
