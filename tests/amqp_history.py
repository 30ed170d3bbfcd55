"""Clients that publish, consume and vanish at random, and what their histories must hold when the server is killed."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from pamqp import commands

from amqp_client import Basic, Channels, Connections, method
from amqp_clients import PATIENCE_S, serving
from amqp_raw import Queue, Raw, publish

QUEUES = {
    "classic": {},
    "quorum": {"x-queue-type": "quorum"},
    "single": {"x-single-active-consumer": True},
    "steady": {},
}
STEADY = "steady"
"""A queue with one consumer, which stays: what another had not been sent yet when it left cannot come out of order."""
BOTH = "both"
"""An exchange: what is published to it comes to the first two queues."""
TARGETS = {queue: (queue,) for queue in QUEUES} | {BOTH: tuple(QUEUES)[:2]}
QUIET_S = 0.3
"""A consumer that is sent nothing for so long settles what it holds."""
_LOST = (OSError, EOFError)


class Key(NamedTuple):
    """A message: who published it where, as the how manyth."""

    publisher: int
    target: str
    number: int

    def body(self) -> bytes:
        text = f"{self.publisher} {self.target} {self.number} ".encode()
        return text + bytes([self.number % 251]) * random.Random(text).choice((0, 10, 1000, 1000, 40_000))


class Seen(NamedTuple):
    """A message that came to a consumer."""

    moment: int
    session: int
    queue: str
    key: Key
    redelivered: bool


class History:
    """What all clients saw; a list is appended to by several threads, which is atomic."""

    def __init__(self) -> None:
        self.clock = count()
        self.sessions = count()
        self.sent: Counter[tuple[int, str]] = Counter()
        self.confirmed: list[Key] = []
        self.progress = threading.Event()
        """Set when something was confirmed."""
        self.seen: list[Seen] = []
        self.committed: list[tuple[int, str, Key]] = []
        """Acks of transactions, by moment."""
        self.closed: list[tuple[int, str, Key]] = []
        """Acks of connections that were closed cleanly, by moment."""
        self.wrong: list[str] = []

    def take(self, session: int, queue: str, redelivered: bool, body: bytes) -> Key:
        """Note what came."""
        publisher, target, number = body.split(b" ", 3)[:3]
        key = Key(int(publisher), target.decode(), int(number))
        if key.body() != body or queue not in TARGETS[key.target] or key.number >= self.sent[key.publisher, key.target]:
            self.wrong.append(f"{key} came to {queue!r}, and nobody put it so")
        self.seen.append(Seen(next(self.clock), session, queue, key, redelivered))
        return key

    def problems(self) -> list[str]:
        """Return what must not have been."""
        found = list(self.wrong)
        came = {(seen.queue, seen.key) for seen in self.seen}
        expected = ((queue, key) for key in self.confirmed for queue in TARGETS[key.target])
        found += [f"lost: {queue} {key}" for queue, key in expected if (queue, key) not in came]
        firsts = Counter((seen.queue, seen.key) for seen in self.seen if not seen.redelivered)
        found += [f"came {times} times as if new: {which}" for which, times in firsts.items() if times > 1]
        found += [f"out of order: {seen}" for seen in self.late() if seen.queue == STEADY]
        found += [f"came after its commit: {seen}" for seen in self._after(self.committed)]
        return found

    def late(self) -> list[Seen]:
        """Return messages that came to a consumer as new behind later ones of the same publisher."""
        last: dict[tuple[int, str, int, str], int] = {}
        late = []
        for seen in self.seen:
            line = seen.session, seen.queue, seen.key.publisher, seen.key.target
            if not seen.redelivered and seen.key.number <= last.get(line, -1):
                late.append(seen)
            elif not seen.redelivered:
                last[line] = seen.key.number
        return late

    def again(self) -> int:
        """Return how many messages came again, as redelivered, that were acked before a clean close."""
        return len(self._after(self.closed))

    def _after(self, settled: list[tuple[int, str, Key]]) -> list[Seen]:
        moments = {(queue, key): moment for moment, queue, key in settled}
        return [seen for seen in self.seen if moments.get((seen.queue, seen.key), seen.moment) < seen.moment]


class Client(threading.Thread):
    """Connects again and again until it is told to stop."""

    def __init__(self, history: History, port: int, number: int, seed: int) -> None:
        super().__init__(name=f"{type(self).__name__} {number}", daemon=True)
        self.history = history
        self.port = port
        self.number = number
        self.chance = random.Random(seed)
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                with Raw(self.port) as raw:
                    self.live(raw.open())
            except _LOST:
                self.stopping.wait(0.02)
            except Exception as error:  # a thread tells by the history that it failed
                self.history.wrong.append(f"{self.name}: {error!r}")
                raise

    def live(self, raw: Raw) -> None:
        raise NotImplementedError


class Publisher(Client):
    """Publishes in windows, and waits for their confirms."""

    targets: Sequence[str] = tuple(TARGETS)

    def live(self, raw: Raw) -> None:
        raw.ask(commands.Confirm.Select(), commands.Confirm.SelectOk)
        open_: dict[int, Key] = {}
        tags = count(1)
        while not self.stopping.is_set() and self.chance.random() > 0.02:
            for _ in range(self.chance.randint(1, 30)):
                target = self.chance.choice(self.targets)
                key = Key(self.number, target, self.history.sent[self.number, target])
                self.history.sent[self.number, target] += 1
                open_[next(tags)] = key
                raw.send(self._frames(key))
            while open_:
                answer = raw.until(Basic.Ack, Basic.Nack)
                done = [
                    tag
                    for tag in open_
                    if tag == answer.delivery_tag or (answer.multiple and tag < answer.delivery_tag)
                ]
                keys = [open_.pop(tag) for tag in done]
                if isinstance(answer, Basic.Ack):
                    self.history.confirmed += keys
                    self.history.progress.set()

    def _frames(self, key: Key) -> bytes:
        if key.target != BOTH:
            return publish(key.target, key.body(), Basic.Properties(delivery_mode=2))
        frames = publish("k", key.body(), Basic.Properties(delivery_mode=2))
        return frames.replace(method(1, Basic.Publish(0, "", "k")), method(1, Basic.Publish(0, BOTH, "k")), 1)


def wait_for_confirms(history: History, number: int) -> None:
    """Let the clients go on."""
    deadline = time.monotonic() + 10 * PATIENCE_S
    while len(history.confirmed) < number:
        assert time.monotonic() < deadline, f"{len(history.confirmed)} of {number} were confirmed"
        assert not history.wrong, history.wrong
        history.progress.wait(PATIENCE_S)
        history.progress.clear()


def live_under_kills(
    spool: Path,
    history: History,
    clients: Sequence[Client],
    declare: Callable[[int], None],
    *,
    port: int,
    kills: int,
    messages: int,
    chance: random.Random,
) -> None:
    """Let clients live beside a server that is killed and started again, and end with the last kill.

    Args:
        declare: makes the queues, given the port, before the clients begin.
        messages: are confirmed before each kill at least, and not twice as many.
    """
    for number in range(kills + 1):
        with serving(spool, "--capacity", "8MiB", port=port) as (_, process):
            if number == 0:
                declare(port)
                for client in clients:
                    client.start()
            wait_for_confirms(history, len(history.confirmed) + chance.randrange(messages, 2 * messages))
            if number == kills:
                for client in clients:
                    client.stopping.set()
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
    for client in clients:
        client.join(PATIENCE_S)
    assert not any(client.is_alive() for client in clients)


class Consumer(Client):
    """Acks, nacks, holds and commits at random, and closes or vanishes."""

    def live(self, raw: Raw) -> None:
        self._raw = raw
        self._session = next(self.history.sessions)
        self._held: dict[int, tuple[str, Key]] = {}
        self._acked: list[tuple[str, Key]] = []
        is_unit = self.chance.random() < 0.3
        if is_unit:
            raw.ask(commands.Tx.Select(), commands.Tx.SelectOk)
        raw.ask(Basic.Qos(0, self.chance.randint(1, 50), False), Basic.QosOk)
        steady = self.number == 0
        queues = [STEADY] if steady else self.chance.sample([queue for queue in QUEUES if queue != STEADY], 2)
        for queue in queues:
            raw.send(method(1, Basic.Consume(0, queue, queue)))
            self._until(Basic.ConsumeOk)
        raw.socket.settimeout(QUIET_S)
        left = self.chance.randint(10, 300)
        while (steady or left) and not self.stopping.is_set():
            left -= 1
            try:
                deliver = raw.until(Basic.Deliver)
            except TimeoutError:
                self._settle(1.0)
            else:
                raw.socket.settimeout(PATIENCE_S)  # its rest comes, however late
                self._take(deliver)
                raw.socket.settimeout(QUIET_S)
            self._settle(0.2)
            if is_unit and self.chance.random() < 0.1:
                self._commit()
        if self.chance.random() < 0.5:
            raw.socket.settimeout(PATIENCE_S)
            raw.send(method(0, Connections.Close(200, "", 0, 0)))
            raw.until(Connections.CloseOk)
            if not is_unit:
                self.history.closed += [(next(self.history.clock), *one) for one in self._acked]

    def _until(self, kind: Any) -> None:
        while not isinstance(value := self._raw.until(kind, Basic.Deliver, Channels.Close), kind):
            assert isinstance(value, Basic.Deliver), value.reply_text
            self._take(value)

    def _take(self, deliver: Any) -> None:
        size = self._raw.next()[1].body_size
        body = b""
        while len(body) < size:
            body += self._raw.next()[1].value
        queue = deliver.consumer_tag
        self._held[deliver.delivery_tag] = queue, self.history.take(self._session, queue, deliver.redelivered, body)

    def _settle(self, likely: float) -> None:
        if not self._held or self.chance.random() > likely:
            return
        tag = self.chance.choice(list(self._held))
        what = self.chance.random()
        if what < 0.15:
            self._raw.send(method(1, Basic.Nack(tag, False, True)))
            del self._held[tag]
            return
        multiple = what < 0.6
        self._raw.send(method(1, Basic.Ack(tag, multiple)))
        for one in [one for one in self._held if one == tag or (multiple and one < tag)]:
            self._acked.append(self._held.pop(one))

    def _commit(self) -> None:
        self._raw.socket.settimeout(PATIENCE_S)
        self._raw.send(method(1, commands.Tx.Commit()))
        self._until(commands.Tx.CommitOk)
        self._raw.socket.settimeout(QUIET_S)
        self.history.committed += [(next(self.history.clock), *one) for one in self._acked]
        self._acked.clear()


def declare_all(port: int) -> None:
    """Have the queues, and the exchange."""
    with Raw(port).open() as raw:
        raw.ask(commands.Exchange.Declare(0, BOTH, "fanout", durable=True), commands.Exchange.DeclareOk)
        for queue, arguments in QUEUES.items():
            raw.ask(Queue.Declare(0, queue, durable=True, arguments=arguments), Queue.DeclareOk)
        for queue in TARGETS[BOTH]:
            raw.ask(Queue.Bind(0, queue, BOTH, ""), Queue.BindOk)


def drain(history: History, port: int) -> None:
    """Take all that is left."""
    session = next(history.sessions)
    with Raw(port).open() as raw:
        for queue in QUEUES:
            while True:
                raw.send(method(1, Basic.Get(0, queue, True)))
                _, answer = raw.next()
                if isinstance(answer, Basic.GetEmpty):
                    break
                size, body = raw.next()[1].body_size, b""
                while len(body) < size:
                    body += raw.next()[1].value
                history.take(session, queue, answer.redelivered, body)
