"""Weather stations that lose the network, and a broker that is killed meanwhile: each reading arrives once, in order.

python examples/mqtt_sensors.py SPOOL
"""

import json
import queue
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from flights import weather
from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion
from usage import spool_of

READINGS = 600
PATIENCE_S = 30
EXACTLY_ONCE = 2


def start(spool: str, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Start `qflow serve` for a spool; return it when it listens, and its port."""
    command = [sys.executable, "-m", "qflow", "serve", spool, "--mqtt", f"127.0.0.1:{port}", "--grace", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    ready = server.stdout.readline().rpartition(":")[2]  # mqtt on 127.0.0.1:40123
    if not ready:
        raise SystemExit(f"qflow serve ended with {server.wait()}")
    return server, int(ready)


class Station:
    """A client with a session of its own; paho keeps what is not acknowledged, and connects again by itself."""

    def __init__(self, name: str, port: int) -> None:
        self.arrived: queue.Queue[int] = queue.Queue()
        self.client = Client(CallbackAPIVersion.VERSION2, client_id=f"station-{name}", clean_session=False)
        self.client.on_publish = lambda _client, _data, number, *_: self.arrived.put(number)
        self.client.reconnect_delay_set(4, 4)  # one that fails to connect tells anew, by paho, what it had released
        self.client.max_inflight_messages_set(1)  # with more, paho may send a new one before it repeats those in flight
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        self.topic = f"weather/{name}/temperature"

    def tell(self, reading: bytes) -> None:
        """Publish; without a network it waits in the client."""
        self.client.publish(self.topic, reading, EXACTLY_ONCE)

    def lose_network(self) -> None:
        """Cut the connection, whatever is on its way."""
        connection = self.client.socket()
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)

    def leave(self, told: int) -> None:
        """Disconnect when all that was told has arrived."""
        for _ in range(told):
            self.arrived.get(timeout=PATIENCE_S)
        self.client.disconnect()
        self.client.loop_stop()


@contextmanager
def listening(port: int, client_id: str, topic_filter: str) -> Iterator[queue.Queue[MQTTMessage]]:
    """Subscribe in a session that stays when this block ends; give what comes, when the subscription is there."""
    found: queue.Queue[MQTTMessage] = queue.Queue()
    ready: queue.Queue[None] = queue.Queue()
    client = Client(CallbackAPIVersion.VERSION2, client_id=client_id, clean_session=False)
    client.on_connect = lambda *_: client.subscribe(topic_filter, EXACTLY_ONCE)
    client.on_subscribe = lambda *_: ready.put(None)
    client.on_message = lambda _client, _data, message: found.put(message)
    client.connect("127.0.0.1", port)
    client.loop_start()
    ready.get(timeout=PATIENCE_S)
    yield found
    client.disconnect()
    client.loop_stop()


def readings() -> Iterator[dict[str, str]]:
    """Yield what the weather was, hour by hour, at each airport in turn."""
    rows = [json.loads(row) for row in weather()]
    return iter(sorted(rows, key=lambda row: (row["time_hour"], row["origin"])))


class Broker:
    """`qflow serve` for a spool, which can be killed and started again where it was."""

    def __init__(self, spool: str) -> None:
        self._spool = spool
        self._process, self.port = start(spool)

    def kill(self) -> None:
        """Give it no chance to tidy up."""
        self._process.kill()
        self._process.wait()

    def start_again(self) -> None:
        """Open what a killed one left."""
        self._process, self.port = start(self._spool, self.port)


def publish(broker: Broker) -> dict[str, list[bytes]]:
    """Have the stations tell their readings through all that happens; return what each has told, by topic."""
    told: dict[str, list[bytes]] = defaultdict(list)
    stations: dict[str, Station] = {}
    for number, row in enumerate(islice(readings(), READINGS)):
        name, reading = row["origin"], f"{row['time_hour']} {row['temp']}".encode()
        if name not in stations:
            stations[name] = Station(name, broker.port)
        station = stations[name]
        station.tell(reading)
        told[station.topic].append(reading)
        if number % 100 == 50:
            station.lose_network()
        if number == READINGS // 2:
            broker.kill()  # with all that its clients had not been told yet
            broker.start_again()
    for station in stations.values():
        station.leave(len(told[station.topic]))
    return told


def run(broker: Broker) -> None:
    """Publish while an archive sleeps; see that it gets all, and that who comes late can read it again."""
    with listening(broker.port, "archive", "weather/+/temperature"):
        pass  # it subscribes, and goes to sleep before anything is published
    told = publish(broker)

    heard: dict[str, list[bytes]] = defaultdict(list)
    with listening(broker.port, "archive", "weather/+/temperature") as messages:
        for _ in range(READINGS):
            message = messages.get(timeout=PATIENCE_S)
            heard[message.topic].append(message.payload)
    assert heard == told, "each reading once, in the order of its station"
    for topic, found in sorted(heard.items()):
        print(f"{topic}: {len(found)} readings, the last one {found[-1].decode()}")

    with listening(broker.port, "latecomer", f"$replay/earliest/{topic}") as messages:
        replayed = [messages.get(timeout=PATIENCE_S).payload for _ in told[topic]]
    assert replayed == told[topic], "who comes late replays the stream"


def main(spool: str) -> None:
    broker = Broker(spool)
    try:
        run(broker)
    finally:
        broker.kill()


if __name__ == "__main__":
    main(spool_of(__doc__))
