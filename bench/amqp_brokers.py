"""Brokers of AMQP as processes: `qflow serve`, and RabbitMQ where it is installed.

RabbitMQ runs as it comes, in a directory and with a name directory (epmd) of its own, so that none that runs already is
touched; its data lie on the file system that qflow's spool lies on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench import brokers
from bench.brokers import QFLOW, Broker, Start
from bench.measure import Setup

RABBITMQ = "RabbitMQ"
RABBITMQ_SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""What Debian's wrapper starts, which would run as another user and write elsewhere."""
HELLO = b"AMQP\x00\x00\x09\x01"


def url(broker: Broker) -> str:
    """Return where it is; connections send no heartbeats, as their loops stand still while the other has its turn."""
    return f"amqp://guest:guest@{brokers.HOST}:{broker.port}/?heartbeat=0"


@contextmanager
def rabbitmq(directory: Path, port: int) -> Iterator[Broker]:
    names_port = brokers.free_port()
    configuration = directory / "rabbitmq.conf"
    configuration.touch()
    (directory / "plugins").write_text("[].")
    settings = {
        "HOME": str(directory),
        "ERL_EPMD_PORT": str(names_port),
        "ERL_EPMD_ADDRESS": brokers.HOST,
        "RABBITMQ_NODENAME": "bench@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": brokers.HOST,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(brokers.free_port()),
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_PID_FILE": str(directory / "pid"),
        "RABBITMQ_CONFIG_FILE": str(configuration.with_suffix("")),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
    }
    with (
        brokers.process(directory, ["epmd", "-address", brokers.HOST, "-port", str(names_port)], {}),
        brokers.process(directory, [str(RABBITMQ_SERVER)], settings) as process,
    ):
        yield Broker(RABBITMQ, port, process.pid, HELLO)


def starters(setup: Setup) -> tuple[dict[str, Start], dict[str, str]]:
    """Return how the brokers that take part are started, and why others do not, by their names."""
    found: dict[str, Start] = {QFLOW: partial(brokers.qflow, option="--amqp", hello=HELLO)}
    if setup.quick:
        return found, {RABBITMQ: f"{RABBITMQ} is left out of a quick run"}
    if not RABBITMQ_SERVER.exists() or not shutil.which("epmd"):
        return found, {RABBITMQ: f"{RABBITMQ} is not installed"}
    return found | {RABBITMQ: rabbitmq}, {}
