"""The server is killed under load and started again on its spool: a history of what all clients saw."""

from __future__ import annotations

import os
import random
from pathlib import Path

from amqp_clients import serving
from amqp_history import Client, Consumer, History, Publisher, declare_all, drain, live_under_kills
from processes import free_port
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
CLIENTS = 25 if TORTURE else 5
"""Of each kind."""
KILLS = int(os.environ.get("QFLOW_ROUNDS", "0")) or (60 if TORTURE else 2)
MESSAGES = 3000 if TORTURE else 300
"""Confirmed in each round, at least, before the server is killed."""


def test_what_was_confirmed_arrives_whatever_is_killed(tmp_path: Path) -> None:
    """At least once, in order to a consumer that stays; nothing comes twice as if it were new, and nothing after the commit that settled it."""
    print(f"seed {SEED} (set QFLOW_SEED)")
    chance = random.Random(SEED)
    history, port = History(), free_port()
    clients: list[Client] = []
    for kind in (Publisher, Consumer):
        clients += [kind(history, port, number, chance.randrange(2**32)) for number in range(CLIENTS)]
    live_under_kills(
        tmp_path / "spool", history, clients, declare_all, port=port, kills=KILLS, messages=MESSAGES, chance=chance
    )
    with serving(tmp_path / "spool", port=port):
        drain(history, port)
    print(
        f"{len(history.confirmed)} confirmed, {len(history.seen)} came, {history.again()} of them again after an ack "
        f"and a clean close, {len(history.committed)} settled by transactions, {len(history.late())} late; "
        f"{KILLS + 1} kills"
    )
    assert history.problems() == []
