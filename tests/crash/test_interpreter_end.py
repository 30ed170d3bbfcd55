"""A broker that is used where the interpreter ends, or in a fork: the process ends, by itself and soon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import qflow

PATIENCE_S = 60
OPEN = """
import atexit, os, sys, threading
import qflow
broker = qflow.open(sys.argv[1])
queue = broker.declare_queue("q")
stream = broker.declare_stream("s", topics=["t/#"])
queue.put(b"kept")
"""
DAEMON = """
from contextlib import suppress
begun = threading.Event()
def work():
    with suppress(qflow.BrokerClosed):
        work_on()
def work_on():
    while True:
        queue.put(b"more")
        broker.publish("t/a", b"more")
        queue.get().ack()
        begun.set()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
"""
WAITING = """
queue.get().ack(wait=True)
queue.put(b"kept")
queue.get()
threading.Thread(target=queue.get, daemon=True).start()
sub = broker.subscribe("s")
threading.Thread(target=sub.get, daemon=True).start()
queue.consume(print)
"""
AT_EXIT = """
def end():
    queue.put(b"more")
    broker.publish("t/a", b"more")
    assert queue.get_many(9, 0).sequences
    broker.close()
    print("closed")
atexit.register(end)
"""
FINALIZER = """
class Last:
    def __init__(self, queue):
        self.queue = queue
        self.error = qflow.QflowError
    def __del__(self):
        try:
            self.queue.put(b"more", headers={"a": 1})
            print("done")
        except self.error as error:
            print("refused:", error)
sys.modules["somewhere"] = last = Last(queue)
"""
FORK = """
pid = os.fork()
if not pid:
    for call in (lambda: queue.put(b"more"), lambda: queue.get(0), lambda: broker.publish("t/a", b"b"), broker.stats):
        try:
            call()
        except qflow.QflowError as error:
            os.write(1, b"refused: %s\\n" % str(error).encode())
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
queue.put(b"more")
broker.close()
print("closed")
"""
THREAD = """
def last():
    threading.main_thread().join()
    work()
    print("worked")
threading.Thread(target=last).start()
"""
TASKS = """
import asyncio, qflow.aio
async def use():
    async with qflow.aio.open(sys.argv[1] + "2", capacity_bytes="2MiB") as tasks:
        queue = await tasks.declare_queue("t", durable=False)
        for _ in range(5):
            await queue.put(bytes(600_000))  # some are spilled
        for _ in range(5):
            await (await queue.get()).ack()
        assert (await tasks.stats()).messages == 0
    assert tasks.closed
    broker.close()
"""
CLIENT = """
import qflow, sys
with qflow.connect(sys.argv[1]) as there:
    there.declare_queue("new").put(b"x")
    assert there.stats().messages == 2
"""
CALLER = f"""
import subprocess
def work():
    subprocess.run([sys.executable, "-c", {CLIENT!r}, sys.argv[1]], check=True)
    broker.close()
"""
ITEMS = """
import gc, glob, tempfile
from qflow.compat import Queue
tempfile.tempdir = sys.argv[1] + "-items"
os.mkdir(tempfile.tempdir)
other, queues = Queue(), [Queue() for _ in range(8)]
def work():
    gc.set_threshold(40, 2, 2)  # so that some are collected in the middle of a call
    while queues:
        around = [queues.pop()]
        around[0].put("x")
        around.append(around)
        del around
        for _ in range(60):
            other.put({"a": [1]})
            other.get()
    gc.set_threshold(700, 10, 10)
    while gc.collect() or len(glob.glob(tempfile.tempdir + "/*")) > 1:
        threading.Event().wait(0.001)
    broker.close()
"""
CANCELLED = """
import asyncio, qflow.aio
broker.close()
ending = threading.Event()
atexit.register(ending.set)
async def use():
    tasks = await qflow.aio.open(sys.argv[1])
    end = tasks.broker.close
    tasks.broker.close = lambda: (ending.wait(), end(), print("closed"))
    closing = asyncio.create_task(tasks.close())
    while not tasks._worker.begun():
        await asyncio.sleep(0)
    closing.cancel()
asyncio.run(use())
"""
STARTING = (
    "a thread goes on, with tasks",
    "a thread goes on, and a first caller comes",
    "tasks close it in atexit",
)
"""They start threads when the main thread has ended."""
CASES = {
    "a task is cancelled that closes it": (CANCELLED, "closed"),
    "a thread goes on, with tasks": (TASKS + "def work(): asyncio.run(use())" + THREAD, "worked"),
    "a thread goes on, and a first caller comes": (CALLER + THREAD, "worked"),
    "a thread goes on, and drops a queue": (ITEMS + THREAD, "worked"),
    "tasks close it in atexit": (TASKS + "atexit.register(lambda: (asyncio.run(use()), print('closed')))", "closed"),
    "daemon threads work": (DAEMON, ""),
    "daemon threads wait": (WAITING, ""),
    "atexit closes it": (AT_EXIT, "closed"),
    "atexit, daemon threads work": (DAEMON + "atexit.register(lambda: (broker.close(), print('closed')))", "closed"),
    "a finalizer at the very end uses it": (FINALIZER, "done|refused:"),
    "a finalizer, daemon threads work": (
        # With other globals, which those threads keep.
        f"exec({DAEMON!r}, dict(globals())){FINALIZER}",
        "done|refused:",
    ),
    "a finalizer asks for what is imported then": (
        FINALIZER.replace('put(b"more", headers={"a": 1})', "recovery").replace("Last(queue)", "Last(broker)"),
        "refused:",
    ),
    "a fork": (FORK, "closed"),
    "a fork, daemon threads work": (DAEMON + FORK, "closed"),
}
STARTS_NO_THREADS = (3, 12) <= sys.version_info < (3, 12, 2)
"""CPython 3.12.0 and 3.12.1 start none once the main thread has ended (gh-113964)."""


@pytest.mark.parametrize("name", CASES)
def test_a_process_ends(name: str, tmp_path: Path) -> None:
    """Whatever still uses the broker: no process hangs or dies of a signal, and the spool opens."""
    if STARTS_NO_THREADS and name in STARTING:
        pytest.skip("this Python starts no thread any more there")
    program, told = CASES[name]
    quiet = "ignore::DeprecationWarning:__main__"  # CPython 3.12 warns of a fork where there are threads
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", quiet, "-c", OPEN + program, str(tmp_path / "spool")],
        capture_output=True,
        timeout=PATIENCE_S,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert any(word in done.stdout for word in told.split("|")), done.stdout
    if "fork" in name:
        assert done.stdout.count("refused:") == 4
    with qflow.open(tmp_path / "spool") as broker:
        assert broker.recovery.problems == ()
        assert broker.check() == []
        if "threads work" not in name:
            assert broker.queue("q").get(0).body == b"kept"
