"""An incident: a program with a spool is stuck, in every way at once. Run as a program, it makes that and waits.

    python tests/incident.py SPOOL [http|https]

One message of `mail` has been held for 40 minutes by the consumer `mailer-3` of another process; five producers have
been blocked for 12 s at `limit_messages` of `payments`; `dead` has dead letters of `orders`; `audit` grows, and nobody
takes from it. Prints a line of JSON when it has come to that: the processes. A number on stdin lets so many seconds pass
and prints `passed`; the end of stdin ends it. With `http` or `https` the program shows its spool in a browser, too, to the
users of `web_served`, and to Prometheus.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import qflow.aio
from qflow import doctor
from qflow.broker import make_broker
from qflow.config import BrokerSettings
from qflow.opening import with_door
from unit.clocks import Clock, until

LIMIT = 100
PRODUCERS = 5
MAILS = 64
MAILER = """
import sys, qflow
with qflow.connect(sys.argv[1]) as broker:
    held = broker.queue("mail").get(consumer="mailer-3")
    print("held", flush=True)
    sys.stdin.read()
"""


class Incident:
    """It, as a test drives it."""

    def __init__(self, spool: Path, process: subprocess.Popen[bytes]) -> None:
        self.spool = spool
        self._process = process
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        self.owner: int = told["owner"]
        self.mailer: int = told["mailer"]
        self.ports: list[int] = told["ports"]
        """Of the page, and of the metrics; none without a page."""

    def end_mailer(self, number: int) -> None:
        """End the process that holds a message, and wait until the owner has seen that."""
        os.kill(self.mailer, number)
        with qflow.connect(self.spool) as broker:
            until(lambda: not broker.stats().queues["mail"].holders)

    def start_consumers(self) -> None:
        """Have somebody take what waits, in all queues."""
        with qflow.connect(self.spool) as broker:
            for name in broker.queues():
                broker.queue(name).get_many(1000, timeout_s=0).ack()

    def left(self) -> list[str]:
        """Return what `qflow doctor` finds, but for what the disk of this machine is to blame for."""
        return [one.kind for one in doctor.examine(self.spool) if one.kind != "disk-full"]

    def let_pass(self, seconds: float) -> None:
        """Let time pass for the owner."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n".encode())
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"passed\n"


@contextmanager
def made(spool: Path, page: str = "") -> Iterator[Incident]:
    """Have an incident in a process, which ends with the context; with a page by `http` or `https`, or without one."""
    command = [sys.executable, __file__, str(spool), *filter(None, [page])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Incident(spool, process)
        finally:
            process.communicate()


def _open(spool: str, clock: Clock) -> qflow.Broker:
    settings = BrokerSettings(capacity_bytes="8MiB")
    return with_door(make_broker(spool, settings, clock=clock.wall, monotonic=clock.monotonic))


def _hold(broker: qflow.Broker) -> subprocess.Popen[bytes]:
    mail = broker.declare_queue("mail")
    for _ in range(MAILS):
        mail.put(b"to somebody" * 1000)  # in a block of its own
    mailer = subprocess.Popen(
        [sys.executable, "-c", MAILER, broker.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert mailer.stdout is not None
    assert mailer.stdout.readline() == b"held\n"
    for delivery in mail.get_many(MAILS - 1):
        delivery.ack()
    return mailer


def _kill_letters(broker: qflow.Broker) -> None:
    orders = broker.declare_queue("orders", dead_letter="dead")
    for reason in ("card declined", "card declined", "card declined", "no such customer"):
        orders.put(b"an order")
        orders.get().nack(requeue=False, reason=reason)
    until(lambda: broker.stats().queues["orders"].messages == 0)


def _block(broker: qflow.Broker) -> list[threading.Thread]:
    payments = broker.declare_queue("payments", limit_messages=LIMIT)
    payments.put_many([b"a payment"] * LIMIT)
    threads = [threading.Thread(target=payments.put, args=(b"one more",)) for _ in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    until(lambda: broker.stats().queues["payments"].blocked_putters == PRODUCERS)
    return threads


async def _serve(broker: qflow.Broker, scheme: str, began: queue.SimpleQueue[_Served]) -> None:
    """Serve the page and the metrics until the event that is told says so."""
    import qflow.metrics.door
    import qflow.web
    import web_served
    from qflow.serving.certificates import Certificates

    pem = Path(__file__).with_name("serving") / "certificates"
    ssl = Certificates(pem / "server.pem", pem / "server.key").context() if scheme == "https" else None
    users, host = web_served.users(), "127.0.0.1"
    tasks = qflow.aio.AsyncBroker(broker)
    async with await qflow.web.serve(tasks, host=host, port=0, ssl=ssl, users=users) as page:
        metrics = await qflow.metrics.door.open_door(tasks, host=host, port=0, ssl=None, users=None)
        is_over = asyncio.Event()
        ports = [door.sockets[0].getsockname()[1] for door in (page, metrics)]
        began.put(_Served(ports, asyncio.get_running_loop(), is_over))
        await is_over.wait()
        await metrics.close()


class _Served(NamedTuple):
    ports: list[int]
    loop: asyncio.AbstractEventLoop
    is_over: asyncio.Event


@contextmanager
def _served(broker: qflow.Broker, scheme: str) -> Iterator[list[int]]:
    """Serve from a thread of its own, and yield the ports."""
    began: queue.SimpleQueue[_Served] = queue.SimpleQueue()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(broker, scheme, began)))
    thread.start()
    served = began.get()
    try:
        yield served.ports
    finally:
        served.loop.call_soon_threadsafe(served.is_over.set)
        thread.join()


def main(spool: str, scheme: str = "") -> None:
    """Make it, and wait."""
    clock = Clock()
    with _open(spool, clock) as broker, _served(broker, scheme) if scheme else nullcontext([]) as ports:
        mailer = _hold(broker)
        clock.advance(2388.0)
        _kill_letters(broker)
        threads = _block(broker)
        audit = broker.declare_queue("audit")
        for _ in range(12):
            audit.put_many([b"an entry"] * 25)
            clock.advance(1.0)
            broker.stats()
        print(json.dumps({"owner": os.getpid(), "mailer": mailer.pid, "ports": ports}), flush=True)
        for line in sys.stdin:
            clock.advance(float(line))
            print("passed", flush=True)
        mailer.communicate()
        broker.queue("payments").purge()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
