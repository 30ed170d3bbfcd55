"""Workers of Celery and dramatiq, and the server, are killed under load: what was confirmed is done, and not again after its ack."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pika
import pytest

from amqp_clients import Server, serving
from amqp_workers import WATCHDOG_S, end, kill, wait_for, worker
from processes import free_port
from thorough import TORTURE

SEED = int(os.environ.get("QFLOW_SEED", "0")) or random.SystemRandom().randrange(10**6)
TASKS = 2500 if TORTURE else 50
"""Confirmed in a round."""
ROUNDS = 4 if TORTURE else 1
KILLS = 5 if TORTURE else 1
"""Of the server in a round, and as many of the worker."""

PUBLISHER = """
if __name__ == "__main__":
    import sys, threading
    number, left = int(sys.argv[1]), int(sys.argv[2])
    while left:
        try:
            send(number)
        except Exception as error:
            print(f"{number} is not confirmed: {error!r}", file=sys.stderr)
            threading.Event().wait(0.05)
        else:
            print(number, flush=True)
            left -= 1
        number += 1
"""
CELERY = """
from celery import Celery

app = Celery("tasks", broker={url!r})
app.conf.task_acks_late = True
app.conf.task_ignore_result = True
app.conf.task_publish_retry = False
app.conf.broker_transport_options = {{"confirm_publish": True}}
app.conf.broker_connection_max_retries = None
app.conf.worker_enable_remote_control = False

@app.task(name="note")
def note(number):
    with open({told!r}, "a") as file:
        file.write(f"{{number}}\\n")

def send(number):
    note.delay(number)
"""
DRAMATIQ = """
import dramatiq
import dramatiq.brokers.rabbitmq

dramatiq.brokers.rabbitmq.MAX_ENQUEUE_ATTEMPTS = 1
dramatiq.set_broker(dramatiq.brokers.rabbitmq.RabbitmqBroker(url={url!r}, confirm_delivery=True))

@dramatiq.actor
def note(number):
    with open({told!r}, "a") as file:
        file.write(f"{{number}}\\n")

def send(number):
    note.send(number)
"""


class Library(NamedTuple):
    """One whose workers are killed."""

    app: str
    ready: str
    command: tuple[str, ...]


LIBRARIES = {
    "celery": Library(
        CELERY,
        " ready.",
        ("celery", "-A", "app_of_test", "worker", "--pool=solo", "--loglevel=INFO", "--without-mingle"),
    ),
    "dramatiq": Library(DRAMATIQ, "ready for action", ("dramatiq", "app_of_test", "--processes=1", "--threads=1")),
}


class Load:
    """What was confirmed, what was done, and the processes that see to it."""

    def __init__(self, library: Library, directory: Path) -> None:
        self.port = free_port()
        self.spool = directory / "spool"
        self.confirmed: list[int] = []
        self.killed = 0
        self._library = library
        self._directory = directory
        self._told = directory / "told"
        self._told.touch()
        self._next = 0
        url = f"amqp://guest:guest@127.0.0.1:{self.port}"
        text = library.app.format(url=url, told=str(self._told))
        (directory / "app_of_test.py").write_text(text + PUBLISHER)
        self._stack = ExitStack()
        self._worker: subprocess.Popen[str] | None = None

    def done(self) -> list[int]:
        return list(map(int, self._told.read_text().split()))

    def start_worker(self) -> None:
        started = worker(
            self._directory, self._library.ready, "-m", *self._library.command, dramatiq_restart_delay="100"
        )
        self._worker = self._stack.enter_context(started)

    def kill_worker(self) -> None:
        assert self._worker is not None
        kill(self._worker)
        self._stack.close()
        self.killed += 1

    def end_worker(self) -> None:
        assert self._worker is not None
        end(self._worker)
        self._stack.close()

    def publish(self, number: int) -> threading.Thread:
        """Have so many tasks confirmed, whatever is killed meanwhile; returns a thread that ends with them."""
        first = self._next

        def run() -> None:
            command = [sys.executable, "app_of_test.py", str(first), str(number)]
            with subprocess.Popen(command, cwd=self._directory, stdout=subprocess.PIPE, text=True) as process:
                for line in process.stdout or ():
                    self.confirmed.append(int(line))

        self._next += 10 * number  # more are sent than are confirmed
        thread = threading.Thread(target=run)
        thread.start()
        return thread


def settle(server: Server) -> None:
    """Have a message confirmed: what was acked before is in the log with it."""
    with pika.BlockingConnection(server.parameters()) as connection:
        channel = connection.channel()
        channel.queue_declare("settled", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "settled", b"", pika.BasicProperties(delivery_mode=2))


def round_of(load: Load, tasks: int, kills: int, chance: random.Random) -> None:
    """Publish and do tasks while worker and server are killed in turn; at the end, the server after all acks."""

    def is_over() -> bool:
        return not publishing.is_alive() and set(load.confirmed) <= set(load.done())

    publishing = load.publish(tasks)
    for index in range(kills):
        with serving(load.spool, port=load.port) as (_, process):
            if not index:
                load.start_worker()
            share = chance.randrange(tasks // (2 * kills), tasks // kills)
            goal = len(load.done()) + share // 2
            wait_for(lambda goal=goal: len(load.done()) >= goal or is_over())
            load.kill_worker()
            load.start_worker()
            goal = len(load.confirmed) + share // 2
            wait_for(lambda goal=goal: len(load.confirmed) >= goal or not publishing.is_alive())
            process.send_signal(signal.SIGKILL)
            process.wait(WATCHDOG_S)
            load.killed += 1
    with serving(load.spool, port=load.port) as (server, process):
        if not kills:
            load.start_worker()
        wait_for(is_over)
        load.publish(1).join()  # behind all that came back
        wait_for(lambda: load.confirmed[-1] in load.done())
        load.end_worker()
        settle(server)
        process.send_signal(signal.SIGKILL)
        process.wait(WATCHDOG_S)


@pytest.mark.parametrize("name", LIBRARIES)
def test_what_was_confirmed_is_done_and_not_again_after_its_ack(name: str, tmp_path: Path) -> None:
    """Each task at least once, twice only if a kill met it before its ack."""
    print(f"seed {SEED} (set QFLOW_SEED)")
    chance, load, settled = random.Random(SEED), Load(LIBRARIES[name], tmp_path), list[int]()
    began = time.monotonic()
    for tasks, kills in [(TASKS, KILLS)] * ROUNDS + [(1, 0)]:
        round_of(load, tasks, kills, chance)
        settled.append(len(load.done()))
    done = load.done()
    print(
        f"{len(load.confirmed)} confirmed, {len(set(done))} done, {len(done) - len(set(done))} times again, "
        f"{load.killed + ROUNDS} kills, {time.monotonic() - began:.0f} s"
    )
    assert set(load.confirmed) <= set(done)
    for count in settled:
        assert not set(done[:count]) & set(done[count:])
