"""Event loops in tests: running one, cancelling a task at any of its awaits, and looking whether anything is left."""

from __future__ import annotations

import asyncio
import inspect
import threading
import types
from collections import Counter
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import pytest

import inside
import qflow
from calls import count as count_calls
from drivers import owner_of
from qflow.aio.home import Home
from qflow.queues.queue import parts_of
from qflow.remote.server.session import Session
from qflow.storage.environment import Environment
from qflow.storage.files import Files

PATIENCE_S = 120
TURNS = 1000
LOOK_S = 0.001


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a loop of its own; hanging is a failure."""

    async def bounded() -> Any:
        return await asyncio.wait_for(work, PATIENCE_S)

    return asyncio.run(bounded())


@types.coroutine
def cancelled_at(work: Coroutine[Any, Any, Any], at: int, late: bool) -> Generator[Any, Any, int]:
    """Run a coroutine in the current task, and cancel the task at one of its awaits; return how many there were.

    Args:
        at: the await to cancel at, from 0.
        late: cancel when what it waits for has come, and before it can take notice; else at once.
    """
    task = asyncio.current_task()
    assert task is not None
    number = 0
    error: BaseException | None = None
    while True:
        try:
            awaited = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return number
        if number == at:
            if late and awaited is not None:
                awaited.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        number += 1
        error = None
        try:
            yield awaited
        except BaseException as thrown:
            error = thrown


async def struck(work: Coroutine[Any, Any, Any], at: int, late: bool) -> bool:
    """Run a coroutine in a task that is cancelled at one of its awaits, see `cancelled_at`; return whether it was."""
    task = asyncio.ensure_future(cancelled_at(work, at, late))  # type: ignore[arg-type]
    await asyncio.wait([task])
    if not task.cancelled():
        assert task.result() <= at, "it swallowed its cancellation"
    return task.cancelled()


class StruckOperations:
    """Operations of connections, in the owner: one of them is cancelled at one of its awaits, as if its caller had been."""

    FINISHED = ("ack", "nack", "extend", "give_back", "subscription_close")
    """Callers that are cancelled have these done all the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: int | None = None
        self._late = False
        call = Session.call

        async def perform(session: Session, head: dict[str, Any], columns: Any) -> Any:
            if self._left is None or self._left < 0 or head["op"] in self.FINISHED:
                return await call(session, head, columns)
            answers: list[Any] = []

            async def work() -> None:
                answers.append(await call(session, head, columns))

            passed = await cancelled_at(work(), self._left, self._late)
            self._left -= passed
            return answers[0]

        monkeypatch.setattr(Session, "call", perform)
        monkeypatch.setattr(Session, "put_at_once", lambda *_: False)

    async def strike(self, work: Coroutine[Any, Any, Any], at: int, late: bool) -> bool:
        """Run a coroutine that calls operations; cancel one at await number `at` of all; return whether it came to that."""
        self._left, self._late = at, late
        try:
            await work
        except qflow.InvalidArgument as error:
            if "the request was cancelled" not in str(error):
                raise
            return True
        finally:
            self._left = None
        return False


async def turns(number: int = 5) -> None:
    """Let other tasks have some turns."""
    for _ in range(number):
        await asyncio.sleep(0)


async def until(condition: Any) -> None:
    """Return when a condition holds that other tasks bring about, in the turn in which it does, or threads."""
    for turn in count():
        if condition():
            return
        await asyncio.sleep(0 if turn < TURNS else LOOK_S)


def count_wake_ups(monkeypatch: pytest.MonkeyPatch, counts: Counter[str], key: str) -> None:
    """Count calls that wake the running loop, but maintenance's, which may look after it at any moment."""
    monkeypatch.setattr(Home, "look_after", lambda home: None)
    count_calls(monkeypatch, counts, asyncio.get_running_loop(), "call_soon_threadsafe", key)


async def told(value: Any) -> Any:
    """Return what is known at once beside the owner, and is to be asked for at its door."""
    return await value if inspect.isawaitable(value) else value


async def length(queue: Any) -> int:
    """Return how many messages of a queue are not settled."""
    return int(await queue.length()) if hasattr(queue, "length") else len(queue)


def plain(broker: Any, name: str = "q") -> qflow.Queue:
    """Return a queue as threads beside the owner have it."""
    return owner_of(broker).broker.queue(name)


async def close_spool(broker: Any) -> None:
    """Close the spool: its owner does."""
    await owner_of(broker).close()


async def heard(broker: Any) -> None:
    """Return when all that was asked for is done, or given up, by the log, too."""
    await turns()  # loops that were left give back what they fetched
    assert await broker.check() == []
    if broker is not owner_of(broker):
        await until(lambda: not inside.link(broker).under_way)
    owner_of(broker).broker.engine.log.drain()


async def leave_nothing_behind(broker: Any) -> list[tuple[str, bytes, int]]:
    """Check that nobody waits, that all books agree, that every message can be had; return (queue, body, delivery).

    Everything is acked then, and nothing may be left in memory.
    """
    await heard(broker)
    broker = owner_of(broker)
    found = []
    for name in broker.queues():
        queue = broker.queue(name)
        inner: Any = queue.queue
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S / 6):  # maintenance may be bringing something back just now
                await until(lambda inner=inner: not inside.left_behind(inner))
        assert inside.left_behind(inner) == {}, name
        assert not parts_of(inner).consumers.listed, name
        while len(queue):
            async with await queue.get(timeout_s=0) as delivery:
                found.append((name, delivery.body, delivery.delivery_count))
        assert (await queue.stats()).resident_bytes == 0, name
    problems = await broker.check()
    assert not problems, problems
    return found


async def leave_no_reader_behind(broker: Any) -> None:
    """Check that nobody waits for a stream or for room, that no subscription is open, and that all books agree."""
    await heard(broker)
    broker = owner_of(broker)
    streams: Any = broker.broker.engine.streams
    for stream in streams.all():
        assert len(stream.readers) == 0, stream
        for cursor in stream.cursors.values():
            assert not cursor.members, cursor
            assert not cursor._line.watching, cursor
            assert cursor._waiting == cursor.held.unsettled == 0, cursor
    assert not streams.room._line
    assert (streams.room._incoming, streams.room._held, streams.room._slack) == (0, 0, 0)
    assert not streams.producers._busy


@contextmanager
def held_syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The disk takes what is written, and a sync does not end in here."""
    goes_on = threading.Event()

    def slow(real: Any) -> Any:
        def operation(*arguments: Any) -> Any:
            goes_on.wait(PATIENCE_S)
            return real(*arguments)

        return operation

    with monkeypatch.context() as patched:
        patched.setattr(Files, "sync_data", staticmethod(slow(Files.sync_data)))
        patched.setattr(Environment, "commit", slow(Environment.commit))
        try:
            yield
        finally:
            goes_on.set()
