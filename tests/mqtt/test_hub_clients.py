"""The server with the clients that people use: paho's, aiomqtt, and mosquitto's on the command line where they are installed."""

from __future__ import annotations

import asyncio
import queue
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiomqtt
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from mqtt_loop import serving
from paho_stopping import stop
from qflow.mqtt import Server

WAIT_S = 60.0


class Paho:
    """A client whose calls wait for their answers; its session lasts."""

    def __init__(self, port: int, client_id: str, version: MQTTProtocolVersion) -> None:
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self._answers: queue.Queue[Any] = queue.Queue()
        given: dict[str, Any] = {} if version == MQTTProtocolVersion.MQTTv5 else {"clean_session": False}
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=version, **given)
        self.client.on_message = lambda _client, _data, message: self.messages.put(message)
        self.client.on_subscribe = lambda *given: self._answers.put(given)
        self.client.on_connect = lambda _client, _data, flags, code, _properties: self._answers.put((flags, code))
        properties = None
        if version == MQTTProtocolVersion.MQTTv5:
            properties = Properties(PacketTypes.CONNECT)
            properties.SessionExpiryInterval = 1000
            self.client.connect("127.0.0.1", port, clean_start=False, properties=properties)
        else:
            self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        flags, code = self._answers.get(timeout=WAIT_S)
        assert not code.is_failure
        self.present = flags.session_present

    def subscribe(self, topic_filter: str, qos: int) -> None:
        self.client.subscribe(topic_filter, qos)
        self._answers.get(timeout=WAIT_S)

    def publish(self, topic: str, payload: bytes, qos: int) -> None:
        self.client.publish(topic, payload, qos).wait_for_publish(WAIT_S)

    def take(self, count: int) -> list[tuple[str, bytes, int]]:
        found = [self.messages.get(timeout=WAIT_S) for _ in range(count)]
        return [(message.topic, message.payload, message.qos) for message in found]

    def close(self) -> None:
        self.client.disconnect()
        stop(self.client)


@pytest.mark.parametrize("version", [MQTTProtocolVersion.MQTTv311, MQTTProtocolVersion.MQTTv5])
def test_paho(version: MQTTProtocolVersion, spool: Path) -> None:
    """A session with all three QoS, asleep while others publish, and awake again."""
    _beside(spool, lambda server: _paho(server.port, version))


def _paho(port: int, version: MQTTProtocolVersion) -> None:
    sender = Paho(port, "sender", version)
    sleeper = Paho(port, "sleeper", version)
    for qos in range(3):
        sleeper.subscribe(f"plant/{qos}/#", qos)
    for _ in range(2):
        for qos in range(3):
            sender.publish(f"plant/{qos}/x", b"%d" % qos, 2)
        assert sorted(sleeper.take(3)) == [(f"plant/{qos}/x", b"%d" % qos, qos) for qos in range(3)]
        sleeper.close()
        for number in range(300):
            sender.publish(f"plant/{1 + number % 2}/y", b"%d" % number, 1 + number % 2)
        sleeper = Paho(port, "sleeper", version)
        assert sleeper.present
        expected = [(f"plant/{1 + number % 2}/y", b"%d" % number, 1 + number % 2) for number in range(300)]
        # Paho hands a message with QoS 2 on at its PUBREL, so others pass it; each topic is in order.
        assert sorted(sleeper.take(300), key=itemgetter(0)) == sorted(expected, key=itemgetter(0))
    assert sleeper.messages.empty()
    sleeper.close()
    sender.close()


@pytest.mark.parametrize("version", [aiomqtt.ProtocolVersion.V311, aiomqtt.ProtocolVersion.V5])
def test_aiomqtt(version: aiomqtt.ProtocolVersion, spool: Path) -> None:
    """Tasks of the loop that the server runs in: retained messages, each QoS, and a will."""

    async def scenario() -> None:
        async with serving(spool) as server, asyncio.timeout(WAIT_S):
            where: dict[str, Any] = {"port": server.port, "protocol": version}
            async with aiomqtt.Client("127.0.0.1", **where) as sender:
                for qos in range(3):
                    await sender.publish(f"a/{qos}", b"kept", qos, retain=True)
                async with aiomqtt.Client("127.0.0.1", **where) as panel:
                    await panel.subscribe("#", qos=2)
                    came = [await anext(panel.messages) for _ in range(3)]
                    assert sorted(str(one.topic) for one in came) == ["a/0", "a/1", "a/2"]
                    assert {(one.payload, one.retain) for one in came} == {(b"kept", True)}
                    await sender.publish("a/2", b"live", 2)
                    live = await anext(panel.messages)
                    assert (live.payload, live.qos, live.retain) == (b"live", 2, False)
                    will = aiomqtt.Will("left", b"cut", 1)
                    with suppress(aiomqtt.MqttError):
                        async with aiomqtt.Client("127.0.0.1", will=will, **where) as lost:
                            lost._client.socket().shutdown(socket.SHUT_RDWR)
                            assert (await anext(panel.messages)).payload == b"cut"

    asyncio.run(scenario())


@pytest.mark.parametrize("version", ["mqttv311", "mqttv5"])
def test_mosquitto(version: str, spool: Path) -> None:
    """Its command-line clients: retained messages, and each QoS."""
    if shutil.which("mosquitto_sub") is None:
        pytest.skip("mosquitto's clients are not installed")
    _beside(spool, lambda server: _mosquitto(server.port, version))


def _mosquitto(port: int, version: str) -> None:
    where = ["-p", str(port), "-V", version]
    for qos in range(3):
        message = ["-t", f"a/{qos}", "-m", f"body {qos}", "-q", str(qos), "-r"]
        subprocess.run(["mosquitto_pub", *where, *message], check=True, timeout=WAIT_S)
    asked = ["mosquitto_sub", *where, "-t", "a/+", "-q", "2", "-C", "3", "-F", "%t %p %q %r"]
    said = subprocess.run(asked, check=True, timeout=WAIT_S, capture_output=True, text=True).stdout
    assert said.splitlines() == [f"a/{qos} body {qos} {qos} 1" for qos in range(3)]


def _beside(spool: Path, work: Callable[[Server], None]) -> None:
    """Do something in a thread, beside the loop of a server."""

    async def both() -> None:
        async with serving(spool) as server:
            await asyncio.to_thread(work, server)

    asyncio.run(both())
