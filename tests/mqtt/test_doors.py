"""Doors for MQTT: users, permissions, certificates, WebSockets, `$SYS`, and all of them in one `qflow serve`."""

from __future__ import annotations

import asyncio
import json
import queue
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

import mqtt_served
import qflow.aio
import qflow.amqp
import qflow.mqtt
from amqp_loop import turns_noted
from doors.event_loop import run
from mqtt_loop import DISCONNECT, PUBACK, PUBCOMP, PUBREC, cut_all, slept, unconnected
from paho_stopping import stop
from qflow.mqtt.server import sys_topics
from qflow.mqtt.server.session import Session
from qflow.mqtt.server.storing import WILLS
from qflow.serving import tasks
from qflow.serving.certificates import Certificates
from qflow.serving.passwords import PasswordHash
from qflow.serving.users import Account, Topics, User, Users

PEM = Path(__file__).parents[1] / "serving" / "certificates"
CHEAP = PasswordHash.of("secret", n=2)
PATIENCE_S = 60
ANNA = User("anna", topics=Topics(("plant/%c/#",), ("plant/#", "$SYS/#")))
BOB = User("bob", topics=Topics((), ("plant/+/heat",)))
CLIENT = User("client", topics=Topics(("#",), ("#",)))


def users(*known: User) -> Users:
    return Users(MappingProxyType({user.name: Account(user, CHEAP) for user in known}))


@asynccontextmanager
async def serving(spool: Path, **options: Any) -> AsyncIterator[qflow.mqtt.Server]:
    async with qflow.aio.open(spool) as broker, await qflow.mqtt.serve(broker, port=0, **options) as server:
        try:
            yield server
        finally:
            await cut_all()


async def logged_in(server: qflow.mqtt.Server, name: str, client_id: str, version: int = 5, **given: Any) -> Any:
    raw = await unconnected(server, version=version)
    connack = await raw.connect(client_id, username=name, password=b"secret", **given)
    assert connack.code == 0, connack
    raw.connack = connack
    return raw


def test_a_user_may_do_what_the_file_says(tmp_path: Path) -> None:
    """The others hear why not, and go on."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", users=users(ANNA, BOB)) as server:
            anna = await logged_in(server, "anna", "c1")
            assert (await anna.subscribe("plant/+/heat", "news", "plant/#")).codes == [1, 0x87, 1]
            old = await logged_in(server, "bob", "c2", version=4)
            assert (await old.subscribe("plant/+/heat", "plant/#")).codes == [1, 0x80]
            anna.publish("plant/c2/heat", qos=1, packet_id=1)
            refused = await anna.expect(PUBACK)
            assert (refused.code, refused.packet_id) == (0x87, 1)
            anna.publish("plant/c2/heat", qos=2, packet_id=2)
            assert (await anna.expect(PUBREC)).code == 0x87
            await anna.published("plant/c1/heat", b"21", packet_id=3)
            assert (await old.message()).payload == b"21"
            assert (await anna.message()).payload == b"21"
            await old.nothing()
            old.publish("plant/c2/heat", qos=1, packet_id=2)  # it can be told no otherwise
            assert await old.gone() == []

    run(scenario())


def test_who_may_not_come_in_is_told(tmp_path: Path) -> None:
    """In the codes of the version."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", users=users(ANNA)) as server:
            for version, wrong, bad_id in ((5, 0x86, 0x85), (4, 4, 2)):
                raw = await unconnected(server, version=version)
                assert (await raw.connect("c1", username="anna", password=b"wrong")).code == wrong
                assert await raw.gone() == []
                raw = await unconnected(server, version=version)
                assert (await raw.connect("c1")).code == wrong
                raw = await unconnected(server, version=version)
                assert (await raw.connect("a/b", username="anna", password=b"secret")).code == bad_id
            raw = await unconnected(server)
            will = {"topic": "plant/c2/gone", "payload": b""}
            assert (await raw.connect("c1", username="anna", password=b"secret", will=will)).code == 0x87
            anybody = await logged_in(server, "anna", "")  # an id that the server gives is as good as another
            client_id = anybody.connack.properties["AssignedClientIdentifier"]
            await anybody.published(f"plant/{client_id}/heat")

    run(scenario())


def test_users_that_are_renewed_hold_for_clients_that_are_there(tmp_path: Path) -> None:
    """Who is none any more, or has what is not permitted any more, is told and closed; what is forbidden is gone."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", users=users(ANNA, BOB, CLIENT)) as server:
            anna, bob, source = [
                await logged_in(server, name, name, SessionExpiryInterval=60) for name in ("anna", "bob", "client")
            ]
            assert (await anna.subscribe("plant/#")).code == 1
            assert (await bob.subscribe("plant/+/heat", "$share/all/plant/1/heat")).codes == [1, 1]
            await source.published("plant/1/heat", b"before")
            assert await anna.messages(1) == [b"before"]
            assert await bob.messages(2) == [b"before"] * 2
            fewer = User("bob", topics=Topics((), ("news",)))
            server.reload(users=users(fewer, CLIENT), ssl=None)
            [told] = await anna.gone()
            assert (told.kind, told.code) == (DISCONNECT, 0x87)
            [told] = await bob.gone()
            assert (told.kind, told.code) == (DISCONNECT, 0x87)
            await source.published("plant/1/heat", b"after", packet_id=2)
            bob = await logged_in(server, "bob", "bob", clean=False)
            assert bob.connack.present
            await bob.nothing()
            assert (await bob.subscribe("plant/+/heat", "news", packet_id=2)).codes == [0x87, 1]
            await source.published("news", b"new", packet_id=3)
            assert await bob.messages(1) == [b"new"]

    run(scenario())


def test_subscriptions_are_compared_with_renewed_users_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 2,000 clients, of twenty filters each, held up all others for 0.8 s."""
    monkeypatch.setattr(tasks, "TURN_S", 0.0)

    async def scenario() -> None:
        async with serving(tmp_path / "spool", users=users(BOB)) as server:
            bobs = [await logged_in(server, "bob", f"{number}") for number in range(5)]
            for bob in bobs:
                await bob.subscribe("plant/+/heat")
            async with turns_noted(Session, "forbidden") as looked:
                server.reload(users=users(User("bob", topics=Topics((), ("news",)))), ssl=None)
                for bob in bobs:
                    [told] = await bob.gone()
                    assert (told.kind, told.code) == (DISCONNECT, 0x87)
            assert len(set(looked)) == len(looked) == len(bobs)

    run(scenario())


@pytest.mark.parametrize("left", [(User("bob", topics=Topics((), ("news",))),), ()], ids=["not permitted", "no user"])
@pytest.mark.parametrize("delay_s", [0, 1])
def test_a_will_that_is_not_permitted_any_more_is_dropped(tmp_path: Path, left: tuple[User, ...], delay_s: int) -> None:
    """It was when its client came, and is not when that goes."""
    before = User("bob", topics=Topics(("plant/#",), ("news",)))
    will = {"topic": "plant/1/heat", "payload": b"gone", "qos": 1, "properties": {"WillDelayInterval": delay_s}}

    async def scenario() -> None:
        async with serving(tmp_path / "spool", users=users(before, CLIENT)) as server:
            other = await logged_in(server, "client", "other")
            await other.subscribe("plant/#")
            bob = await logged_in(server, "bob", "bob", will=will, SessionExpiryInterval=60)
            server.reload(users=users(CLIENT, *left), ssl=None)
            await bob.cut()
            await slept(server, 1)
            assert server.broker.broker.engine.log.facts(WILLS) == {}
            await other.nothing()

    run(scenario())


@pytest.mark.parametrize("qos", [1, 2])
def test_a_session_that_another_user_takes_over_gives_nothing_away(tmp_path: Path, qos: int) -> None:
    """Neither its subscriptions, nor what was in flight, nor what waits."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", users=users(ANNA, BOB, CLIENT)) as server:
            anna = await logged_in(server, "anna", "c1", clean=False, SessionExpiryInterval=60)
            assert (await anna.subscribe("plant/#", qos=qos)).code == qos
            source = await logged_in(server, "client", "source")
            for number, topic in enumerate(("plant/1/heat", "plant/1/door", "plant/1/heat"), 1):
                await source.published(topic, str(number).encode(), packet_id=number)
            for _ in range(3):
                await anna.message(ack=False)
            await anna.cut()
            await source.published("plant/1/door", b"4", packet_id=4)
            bob = await logged_in(server, "bob", "c1", clean=False, SessionExpiryInterval=60)
            assert bob.connack.present
            assert [(await bob.message()).payload, (await bob.message()).payload] == [b"1", b"3"]
            if qos == 2:  # the exchange of the other one is ended
                bob.ack(PUBCOMP, 2)
                bob.unread.clear()
            await bob.nothing()
            await source.published("plant/1/door", b"5", packet_id=5)
            await bob.nothing()

    run(scenario())


def test_the_last_answer_arrives_although_the_client_sends_on(tmp_path: Path) -> None:
    """A connection that is closed with bytes unread is reset, and what was on its way to the client is gone."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool") as server:
            raw = await unconnected(server)
            assert (await raw.connect("c1")).code == 0
            raw.send(b"\xff\x00", bytes(2**20))
            [told] = await raw.gone()
            assert (told.kind, told.code) == (DISCONNECT, 0x81)

    run(scenario())


@pytest.mark.parametrize("serve", [qflow.mqtt.serve, qflow.amqp.serve])
@pytest.mark.parametrize("port", [99_999, -1, "1883", None, True])
def test_what_is_no_port_is_refused(serve: Any, port: Any, tmp_path: Path) -> None:
    """By both protocols, and before anything is opened."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            with pytest.raises(qflow.InvalidArgument, match="a port is a number from 0 to 65535"):
                await serve(broker, port=port)
            assert broker.streams() == []

    run(scenario())


def test_refused_logins_are_all_counted_in_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those after the line that told of the first, too."""

    async def scenario() -> None:
        async with serving(tmp_path / "spool", users=users(ANNA)) as server:
            for _ in range(3):
                raw = await unconnected(server)
                assert (await raw.connect("c1", username="anna", password=b"wrong")).code == 0x86

    run(scenario())
    lines = [message for message in caplog.messages if "a login as" in message]
    assert [line.partition("was refused")[2] for line in lines] == ["", ", and 1 more since the last line"]


def test_figures_go_to_who_subscribes_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each some seconds, which are few here."""
    monkeypatch.setattr(sys_topics, "INTERVAL_S", 0.01)

    async def scenario() -> None:
        async with serving(tmp_path / "spool", users=users(ANNA, CLIENT)) as server:
            source = await logged_in(server, "client", "c2")
            assert (await source.subscribe("#")).code == 1
            for number in range(3):
                await source.published(f"a/{number}", retain=True)
                await source.message()
            anna = await logged_in(server, "anna", "c1")
            assert (await anna.subscribe("$SYS/broker/#")).code == 1
            heard: dict[str, str] = {}
            while "retained messages/count" not in heard:  # the last one
                message = await anna.message()
                heard[message.topic.removeprefix("$SYS/broker/")] = message.payload.decode()
            assert heard["clients/connected"] == "2"
            assert heard["subscriptions/count"] == "2"
            assert heard["publish/messages/received"] == "3"
            assert int(heard["publish/messages/sent"]) >= 3
            assert heard["retained messages/count"] == "3"
            assert heard["version"].startswith("qflow ")
            await source.nothing()

    run(scenario())


# Clients of others ---------------------------------------------------------------------------------------------------


class Paho:
    """A client of paho's in a thread of its own, connected."""

    def __init__(self, port: int, client_id: str, *, tls: ssl.SSLContext | None = None, **options: Any) -> None:
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            protocol=paho.MQTTv5,
            reconnect_on_failure=False,
            **options,
        )
        self.heard: queue.Queue[Any] = queue.Queue()
        self.client.on_connect = lambda _client, _data, _flags, code, _properties: self.heard.put(code.value)
        self.client.on_subscribe = lambda _client, _data, _id, codes, _properties: self.heard.put(codes[0].value)
        self.client.on_message = lambda _client, _data, message: self.heard.put((message.topic, message.payload))
        if tls is not None:
            self.client.tls_set_context(tls)
        self._port = port

    def __enter__(self) -> Paho:
        self.client.connect("localhost", self._port)
        self.client.loop_start()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.disconnect()
        stop(self.client)

    def next(self) -> Any:
        return self.heard.get(timeout=PATIENCE_S)

    def publish(self, topic: str, payload: bytes, qos: int = 1) -> None:
        self.client.publish(topic, payload, qos).wait_for_publish(PATIENCE_S)


def trusting(certificate: str = "client") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=PEM / "ca.pem")
    if certificate:
        context.load_cert_chain(PEM / f"{certificate}.pem", PEM / f"{certificate}.key")
    return context


@pytest.mark.parametrize("transport", ["tcp", "websockets"])
def test_a_certificate_logs_in_whom_it_names(tmp_path: Path, transport: Any) -> None:
    """`client.pem` is anna's; a password that comes with it has to be right all the same."""

    async def scenario() -> None:
        context = Certificates(PEM / "server.pem", PEM / "server.key", PEM / "ca.pem").context()
        options = {"users": users(ANNA), "ssl": context, "websockets": transport == "websockets"}
        async with serving(tmp_path / "spool", **options) as server:
            await asyncio.to_thread(talk, server.port)

    def talk(port: int) -> None:
        with Paho(port, "c1", tls=trusting(), transport=transport) as client:
            assert client.next() == 0
            client.client.subscribe("plant/#", 2)
            assert client.next() == 2
            client.publish("plant/c1/heat", b"x" * 100_000, 2)
            assert client.next() == ("plant/c1/heat", b"x" * 100_000)
        wrong = Paho(port, "c2", tls=trusting(), transport=transport)
        wrong.client.username_pw_set("anna", "wrong")
        with wrong:
            assert wrong.next() == 0x86

    run(scenario())


def test_without_the_package_websockets_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other doors need nothing."""
    monkeypatch.delitem(sys.modules, "qflow.mqtt.server.websockets", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "websockets"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "websockets", None)

    async def scenario() -> None:
        with pytest.raises(qflow.NotFound, match="MQTT over WebSockets needs the package websockets"):
            async with serving(tmp_path / "spool", websockets=True):
                pass
        async with serving(tmp_path / "spool") as server:
            assert server.port

    run(scenario())


def test_all_doors_of_a_process_are_to_one_broker(tmp_path: Path) -> None:
    """Also the clients of mosquitto come in; AMQP is beside it."""
    any_port = "127.0.0.1:0"
    options = ["--amqp", any_port, "--mqtt", any_port, "--mqtt", any_port, "--ws", any_port]
    options += [
        "--mqtts",
        any_port,
        "--wss",
        any_port,
        "--cert",
        str(PEM / "server.pem"),
        "--key",
        str(PEM / "server.key"),
    ]
    with mqtt_served.serving(tmp_path, *options) as (process, ports):
        assert {name: len(found) for name, found in ports.items()} == {
            "amqp": 1,
            "mqtt": 2,
            "mqtts": 1,
            "ws": 1,
            "wss": 1,
        }
        secured = trusting("")
        with ExitStack() as stack:
            clients = [
                stack.enter_context(Paho(port, f"c{port}", tls=tls, transport=transport))
                for name, transport, tls in (
                    ("mqtt", "tcp", None),
                    ("mqtts", "tcp", secured),
                    ("ws", "websockets", None),
                    ("wss", "websockets", secured),
                )
                for port in ports[name]
            ]
            for client in clients:
                assert client.next() == 0
                client.client.subscribe("plant/+", 1)
                assert client.next() == 1
            for number, client in enumerate(clients):
                client.publish(f"plant/{number}", b"hello", qos=1)
                assert [each.next() for each in clients] == [(f"plant/{number}", b"hello")] * len(clients)
            sub = shutil.which("mosquitto_sub")
            if sub is not None:
                mosquitto = ["-h", "127.0.0.1", "-p", str(ports["mqtt"][1])]
                subprocess.run([sub, *mosquitto, "-i", "m1", "-c", "-q", "1", "-t", "plant/#", "-E"], check=True)
                subprocess.run(["mosquitto_pub", *mosquitto, "-q", "2", "-t", "plant/a/b", "-m", "asleep"], check=True)
                taken = subprocess.run(
                    [sub, *mosquitto, "-i", "m1", "-c", "-q", "1", "-t", "plant/#", "-C", "1", "-v"],
                    check=True, capture_output=True, text=True, timeout=PATIENCE_S,
                )  # fmt: skip
                assert taken.stdout == "plant/a/b asleep\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE_S)[0] == ""
        assert process.returncode == 128 + signal.SIGTERM
    with qflow.open(tmp_path / "spool") as broker:
        bodies = [message.body for message in broker.stream("mqtt").query()]
    assert bodies[:5] == [b"hello"] * 5


def test_users_of_the_command_line_are_those_of_the_doors(tmp_path: Path) -> None:
    """And are read again on SIGHUP."""
    file = str(tmp_path / "users.json")

    def change(*arguments: str, stdin: str = "") -> None:
        subprocess.run([sys.executable, "-m", "qflow", "users", *arguments], input=stdin, text=True, check=True)

    change("add", file, "anna", stdin="secret\n")
    change("permit", file, "anna", "--publish", "plant/%c", "--subscribe", "plant/#")
    assert json.loads(Path(file).read_text())["users"]["anna"]["topics"]["publish"] == ["plant/%c"]
    with mqtt_served.serving(tmp_path, "--mqtt", "127.0.0.1:0", "--users", file) as (process, ports):
        [port] = ports["mqtt"]
        anna = Paho(port, "c1")
        anna.client.username_pw_set("anna", "secret")
        with anna:
            assert anna.next() == 0
            anna.client.subscribe("plant/#", 1)
            assert anna.next() == 1
            anna.publish("plant/c1", b"mine")
            assert anna.next() == ("plant/c1", b"mine")
            told: queue.Queue[int] = queue.Queue()
            anna.client.on_disconnect = lambda _client, _data, _flags, code, _properties: told.put(code.value)
            change("remove", file, "anna")
            process.send_signal(signal.SIGHUP)
            assert told.get(timeout=PATIENCE_S) == 0x87


@pytest.mark.parametrize("serve", [qflow.mqtt.serve, qflow.amqp.serve])
def test_the_name_of_a_users_file_is_no_users(serve: Any, tmp_path: Path) -> None:
    """It is refused before anybody listens: every login would fail."""

    async def scenario() -> None:
        async with qflow.aio.open(tmp_path / "spool") as broker:
            with pytest.raises(qflow.InvalidArgument, match="Users.load"):
                await serve(broker, host="0.0.0.0", port=0, users="users.json")

    run(scenario())
