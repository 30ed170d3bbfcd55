"""Which requests share a commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

import qflow
import scratch
from qflow.storage.log import writer
from unit.clocks import until


@pytest.fixture
def on_disk() -> Iterator[qflow.Broker]:
    """A broker whose syncs take some time."""
    with scratch.directory(None, "commits") as path, qflow.open(path / "spool") as broker:
        yield broker


def test_threads_that_put_one_by_one_share_each_commit_and_do_not_take_turns(
    on_disk: qflow.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "GATHER_S", 60.0)  # whoever was let go comes again in time
    broker = on_disk
    queue = broker.declare_queue("q")
    enough = threading.Event()
    stopped = threading.Event()
    commits: list[int] = []

    def put() -> None:
        while not stopped.is_set():
            if queue.put(b"x") == 400:  # by this thread, for which all others wait meanwhile
                commits.append(broker.stats().commits_total)
                enough.set()

    def begin(*_: object) -> None:
        for thread in threads[1:]:
            thread.start()
        until(lambda: len(broker.engine.log.requests) == 3)

    def put_first() -> None:
        """Have the writer wait for a put of each of the others: nobody puts alone until they have begun."""
        broker.engine.log.alone(begin)
        put()

    threads = [threading.Thread(target=put_first), *(threading.Thread(target=put) for _ in range(3))]
    before = broker.stats().commits_total
    threads[0].start()
    enough.wait(60)
    monkeypatch.undo()
    stopped.set()
    for _ in threads:  # in place of those that do not come again
        queue.submit(b"y")
    queue.put(b"y")
    for thread in threads:
        thread.join(60)
    assert commits[0] - before == 101  # that of the first, and a hundred of four


def test_a_thread_that_does_not_come_again_holds_nobody_up_for_long(open_spool: Callable[..., qflow.Broker]) -> None:
    queue = open_spool().declare_queue("q")
    one_off = [threading.Thread(target=queue.put, args=(b"x",)) for _ in range(50)]
    for thread in one_off:
        thread.start()
    for _ in range(50):
        queue.put(b"y")
    for thread in one_off:
        thread.join(60)
    assert len(queue) == 100
