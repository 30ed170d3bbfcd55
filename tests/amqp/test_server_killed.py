"""The server is killed under load and started again on its spool: a history of what all clients saw."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

from amqp_clients import PATIENCE_S, serving
from amqp_history import Client, Consumer, History, Publisher, declare_all, drain

TORTURE = bool(os.environ.get("QFLOW_TORTURE"))
SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
CLIENTS = 25 if TORTURE else 5
"""Of each kind."""
KILLS = int(os.environ.get("QFLOW_ROUNDS", "0")) or (60 if TORTURE else 2)
MESSAGES = 3000 if TORTURE else 300
"""Confirmed in each round, at least, before the server is killed."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for_confirms(history: History, number: int) -> None:
    """Let the clients go on."""
    deadline, _beat = time.monotonic() + 10 * PATIENCE_S, threading.Event()
    while len(history.confirmed) < number:
        assert time.monotonic() < deadline, f"{len(history.confirmed)} of {number} were confirmed"
        assert not history.wrong, history.wrong
        history.progress.wait(PATIENCE_S)
        history.progress.clear()


def test_what_was_confirmed_arrives_whatever_is_killed(tmp_path: Path) -> None:
    """At least once, in order to a consumer that stays; nothing comes twice as if it were new, and nothing after the commit that settled it."""
    print(f"seed {SEED} (set QFLOW_SEED)")
    chance = random.Random(SEED)
    history, port = History(), free_port()
    clients: list[Client] = []
    for kind in (Publisher, Consumer):
        clients += [kind(history, port, number, chance.randrange(2**32)) for number in range(CLIENTS)]
    for number in range(KILLS + 1):
        with serving(tmp_path / "spool", "--capacity", "8MiB", port=port) as (_, process):
            if number == 0:
                declare_all(port)
                for client in clients:
                    client.start()
            wait_for_confirms(history, len(history.confirmed) + chance.randrange(MESSAGES, 2 * MESSAGES))
            if number == KILLS:
                for client in clients:
                    client.stopping.set()
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
    for client in clients:
        client.join(PATIENCE_S)
    assert not any(client.is_alive() for client in clients)
    with serving(tmp_path / "spool", port=port):
        drain(history, port)
    print(
        f"{len(history.confirmed)} confirmed, {len(history.seen)} came, {history.again()} of them again after an ack "
        f"and a clean close, {len(history.committed)} settled by transactions, {len(history.late())} late; "
        f"{KILLS + 1} kills"
    )
    assert history.problems() == []
