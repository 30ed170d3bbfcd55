"""Whether engines keep what they promise when they are killed: put, SIGKILL, open again, count."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from bench import children
from bench.contest import Entrant
from bench.engines import by_name
from bench.engines.base import FLOOR, MEMORY, PEER, Engine
from bench.errors import CannotRun
from bench.measure import Row, Series, Setup, Workload

COUNT = 100
BODY = bytes(1024)
PATIENCE_S = 10


# In the parent -----------------------------------------------------------------------------------------------------


def after_a_kill(setup: Setup) -> Iterator[Row]:
    for engine in setup.engines:
        if _can_be_opened_again(engine):
            yield _killed(setup, engine)


def _can_be_opened_again(engine: Engine) -> bool:
    """Tell whether a second process could find anything: floors keep no positions, objects in memory are gone."""
    return engine.kind == PEER or (engine.kind != FLOOR and engine.promise != MEMORY)


def _killed(setup: Setup, engine: Engine) -> Row:
    entrant, found = Entrant(engine), 0
    try:
        with setup.scratch() as path:
            children.run_and_kill("put-and-wait", path, engine.name)
            found = children.run("count", path, engine.name)
    except CannotRun as error:
        entrant.problem = f"not measured: {error}"
    verdict = "kept" if found == COUNT else "none promised" if engine.promise == MEMORY else "BROKEN"
    figure = Series("messages", "", [found])
    return entrant.row(f"found of {COUNT} after SIGKILL", "found", figure, more=True, verdict=verdict)


WORKLOADS = [
    Workload(
        "promises", "100 messages put one by one, the process killed: how many are there when it opens", after_a_kill
    )
]


# In a child --------------------------------------------------------------------------------------------------------


def _put_and_wait(path: str, name: str) -> None:
    with by_name(name).opened(Path(path)) as engine:
        assert engine.put is not None
        for _ in range(COUNT):
            engine.put(BODY)
        children.report(COUNT)
        children.wait_to_be_killed()


def _count(path: str, name: str) -> None:
    """Take until it says, in whatever way, that there is no more; some wait for ever instead, so an alarm ends it."""
    found = 0
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(PATIENCE_S)
    try:
        with by_name(name).opened(Path(path)) as engine:
            assert engine.take is not None
            while found < COUNT and engine.take() is not None:
                found += 1
    except CannotRun:
        raise
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    children.report(found)


def _give_up(*_: object) -> NoReturn:
    raise TimeoutError(f"nothing came for {PATIENCE_S} s")


ROLES: dict[str, Callable[..., None]] = {"put-and-wait": _put_and_wait, "count": _count}
