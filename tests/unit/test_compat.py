"""Drop-ins for `queue.Queue` and `asyncio.Queue`, under the tests that Python has of its own."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import queue
import subprocess
import sys
import threading
import unittest
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import qflow
from qflow import compat
from unit.clocks import LONG_S, until

NOT_FOR_US = {"test_repr", "test_str"}
"""They look for each item in the text that shows a queue: ours has their number."""


def adapted(module: str, name: str, **attributes: Any) -> unittest.TestSuite:
    """Return tests of Python's own suite, which make our queues."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        pytest.skip(f"this Python comes without its own tests: {module}")
    bases = (getattr(found, name),)
    if not issubclass(bases[0], unittest.TestCase):
        bases = (*bases, unittest.TestCase)
    kind = type(name, bases, attributes)
    names = [one for one in unittest.TestLoader().getTestCaseNames(kind) if one not in NOT_FOR_US]
    assert names
    return unittest.TestSuite(map(kind, names))


def passes(suite: unittest.TestSuite) -> None:
    result = unittest.TestResult()
    suite.run(result)
    assert result.testsRun > 0
    assert [trace for _, trace in result.failures + result.errors] == []


def for_threads() -> Any:
    kinds = SimpleNamespace(Queue=compat.Queue, Full=queue.Full, Empty=queue.Empty, ShutDown=compat.ShutDown)
    return {"queue": kinds, "type2test": compat.Queue}


@pytest.mark.parametrize("name", ["BaseQueueTestMixin", "FailingQueueTest"])
def test_pythons_own_tests_of_queue_pass(name: str) -> None:
    """Those of threads; the queue that fails overrides `_put` and `_get`, as its users do."""
    passes(adapted("test.test_queue", name, **for_threads()))


@pytest.mark.parametrize("name", ["QueueBasicTests", "QueueGetTests", "QueuePutTests", "QueueJoinTests"])
def test_pythons_own_tests_of_asyncio_queues_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tasks."""
    monkeypatch.setattr(asyncio, "Queue", compat.AsyncQueue)
    passes(adapted("test.test_asyncio.test_queues", name, **({"q_class": compat.AsyncQueue} if "Join" in name else {})))


def test_items_that_are_kept_are_there_for_the_next_process(spool: Path) -> None:
    """They count as unfinished tasks; two queues of one spool are kept apart."""
    first: compat.Queue[Any] = compat.Queue(path=spool, name="a", serializer="json")
    first.put({"n": 1})
    first.put([2])
    first.close()
    again: compat.Queue[Any] = compat.Queue(path=spool, name="a", serializer="json")
    assert (again.qsize(), again.unfinished_tasks) == (2, 2)
    assert [again.get(), again.get()] == [{"n": 1}, [2]]
    again.close()
    with qflow.open(spool) as broker:
        assert len(broker.queue("a")) == 0


def test_items_beyond_memory_lie_on_the_disk_and_go_with_the_queue() -> None:
    """Its directory is gone when nothing refers to it."""
    items: compat.Queue[bytes] = compat.Queue(capacity_bytes="256KiB", serializer="bytes")
    directory = Path(items._items.queue._parts.context.shared.keys._log._env.path).parent
    for number in range(1000):
        items.put(b"%04d" % number * 250)
    assert items.qsize() == 1000
    assert items._items.queue.stats().spilled_messages > 500
    assert [int(items.get()[:4]) for _ in range(1000)] == list(range(1000))
    assert directory.exists()
    del items
    gc.collect()
    until(lambda: not directory.exists())


def test_the_end_of_a_forked_child_takes_nothing_and_that_of_the_program_all(tmp_path: Path) -> None:
    """Directories of a queue that is in use, and of one that is garbage."""
    program = """
import os, sys, qflow
used, garbage = qflow.compat.Queue(), qflow.compat.Queue()
used.put(1)
if not (child := os.fork()):
    del used, garbage
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert len(os.listdir(sys.argv[1])) == 2
assert used.get() == 1
del garbage
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", "import qflow.compat" + program, str(tmp_path)], check=True, env=environment, timeout=60
    )
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_stored_or_loaded_changes_nothing() -> None:
    """An error, and the queue as it was."""
    items: compat.Queue[Any] = compat.Queue(serializer="json")
    with pytest.raises(TypeError):
        items.put(object())
    assert (items.qsize(), items.unfinished_tasks) == (0, 0)
    items._items.queue.put(b"{")
    for _ in range(2):
        with pytest.raises(ValueError, match="Expecting property name"):
            items.get()
    assert items.qsize() == 1
    with pytest.raises(qflow.InvalidArgument, match="serializer='bytes' takes items that are bytes"):
        compat.Queue(serializer="bytes").put("text")
    for bad in ("xml", 7, json_without_loads()):
        with pytest.raises(qflow.InvalidArgument, match="serializer must be"):
            compat.Queue(serializer=bad)  # type: ignore[arg-type]


def json_without_loads() -> Any:
    return SimpleNamespace(dumps=str)


@pytest.mark.parametrize("maxsize", [0, -1, 1])
def test_a_negative_timeout_is_refused_where_python_refuses_it(maxsize: int) -> None:
    """By who might wait: not by a put into a queue without a limit."""

    def refused(one: queue.Queue[bytes]) -> list[bool]:
        found = []
        for call in (lambda: one.put(b"x", timeout=-1), lambda: one.get(timeout=-1)):
            try:
                call()
            except ValueError:
                found.append(True)
            else:
                found.append(False)
        return found

    ours: compat.Queue[bytes] = compat.Queue(maxsize)
    assert refused(ours) == refused(queue.Queue(maxsize))


def test_shutdown_ends_those_who_wait() -> None:
    """Puts at once, gets when it is empty; with `immediate`, what is there is dropped and `join` returns."""
    items: compat.Queue[int] = compat.Queue(maxsize=1)
    items.put(1)
    ended: list[type[BaseException]] = []

    def end(call: Any) -> None:
        try:
            call()
        except BaseException as error:
            ended.append(type(error))

    threads = [threading.Thread(target=end, args=(call,)) for call in (lambda: items.put(2), lambda: items.put(3))]
    for thread in threads:
        thread.start()
    items.shutdown()
    for thread in threads:
        thread.join(LONG_S)
    assert ended == [compat.ShutDown] * 2
    assert items.get() == 1
    with pytest.raises(compat.ShutDown):
        items.get_nowait()
    other: compat.Queue[int] = compat.Queue()
    other.put(1)
    getter = threading.Thread(target=end, args=(lambda: [other.get(), other.get()],))
    getter.start()
    other.shutdown(immediate=True)
    getter.join(LONG_S)
    assert ended[2:] == [compat.ShutDown]
    assert other.empty()


def test_a_shutdown_is_told_before_a_timeout_that_makes_no_sense() -> None:
    """As by Python 3.13; what is there is taken with one that makes sense."""
    items: compat.Queue[int] = compat.Queue(1)
    items.put(1)
    for method in (partial(items.put, 2), items.get):
        with pytest.raises(ValueError, match="non-negative"):
            method(timeout=-1)
    items.shutdown()
    with pytest.raises(compat.ShutDown):
        items.put(2, timeout=-1)
    with pytest.raises(ValueError, match="non-negative"):
        items.get(timeout=-1)
    assert items.get() == 1
    with pytest.raises(compat.ShutDown):
        items.get(timeout=-1)


@pytest.mark.parametrize("is_held", [False, True])
def test_a_shutdown_drops_what_cannot_be_taken_and_ends_those_who_wait(spool: Path, is_held: bool) -> None:
    """Items that cannot be loaded, and one that another process holds."""
    items: compat.Queue[Any] = compat.Queue(maxsize=1, path=spool, serializer="json")
    items.put(1)
    holder = items._items.queue.get(timeout_s=0) if is_held else None
    if not is_held:
        items.get()
        items._items.queue.put(b"{")
    ended: list[str] = []

    def put() -> None:
        with pytest.raises(compat.ShutDown):
            items.put(2)
        ended.append("put")

    def join() -> None:
        items.join()
        ended.append("join")

    threads = [threading.Thread(target=one, daemon=True) for one in (put, join)]
    for thread in threads:
        thread.start()
    items.shutdown(immediate=True)
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(ended) == ["join", "put"]
    assert (items.qsize(), items.unfinished_tasks) == (0, 0)
    if holder is not None:
        holder.ack()
    items.close()
    items.shutdown(immediate=True)

    async def scenario() -> None:
        queue: compat.AsyncQueue[Any] = compat.AsyncQueue(maxsize=1, path=spool, serializer="json")
        queue.put_nowait(1)
        holder = queue._items.queue.get(timeout_s=0) if is_held else None
        waiting = [asyncio.create_task(queue.put(2)), asyncio.create_task(queue.join())]
        await asyncio.sleep(0)
        if not is_held:
            queue._items.queue.purge()
            queue._items.queue.put(b"{")
        queue.shutdown(immediate=True)
        assert [type(one) for one in await asyncio.gather(*waiting, return_exceptions=True)] == [
            compat.QueueShutDown,
            type(None),
        ]
        assert queue.empty()
        if holder is not None:
            holder.ack()
        queue.close()
        queue.shutdown(immediate=True)

    asyncio.run(scenario())


def test_a_shutdown_that_the_disk_refuses_ends_those_who_wait_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised where it was called."""

    def refuse() -> int:
        raise qflow.StorageError("no")

    items: compat.Queue[int] = compat.Queue(maxsize=1)
    items.put(1)
    monkeypatch.setattr(items._items, "drop", refuse)
    ended: list[type[BaseException]] = []

    def put() -> None:
        with pytest.raises(compat.ShutDown) as caught:
            items.put(2)
        ended.append(caught.type)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    with pytest.raises(qflow.StorageError):
        items.shutdown(immediate=True)
    thread.join(LONG_S)
    assert ended == [compat.ShutDown]

    async def scenario() -> None:
        queue: compat.AsyncQueue[int] = compat.AsyncQueue(maxsize=1)
        queue.put_nowait(1)
        monkeypatch.setattr(queue._items, "drop", refuse)
        putter = asyncio.create_task(queue.put(2))
        await asyncio.sleep(0)
        with pytest.raises(qflow.StorageError):
            queue.shutdown(immediate=True)
        with pytest.raises(compat.QueueShutDown):
            await putter

    asyncio.run(scenario())


def test_a_get_waits_for_an_item_that_somebody_else_holds(spool: Path) -> None:
    """As it does where there is none, with the exceptions of Python, for threads and for tasks."""
    items: compat.Queue[int] = compat.Queue(path=spool, serializer="json")
    items.put(1)
    other = items._items.queue
    held = other.get(timeout_s=0)
    for call in (items.get_nowait, lambda: items.get(timeout=0.001), lambda: items.get(timeout=0)):
        with pytest.raises(queue.Empty):
            call()
    got: list[int] = []
    getter = threading.Thread(target=lambda: got.append(items.get(timeout=LONG_S)), daemon=True)
    getter.start()
    until(lambda: bool(items.not_empty._waiters))  # type: ignore[attr-defined]
    held.nack()
    getter.join(LONG_S)
    assert got == [1]
    items.put(2)
    other.pause()
    with pytest.raises(queue.Empty):
        items.get_nowait()
    items.shutdown(immediate=True)
    with pytest.raises(compat.ShutDown):
        items.get()
    items.close()

    async def scenario() -> None:
        tasks: compat.AsyncQueue[int] = compat.AsyncQueue(path=spool, serializer="json")
        await tasks.put(1)
        held = tasks._items.queue.get(timeout_s=0)
        with pytest.raises(asyncio.QueueEmpty):
            tasks.get_nowait()
        getters = [asyncio.create_task(tasks.get()) for _ in range(2)]
        await asyncio.sleep(0)
        held.nack()
        assert await getters[0] == 1
        await tasks.put(2)
        assert await getters[1] == 2
        await tasks.put(3)
        held = tasks._items.queue.get(timeout_s=0)
        getter = asyncio.create_task(tasks.get())
        await asyncio.sleep(0)
        tasks.shutdown(immediate=True)
        with pytest.raises(compat.QueueShutDown):
            await getter
        tasks.close()

    asyncio.run(scenario())


def test_closing_ends_those_who_wait_and_who_come_later() -> None:
    items: compat.Queue[int] = compat.Queue(maxsize=1)
    ended: list[str] = []

    def wait(call: Callable[[], object], error: type[Exception] | None) -> None:
        if error is None:
            call()
        else:
            with pytest.raises(error):
                call()
        ended.append(call.__name__)

    items.put(1)
    threads = [threading.Thread(target=wait, args=(items.join, None), daemon=True)]
    empty: compat.Queue[int] = compat.Queue()
    threads.append(threading.Thread(target=wait, args=(empty.get, compat.ShutDown), daemon=True))
    for thread in threads:
        thread.start()
    for one in (items, empty):
        one.close()
        for call in (one.get, lambda one=one: one.put(1)):
            with pytest.raises(compat.ShutDown):
                call()
    for thread in threads:
        thread.join(LONG_S)
    assert sorted(ended) == ["get", "join"]

    async def scenario() -> None:
        queue: compat.AsyncQueue[int] = compat.AsyncQueue()
        getter = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.close()
        with pytest.raises(compat.QueueShutDown):
            await getter
        await queue.join()

    asyncio.run(scenario())


def test_a_queue_is_shown_with_the_number_of_its_items() -> None:
    """They are not read for that."""

    async def main() -> None:
        items: compat.AsyncQueue[int] = compat.AsyncQueue(maxsize=5)
        await items.put(1)
        assert "maxsize=5 qsize=1" in repr(items)
        assert "maxsize=5 qsize=1" in str(items)

    asyncio.run(main())


def test_shutdown_ends_tasks_that_wait() -> None:
    """As it does in asyncio from Python 3.13 on."""

    async def main() -> None:
        items: compat.AsyncQueue[int] = compat.AsyncQueue(maxsize=1)
        getter = asyncio.create_task(items.get())
        await asyncio.sleep(0)
        items.shutdown()
        with pytest.raises(compat.QueueShutDown):
            await getter
        full: compat.AsyncQueue[int] = compat.AsyncQueue(maxsize=1)
        await full.put(1)
        putter = asyncio.create_task(full.put(2))
        await asyncio.sleep(0)
        full.shutdown(immediate=True)
        with pytest.raises(compat.QueueShutDown):
            await putter
        await full.join()
        for call in (full.get, full.get_nowait):
            with pytest.raises(compat.QueueShutDown):
                await call()  # type: ignore[misc]

    asyncio.run(main())


class Unloadable:
    """Its bytes cannot be loaded."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def test_an_item_that_cannot_be_loaded_keeps_nobody_waiting() -> None:
    """Who was woken for it has had the error; the next one has it, too."""
    ours: compat.Queue[Any] = compat.Queue()
    errors: list[BaseException] = []

    def get() -> None:
        try:
            ours.get(timeout=LONG_S)
        except (ValueError, queue.Empty) as error:
            errors.append(error)

    getters = [threading.Thread(target=get) for _ in range(2)]
    for getter in getters:
        getter.start()
    ours.put(Unloadable())
    for getter in getters:
        getter.join()
    assert [type(error) for error in errors] == [ValueError, ValueError]
    ours.close()


def test_an_item_that_cannot_be_loaded_keeps_no_task_waiting() -> None:
    async def scenario() -> list[Any]:
        ours: compat.AsyncQueue[Any] = compat.AsyncQueue()
        getters = [asyncio.ensure_future(ours.get()) for _ in range(2)]
        await asyncio.sleep(0)
        await ours.put(Unloadable())
        found = await asyncio.wait_for(asyncio.gather(*getters, return_exceptions=True), LONG_S)
        ours.close()
        return found

    assert [type(error) for error in asyncio.run(scenario())] == [ValueError, ValueError]


def test_an_item_that_cannot_be_stored_leaves_its_slot_to_who_waits_for_one() -> None:
    """Whoever was woken for the slot fails; the next one in line has it."""
    ours: compat.Queue[Any] = compat.Queue(maxsize=1)
    ours.put(0)
    errors: list[BaseException] = []

    def put(item: Any) -> None:
        try:
            ours.put(item)
        except Exception as error:
            errors.append(error)

    line = ours.not_full._waiters  # type: ignore[attr-defined]
    threading.Thread(target=put, args=(lambda: None,), daemon=True).start()
    until(lambda: len(line) == 1)
    threading.Thread(target=put, args=(2,), daemon=True).start()
    until(lambda: len(line) == 2)
    assert [ours.get(), ours.get(timeout=LONG_S)] == [0, 2]
    assert len(errors) == 1
    ours.close()


def test_an_item_that_cannot_be_stored_leaves_its_slot_to_a_task_that_waits_for_one() -> None:
    async def scenario() -> None:
        ours: compat.AsyncQueue[Any] = compat.AsyncQueue(maxsize=1)
        ours.put_nowait(0)
        putters = [asyncio.ensure_future(ours.put(item)) for item in (lambda: None, 2)]
        await asyncio.sleep(0)
        assert await ours.get() == 0
        assert await asyncio.wait_for(ours.get(), LONG_S) == 2
        failed, done = await asyncio.gather(*putters, return_exceptions=True)
        assert isinstance(failed, Exception)
        assert done is None
        ours.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [qflow.StorageError("no"), KeyboardInterrupt()])
def test_a_close_that_fails_ends_those_who_wait_and_may_be_repeated(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that could not be closed is closed by the next call."""
    real, failures, here = qflow.Broker.close, [error, error], threading.current_thread()

    def close(broker: qflow.Broker) -> None:
        if failures and threading.current_thread() is here:  # another one closes what earlier tests have dropped
            raise failures.pop()
        real(broker)

    monkeypatch.setattr(qflow.Broker, "close", close)
    ours: compat.Queue[int] = compat.Queue()
    ended: list[type[BaseException]] = []

    def get() -> None:
        with pytest.raises(compat.ShutDown) as caught:
            ours.get()
        ended.append(caught.type)

    getter = threading.Thread(target=get, daemon=True)
    getter.start()
    until(lambda: ours.not_empty._waiters)  # type: ignore[attr-defined]
    with pytest.raises(type(error)):
        ours.close()
    getter.join(LONG_S)
    assert ended == [compat.ShutDown]

    async def scenario() -> None:
        queue: compat.AsyncQueue[int] = compat.AsyncQueue()
        getter = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        with pytest.raises(type(error)):
            queue.close()
        with pytest.raises(compat.QueueShutDown):
            await asyncio.wait_for(getter, LONG_S)
        queue.close()

    asyncio.run(scenario())
    broker = ours._items.queue
    ours.close()
    with pytest.raises(qflow.BrokerClosed):
        broker.put(b"")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_whoever_stops_looking_at_an_item_that_is_held_leaves_that_to_the_next(
    is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two wait, one is woken for the item, which another holds by then; the item comes back when that one has gone."""
    ours: compat.Queue[int] = compat.Queue()
    line = ours.not_empty._waiters  # type: ignore[attr-defined]
    found: list[Any] = []
    passed_s = 0.0
    monkeypatch.setattr("qflow.compat.threads.time", SimpleNamespace(monotonic=lambda: passed_s))

    def get(timeout: float | None) -> None:
        try:
            found.append(ours.get(timeout=timeout))
        except (queue.Empty, KeyboardInterrupt) as error:
            found.append(error)

    hasty = threading.Thread(target=get, args=(LONG_S,), daemon=True)
    hasty.start()
    until(lambda: len(line) == 1)
    patient = threading.Thread(target=get, args=(None,), daemon=True)
    patient.start()
    until(lambda: len(line) == 2)
    waits = ours.not_empty.wait

    def wait(timeout: float | None) -> bool:
        if is_interrupted and threading.current_thread() is hasty:
            raise KeyboardInterrupt
        return waits(timeout)

    with ours.mutex:
        ours._items.put(1)
        held = ours._items.queue.get_nowait()
        ours.not_empty.wait = wait  # type: ignore[method-assign]
        passed_s = 0.0 if is_interrupted else LONG_S
        ours.not_empty.notify()
    until(lambda: found)
    held.nack()
    patient.join(LONG_S)
    assert isinstance(found[0], KeyboardInterrupt if is_interrupted else queue.Empty)
    assert found[1:] == [1]


def test_a_task_that_stops_looking_at_an_item_that_is_held_leaves_that_to_the_next() -> None:
    async def scenario() -> None:
        ours: compat.AsyncQueue[int] = compat.AsyncQueue()
        first, second = (asyncio.ensure_future(ours.get()) for _ in range(2))
        await asyncio.sleep(0)
        ours.put_nowait(1)
        held = ours._items.queue.get_nowait()
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        held.nack()
        assert await asyncio.wait_for(second, LONG_S) == 1
        ours.close()

    asyncio.run(scenario())
