"""Whatever a client sends, in whatever pieces: packets, a reason code or the end; never an exception, memory bounded."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from damaging import damaged, torn
from mqtt_wire import connect, decoded, opened, packet, properties, publish, string, subscribe
from qflow.mqtt.errors import MqttError
from qflow.mqtt.wire import Connection, Limits, State, encode_publish
from qflow.mqtt.wire.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Event,
    Failed,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from qflow.streams.topic_filter import check_filter, check_topic
from thorough import TORTURE

LIMITS = Limits(maximum_packet_bytes=600, topic_bytes=60, receive_maximum=4, topic_alias_maximum=3, filters=4)
USER = b"\x26" + string("name") + string("value é")
METHOD = b"\x15" + string("M")
WILL = properties(b"\x18\0\0\0\5", USER) + string("left/é") + string(b"\0\xff")
CONNECTS = {
    4: connect(4, flags=0xEE, rest=string("left/é") + string(b"\0\xff") + string("user") + string("secret")),
    5: connect(
        5,
        flags=0xEE,
        having=b"\x11\0\0\0\x3c\x21\0\5\x22\0\3\x27\0\0\0\xff" + METHOD + USER,
        rest=WILL + string("user") + string("secret"),
    ),
}


def later(version: int) -> tuple[bytes, ...]:
    """What a client may do once it is connected."""
    common = (
        publish(version, "plant/3/heat", b"x" * 20),
        publish(version, "plant/3/heat", b"y" * 130, first=0x33, packet_id=1),
        publish(version, "é", b"z", first=0x34, packet_id=2),
        publish(version, "é", b"z", first=0x3C, packet_id=2),
        packet(0x62, b"\0\2"),
        packet(0x40, b"\0\1"),
        packet(0x50, b"\0\2"),
        packet(0x70, b"\0\2"),
        packet(0xC0),
        subscribe(version, ("a/+/#", 1), ("$share/group/a/#", 2)),
        packet(0xA2, b"\0\5", properties() if version == 5 else b"", string("a/+/#"), string("b")),
    )
    if version == 4:
        return common
    return (
        *common,
        publish(
            5,
            "t",
            b"1",
            first=0x32,
            packet_id=3,
            having=b"\1\1\2\0\0\0\x3c\3"
            + string("text")
            + b"\x08"
            + string("r/1")
            + b"\x09"
            + string(b"\xff")
            + USER
            + USER,
        ),
        publish(5, "aliased", b"2", having=b"\x23\0\1"),
        publish(5, "", b"3", having=b"\x23\0\1"),
        packet(0x40, b"\0\3\x10"),
        packet(0x50, b"\0\3\x97", properties(b"\x1f" + string("no"), USER)),
        subscribe(5, ("a/#", 0x2D), having=b"\x0b\x80\1" + USER),
        packet(0xF0, b"\x19", properties(METHOD, b"\x16" + string(b"\0"))),
    )


ENDS = {4: packet(0xE0), 5: packet(0xE0, b"\4", properties(b"\x11\0\0\0\1", USER))}
SESSIONS = {version: (CONNECTS[version], *later(version), ENDS[version]) for version in (4, 5)}


class Shell:
    """Answers as a server does, and now and then with an error of its own."""

    def __init__(self, randomness: random.Random, fails: float) -> None:
        self.connection = Connection(LIMITS)
        self.told: list[Event] = []
        self.sent = b""
        self._random = randomness
        self._fails = fails

    def take(self, data: bytes) -> None:
        """Receive, answer, send, and look that what is told is what may be told."""
        connection = self.connection
        for event in connection.receive(data):
            self._answer(event)
        if connection.state is State.OPEN:  # what was sent behind CONNECT
            for event in connection.receive(b""):
                self._answer(event)
        sent = connection.data_to_send()
        assert connection.pending_bytes == 0
        self.sent += sent
        assert 0 <= connection.unacknowledged <= LIMITS.receive_maximum or connection.version != 5
        assert connection.connect is None or connection.version == connection.connect.version

    def _answer(self, event: Event) -> None:
        connection = self.connection
        assert not any(isinstance(before, Failed | Disconnect) for before in self.told)
        assert isinstance(event, Connect) is (not self.told) or isinstance(event, Failed)
        self.told.append(event)
        if isinstance(event, Failed | Disconnect):
            assert connection.state is State.CLOSED
        elif self._random.random() < self._fails:
            connection.fail(MqttError(0x87, "not allowed"))
        elif isinstance(event, Connect):
            connection.send(Connack())
        elif isinstance(event, Publish):
            self._published(event)
        elif isinstance(event, Pubrel):
            connection.send(Pubcomp(event.packet_id))
        elif isinstance(event, Pubrec):
            connection.send(Pubrel(event.packet_id))
        elif isinstance(event, Subscribe):
            assert all(check_filter(one.filter) and one.qos < 3 for one in event.subscriptions)
            connection.send(Suback(event.packet_id, [one.qos for one in event.subscriptions]))
        elif isinstance(event, Unsubscribe):
            connection.send(Unsuback(event.packet_id, [0 for _ in event.filters]))
        elif isinstance(event, Auth):
            assert connection.version == 5

    def _published(self, event: Publish) -> None:
        assert check_topic(event.topic)
        assert len(event.payload) < LIMITS.maximum_packet_bytes
        assert "topic_alias" not in event.properties
        encoded = encode_publish(
            self.connection.version, event.topic, event.payload, event.qos, properties=event.properties
        )
        if self.connection.takes(encoded):
            assert self.connection.publish(encoded, event.packet_id)
        if event.qos == 1:
            self.connection.send(Puback(event.packet_id))
        elif event.qos == 2:
            self.connection.send(Pubrec(event.packet_id))


def pieces_of(data: bytes, randomness: random.Random) -> list[bytes]:
    """The bytes in pieces, of a few bytes or of hundreds."""
    return torn(data, randomness, (1, 5, 30, 300, 3000))


SEEDS = st.integers(0, 2**32 - 1)
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@settings(SETTINGS, max_examples=20_000 if TORTURE else 200)
@given(
    st.sampled_from((4, 5)).flatmap(
        lambda version: st.tuples(
            st.just(version), st.lists(st.sampled_from((*SESSIONS[version], *later(9 - version))), max_size=30)
        )
    ),
    SEEDS,
)
def test_any_packets_in_any_order_torn_anywhere(session: tuple[int, list[bytes]], seed: int) -> None:
    """Also those of the other version; torn or whole, the same comes of them, and paho can read what is answered."""
    version, packets = session
    data = CONNECTS[version] + b"".join(packets)
    whole, pieces = Shell(random.Random(seed), 0), Shell(random.Random(seed), 0)
    whole.take(data)
    for piece in pieces_of(data, random.Random(seed)):
        pieces.take(piece)
    assert pieces.told == whole.told
    assert pieces.sent == whole.sent
    assert decoded(whole.sent, version)[0][1].rc == 0
    failing = Shell(random.Random(seed), 0.2)
    for piece in pieces_of(data, random.Random(seed)):
        failing.take(piece)


def test_the_sessions_are_right_before_they_are_damaged() -> None:
    """Else the damages would hit little."""
    for version, session in SESSIONS.items():
        shell = Shell(random.Random(0), 0)
        shell.take(b"".join(session))
        assert isinstance(shell.told[-1], Disconnect), shell.told[-1]
        assert len(shell.told) == len(session) - 1, "all but the ping"
        assert not any(isinstance(event, Failed) for event in shell.told), version


def test_mutated_sessions_end_in_an_error_or_cleanly() -> None:
    """Bytes changed, cut out, doubled or put in; 4,000 sessions, 100,000 with `QFLOW_TORTURE=1`."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"{seed=}")
    failed = 0
    for number in range(100_000 if TORTURE else 4000):
        randomness = random.Random(seed + number)
        shell = Shell(randomness, 0.05)
        for piece in pieces_of(mutated(randomness), randomness):
            shell.take(piece)
        failed += bool(shell.told) and isinstance(shell.told[-1], Failed)
    assert failed


def mutated(randomness: random.Random) -> bytes:
    """A session with one to four damages, most of them after CONNECT."""
    session = SESSIONS[randomness.choice((4, 5))]
    return damaged(b"".join(session), len(session[0]), randomness, 0.3)


@settings(SETTINGS, max_examples=1000 if TORTURE else 200)
@given(st.binary(max_size=200), st.sampled_from((0, 4, 5)))
def test_any_bytes_before_and_after_connect(data: bytes, version: int) -> None:
    """Also as the body of each packet, so that its header is right."""
    shell = Shell(random.Random(0), 0)
    if version:
        shell.take(CONNECTS[version])
    shell.take(data)
    for first in (0x10, 0x30, 0x32, 0x35, 0x40, 0x50, 0x62, 0x70, 0x82, 0xA2, 0xE0, 0xF0):
        shell = Shell(random.Random(0), 0)
        if version:
            shell.take(CONNECTS[version])
        shell.take(packet(first, data))


def test_a_million_pings_are_answered_and_nothing_is_kept() -> None:
    """The caller bounds what is to be sent: `pending_bytes` tells how much there is."""
    connection = opened(5)
    assert list(connection.receive(packet(0xC0) * 1_000_000)) == []
    assert connection.pending_bytes == 2_000_000
    assert len(connection.data_to_send()) == 2_000_000
    assert connection.data_to_send() == b""
