"""`qflow serve` with doors for both: pika and paho talk to each other, and a kill of the server loses nothing."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pika

from mqtt_served import serving
from paho_stopping import stop

WAIT_S = 60.0
DOORS = ("--amqp", "127.0.0.1:0", "--mqtt", "127.0.0.1:0")


def sensor(port: int, client_id: str = "") -> tuple[paho.Client, queue.SimpleQueue[tuple[str, bytes]]]:
    """Return a client that is connected, and what comes to it."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5)
    came: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
    client.on_message = lambda _client, _data, message: came.put((message.topic, message.payload))
    client.connect("127.0.0.1", port)
    client.loop_start()
    return client, came


def taken(channel: Any, number: int) -> list[bytes]:
    """Return bodies of the queue `heat`, and settle them."""
    found = []
    for method, _, content in channel.consume("heat", inactivity_timeout=WAIT_S):
        assert method is not None, f"{len(found)} of {number} came"
        found.append(content)
        channel.basic_ack(method.delivery_tag)
        if len(found) == number:
            break
    channel.cancel()
    return found


def test_clients_of_both_talk_to_each_other_and_a_kill_loses_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, *DOORS) as (_, ports):
        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", ports["amqp"][0])) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("heat", durable=True)
            channel.queue_bind("heat", "amq.topic", "plant.*.heat")
            client, came = sensor(ports["mqtt"][0])
            granted: queue.SimpleQueue[object] = queue.SimpleQueue()
            client.on_subscribe = lambda *_: granted.put(None)
            client.subscribe("alarm/#", qos=1)
            granted.get(timeout=WAIT_S)
            client.publish("plant/1/heat", b"21.5", qos=1).wait_for_publish(WAIT_S)
            assert taken(channel, 1) == [b"21.5"]
            channel.basic_publish("amq.topic", "alarm.door", b"open")
            assert came.get(timeout=WAIT_S) == ("alarm/door", b"open")
        for number in range(100):
            client.publish("plant/1/heat", b"%d" % number, qos=1)
        client.publish("plant/1/heat", b"last", qos=1).wait_for_publish(WAIT_S)
        stop(client)
    with (
        serving(tmp_path, *DOORS) as (_, ports),
        pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", ports["amqp"][0])) as connection,
    ):
        found = taken(connection.channel(), 101)
        assert found == [*(b"%d" % number for number in range(100)), b"last"]
