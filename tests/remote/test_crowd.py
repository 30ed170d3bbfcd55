"""A crowd of tasks at one connection, a tenth of whose calls are cancelled: what both sides still hold afterwards."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import inside
import qflow
import qflow.aio
from crash.door_client import STREAM, lane_of, own
from crash.door_crowd import Crowd
from crash.door_history import History, Place, look
from doors.event_loop import until
from qflow.aio.delivery import held_of
from qflow.remote.server.grants import Grant
from qflow.remote.server.session import Session
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
TOLD = 1_000_000 if TORTURE else 60_000
"""So many bytes of reports are enough."""


def left_of(grant: Grant) -> Iterator[Place]:
    """Yield where the messages are that are held by a grant."""
    held = held_of(grant.batch)
    for place in range(held.total):
        if not held.is_settled(place):
            one = held.delivery_at(place)
            yield (lane_of(one.partition), one.offset) if one.queue == STREAM else (one.queue, one.sequence)


def test_a_crowd_leaves_nothing_open_and_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is under way, no page, subscription or consumer is left; messages are with the client, or waiting."""
    print(f"seed {SEED} (set QFLOW_SEED)")
    sessions: list[Session] = []
    make = Session.__init__

    def made(session: Session, *arguments: Any, **named: Any) -> None:
        make(session, *arguments, **named)
        sessions.append(session)

    monkeypatch.setattr(Session, "__init__", made)
    spool, reports = tmp_path / "spool", tmp_path / "reports"
    reports.mkdir()
    client = Crowd(str(spool), str(reports), "crowd", SEED, 0)

    async def scenario(owner: qflow.Broker) -> None:
        async with qflow.aio.connect(spool) as broker:
            working = asyncio.ensure_future(client.crowd(broker))
            await until(lambda: working.done() or (reports / "crowd-0").stat().st_size > TOLD)
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            assert await broker.check() == []
            await until(lambda: not inside.link(broker).under_way)
            (session,) = sessions
            left = (session.browsing, session.queries, session.subscriptions, session.consumers)
            await until(lambda: not any(left))
            shown = {got.place for got in History(reports).got}
            # What is held beside that is held for a call that was given up.
            await until(lambda: {place for grant in inside.grants(session) for place in left_of(grant)} <= shown)
            assert not any(owner.queue(name).stats().consumers for name in owner.queues())

    with own(str(spool)) as owner:
        asyncio.run(scenario(owner))
    problems = History(reports).problems(*look(spool))
    assert not problems, problems[:20]
