"""The owner's disk is really full, a tmpfs of some MiB: what that refuses, and what goes on, at the door as beside it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import qflow
import qflow.aio
from door_raw import until
from doors.event_loop import run
from drivers import DOOR, OWNER, joining
from faults.test_full_disk import disk_of, fill, filled

BODY = bytes(6_000)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with disk_of("4m", tmp_path / "disk") as disk:
        yield disk


@pytest.fixture(params=[OWNER, DOOR])
def access(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def spool(small_disk: Path) -> Path:
    return small_disk / "spool"


def prepare(broker: qflow.Broker, disk: Path) -> list[bytes]:
    """Declare all that is used, and leave not a byte on the disk; return what is in queue `q`, all of it confirmed."""
    queue, _ = broker.declare_queues(["q", "other"])
    broker.declare_stream("s", topics=["s/#"])
    broker.bind(queue, "both")
    broker.publish_many([("s/1", b"%d" % number) for number in range(20)])
    bodies = [b"%06d" % number * 1_000 for number in range(30)]
    queue.put_many(bodies)
    fill(disk)
    filled(broker.queue("other"), 1_000)
    return bodies


@contextmanager
def opened(access: str, spool: Path) -> Iterator[tuple[qflow.Broker, Any]]:
    """Provide the owner of a spool, and the same or what is connected to it."""
    with qflow.open(spool) as owner:
        if access == OWNER:
            yield owner, owner
        else:
            with qflow.connect(spool) as remote:
                yield owner, remote


def left_in(spool: Path) -> list[bytes]:
    """Open the spool anew; return what is in queue `q`."""
    with qflow.open(spool) as owner:
        assert owner.recovery.problems == ()
        assert owner.check() == []
        return owner.queue("q").get_many(1000).bodies


def test_what_stores_something_is_refused_and_all_else_goes_on(spool: Path, small_disk: Path, access: str) -> None:
    """I12: DiskFull, with what to do; acks and gets go on; when there is space again, all of it does."""
    with opened(access, spool) as (owner, broker):
        bodies = prepare(owner, small_disk)
        queue = broker.queue("q")
        subscription = broker.subscribe("s", name="n", start="earliest")

        def transact() -> None:
            with broker.transaction() as tx:
                tx.put(queue, BODY)

        calls: dict[str, Callable[[], Any]] = {
            "put": lambda: queue.put(BODY),
            "put_many": lambda: queue.put_many([BODY] * 3),
            "submit": lambda: queue.submit(BODY).result(60),
            "publish": lambda: broker.publish("both", BODY),
            "publish to a stream": lambda: broker.publish("s/1", BODY, producer="p", number=1),
            "publish_many": lambda: broker.publish_many([("both", BODY), ("s/1", BODY)]),
            "submit_publish": lambda: broker.submit_publish("both", BODY).result(60),
            "transaction": transact,
            "compact": broker.compact,  # while `stats.json` is small: renewed for many queues, it takes the room of a copy
            "declare": lambda: broker.declare_queues([f"n{number}" for number in range(300)]),
        }
        for name, call in calls.items():
            with pytest.raises(qflow.DiskFull, match="space"):
                call()
            assert len(queue) == len(bodies), name
        for _ in range(50):  # some of them on a connection of their own
            with pytest.raises(qflow.DiskFull):
                queue.put(BODY)
        for body in bodies[:5]:
            delivery = queue.get(0)
            assert delivery.body == body
            delivery.ack(wait=True)
        queue.get_many(5, 0).ack()
        queue.get_many(5, 0).nack()
        with broker.transaction() as tx:
            tx.ack(queue.get(0))
        subscription.get_many(10, 0).ack(wait=True)
        assert len(queue) == len(bodies) - 11
        assert broker.check() == []
        os.unlink(small_disk / "ballast")
        for call in calls.values():
            call()
        assert len(queue) == len(bodies) - 11 + 9
        assert subscription.get(0).body == b"10"
    assert left_in(spool) == bodies[11:] + [BODY] * 9


def test_tasks_are_refused_and_go_on(spool: Path, small_disk: Path, access: str) -> None:
    """As threads; puts of one turn are refused each by itself, and what is confirmed of them is there."""

    async def scenario() -> list[bytes]:
        async with qflow.aio.open(spool) as owner, joining(access, owner) as broker:
            bodies = prepare(owner.broker, small_disk)
            queue = broker.queue("q")

            async def transact() -> None:
                async with broker.transaction() as tx:
                    await tx.put(queue, BODY)

            refused = [
                *(queue.put(BODY) for _ in range(10)),
                queue.put_many([BODY] * 3),
                queue.submit(BODY),
                broker.publish("both", BODY),
                broker.submit_publish("s/1", BODY),
                transact(),
                broker.declare_queues([f"n{number}" for number in range(300)]),
            ]
            for outcome in await asyncio.gather(*refused, return_exceptions=True):
                assert isinstance(outcome, qflow.DiskFull)
            for body in bodies[:3]:
                async with await queue.get(0) as delivery:
                    assert delivery.body == body
            await (await queue.get_many(3, 0)).ack(wait=True)
            await (await queue.get(0)).nack()
            os.unlink(small_disk / "ballast")
            new = [b"%d" % number for number in range(10)]
            sequences = await asyncio.gather(*map(queue.put, new))
            assert sequences == sorted(sequences)
            return bodies[6:] + new

    expected = run(scenario())
    assert left_in(spool) == expected


def test_producers_wait_for_a_full_spill_store_and_for_nobody_else(spool: Path, small_disk: Path, access: str) -> None:
    """I12, edge 9: one is refused in time, the others wait, whatever else their connection does, and go on later."""
    with opened(access, spool) as (owner, broker), ThreadPoolExecutor(4) as threads:
        owner.declare_queue("q", durable=False, capacity_bytes=100_000)
        fill(small_disk)
        queue = broker.queue("q")
        bodies = []
        with pytest.raises(qflow.DiskFull, match="could not spill"):
            while True:
                body = b"%06d" % len(bodies) * 1_000
                queue.put(body, timeout_s=0)
                bodies.append(body)
        more = [b"%06d" % number * 1_000 for number in range(len(bodies), len(bodies) + 4)]
        waiting = []
        for number, body in enumerate(more, 1):
            waiting.append(threads.submit(queue.put, body))
            until(lambda number=number: owner.queue("q").stats().blocked_putters == number)
        with queue.get(0) as delivery:
            assert delivery.body == bodies.pop(0)
        assert broker.queues() == ["q"]
        os.unlink(small_disk / "ballast")
        placed = {future.result(60): body for future, body in zip(waiting, more, strict=True)}
        bodies += [placed[sequence] for sequence in sorted(placed)]
        while bodies:
            with queue.get(60) as delivery:
                assert delivery.body == bodies.pop(0)
        assert owner.check() == []


@pytest.mark.parametrize("how", ["close", "kill", "owner"])
def test_what_a_client_held_is_back_though_the_disk_is_full(spool: Path, small_disk: Path, how: str) -> None:
    """It closes, dies, or sees its owner close: in order, of a queue that has dead letters, too, and told as delivered.

    (How often is exact after a clean close alone; with not a byte left, an owner's is none.)
    """
    owner = qflow.open(spool)
    owner.declare_queue("mortal", max_deliveries=5, dead_letter="dead").put_many(
        [b"%d" % number for number in range(9)]
    )
    bodies = prepare(owner, small_disk)
    with qflow.connect(spool) as remote:
        first = remote.queue("q").get_many(10, 0)
        held = [*first, remote.queue("q").get(0), *remote.queue("mortal").get_many(5, 0)]
        held[0].ack()
        if how == "owner":
            remote.queues()
            owner.close()
        elif how == "kill":
            link: Any = remote._connection._channel
            link._socket.shutdown(socket.SHUT_RDWR)
        else:
            remote.close()
        if how != "owner":
            for name in ("q", "mortal"):
                until(lambda name=name: not owner.queue(name).stats().acquired_messages)
            assert owner.check() == []
            owner.close()
    with qflow.open(spool) as again:
        left = again.queue("q").get_many(100)
        assert left.bodies == bodies[1:]
        assert all(one.redelivered for one in left[:10])
        mortal = again.queue("mortal").get_many(10)
        assert mortal.bodies == [b"%d" % number for number in range(9)]
        assert all(one.redelivered for one in mortal[:5])
