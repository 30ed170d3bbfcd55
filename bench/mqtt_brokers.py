"""Brokers of MQTT as processes: `qflow serve`, and mosquitto where it is installed, with a configuration of its own.

mosquitto keeps nothing on the disk, and syncs nothing: it has what its clients want in memory, without a limit here.
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
from bench.mqtt_clients import connect

MOSQUITTO = "mosquitto"
SETTINGS = """\
listener {port} {host}
allow_anonymous true
persistence false
max_queued_messages 0
max_inflight_messages 100
set_tcp_nodelay true
user root
log_type error
"""
"""As many messages in flight as `qflow serve` has; what is queued has no limit."""
SAVING = "mosquitto, saving each change"
SAVES = """\
persistence true
persistence_location {directory}/
autosave_interval 1
autosave_on_changes true
"""
"""What comes nearest to a PUBACK that is a promise: it writes all it has after each change."""
HELLO = connect("hello")


@contextmanager
def mosquitto(directory: Path, port: int, saves: bool = False) -> Iterator[Broker]:
    settings = directory / "mosquitto.conf"
    text = SETTINGS.format(port=port, host=brokers.HOST)
    if saves:
        text = text.replace("persistence false\n", SAVES.format(directory=directory))
    settings.write_text(text)
    with brokers.process(directory, [_command() or MOSQUITTO, "-c", str(settings)], {}) as process:
        yield Broker(SAVING if saves else MOSQUITTO, port, process.pid, HELLO)


def starters(setup: Setup, saves: bool = False) -> tuple[dict[str, Start], dict[str, str]]:
    """Return how the brokers that take part are started, and why others do not, by their names.

    Args:
        saves: mosquitto is the one that saves each change.
    """
    found: dict[str, Start] = {QFLOW: partial(brokers.qflow, option="--mqtt", hello=HELLO)}
    if setup.quick:
        return found, {MOSQUITTO: f"{MOSQUITTO} is left out of a quick run"}
    if _command() is None:
        return found, {MOSQUITTO: f"{MOSQUITTO} is not installed"}
    return found | {SAVING if saves else MOSQUITTO: partial(mosquitto, saves=saves)}, {}


def _command() -> str | None:
    return shutil.which(MOSQUITTO) or shutil.which(MOSQUITTO, path="/usr/sbin:/usr/local/sbin")
