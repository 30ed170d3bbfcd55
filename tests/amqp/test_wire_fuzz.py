"""Whatever a client sends, in whatever pieces: events, an AMQP error or the end; never an exception, memory bounded."""

from __future__ import annotations

import random
import tracemalloc

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pamqp import body, commands, header, heartbeat

from amqp_client import HANDSHAKE, Basic, Channels, Connections, events, message, method, opened, raw
from damaging import damaged, torn
from qflow.amqp.errors import AmqpError
from qflow.amqp.wire.connection import Connection
from qflow.amqp.wire.events import ChannelFailed, ChannelReleased, Failed, Login, Method, Published, VhostAsked
from qflow.amqp.wire.frames import Content
from qflow.amqp.wire.limits import Limits
from qflow.amqp.wire.states import State
from thorough import TORTURE, examples

LIMITS = Limits(max_body_bytes=5000, max_assembling_bytes=8000, channel_max=4)
SESSION = (
    *HANDSHAKE,
    message(1, b"x" * 20),
    method(2, Channels.Open()),
    method(2, commands.Queue.Declare(0, "q", arguments={"x-max-length": 5, "a": [1, {"b": True}]})),
    method(1, Basic.Ack(1)),
    message(2, b"y" * 30, properties=Basic.Properties(headers={"n": 1, "t": {"u": [None]}}, message_id="m")),
    heartbeat.Heartbeat().marshal(),
    method(1, Basic.Consume(0, "q", "tag")),
    method(2, Channels.Close(200, "bye", 0, 0)),
    message(1, b"z" * 9000),
    method(1, Channels.CloseOk()),
    method(1, Channels.Open()),
    message(1, b"last"),
    method(0, Connections.Close(200, "bye", 0, 0)),
)
"""What a client may do in one connection, as frames."""
TAIL = (
    *SESSION[5:],
    method(1, Basic.Publish(0, "x", "k")),
    method(1, header.ContentHeader(0, 40)),
    method(2, header.ContentHeader(0, 4900)),
    method(1, body.ContentBody(b"b" * 20)),
    method(2, body.ContentBody(b"b" * 2450)),
    method(2, Basic.Publish(0, "", "k")),
    method(3, Channels.Open()),
    method(9, Channels.Open()),
    method(0, Connections.CloseOk()),
    method(0, Connections.TuneOk(1, 4096, 0)),
    raw(1, 1, b"\0\x3c\0\x28"),
    raw(7, 1, b""),
)


class Shell:
    """Answers as a server does, and now and then with an error of its own."""

    def __init__(self, randomness: random.Random, fails: float) -> None:
        self.connection = Connection(limits=LIMITS)
        self.published: list[Published] = []
        self._random = randomness
        self._fails = fails
        self.failures = 0
        self._closing: set[int] = set()

    def take(self, data: bytes) -> None:
        """Receive, answer, send, and look that what is kept is bounded."""
        connection = self.connection
        before = connection.state
        for event in connection.receive(data):
            assert before is not State.OVER
            self._answer(event)
        connection.data_to_send()
        assert connection.pending_bytes() == 0
        assert 0 <= connection.assembling_bytes <= LIMITS.max_assembling_bytes
        assert connection.state is not State.OVER or connection.assembling_bytes == 0

    def _answer(self, event: object) -> None:
        connection = self.connection
        if isinstance(event, Login):
            connection.accept_login()
        elif isinstance(event, VhostAsked):
            connection.open_ok()
        elif isinstance(event, Failed):
            self.failures += 1
            assert self.failures == 1
            assert connection.state in (State.CLOSING, State.OVER)
        elif isinstance(event, ChannelFailed):
            self._closing.add(event.channel)
        elif isinstance(event, ChannelReleased):
            self._closing.remove(event.channel)
        elif isinstance(event, Published | Method) and event.channel:
            assert event.channel not in self._closing
            self._answer_on_channel(event)

    def _answer_on_channel(self, event: Published | Method) -> None:
        if isinstance(event, Published):
            self.published.append(event)
            assert len(event.body) <= LIMITS.max_body_bytes
            self.connection.confirm(event.channel, 1, False, True)
            content = Content(event.exchange, event.routing_key, event.properties, event.body)
            self.connection.deliver(event.channel, "tag", 1, False, content)
        if self._random.random() < self._fails:
            self.connection.fail_channel(event.channel, AmqpError(404, "no queue 'q'"))
            self._closing.add(event.channel)


def pieces_of(data: bytes, randomness: random.Random) -> list[bytes]:
    """The bytes in pieces, of a few bytes or of thousands; the handshake byte by byte."""
    return torn(data, randomness, (30, 300, 3000, 100_000), singly=61)


SEEDS = st.integers(0, 2**32 - 1)
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@settings(SETTINGS, max_examples=20_000 if TORTURE else 200)
@given(st.lists(st.sampled_from(TAIL), max_size=40), SEEDS)
def test_any_frames_in_any_order_torn_anywhere(frames: list[bytes], seed: int) -> None:
    """Torn or whole, the same messages come of them."""
    data = b"".join((*HANDSHAKE, *frames))
    whole, pieces = Shell(random.Random(seed), 0), Shell(random.Random(seed), 0)
    whole.take(data)
    for piece in pieces_of(data, random.Random(seed)):
        pieces.take(piece)
    assert pieces.published == whole.published
    assert pieces.connection.state is whole.connection.state
    failing = Shell(random.Random(seed), 0.2)
    for piece in pieces_of(data, random.Random(seed)):
        failing.take(piece)


def test_mutated_sessions_end_in_an_error_or_cleanly() -> None:
    """Bytes changed, cut out, doubled or put in; 2,000 sessions, 100,000 with `QFLOW_TORTURE=1`."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"{seed=}")
    ended = 0
    for number in range(100_000 if TORTURE else 2000):
        randomness = random.Random(seed + number)
        shell = Shell(randomness, 0.1)
        for piece in pieces_of(mutated(randomness), randomness):
            shell.take(piece)
        ended += shell.connection.state is State.OVER
        assert not ended or shell.connection.assembling_bytes == 0 or shell.connection.state is not State.OVER
    assert ended


def mutated(randomness: random.Random) -> bytes:
    """A session with one to four damages, most of them after the handshake."""
    return damaged(b"".join(SESSION), sum(map(len, SESSION[: len(HANDSHAKE)])), randomness, 0.2)


@settings(SETTINGS, max_examples=examples(200))
@given(st.binary(max_size=200), st.integers(0, len(HANDSHAKE)))
def test_any_bytes_after_any_step_of_the_handshake(data: bytes, steps: int) -> None:
    """Also with nothing of the handshake."""
    shell = Shell(random.Random(0), 0)
    for part in (*HANDSHAKE[:steps], data):
        shell.take(part)


def test_a_body_that_drips_in_costs_little_more_than_its_bytes() -> None:
    """In frames of two bytes; an object for each would take twenty times as much."""
    connection = opened()
    events(connection, method(1, Basic.Publish()), method(1, header.ContentHeader(0, 1_000_000)))
    drip = method(1, body.ContentBody(b"ab")) * 100
    tracemalloc.start()
    try:
        for _ in range(200):
            events(connection, drip)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert connection.assembling_bytes == 40_000
    assert held < 80_000
